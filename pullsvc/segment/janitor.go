package segment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	// DefaultSweepEvery is how often a [Janitor] looks for expired segments.
	DefaultSweepEvery = 10 * time.Minute
	// sweepBatch is how much one pass deletes.
	sweepBatch = 200
)

// JanitorConfig configures a [Janitor]. Store is required.
type JanitorConfig struct {
	Store Store
	// Every is the time between two sweeps, of which up to a quarter is left out at random
	// so that instances take turns. Default 10 min.
	Every time.Duration
	// Logger receives failures. Default: nothing is logged.
	Logger *slog.Logger
}

// Janitor deletes expired segments in the background. Several of them on one store do no
// harm.
type Janitor struct {
	cfg  JanitorConfig
	wait func(time.Duration) (<-chan time.Time, func() bool)

	mu     sync.Mutex
	cancel context.CancelFunc // nil: not started
	done   chan struct{}
}

// NewJanitor returns a janitor that has not started.
func NewJanitor(cfg JanitorConfig) (*Janitor, error) {
	switch {
	case cfg.Store == nil:
		return nil, errors.New("segment: JanitorConfig.Store is required")
	case cfg.Every < 0:
		return nil, fmt.Errorf("segment: JanitorConfig.Every is %v; it must be positive, or 0 for the default of %v", cfg.Every, DefaultSweepEvery)
	case cfg.Every == 0:
		cfg.Every = DefaultSweepEvery
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Janitor{cfg: cfg, wait: func(d time.Duration) (<-chan time.Time, func() bool) {
		t := time.NewTimer(d)
		return t.C, t.Stop
	}}, nil
}

// Start begins the work, which lasts until [Janitor.Stop]; the end of ctx does not end it.
// The first sweep is due after the first wait.
func (j *Janitor) Start(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.cancel != nil {
		return errors.New("segment: the janitor is started already")
	}
	ctx, j.cancel = context.WithCancel(context.WithoutCancel(ctx))
	j.done = make(chan struct{})
	go j.run(ctx, j.done)
	return nil
}

// Stop ends the work and returns when it has ended, or with an error when ctx ends first.
// It may be called more than once, and before Start.
func (j *Janitor) Stop(ctx context.Context) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.cancel == nil {
		return nil
	}
	j.cancel()
	select {
	case <-j.done:
		j.cancel = nil
		return nil
	case <-ctx.Done():
		return fmt.Errorf("segment: the janitor is still at work: %w", ctx.Err())
	}
}

func (j *Janitor) run(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	for ctx.Err() == nil {
		due, stop := j.wait(j.cfg.Every - rand.N(j.cfg.Every/4+1)) //nolint:gosec // spreads load
		select {
		case <-due:
			j.sweep(ctx)
		case <-ctx.Done():
			stop()
			return
		}
	}
}

// sweep runs passes until nothing expired is left. What fails is tried again next time.
func (j *Janitor) sweep(ctx context.Context) {
	total := 0
	for more := true; more && ctx.Err() == nil; {
		var deleted int
		var err error
		deleted, more, err = j.cfg.Store.DeleteExpired(ctx, sweepBatch)
		if err != nil {
			if ctx.Err() == nil {
				j.cfg.Logger.WarnContext(ctx, "expired segments were not deleted", "error", err)
			}
			return
		}
		total += deleted
	}
	if total > 0 {
		j.cfg.Logger.DebugContext(ctx, "expired segments deleted", "segments", total)
	}
}
