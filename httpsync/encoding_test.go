package httpsync_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func TestAcceptEncoding(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		header []string
		want   string
	}{
		{nil, ""},
		{[]string{""}, ""},
		{[]string{"zstd, gzip"}, "zstd"},
		{[]string{"gzip, zstd"}, "zstd"},
		{[]string{"gzip", "zstd"}, "zstd"},
		{[]string{"gzip"}, "gzip"},
		{[]string{"x-gzip"}, "gzip"},
		{[]string{"GZIP"}, "gzip"},
		{[]string{"gzip, deflate, br"}, "gzip"},
		{[]string{"br"}, ""},
		{[]string{"*"}, "zstd"},
		{[]string{"zstd;q=0, *"}, "gzip"},
		{[]string{"zstd;q=0, *;q=0"}, ""},
		{[]string{"zstd;q=0.5, gzip;q=0.8"}, "gzip"},
		{[]string{"zstd; Q=0.5 , gzip; q=0.5"}, "zstd"},
		{[]string{"gzip;q=0"}, ""},
		{[]string{"gzip;q=0.000"}, ""},
		{[]string{"identity"}, ""},
		{[]string{"identity;q=1, gzip;q=0.5"}, ""},
		{[]string{"identity;q=0.5, gzip;q=0.5"}, "gzip"},
		{[]string{"identity;q=0"}, ""},
		{[]string{"gzip;q=nonsense"}, ""},
		{[]string{"gzip;q=NaN"}, ""},
		{[]string{"gzip;q=2"}, ""},
		{[]string{"gzip;level=9"}, "gzip"},
		{[]string{",, ,gzip,,"}, "gzip"},
	} {
		require.Equal(t, tc.want, httpsync.Negotiate(tc.header), "%q", tc.header)
	}
}

// decoder decompresses a response of a coding as it arrives.
func decoder(t *testing.T, coding string, body io.Reader) io.Reader {
	t.Helper()
	switch coding {
	case "zstd":
		z, err := zstd.NewReader(body, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20))
		require.NoError(t, err)
		t.Cleanup(z.Close)
		return z
	case "gzip":
		z, err := gzip.NewReader(body)
		require.NoError(t, err)
		return z
	}
	return body
}

// answered is a response whose body is still to be read, compressed as it came.
type answered struct {
	status int
	header http.Header
	body   io.Reader
}

// open posts a request to a server.
func open(t *testing.T, server *httptest.Server, coding string) answered {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/sync", bytes.NewReader(request(t)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", httpsync.ContentType)
	r.Header.Set("Accept-Encoding", "identity;q=0.1")
	if coding != "" {
		r.Header.Set("Accept-Encoding", coding)
	}
	res, err := server.Client().Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { _ = res.Body.Close() })
	return answered{res.StatusCode, res.Header, res.Body}
}

func serve(t *testing.T, cfg httpsync.Config) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(newHandler(t, cfg))
	t.Cleanup(server.Close)
	return server
}

var codings = []string{"", "gzip", "zstd"}

func TestCompressionRoundTrips(t *testing.T) {
	t.Parallel()
	server := serve(t, httpsync.Config{Rounds: answer(2000)})
	for _, coding := range codings {
		t.Run("coding "+coding, func(t *testing.T) {
			t.Parallel()
			for range 3 { // the encoders are used again
				res := open(t, server, coding)
				require.Equal(t, http.StatusOK, res.status)
				require.Equal(t, httpsync.ContentType, res.header.Get("Content-Type"))
				require.Equal(t, coding, res.header.Get("Content-Encoding"))
				require.Equal(t, "Accept-Encoding", res.header.Get("Vary"))
				require.Equal(t, "no-store", res.header.Get("Cache-Control"))
				packed, err := io.ReadAll(res.body)
				require.NoError(t, err)
				if coding != "" {
					require.Less(t, len(packed), len(response(2000))/4)
				}
				plain, err := io.ReadAll(decoder(t, coding, bytes.NewReader(packed)))
				require.NoError(t, err)
				require.Equal(t, response(2000), plain)
			}
		})
	}
}

func TestASmallResponseIsNotCompressed(t *testing.T) {
	t.Parallel()
	server := serve(t, httpsync.Config{Rounds: answer(1)})
	for _, coding := range codings {
		res := open(t, server, coding)
		require.Empty(t, res.header.Get("Content-Encoding"))
		require.Equal(t, strconv.Itoa(len(response(1))), res.header.Get("Content-Length"))
		body, err := io.ReadAll(res.body)
		require.NoError(t, err)
		require.Equal(t, response(1), body)
	}
}

