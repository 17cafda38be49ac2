package httpsync_test

import (
	"bytes"
	"context"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// TestARoundIsReportedWhenItsResponseIsOut: with the bytes of both bodies as they
// went over the connection.
func TestARoundIsReportedWhenItsResponseIsOut(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		body   []byte
		header http.Header
		run    runner
		whole  bool // the connection is of use afterwards
	}{
		{"a short response", request(t), nil, answer(1), true},
		{"compressed bodies", gz(t, request(t)), http.Header{"Content-Encoding": {"gzip"}, "Accept-Encoding": {"gzip"}}, answer(100), true},
		{"a round that fails", request(t), nil, func(context.Context, round.Identity, *ssp2.Request, round.Writer) error {
			return ssp2.Errorf(ssp2.CodeInvalidRequest, "no")
		}, true},
		{"a round that panics", request(t), nil, func(_ context.Context, _ round.Identity, _ *ssp2.Request, w round.Writer) error {
			_, _ = w.Write(response(100))
			panic("broken")
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var reports [][2]int64
			w := httptest.NewRecorder()
			h := newHandler(t, httpsync.Config{Rounds: runner(func(ctx context.Context, id round.Identity, req *ssp2.Request, out round.Writer) error {
				out.(round.Finisher).WhenFinished(func(received, sent int64) {
					require.Equal(t, tc.whole, w.Flushed || w.Code != http.StatusOK)
					reports = append(reports, [2]int64{received, sent})
				})
				return tc.run(ctx, id, req, out)
			})})
			r := httptest.NewRequest(http.MethodPost, "/sync", bytes.NewReader(tc.body))
			r.Header.Set("Content-Type", httpsync.ContentType)
			maps.Copy(r.Header, tc.header)
			if serve := func() { h.ServeHTTP(w, r) }; tc.whole {
				serve()
			} else {
				require.PanicsWithValue(t, http.ErrAbortHandler, serve)
			}
			sent := int64(w.Body.Len())
			if w.Code != http.StatusOK {
				sent = 0 // an answer of HTTP, no response of a round
			}
			require.Equal(t, [][2]int64{{int64(len(tc.body)), sent}}, reports)
		})
	}
}
