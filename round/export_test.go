package round

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// Reading is a pull that has begun, of a PullFake.
type Reading struct {
	Reset    bool
	LogEpoch string
	Stream   func(ctx context.Context, emit func(frames []byte) error) error
	Close    func()
}

// PullFake stands in for pullsvc.Service.
type PullFake interface {
	Validate(req pullsvc.Request) error
	Begin(ctx context.Context, req pullsvc.Request) (Reading, error)
}

type fakePull struct{ PullFake }

func (f fakePull) Begin(ctx context.Context, req pullsvc.Request) (reading, error) {
	r, err := f.PullFake.Begin(ctx, req)
	return reading{reset: r.Reset, logEpoch: r.LogEpoch, stream: r.Stream, close: r.Close}, err
}

// NewWith is New with stand-ins for the services.
func NewWith(cfg Config, push pusher, pull PullFake, gate entry) *Engine {
	return newEngine(cfg, push, fakePull{pull}, gate)
}

// AllocsWithoutSink counts what telling events allocates when nobody listens.
func AllocsWithoutSink(ctx context.Context) float64 {
	e, req, out := &Engine{}, &ssp2.Request{}, &response{}
	failure := errors.New("failed")
	return testing.AllocsPerRun(100, func() {
		err := failure
		e.handled(ctx, Identity{}, req, out.w, time.Now(), &err)
		e.resolverFailed(ctx, ScopeRequest{}, false, err)
	})
}
