package trace_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	api "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/ssp2"
)

// recorder is a tracer provider that keeps what its tracer was asked for.
type recorder struct {
	embedded.TracerProvider
	off   bool
	spans []*recorded
}

type recorded struct {
	noop.Span
	name, parent, status string
	code                 codes.Code
	attributes           map[string]string
	ended                bool
	off                  bool
}

func (r *recorder) Tracer(name string, _ ...api.TracerOption) api.Tracer {
	if name != trace.Scope {
		panic(name)
	}
	return tracer{r: r}
}

type tracer struct {
	embedded.Tracer
	r *recorder
}

func (t tracer) Start(ctx context.Context, name string, _ ...api.SpanStartOption) (context.Context, api.Span) {
	s := &recorded{name: name, attributes: map[string]string{}, off: t.r.off}
	if parent, ok := api.SpanFromContext(ctx).(*recorded); ok {
		s.parent = parent.name
	}
	t.r.spans = append(t.r.spans, s)
	return api.ContextWithSpan(ctx, s), s
}

func (s *recorded) SpanContext() api.SpanContext {
	return api.NewSpanContext(api.SpanContextConfig{TraceID: api.TraceID{1}, SpanID: api.SpanID{1}})
}
func (s *recorded) IsRecording() bool                    { return !s.off }
func (s *recorded) SetStatus(c codes.Code, about string) { s.code, s.status = c, about }
func (s *recorded) End(...api.SpanEndOption)             { s.ended = true }
func (s *recorded) SetAttributes(list ...attribute.KeyValue) {
	for _, kv := range list {
		s.attributes[string(kv.Key)] = kv.Value.AsString()
	}
}

func work(ctx context.Context, fail error, below func(context.Context)) (err error) {
	ctx, span := trace.Start(ctx, "outer")
	defer span.End(&err)
	below(ctx)
	return fail
}

// registered is the provider of all runs: tracers keep the first one.
var registered = &recorder{}

// The provider belongs to the process, so one test goes through its life.
func TestSpans(t *testing.T) { //nolint:paralleltest // see above
	ctx := t.Context()
	nothing := func(context.Context) {}

	// Nobody registered a provider, which only the first run of several can see.
	if _, again := otel.GetTracerProvider().(*recorder); !again {
		same, span := trace.Start(ctx, "alone")
		require.Equal(t, ctx, same, "the context stays as it is")
		require.Zero(t, span)
		require.NotPanics(t, func() { span.End(nil) })
		require.NoError(t, work(ctx, nil, nothing))
		require.LessOrEqual(t, testing.AllocsPerRun(100, func() {
			_, span := trace.Start(ctx, "alone")
			span.End(nil)
		}), 3.0)
	}

	r := registered
	r.off = false
	otel.SetTracerProvider(r)
	for _, c := range []struct {
		name string
		err  error
		code codes.Code
		says string
	}{
		{"success", nil, codes.Unset, ""},
		{"an error of the protocol", fmt.Errorf("pushing: %w", ssp2.Errorf(ssp2.CodeForbidden, "quotes data")), codes.Error, "sync.forbidden"},
		{"any other error", errors.New("quotes data"), codes.Error, "sync.internal_error"},
	} {
		r.spans = nil
		require.ErrorIs(t, work(ctx, c.err, func(ctx context.Context) {
			_, span := trace.Start(ctx, "inner")
			span.End(nil)
		}), c.err, c.name)
		require.Len(t, r.spans, 2, c.name)
		outer, inner := r.spans[0], r.spans[1]
		require.Equal(t, []string{"outer", "", "inner", "outer"}, []string{outer.name, outer.parent, inner.name, inner.parent}, c.name)
		require.True(t, outer.ended && inner.ended, c.name)
		require.Equal(t, c.code, outer.code, c.name)
		require.Equal(t, c.says, outer.status, c.name)
		require.Equal(t, c.says, outer.attributes["syncpg.code"], c.name)
	}

	// A span that was sampled out hands its decision down, and records nothing.
	r.off = true
	r.spans = nil
	require.Error(t, work(ctx, errors.New("no"), func(ctx context.Context) {
		require.Equal(t, r.spans[0], api.SpanFromContext(ctx))
	}))
	require.Equal(t, codes.Unset, r.spans[0].code)
}
