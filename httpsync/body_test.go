package httpsync_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func TestContentEncodingOfRequests(t *testing.T) {
	t.Parallel()
	whole := request(t)
	packed := gz(t, whole)
	for _, tc := range []struct {
		name     string
		encoding []string
		body     []byte
		status   int
	}{
		{"none", nil, whole, 200},
		{"identity", []string{"identity"}, whole, 200},
		{"gzip", []string{"gzip"}, packed, 200},
		{"gzip in capitals", []string{" GZIP "}, packed, 200},
		{"x-gzip", []string{"x-gzip"}, packed, 200},
		{"gzip in members", []string{"gzip"}, gz(t, whole[:3], nil, whole[3:20], whole[20:]), 200},
		{"deflate", []string{"deflate"}, packed, 415},
		{"zstd", []string{"zstd"}, packed, 415},
		{"twice", []string{"gzip, gzip"}, packed, 415},
		{"on two lines", []string{"gzip", "gzip"}, packed, 415},
		{"announced but not done", []string{"gzip"}, whole, 400},
		{"done but not announced", nil, packed, 400},
		{"empty", []string{"gzip"}, nil, 400},
		{"header only", []string{"gzip"}, packed[:10], 400},
		{"cut off", []string{"gzip"}, packed[:len(packed)-9], 400},
		{"without its checksum", []string{"gzip"}, packed[:len(packed)-8], 400},
		{"wrong checksum", []string{"gzip"}, append(bytes.Clone(packed[:len(packed)-8]), 0, 0, 0, 0, 0, 0, 0, 0), 400},
		{"damaged", []string{"gzip"}, append(bytes.Clone(packed[:10]), 0xff, 0xff, 0xff, 0xff), 400},
		{"garbage behind it", []string{"gzip"}, append(bytes.Clone(packed), "garbage"...), 400},
		{"a member behind the message", []string{"gzip"}, gz(t, whole, []byte{0}), 400},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			rounds := answer(1)
			if tc.status != 200 {
				rounds = noRound(t)
			}
			h := newHandler(t, httpsync.Config{Rounds: rounds})
			header := http.Header{}
			if tc.encoding != nil {
				header["Content-Encoding"] = tc.encoding
			}
			w := post(h, bytes.NewReader(tc.body), header)
			if tc.status == 200 {
				require.Equal(t, 200, w.Code, "body: %s", w.Body)
				return
			}
			requireError(t, w, tc.status, ssp2.CodeInvalidRequest)
			if tc.status == 415 {
				require.Equal(t, "gzip", w.Header().Get("Accept-Encoding"))
			}
		})
	}
}

func TestMalformedMessagesAreDecodeErrors(t *testing.T) {
	t.Parallel()
	whole := request(t)
	patched := func(at int, b ...byte) []byte {
		out := bytes.Clone(whole)
		copy(out[at:], b)
		return out
	}
	empty, err := ssp2.AppendFrame(
		ssp2.AppendEnvelope(nil, ssp2.WireV2, ssp2.KindRequest), ssp2.WireV2,
		&ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1})
	require.NoError(t, err)
	noOperations := ssp2.AppendStr(nil, "commit")
	noOperations = ssp2.AppendU32(noOperations, 0)
	emptyCommit, mark := ssp2.BeginFrame(bytes.Clone(empty), ssp2.FramePushCommit)
	emptyCommit, err = ssp2.EndFrame(append(emptyCommit, noOperations...), mark)
	require.NoError(t, err)

	for _, tc := range []struct {
		name string
		body []byte
		code ssp2.Code
	}{
		{"no body", nil, ssp2.CodeInvalidRequest},
		{"cut off in the envelope", whole[:7], ssp2.CodeInvalidRequest},
		{"cut off in a frame", whole[:20], ssp2.CodeInvalidRequest},
		{"without END", whole[:len(whole)-5], ssp2.CodeInvalidRequest},
		{"wrong magic", patched(0, 'S', 'S', 'P', '1'), ssp2.CodeInvalidRequest},
		{"wire version 0", patched(4, 0), ssp2.CodeInvalidRequest},
		{"wire version 4", patched(4, 4), ssp2.CodeInvalidRequest},
		{"a response", patched(6, 2), ssp2.CodeInvalidRequest},
		{"flags", patched(7, 1), ssp2.CodeInvalidRequest},
		{"bytes behind END", append(bytes.Clone(whole), 0), ssp2.CodeInvalidRequest},
		{"neither push nor pull", ssp2.AppendEnd(empty), ssp2.CodeInvalidRequest},
		{"a commit without operations", ssp2.AppendEnd(emptyCommit), ssp2.CodeEmptyCommit},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newHandler(t, httpsync.Config{Rounds: noRound(t)})
			requireError(t, post(h, bytes.NewReader(tc.body), nil), http.StatusBadRequest, tc.code)
		})
	}
}

