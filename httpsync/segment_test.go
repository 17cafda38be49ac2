package httpsync_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// shelf has one segment and writes down how it is asked for.
type shelf struct {
	body      []byte
	reader    io.Reader     // instead of body
	described *segment.Meta // instead of what follows from body
	err       error
	id        round.Identity
	segmentID string
	requested map[string][]string
	token     string
	closed    bool
}

func (s *shelf) meta() segment.Meta {
	if s.described != nil {
		return *s.described
	}
	return segment.Meta{ID: segment.ID(s.body), ByteLength: int64(len(s.body))}
}

func (s *shelf) open() (segment.Meta, io.ReadCloser, error) {
	if s.err != nil {
		return segment.Meta{}, nil, s.err
	}
	r := s.reader
	if r == nil {
		r = bytes.NewReader(s.body)
	}
	return s.meta(), closer{r, s}, nil
}

type closer struct {
	io.Reader
	s *shelf
}

func (c closer) Close() error {
	c.s.closed = true
	return nil
}

func (s *shelf) OpenSegment(_ context.Context, id round.Identity, segmentID string, requested map[string][]string) (segment.Meta, io.ReadCloser, error) {
	s.id, s.segmentID, s.requested = id, segmentID, requested
	return s.open()
}

func (s *shelf) OpenSigned(_ context.Context, segmentID, token string) (segment.Meta, io.ReadCloser, error) {
	s.segmentID, s.token = segmentID, token
	return s.open()
}

const scopes = `{"project":["p1","p2"]}`

// getSegment asks a handler for the segment of a shelf.
func getSegment(t *testing.T, s *shelf, method, query string, header http.Header) *httptest.ResponseRecorder {
	t.Helper()
	h := newHandler(t, httpsync.Config{Rounds: noRound(t), Segments: s})
	r := httptest.NewRequest(method, "/segments/"+strings.Replace(s.meta().ID, ":", "%3A", 1)+query, nil)
	for name, values := range header {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestSegmentDownload: the bytes and headers of §5.5, compressed as asked.
func TestSegmentDownload(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 10, 3 << 20} {
		for _, coding := range []string{"", "gzip", "zstd"} {
			t.Run(strconv.Itoa(size)+coding, func(t *testing.T) {
				t.Parallel()
				s := &shelf{body: bytes.Repeat([]byte("0123456789"), size/10)}
				w := getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {scopes}, "Accept-Encoding": {coding}})
				require.Equal(t, http.StatusOK, w.Code)
				require.Equal(t, "application/octet-stream", w.Header().Get("Content-Type"))
				require.Equal(t, `"`+s.meta().ID+`"`, w.Header().Get("ETag"))
				require.Equal(t, "private, max-age=0", w.Header().Get("Cache-Control"))
				require.Equal(t, "Authorization, X-Syncular-Scopes, Accept-Encoding", w.Header().Get("Vary"))
				require.Equal(t, "nosniff", w.Header().Get("X-Content-Type-Options"))
				head := getSegment(t, &shelf{body: s.body}, http.MethodHead, "", http.Header{httpsync.ScopesHeader: {scopes}, "Accept-Encoding": {coding}})
				require.Equal(t, w.Header(), head.Header(), "HEAD has the headers of GET")
				require.Zero(t, head.Body.Len())
				body := io.Reader(w.Body)
				if size > 1024 && coding != "" {
					require.Equal(t, coding, w.Header().Get("Content-Encoding"))
					require.Less(t, w.Body.Len(), size/10)
					require.Empty(t, w.Header().Get("Content-Length"))
				} else {
					require.Equal(t, strconv.Itoa(len(s.body)), w.Header().Get("Content-Length"))
					require.Empty(t, w.Header().Get("Content-Encoding"))
				}
				switch w.Header().Get("Content-Encoding") {
				case "gzip":
					z, err := gzip.NewReader(body)
					require.NoError(t, err)
					body = z
				case "zstd":
					z, err := zstd.NewReader(body)
					require.NoError(t, err)
					defer z.Close()
					body = z
				}
				got, err := io.ReadAll(body)
				require.NoError(t, err)
				require.Equal(t, s.meta().ID, segment.ID(got))
				require.True(t, s.closed)
				require.Equal(t, round.Identity{Actor: "ada", Partition: "acme"}, s.id)
				require.Equal(t, s.meta().ID, s.segmentID)
				require.Equal(t, map[string][]string{"project": {"p1", "p2"}}, s.requested)
			})
		}
	}
}

