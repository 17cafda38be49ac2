package httpsync_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func get(h http.Handler, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

func TestHealthRoutes(t *testing.T) {
	t.Parallel()
	secret := errors.New("secret: host=10.0.0.1 user=app")
	for _, tc := range []struct {
		name   string
		path   string
		checks []httpsync.Check
		status int
		body   string
	}{
		{"the process runs", "/healthz", []httpsync.Check{{Name: "database", Err: secret}}, 200, `{"status":"ok"}`},
		{"no checks", "/readyz", nil, 200, `{"status":"ready"}`},
		{
			"all pass", "/readyz",
			[]httpsync.Check{{Name: "database"}, {Name: "migrations"}},
			200, `{"status":"ready","checks":[{"name":"database","status":"ok"},{"name":"migrations","status":"ok"}]}`,
		},
		{
			"one fails", "/readyz",
			[]httpsync.Check{{Name: "database", Help: "unused"}, {Name: "migrations", Err: secret, Help: "run syncpg migrate up"}},
			503, `{"status":"unavailable","checks":[{"name":"database","status":"ok"},{"name":"migrations","status":"failed","help":"run syncpg migrate up"}]}`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := newHandler(t, httpsync.Config{
				Rounds:       noRound(t),
				Authenticate: func(*http.Request) (round.Identity, error) { panic("probes are not authenticated") },
				Ready:        func(context.Context) []httpsync.Check { return tc.checks },
			})
			w := get(h, tc.path)
			require.Equal(t, tc.status, w.Code)
			require.Equal(t, "application/json", w.Header().Get("Content-Type"))
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.JSONEq(t, tc.body, w.Body.String())

			w = httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, tc.path, nil))
			require.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
			requireError(t, w, http.StatusMethodNotAllowed, ssp2.CodeInvalidRequest)
		})
	}
}

func TestReadinessProbesRunOneAtATime(t *testing.T) {
	t.Parallel()
	var running, calls atomic.Int32
	h := newHandler(t, httpsync.Config{
		Rounds: noRound(t),
		Ready: func(ctx context.Context) []httpsync.Check {
			_, bounded := ctx.Deadline()
			if running.Add(1) != 1 || !bounded {
				t.Error("two probes at once, or one without a deadline")
			}
			calls.Add(1)
			running.Add(-1)
			return nil
		},
	})
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() { get(h, "/readyz") })
	}
	all.Wait()
	require.EqualValues(t, 50, calls.Load())
}

func TestAProbeThatCannotRunIsNotReady(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	h := newHandler(t, httpsync.Config{
		Rounds: noRound(t),
		Ready: func(context.Context) []httpsync.Check {
			close(entered)
			<-leave
			return nil
		},
	})
	var first sync.WaitGroup
	first.Go(func() { get(h, "/readyz") })
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/readyz", nil))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.JSONEq(t, `{"status":"unavailable"}`, w.Body.String())
	close(leave)
	first.Wait()
}
