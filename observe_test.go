package syncpg_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

// spans is a tracer provider that keeps the spans of the contexts that carry it.
type spans struct {
	embedded.TracerProvider
	mu  sync.Mutex
	all []string // "parent > name, ended"
}

type spansKey struct{}

// spanTracer makes the spans of whichever test the context is of.
type spanTracer struct{ embedded.Tracer }

type span struct {
	noop.Span
	of   *spans
	path string
}

func (*spans) Tracer(string, ...trace.TracerOption) trace.Tracer { return spanTracer{} }

func (spanTracer) Start(ctx context.Context, name string, _ ...trace.SpanStartOption) (context.Context, trace.Span) {
	of, ok := ctx.Value(spansKey{}).(*spans)
	if !ok {
		return ctx, noop.Span{}
	}
	s := &span{of: of, path: name}
	if parent, ok := trace.SpanFromContext(ctx).(*span); ok {
		s.path = parent.path + " > " + name
	}
	return trace.ContextWithSpan(ctx, s), s
}

func (*span) IsRecording() bool { return true }
func (s *span) End(...trace.SpanEndOption) {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.of.all = append(s.of.all, s.path)
}

// observed runs a round of a push and a pull, and returns the response.
func observed(ctx context.Context, t *testing.T, server *syncpg.Server, s *syncpg.Schema) (body []byte, sent int) {
	t.Helper()
	req := &ssp2.Request{
		WireVersion:   ssp2.WireV1,
		Header:        ssp2.RequestHeader{ClientID: "device", SchemaVersion: s.Version},
		Commits:       []ssp2.PushCommit{newList("l1", "team-1", "Groceries")},
		Pull:          &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows},
		Subscriptions: []ssp2.Subscription{{ID: "lists", Table: "lists", Cursor: -1, Scopes: ssp2.ScopeMap{"team_id": {"team-1"}}}},
	}
	encoded, err := ssp2.AppendMessage(nil, req.Message())
	require.NoError(t, err)
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/sync", bytes.NewReader(encoded))
	r.Header.Set("Content-Type", httpsync.ContentType)
	w := httptest.NewRecorder()
	server.Handler().ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	server.Push().Wait()
	return w.Body.Bytes(), len(encoded)
}

// The provider of spans belongs to the process, so one test sets it.
func TestARoundIsObserved(t *testing.T) {
	t.Parallel()
	kept := &spans{}
	otel.SetTracerProvider(kept)
	ring := events.NewRing(10)
	cfg := config()
	cfg.Events = ring
	server, err := syncpg.New(pgtest.New(t, installed).Pool, cfg)
	require.NoError(t, err)
	body, sent := observed(context.WithValue(t.Context(), spansKey{}, kept), t, server, cfg.Schema)

	var names []string
	for _, r := range ring.Query(events.Filter{}) {
		names = append(names, r.Event.EventName())
		if e, ok := r.Event.(events.RequestHandled); ok {
			require.EqualValues(t, sent, e.BytesReceived)
			require.EqualValues(t, len(body), e.BytesSent)
		}
	}
	slices.Sort(names)
	require.Equal(t, []string{"pull.served", "push.applied", "request.handled"}, names)

	slices.Sort(kept.all)
	require.Equal(t, []string{
		"syncpg.request",
		"syncpg.request > syncpg.pull.begin",
		"syncpg.request > syncpg.pull.stream",
		"syncpg.request > syncpg.push.admit",
		"syncpg.request > syncpg.push.apply",
	}, kept.all)
}

// panicking is a sink that is broken.
type panicking struct{}

func (panicking) Emit(context.Context, events.Event) { panic("sink is broken") }

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	var want []byte
	for _, sink := range []events.Sink{nil, panicking{}, (*events.Ring)(nil)} {
		cfg := config()
		cfg.Events = sink
		db := pgtest.New(t, installed)
		server, err := syncpg.New(db.Pool, cfg)
		require.NoError(t, err)
		body, _ := observed(t.Context(), t, server, cfg.Schema)
		if want == nil {
			want = body
		}
		require.Len(t, body, len(want))
		require.Zero(t, db.Pool.Stat().AcquiredConns())
	}
}

// TestCommitsAreTold: Config.Committed hears of what a round pushed, before its answer.
func TestCommitsAreTold(t *testing.T) {
	t.Parallel()
	var told []string
	cfg := config()
	cfg.Committed = func(partition string, seq int64) { told = append(told, fmt.Sprint(partition, " ", seq)) }
	server, err := syncpg.New(pgtest.New(t, installed).Pool, cfg)
	require.NoError(t, err)
	observed(t.Context(), t, server, cfg.Schema)
	require.Len(t, told, 1)
	require.Regexp(t, ` 1$`, told[0])
}