// TestSegmentRevalidation: 304 has no body and comes after authorization only; HEAD has the
// headers of GET.
func TestSegmentRevalidation(t *testing.T) {
	t.Parallel()
	s := &shelf{body: []byte("body")}
	tag := `"` + s.meta().ID + `"`
	for _, match := range []string{tag, "W/" + tag, `"x", ` + tag, "*"} {
		w := getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {scopes}, "If-None-Match": {match}})
		require.Equal(t, http.StatusNotModified, w.Code, match)
		require.Zero(t, w.Body.Len())
		require.Empty(t, w.Header().Get("Content-Type"))
		require.Equal(t, tag, w.Header().Get("ETag"))
		require.Equal(t, "private, max-age=0", w.Header().Get("Cache-Control"))
		require.Equal(t, "Authorization, X-Syncular-Scopes, Accept-Encoding", w.Header().Get("Vary"))
	}
	w := getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {scopes}, "If-None-Match": {`"other"`}})
	require.Equal(t, http.StatusOK, w.Code)
	w = getSegment(t, s, http.MethodHead, "", http.Header{httpsync.ScopesHeader: {scopes}})
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "4", w.Header().Get("Content-Length"))
	require.Equal(t, tag, w.Header().Get("ETag"))
	require.Zero(t, w.Body.Len())

	s.err = ssp2.Errorf(ssp2.CodeForbidden, "no")
	w = getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {scopes}, "If-None-Match": {tag}})
	require.Equal(t, http.StatusForbidden, w.Code)
}

// told is a sink that keeps what it is told of segments.
type told []events.SegmentServed

func (s *told) Emit(_ context.Context, e events.Event) {
	if e, ok := e.(events.SegmentServed); ok {
		*s = append(*s, e)
	}
}

// TestSegmentEvents: every download is told of, how it ended, and to whom it went as far as
// that is known.
func TestSegmentEvents(t *testing.T) {
	t.Parallel()
	body := bytes.Repeat([]byte("0123456789"), 500)
	id := segment.ID(body)
	rows := segment.Meta{Key: segment.Key{Partition: "acme", Table: "items", MediaType: ssp2.MediaRows}, ID: id, ByteLength: 5000}
	known := events.SegmentServed{Partition: "acme", Actor: "ada", SegmentID: id, Table: "items", MediaType: ssp2.MediaRows, Bytes: 5000}
	refused := events.SegmentServed{Partition: "acme", Actor: "ada", SegmentID: id}
	for _, tc := range []struct {
		name   string
		shelf  shelf
		method string
		target string
		header http.Header
		panics bool
		want   func() []events.SegmentServed
	}{
		{name: "sent", want: func() []events.SegmentServed { e := known; e.BytesSent = 5000; return []events.SegmentServed{e} }},
		{name: "not modified", header: http.Header{"If-None-Match": {`"` + id + `"`}}, want: func() []events.SegmentServed { e := known; e.NotModified = true; return []events.SegmentServed{e} }},
		{name: "headers only", method: http.MethodHead, want: func() []events.SegmentServed { return nil }},
		{name: "by URL", target: "/segments/" + id + "?st=x", want: func() []events.SegmentServed {
			e := known
			e.Actor, e.Signed, e.BytesSent = "", true, 5000
			return []events.SegmentServed{e}
		}},
		{name: "by URL, refused", target: "/segments/" + id + "?st=x", shelf: shelf{err: ssp2.Errorf(ssp2.CodeForbidden, "no")}, want: func() []events.SegmentServed {
			return []events.SegmentServed{{SegmentID: id, Signed: true, Code: ssp2.CodeForbidden}}
		}},
		{name: "refused", shelf: shelf{err: ssp2.Errorf(ssp2.CodeSegmentExpired, "no")}, want: func() []events.SegmentServed {
			e := refused
			e.Code = ssp2.CodeSegmentExpired
			return []events.SegmentServed{e}
		}},
		{name: "no id", target: "/segments/x", shelf: shelf{err: ssp2.Errorf(ssp2.CodeNotFound, "no")}, want: func() []events.SegmentServed {
			e := refused
			e.SegmentID, e.Code = "", ssp2.CodeNotFound
			return []events.SegmentServed{e}
		}},
		{name: "no scopes", header: http.Header{httpsync.ScopesHeader: nil}, want: func() []events.SegmentServed {
			e := refused
			e.Code = ssp2.CodeInvalidRequest
			return []events.SegmentServed{e}
		}},
		{name: "nobody", header: http.Header{"Authorization": {"nobody"}}, want: func() []events.SegmentServed {
			return []events.SegmentServed{{SegmentID: id, Code: ssp2.CodeAuthRequired}}
		}},
		{name: "a panic", header: http.Header{"Authorization": {"panic"}}, want: func() []events.SegmentServed {
			return []events.SegmentServed{{SegmentID: id, Code: ssp2.CodeInternalError}}
		}},
		{name: "gone before the first byte", shelf: shelf{reader: iotest.ErrReader(segment.ErrCutShort)}, want: func() []events.SegmentServed {
			e := known
			e.Code = ssp2.CodeInternalError
			return []events.SegmentServed{e}
		}},
		{
			name: "gone in the middle", panics: true,
			shelf: shelf{reader: io.MultiReader(bytes.NewReader(body[:2000]), iotest.ErrReader(segment.ErrCutShort))},
			want: func() []events.SegmentServed {
				e := known
				e.Broken, e.BytesSent = true, 2000
				return []events.SegmentServed{e}
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var got told
			s := &tc.shelf
			s.body, s.described = body, &rows
			h := newHandler(t, httpsync.Config{
				Rounds: noRound(t), Segments: s, Events: &got,
				Authenticate: func(r *http.Request) (round.Identity, error) {
					switch r.Header.Get("Authorization") {
					case "nobody":
						return round.Identity{}, errors.New("who?")
					case "panic":
						panic("authenticating")
					}
					return round.Identity{Actor: "ada", Partition: "acme"}, nil
				},
			})
			r := httptest.NewRequest(cmp.Or(tc.method, http.MethodGet), cmp.Or(tc.target, "/segments/"+id), nil)
			r.Header.Set(httpsync.ScopesHeader, scopes)
			maps.Copy(r.Header, tc.header)
			serve := func() { h.ServeHTTP(httptest.NewRecorder(), r) }
			if tc.panics {
				require.Panics(t, serve)
			} else {
				serve()
			}
			for i := range got {
				require.Positive(t, got[i].Duration)
				got[i].Duration = 0
			}
			require.Equal(t, tc.want(), []events.SegmentServed(got))
		})
	}
}

