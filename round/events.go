package round

import (
	"context"
	"errors"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

// Finisher is a [Writer] whose response is not out when [Engine.Run] returns. When
// somebody listens to events, Run hands it what is left to do once it is: the writer
// calls report, from any goroutine, with the bytes of the request and of the response
// as they were on the wire. Other writers need not know of events; their bytes are 0.
type Finisher interface {
	WhenFinished(report func(received, sent int64))
}

// errPanicked is how a round ended that did not return.
var errPanicked = errors.New("the round panicked")

// handled tells that a round is over, with the error it ended with.
func (e *Engine) handled(ctx context.Context, id Identity, req *ssp2.Request, w Writer, began time.Time, err *error) {
	if e.events == nil {
		return
	}
	handled := events.RequestHandled{
		Partition: id.Partition, Actor: id.Actor, ClientID: req.Header.ClientID, WireVersion: req.WireVersion,
		Commits: len(req.Commits), Subscriptions: len(req.Subscriptions),
	}
	if f := Failure(*err); f != nil {
		handled.Code = f.Code
	}
	ctx = context.WithoutCancel(ctx) // it may end with the response
	report := func(received, sent int64) {
		handled.BytesReceived, handled.BytesSent = received, sent
		handled.Duration = time.Since(began)
		events.Emit(ctx, e.events, handled)
	}
	if f, ok := w.(Finisher); ok {
		f.WhenFinished(report)
		return
	}
	report(0, 0)
}

func (e *Engine) resolverFailed(ctx context.Context, req ScopeRequest, outage bool, err error) {
	events.Emit(ctx, e.events, events.ResolverFailed{
		Partition: req.Partition, Actor: req.Actor, ClientID: req.ClientID,
		Phase: "request", Outage: outage, Err: err,
	})
}
