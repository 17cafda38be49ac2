// Package trace makes OpenTelemetry spans. They go to the tracer provider that the host
// program has registered with the OpenTelemetry API; without one they are no-ops.
package trace

import (
	"context"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/syncpg/syncpg/ssp2"
)

// Scope is the instrumentation scope of all spans.
const Scope = "github.com/syncpg/syncpg"

// tracer follows a provider that is registered later.
var tracer = otel.Tracer(Scope)

// Span is a piece of work that has begun. The zero value is a no-op.
type Span struct {
	span trace.Span // nil: nobody records
}

// Start begins a span under the one in ctx. Around a function it is one line more:
//
//	ctx, span := trace.Start(ctx, "syncpg.push.admit")
//	defer span.End(&err)
func Start(ctx context.Context, name string) (context.Context, Span) {
	inner, span := tracer.Start(ctx, name)
	if span.IsRecording() {
		return inner, Span{span}
	}
	if !span.SpanContext().IsValid() {
		return ctx, Span{}
	}
	// Not recorded, but the spans below must know that this was decided.
	return inner, Span{}
}

// End ends the span. A non-nil *err marks it as failed, with the code that a client is
// told (§10.2) and without any text of the error, which may quote data. A nil err is
// allowed.
func (s Span) End(err *error) {
	if s.span == nil {
		return
	}
	if err != nil && *err != nil {
		code := ssp2.CodeOf(*err)
		if code == "" {
			code = ssp2.CodeInternalError
		}
		s.span.SetAttributes(attribute.String("syncpg.code", string(code)))
		s.span.SetStatus(codes.Error, string(code))
	}
	s.span.End()
}