// TestSegmentRefusals: with the status and code of §10.2, never a byte of a segment.
func TestSegmentRefusals(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		method string
		header http.Header
		err    error
		status int
		code   ssp2.Code
	}{
		{"another method", http.MethodPost, http.Header{httpsync.ScopesHeader: {scopes}}, nil, 405, ssp2.CodeInvalidRequest},
		{"no scopes", http.MethodGet, nil, nil, 400, ssp2.CodeInvalidRequest},
		{"scopes twice", http.MethodGet, http.Header{httpsync.ScopesHeader: {scopes, scopes}}, nil, 400, ssp2.CodeInvalidRequest},
		{"scopes that are none", http.MethodGet, http.Header{httpsync.ScopesHeader: {`["p1"]`}}, nil, 400, ssp2.CodeInvalidRequest},
		{"forbidden", http.MethodGet, http.Header{httpsync.ScopesHeader: {scopes}}, ssp2.Errorf(ssp2.CodeForbidden, "no"), 403, ssp2.CodeForbidden},
		{"unknown", http.MethodGet, http.Header{httpsync.ScopesHeader: {scopes}}, ssp2.Errorf(ssp2.CodeNotFound, "no"), 404, ssp2.CodeNotFound},
		{"expired", http.MethodGet, http.Header{httpsync.ScopesHeader: {scopes}}, ssp2.Errorf(ssp2.CodeSegmentExpired, "no"), 404, ssp2.CodeSegmentExpired},
		{"broken", http.MethodGet, http.Header{httpsync.ScopesHeader: {scopes}}, errors.New("table on fire"), 500, ssp2.CodeInternalError},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := getSegment(t, &shelf{body: []byte("secret"), err: tc.err}, tc.method, "", tc.header)
			require.Equal(t, tc.status, w.Code)
			require.Contains(t, w.Body.String(), `"code":"`+string(tc.code)+`"`)
			require.NotContains(t, w.Body.String(), "secret")
			require.NotContains(t, w.Body.String(), "fire")
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.Empty(t, w.Header().Get("ETag"))
		})
	}
	h := newHandler(t, httpsync.Config{Rounds: noRound(t), Segments: &shelf{}, Authenticate: func(*http.Request) (round.Identity, error) {
		return round.Identity{}, errors.New("who?")
	}})
	r := httptest.NewRequest(http.MethodGet, "/segments/x", nil)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusUnauthorized, w.Code)

	h = newHandler(t, httpsync.Config{Rounds: noRound(t)})
	for _, target := range []string{"/segments/x", "/segments/x?st=y"} {
		r = httptest.NewRequest(http.MethodGet, target, nil)
		r.Header.Set(httpsync.ScopesHeader, scopes)
		w = httptest.NewRecorder()
		h.ServeHTTP(w, r)
		require.Equal(t, http.StatusNotFound, w.Code)
		require.Contains(t, w.Body.String(), `"code":"sync.not_found"`)
	}
}