func TestFlushedBytesArriveWhileTheRoundGoesOn(t *testing.T) {
	t.Parallel()
	for _, coding := range codings {
		t.Run("coding "+coding, func(t *testing.T) {
			t.Parallel()
			first, second := response(3), response(200)
			arrived := make(chan struct{})
			server := serve(t, httpsync.Config{
				Rounds: runner(func(ctx context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
					if _, err := w.Write(first); err != nil {
						return err
					}
					if err := w.Flush(); err != nil {
						return err
					}
					select { // the second subscription is read only when the first has arrived
					case <-arrived:
					case <-ctx.Done():
						return ctx.Err()
					}
					_, err := w.Write(second)
					return err
				}),
			})
			res := open(t, server, coding)
			require.Equal(t, coding, res.header.Get("Content-Encoding"))
			body := decoder(t, coding, res.body)
			got := make([]byte, len(first))
			_, err := io.ReadFull(body, got)
			require.NoError(t, err)
			require.Equal(t, first, got)
			close(arrived)
			rest, err := io.ReadAll(body)
			require.NoError(t, err)
			require.Equal(t, second, rest)
		})
	}
}

// TestCompressionIsBounded: responses beyond the bound go out as they are, and a response
// that has ended makes room.
func TestCompressionIsBounded(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ most, held, packed int }{{2, 4, 2}, {-1, 4, 4}} {
		goOn := make(chan struct{})
		server := serve(t, httpsync.Config{
			MaxCompressed: tc.most,
			Rounds: runner(func(ctx context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
				if _, err := w.Write(response(100)); err != nil {
					return err
				}
				if err := w.Flush(); err != nil {
					return err
				}
				select {
				case <-goOn:
				case <-ctx.Done():
				}
				return nil
			}),
		})
		packed := 0
		var all []answered
		for i := range tc.held {
			res := open(t, server, codings[1+i%2])
			all = append(all, res)
			if res.header.Get("Content-Encoding") != "" {
				packed++
			}
		}
		require.Equal(t, tc.packed, packed)
		close(goOn)
		for _, res := range all {
			plain, err := io.ReadAll(decoder(t, res.header.Get("Content-Encoding"), res.body))
			require.NoError(t, err)
			require.Equal(t, response(100), plain)
		}
	}
}

// TestCompressionEnds: what a response took of the bound is given back, however it ends.
func TestCompressionEnds(t *testing.T) {
	t.Parallel()
	failing, broken := false, errors.New("broken")
	h := newHandler(t, httpsync.Config{
		MaxCompressed: 1,
		Rounds: runner(func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			if _, err := w.Write(response(100)); err != nil || !failing {
				return err
			}
			return broken
		}),
	})
	for range 3 {
		for _, failing = range []bool{false, true} {
			r := httptest.NewRequest(http.MethodPost, "/sync", bytes.NewReader(request(t)))
			r.Header.Set("Content-Type", httpsync.ContentType)
			r.Header.Set("Accept-Encoding", "zstd")
			w := httptest.NewRecorder()
			if failing {
				require.Panics(t, func() { h.ServeHTTP(w, r) })
			} else {
				h.ServeHTTP(w, r)
			}
			require.Equal(t, "zstd", w.Header().Get("Content-Encoding"))
		}
	}
}

// BenchmarkEncoders is what a compressed response holds while it is under way, which is
// what Config.MaxCompressed multiplies, and how well it packs rows of words.
func BenchmarkEncoders(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	words := make([]string, 3000)
	for i := range words {
		words[i] = strconv.FormatUint(r.Uint64()>>(8+r.IntN(40)), 36)
	}
	var body []byte
	for len(body) < 4<<20 {
		body = fmt.Appendf(body, "%016x%016x", r.Uint64(), r.Uint64())
		for range 10 {
			body = append(append(body, words[min(2999, int(r.ExpFloat64()*300))]...), ' ')
		}
	}
	for _, coding := range codings[1:] {
		b.Run(coding, func(b *testing.B) {
			const n = 16
			heap := func() uint64 {
				runtime.GC()
				runtime.GC() // what pools kept from the last one is gone
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			b.SetBytes(n * int64(len(body)))
			var each, sent uint64
			for b.Loop() {
				before := heap()
				taken, packed := httpsync.Compress(coding, body, n)
				each, sent = (heap()-before)/n, uint64(packed)/n
				runtime.KeepAlive(taken)
			}
			b.ReportMetric(float64(each)/(1<<20), "MiB/response")
			b.ReportMetric(float64(sent)/float64(len(body)), "ratio")
		})
	}
}

func FuzzAcceptEncoding(f *testing.F) {
	f.Add("zstd;q=0.5, gzip;q=0.8, *;q=0")
	f.Add(";q=,;;=,identity")
	f.Fuzz(func(t *testing.T, header string) {
		require.Contains(t, codings, httpsync.Negotiate([]string{header}))
	})
}
