package integration_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/ssp2"
)

// TestHostileRequests sends what no client would. It is not parallel: what it
// allocates is measured.
func TestHostileRequests(t *testing.T) { //nolint:paralleltest // measures memory
	s := newSite(t, func(c *syncpg.Config) { c.MaxRequestBytes = 1 << 20 })
	epoch := s.epoch(t)
	pull := func(subs ...ssp2.Subscription) *ssp2.Request {
		req := s.request(epoch)
		req.Pull, req.Subscriptions = rowsPull(), subs
		return req
	}
	valid := encode(t, pull(fresh("s1", "lists")))
	patched := func(at int, b ...byte) []byte {
		out := bytes.Clone(valid)
		copy(out[at:], b)
		return out
	}
	deletes := func(n int) ssp2.PushCommit {
		c := ssp2.PushCommit{ClientCommitID: "many"}
		for i := range n {
			c.Operations = append(c.Operations, ssp2.Operation{Table: "lists", RowID: strconv.Itoa(i), Op: ssp2.OpDelete})
		}
		return c
	}
	pushing := func(req *ssp2.Request, commits ...ssp2.PushCommit) *ssp2.Request {
		req.Commits = commits
		return req
	}
	many := make([]ssp2.Subscription, 10_000)
	for i := range many {
		many[i] = fresh(strconv.Itoa(i), "lists")
	}
	starred, unknownKey := fresh("s1", "lists"), fresh("s1", "lists")
	starred.Scopes = ssp2.ScopeMap{"team_id": {"team-1", "*"}}
	unknownKey.Scopes = ssp2.ScopeMap{"tema_id": {"team-1"}}
	noRows := pull(fresh("s1", "lists"))
	noRows.Pull.Accept = ssp2.AcceptSQLite
	reserved := pull()
	reserved.Header.ClientID = `["remote-command","x"]`
	nul := pull()
	nul.Header.ClientID = "a\x00b"
	deep := fresh("s1", "lists")
	nested := strings.Repeat("[", ssp2.MaxJSONDepth) + strings.Repeat("]", ssp2.MaxJSONDepth)
	deep.Params = &nested
	deepBody := bytes.Replace(encode(t, pull(deep)), []byte("[[[["), []byte("[[[]"), 1)

	// 256 MiB of frames in 256 KiB of gzip.
	zeros := append([]byte{0x7f, 0, 0, 1, 0}, make([]byte, 1<<16)...)
	bomb := gz(t, valid[:len(valid)-5])
	bomb = append(bomb, bytes.Repeat(gz(t, bytes.Repeat(zeros, 256)), 16)...)

	inFrame := func(payload []byte) []byte {
		b, mark := ssp2.BeginFrame(ssp2.AppendEnvelope(nil, ssp2.WireV2, ssp2.KindRequest), ssp2.FrameReqHeader)
		b, err := ssp2.EndFrame(append(b, payload...), mark)
		require.NoError(t, err)
		return b
	}
	const most = 0xffffffff
	commitsOf4G, mark := ssp2.BeginFrame(bytes.Clone(valid[:len(valid)-5]), ssp2.FramePushCommit)
	commitsOf4G, err := ssp2.EndFrame(ssp2.AppendU32(ssp2.AppendStr(commitsOf4G, "c"), most), mark)
	require.NoError(t, err)

	for _, tc := range []struct { //nolint:paralleltest // measures memory
		name   string
		body   []byte
		header http.Header
		status int
		code   ssp2.Code
	}{
		{"no body", nil, nil, 400, ssp2.CodeInvalidRequest},
		{"wrong magic", patched(0, 'S', 'S', 'G', '2'), nil, 400, ssp2.CodeInvalidRequest},
		{"JSON", []byte(`{"hello":"world"}`), nil, 400, ssp2.CodeInvalidRequest},
		{"wire version 0", patched(4, 0), nil, 400, ssp2.CodeInvalidRequest},
		{"wire version 4", patched(4, 4), nil, 400, ssp2.CodeInvalidRequest},
		{"wire version 65535", patched(4, 0xff, 0xff), nil, 400, ssp2.CodeInvalidRequest},
		{"a response", patched(6, 2), nil, 400, ssp2.CodeInvalidRequest},
		{"an unknown message kind", patched(6, 9), nil, 400, ssp2.CodeInvalidRequest},
		{"flags", patched(7, 0x80), nil, 400, ssp2.CodeInvalidRequest},
		{"bytes behind END", append(bytes.Clone(valid), 0), nil, 400, ssp2.CodeInvalidRequest},
		{"a message behind END", append(bytes.Clone(valid), valid...), nil, 400, ssp2.CodeInvalidRequest},
		{"a frame of 4 GiB, claimed", patched(9, 0xff, 0xff, 0xff, 0xff), nil, 413, ssp2.CodeInvalidRequest},
		{"a string of 4 GiB, claimed", inFrame(ssp2.AppendU32(nil, most)), nil, 400, ssp2.CodeInvalidRequest},
		{"4 Gi operations, claimed", commitsOf4G, nil, 400, ssp2.CodeInvalidRequest},
		{"a body over the limit", append(bytes.Clone(valid[:len(valid)-5]), bytes.Repeat(zeros, 64)...), nil, 413, ssp2.CodeInvalidRequest},
		{"a gzip bomb", bomb, http.Header{"Content-Encoding": {"gzip"}}, 413, ssp2.CodeInvalidRequest},
		{"not gzip", valid, http.Header{"Content-Encoding": {"gzip"}}, 400, ssp2.CodeInvalidRequest},
		{"another content coding", valid, http.Header{"Content-Encoding": {"br"}}, 415, ssp2.CodeInvalidRequest},
		{"another content type", valid, http.Header{"Content-Type": {"application/octet-stream"}}, 415, ssp2.CodeInvalidRequest},
		{"no content type", valid, http.Header{"Content-Type": nil}, 415, ssp2.CodeInvalidRequest},
		{"nobody", valid, http.Header{"X-Actor": nil}, 401, ssp2.CodeAuthRequired},
		{"10,000 subscriptions", encode(t, pull(many...)), nil, 400, ssp2.CodeInvalidSubscription},
		{"the scope *", encode(t, pull(starred)), nil, 400, ssp2.CodeInvalidSubscription},
		{"an undeclared scope", encode(t, pull(unknownKey)), nil, 400, ssp2.CodeInvalidSubscription},
		{"an id twice", encode(t, pull(fresh("s1", "lists"), fresh("s1", "todos"))), nil, 400, ssp2.CodeInvalidSubscription},
		{"an unknown table", encode(t, pull(fresh("s1", "nope"))), nil, 400, ssp2.CodeUnknownTable},
		{"a system table", encode(t, pull(fresh("s1", "sync_commits"))), nil, 400, ssp2.CodeUnknownTable},
		{"no rows segments", encode(t, noRows), nil, 400, ssp2.CodeInvalidRequest},
		{"params nested too deep", deepBody, nil, 400, ssp2.CodeInvalidRequest},
		{"a reserved client id", encode(t, reserved), nil, 400, ssp2.CodeInvalidClientID},
		{"U+0000 in a client id", encode(t, nul), nil, 400, ssp2.CodeInvalidClientID},
		{"501 operations", encode(t, pushing(s.request(epoch), deletes(501))), nil, 413, ssp2.CodeTooManyOperations},
		{"commits without an epoch", encode(t, pushing(s.request(nil), deletes(1))), nil, 400, ssp2.CodeInvalidRequest},
		{"a good push beside a bad pull", encode(t, pushing(pull(starred), deletes(1))), nil, 400, ssp2.CodeInvalidSubscription},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			s.requireError(t, bytes.NewReader(tc.body), tc.header, tc.status, tc.code)
			runtime.ReadMemStats(&after)
			// What is allocated in all bounds what is held at any moment. Client and
			// server share the process.
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<20))
		})
	}

	t.Run("every truncation", func(t *testing.T) { //nolint:paralleltest // measures memory
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for n := range valid {
			s.requireError(t, bytes.NewReader(valid[:n]), nil, 400, ssp2.CodeInvalidRequest)
		}
		runtime.ReadMemStats(&after)
		require.Less(t, (after.TotalAlloc-before.TotalAlloc)/uint64(len(valid)), uint64(1<<20))
	})

	t.Run("a body of 4 GiB, announced", func(t *testing.T) { //nolint:paralleltest // shares the site
		u, err := url.Parse(s.url)
		require.NoError(t, err)
		conn, err := net.Dial("tcp", u.Host)
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		_, err = fmt.Fprintf(conn, "POST /api/sync HTTP/1.1\r\nHost: %s\r\nX-Actor: ada\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
			u.Host, contentType, int64(1)<<32)
		require.NoError(t, err)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		message := reply{res.StatusCode, res.Header, body}.requireError(t, 413, ssp2.CodeInvalidRequest)
		require.Contains(t, message, "1048576 bytes")
		require.True(t, res.Close)
	})

	require.Zero(t, s.count(t, `select count(*) from syncpg.sync_commits`))
	require.Zero(t, s.count(t, `select count(*) from syncpg.sync_push_results`))
	require.Zero(t, s.count(t, `select count(*) from syncpg.sync_clients`))
	require.NotEmpty(t, s.sync(t, pull(fresh("s1", "lists"))), "the server still serves")
}

func TestAClientIDStaysWithItsFirstActor(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	req := s.request(s.epoch(t))
	req.Commits = []ssp2.PushCommit{s.putLists(t, "c1", "Groceries", "l1")}
	s.sync(t, req)
	bob := http.Header{"X-Actor": {"bob"}}
	req.Commits = []ssp2.PushCommit{s.putLists(t, "c2", "Groceries", "l2")}
	s.requireError(t, bytes.NewReader(encode(t, req)), bob, 400, ssp2.CodeInvalidClientID)
	req.Commits, req.Pull = nil, rowsPull()
	s.requireError(t, bytes.NewReader(encode(t, req)), bob, 400, ssp2.CodeInvalidClientID)
	require.Equal(t, 1, s.count(t, `select count(*) from public.lists`))
}
