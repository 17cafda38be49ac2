package round

import (
	"context"

	"github.com/syncpg/syncpg/pullsvc"
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