// TestSignedSegment: the token decides alone; the bytes go out as they are stored, to any
// origin.
func TestSignedSegment(t *testing.T) {
	t.Parallel()
	s := &shelf{body: bytes.Repeat([]byte("x"), 5000)}
	nobody := func(*http.Request) (round.Identity, error) { return round.Identity{}, errors.New("asked who it is") }
	h := newHandler(t, httpsync.Config{Rounds: noRound(t), Segments: s, Authenticate: nobody})
	r := httptest.NewRequest(http.MethodGet, "/segments/"+s.meta().ID+"?st=a.b&x=y", nil)
	r.Header.Set("Accept-Encoding", "zstd, gzip")
	r.Header.Set("Authorization", "Bearer nonsense")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "a.b", s.token)
	require.Empty(t, w.Header().Get("Content-Encoding"))
	require.Empty(t, w.Header().Get("Vary"))
	require.Equal(t, "*", w.Header().Get("Access-Control-Allow-Origin"))
	require.Equal(t, s.body, w.Body.Bytes())

	// Which origins there are is the host's to say, if it says so.
	w = httptest.NewRecorder()
	w.Header().Set("Access-Control-Allow-Origin", "https://app.example.com")
	h.ServeHTTP(w, r)
	require.Equal(t, []string{"https://app.example.com"}, w.Header().Values("Access-Control-Allow-Origin"))

	s.err = ssp2.Errorf(ssp2.CodeForbidden, "no")
	r = httptest.NewRequest(http.MethodGet, "/segments/"+s.meta().ID+"?st=", nil)
	w = httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusForbidden, w.Code)
}

// TestSegmentCutShort: a segment that goes away while it is sent ends the connection, so
// that nobody takes the part for the whole.
func TestSegmentCutShort(t *testing.T) {
	t.Parallel()
	for _, coding := range []string{"identity", "gzip", "zstd"} {
		t.Run(coding, func(t *testing.T) {
			t.Parallel()
			body := bytes.Repeat([]byte("x"), 3<<20)
			s := &shelf{body: body, reader: io.MultiReader(bytes.NewReader(body[:2<<20]), iotest.ErrReader(segment.ErrCutShort))}
			server := httptest.NewServer(newHandler(t, httpsync.Config{Rounds: noRound(t), Segments: s}))
			defer server.Close()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/segments/"+s.meta().ID, nil)
			require.NoError(t, err)
			req.Header.Set(httpsync.ScopesHeader, scopes)
			req.Header.Set("Accept-Encoding", coding)
			resp, err := server.Client().Do(req)
			if err == nil { // some bytes were out already
				defer func() { _ = resp.Body.Close() }()
				_, err = io.Copy(io.Discard, resp.Body)
			}
			require.Error(t, err)
		})
	}
	// Before the first byte it is an error like any other.
	s := &shelf{body: make([]byte, 5000), reader: iotest.ErrReader(errors.New("gone"))}
	w := getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {scopes}})
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.Contains(t, w.Body.String(), `"code":"sync.internal_error"`)
}

// TestScopesHeaderBytes: characters come as UTF-8, or as a browser sends them.
func TestScopesHeaderBytes(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`{"project":["ä"]}`, "{\"project\":[\"\xe4\"]}", `{"project":["\u00e4"]}`} {
		s := &shelf{body: []byte("x")}
		w := getSegment(t, s, http.MethodGet, "", http.Header{httpsync.ScopesHeader: {text}})
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, map[string][]string{"project": {"ä"}}, s.requested)
	}
}
