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
				t.Error("two runs at once, or one without a deadline")
			}
			calls.Add(1)
			running.Add(-1)
			return nil
		},
	})
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if w := get(h, "/readyz"); w.Code != http.StatusOK {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	all.Wait()
	require.Positive(t, calls.Load())
	require.LessOrEqual(t, calls.Load(), int32(50))
}

// stuckProbe is a handler whose first probe runs until leave is closed.
func stuckProbe(t *testing.T, checks ...httpsync.Check) (h http.Handler, calls *atomic.Int32, leave chan struct{}) {
	t.Helper()
	calls, leave = new(atomic.Int32), make(chan struct{})
	entered := make(chan struct{})
	h = newHandler(t, httpsync.Config{
		Rounds: noRound(t),
		Ready: func(ctx context.Context) []httpsync.Check {
			if calls.Add(1) == 1 {
				close(entered)
				<-leave
			}
			if ctx.Err() != nil {
				return []httpsync.Check{{Name: "cancelled", Err: ctx.Err()}}
			}
			return checks
		},
	})
	gone, cancel := context.WithCancel(t.Context())
	var first sync.WaitGroup
	first.Go(func() {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(gone, http.MethodGet, "/readyz", nil))
	})
	t.Cleanup(first.Wait)
	<-entered
	cancel() // whoever asked first does not wait for the answer
	return h, calls, leave
}

// However many ask, they get the answer of the run that is under way.
func TestProbesShareARun(t *testing.T) {
	t.Parallel()
	h, calls, leave := stuckProbe(t, httpsync.Check{Name: "database"})
	var all, asked sync.WaitGroup
	asked.Add(100)
	for range 100 {
		all.Go(func() {
			w := httptest.NewRecorder()
			ctx := &announced{Context: t.Context(), waiting: asked.Done}
			h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/readyz", nil))
			if w.Code != http.StatusOK {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		})
	}
	asked.Wait()
	close(leave)
	all.Wait()
	require.EqualValues(t, 1, calls.Load())
	require.Equal(t, http.StatusOK, get(h, "/readyz").Code)
	require.EqualValues(t, 2, calls.Load())
}

// announced is a context that tells when somebody waits for it.
type announced struct {
	context.Context
	once    sync.Once
	waiting func()
}

func (a *announced) Done() <-chan struct{} {
	a.once.Do(a.waiting)
	return a.Context.Done()
}

func TestAProbeThatCannotRunIsNotReady(t *testing.T) {
	t.Parallel()
	h, _, leave := stuckProbe(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/readyz", nil))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.JSONEq(t, `{"status":"unavailable"}`, w.Body.String())
	close(leave)
}

func TestAProbeThatPanicsIsNotReady(t *testing.T) {
	t.Parallel()
	calls := 0
	h := newHandler(t, httpsync.Config{
		Rounds: noRound(t),
		Ready: func(context.Context) []httpsync.Check {
			if calls++; calls == 1 {
				panic("a check")
			}
			return nil
		},
	})
	require.Panics(t, func() { get(h, "/readyz") })
	require.Equal(t, http.StatusOK, get(h, "/readyz").Code)
}
