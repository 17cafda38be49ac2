package events

import (
	"context"
	"log/slog"
)

// Event is something that happened. The types of this package are used as values;
// they are never changed after they were emitted.
type Event interface {
	// EventName returns the name of the type of event, such as "push.applied".
	EventName() string
}

// Sink receives events. Emit is called from many goroutines, must not block, and must
// not keep ctx. A nil Sink means that nobody listens.
type Sink interface {
	Emit(ctx context.Context, e Event)
}

// Emit gives an event to a sink, and does nothing, without allocating, when there is
// none. Producers call it, on a sink that went through [Safe].
func Emit[E Event](ctx context.Context, s Sink, e E) {
	if s != nil {
		s.Emit(ctx, e)
	}
}

// Multi returns a sink that gives every event to each of the sinks, in order, to the
// rest of them also when one panics. Nil sinks are left out; without any other the
// result is nil.
func Multi(sinks ...Sink) Sink {
	var some multi
	for _, s := range sinks {
		if s != nil {
			some = append(some, s)
		}
	}
	switch len(some) {
	case 0:
		return nil
	case 1:
		return some[0]
	}
	return some
}

type multi []Sink

func (m multi) Emit(ctx context.Context, e Event) {
	if len(m) > 1 {
		defer m[1:].Emit(ctx, e)
	}
	m[0].Emit(ctx, e)
}

// Safe returns a sink that contains the panics of s, so that they change nothing for
// the work that the event is about, and reports them to log; nil: to nobody. A nil
// sink stays nil.
func Safe(s Sink, log *slog.Logger) Sink {
	switch s.(type) {
	case nil:
		return nil
	case safe:
		return s
	}
	return safe{s, log}
}

type safe struct {
	sink Sink
	log  *slog.Logger
}

func (s safe) Emit(ctx context.Context, e Event) {
	defer func() {
		if cause := recover(); cause != nil {
			s.report(ctx, e, cause)
		}
	}()
	s.sink.Emit(ctx, e)
}

func (s safe) report(ctx context.Context, e Event, cause any) {
	// The logger may be what panicked.
	defer func() { _ = recover() }()
	if s.log != nil {
		s.log.ErrorContext(ctx, "an event sink panicked", "event", e.EventName(), "panic", cause)
	}
}