func TestBodyLimit(t *testing.T) {
	t.Parallel()
	whole := request(t)
	limit := int64(len(whole))
	huge := append(bytes.Clone(whole[:8]), byte(ssp2.FrameReqHeader), 0xff, 0xff, 0xff, 0xff)
	// A request that is only large when it is decompressed.
	bomb := gz(t, whole[:len(whole)-5], []byte{0x7f, 0, 0, 0x20, 0}, make([]byte, 1<<21), whole[len(whole)-5:])
	require.Less(t, len(bomb), 1<<16)
	for _, tc := range []struct {
		name     string
		limit    int64
		encoding string
		body     io.Reader
		status   int
	}{
		{"a body of the limit", limit, "", bytes.NewReader(whole), 200},
		{"a body over it, by its Content-Length", limit - 1, "", bytes.NewReader(whole), 413},
		{"a body over it, without a Content-Length", limit - 1, "", io.MultiReader(bytes.NewReader(whole)), 413},
		{"bytes behind the limit", limit, "", io.MultiReader(bytes.NewReader(whole), strings.NewReader("x")), 413},
		{"a frame that claims 4 GiB", limit, "", io.MultiReader(bytes.NewReader(huge)), 413},
		{"a decompressed body over it", 1 << 20, "gzip", bytes.NewReader(bomb), 413},
		{"a decompressed body under it", 1 << 22, "gzip", bytes.NewReader(bomb), 200},
		{"endless empty gzip members", limit * 4, "gzip", &endless{piece: gz(t, nil)}, 413},
		{"no limit", -1, "gzip", bytes.NewReader(bomb), 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			rounds := answer(1)
			if tc.status != 200 {
				rounds = noRound(t)
			}
			h := newHandler(t, httpsync.Config{Rounds: rounds, MaxRequestBytes: tc.limit})
			header := http.Header{}
			if tc.encoding != "" {
				header.Set("Content-Encoding", tc.encoding)
			}
			w := post(h, tc.body, header)
			if tc.status == 200 {
				require.Equal(t, 200, w.Code, "body: %s", w.Body)
				return
			}
			e := requireError(t, w, tc.status, ssp2.CodeInvalidRequest)
			if tc.status == 413 {
				require.Contains(t, e.Message, strconv.FormatInt(tc.limit, 10)+" bytes")
			}
		})
	}
}

// endless repeats a piece for ever.
type endless struct {
	piece []byte
	at    int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.piece[e.at:])
	e.at = (e.at + n) % len(e.piece)
	return n, nil
}

func TestABodyThatFailsToArrive(t *testing.T) {
	t.Parallel()
	h := newHandler(t, httpsync.Config{Rounds: noRound(t)})
	broken := io.MultiReader(bytes.NewReader(request(t)[:20]), failing{errors.New("secret: connection reset")})
	e := requireError(t, post(h, broken, nil), http.StatusBadRequest, ssp2.CodeInvalidRequest)
	require.NotContains(t, e.Message, "secret")
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func FuzzGzipBody(f *testing.F) {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write(response(1))
	require.NoError(f, err)
	require.NoError(f, w.Close())
	f.Add(packed.Bytes())
	f.Add(packed.Bytes()[:12])
	f.Add([]byte(nil))
	h, err := httpsync.New(httpsync.Config{
		Rounds: runner(func(context.Context, round.Identity, *ssp2.Request, round.Writer) error {
			return ssp2.Errorf(ssp2.CodeNotFound, "decoded")
		}),
		Authenticate:    ada,
		MaxRequestBytes: 1 << 16,
	})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, body []byte) {
		w := post(h, bytes.NewReader(body), http.Header{"Content-Encoding": {"gzip"}})
		require.Contains(t, []int{400, 404, 413}, w.Code)
	})
}
