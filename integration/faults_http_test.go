package integration_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/ssp2"
)

// raw writes bytes to the server's socket and reads the answers up to its end, or up
// to the number of answers asked for.
func (s *site) raw(t *testing.T, text string, answers int) (got []reply) {
	t.Helper()
	u, err := url.Parse(s.url)
	require.NoError(t, err)
	conn, err := net.Dial("tcp", u.Host)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, _ = io.WriteString(conn, text) // the server may hang up in the middle
	}()
	defer func() { <-written }()
	reader := bufio.NewReader(conn)
	for len(got) < answers {
		res, err := http.ReadResponse(reader, nil)
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return got
		}
		require.NoError(t, err)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		got = append(got, reply{res.StatusCode, res.Header, body})
		if res.Close {
			return got
		}
	}
	return got
}

// What is true of HTTP is not what clients say it is: lengths that lie, codings and
// expectations nobody has heard of, other versions. A request that is whole is
// answered; any other is refused, and nothing of it is believed.
func TestHTTPThatLies(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	epoch := s.epoch(t)
	push := s.request(epoch)
	push.Commits = []ssp2.PushCommit{s.putLists(t, "c", "Groceries", "l1")}
	body := string(encode(t, push))
	head := func(version string, lines ...string) string {
		return "POST /api/sync HTTP/" + version + "\r\nHost: h\r\nX-Actor: ada\r\nContent-Type: " + contentType + "\r\n" +
			strings.Join(append(lines, "", ""), "\r\n")
	}
	length := func(n int) string { return fmt.Sprintf("Content-Length: %d", n) }
	const chunked = "Transfer-Encoding: chunked"
	chunk := func(s string) string { return fmt.Sprintf("%x;why=\"not\"\r\n%s\r\n", len(s), s) }
	inBytes := func(s string) string {
		var chunks strings.Builder
		for i := range len(s) {
			fmt.Fprintf(&chunks, "1\r\n%s\r\n", s[i:i+1])
		}
		return chunks.String() + "0\r\n\r\n"
	}
	cases := []struct {
		name   string
		text   string
		status []int // of the answers
	}{
		{"HTTP/1.0", head("1.0", length(len(body))) + body, []int{200}},
		{"HTTP/1.0 that stays", head("1.0", "Connection: keep-alive", length(len(body))) + body, []int{200}},
		{"HTTP/1.0 without a length", head("1.0") + body, []int{400}},
		{"a length too small", head("1.1", length(len(body)-1), "Connection: close") + body[:len(body)-1], []int{400}},
		{"a length too small, and a request behind it", head("1.1", length(len(body)-1)) + body[:len(body)-1] + head("1.1", length(len(body))) + body, []int{400, 200}},
		{"a negative length", head("1.1", "Content-Length: -1") + body, []int{400}},
		{"two lengths", head("1.1", length(len(body)), length(3)) + body, []int{400}},
		{"a length and chunks", head("1.1", length(3), chunked) + chunk(body) + "0\r\n\r\n", []int{200}},
		{"chunks of one byte", head("1.1", chunked) + inBytes(body), []int{200}},
		{
			"chunks with trailers, which are nobody's identity",
			head("1.1", chunked, "Trailer: X-Actor") + chunk(body) + "0\r\nX-Actor: eve\r\n\r\n",
			[]int{200},
		},
		{"a chunk that is none", head("1.1", chunked) + "zz\r\n" + body, []int{400}},
		{"a chunk of 2^64 bytes", head("1.1", chunked) + "10000000000000000\r\n" + body, []int{400}},
		{"another transfer coding", head("1.1", "Transfer-Encoding: gzip, chunked") + chunk(body) + "0\r\n\r\n", []int{501}},
		{"a continuation awaited", head("1.1", "Expect: 100-continue", length(len(body))) + body, []int{100, 200}},
		{"something else expected", head("1.1", "Expect: the unexpected", length(len(body))) + body, []int{417}},
		{"HTTP/2 in clear", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{400}},
		{"an offer to go on in HTTP/2", head("1.1", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", length(len(body))) + body, []int{200}},
		{"absurd codings", head("1.1", "Accept-Encoding: "+strings.Repeat("gzip;q=1e400,zstd;q=NaN,*;q=-1,;;,", 10_000), length(len(body))) + body, []int{200}},
		{"codings on 3,000 lines", head("1.1", strings.TrimSuffix(strings.Repeat("Accept-Encoding: zstd;q=0.1\r\n", 3000), "\r\n"), length(len(body))) + body, []int{200}},
		{"a head without end", head("1.1", "X-Long: "+strings.Repeat("x", 2<<20)), []int{431}},
		{"many in one", strings.Repeat(head("1.1", length(len(body)))+body, 20), slices.Repeat([]int{200}, 20)},
	}
	for _, tc := range cases { //nolint:paralleltest // what they leave is counted
		t.Run(tc.name, func(t *testing.T) {
			got := s.raw(t, tc.text, len(tc.status))
			var status []int
			for _, r := range got {
				status = append(status, r.status)
				if r.status == http.StatusOK {
					m, err := ssp2.DecodeMessage(r.body)
					require.NoError(t, err)
					require.NotEqual(t, ssp2.PushRejected, m.Frames[1].(*ssp2.PushResult).Status)
				}
			}
			require.Equal(t, tc.status, status)
		})
	}
	// However often it came, it was one commit of one actor.
	require.Equal(t, 1, s.count(t, `select count(*) from syncpg.sync_commits`))
	require.Equal(t, 1, s.count(t, `select count(*) from syncpg.sync_commits where actor_id = 'ada'`))
}

// Requests that are large in number rather than in size are refused or answered, and
// none of them costs more than a moment.
func TestRequestsOfManySmallThings(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *syncpg.Config) { c.MaxScopeValues = 50_000 })
	epoch := s.epoch(t)
	pull := s.request(epoch)
	pull.Pull = rowsPull()
	whole := encode(t, pull)
	frames := append(bytes.Clone(whole[:len(whole)-5]), bytes.Repeat([]byte{0x7f, 0, 0, 0, 0}, 1_000_000)...)
	frames = append(frames, whole[len(whole)-5:]...)
	small := gz(t, frames) // some kilobytes
	require.Equal(t, http.StatusOK, s.post(t, bytes.NewReader(small), http.Header{"Content-Encoding": {"gzip"}}).status)
	s.requireError(t, bytes.NewReader(gz(t, small)), http.Header{"Content-Encoding": {"gzip"}}, 400, ssp2.CodeInvalidRequest)

	push := s.request(epoch)
	push.Commits = []ssp2.PushCommit{{ClientCommitID: "c", Operations: make([]ssp2.Operation, 1_000_000)}}
	for i := range push.Commits[0].Operations {
		push.Commits[0].Operations[i].Op = ssp2.OpDelete
	}
	s.requireError(t, bytes.NewReader(encode(t, push)), nil, 413, ssp2.CodeTooManyOperations)

	values := make([]string, 100_000)
	for i := range values {
		values[i] = fmt.Sprintf("%06d", i)
	}
	sub := fresh("s", "lists")
	sub.Scopes = ssp2.ScopeMap{"team_id": values}
	pull.Subscriptions = []ssp2.Subscription{sub}
	message := s.requireError(t, bytes.NewReader(encode(t, pull)), nil, 400, ssp2.CodeInvalidSubscription)
	require.Contains(t, message, "100000 scope values")
	require.Contains(t, message, "takes 50000")
}
