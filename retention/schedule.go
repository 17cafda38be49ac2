package retention

import (
	"context"
	"errors"
	"time"
)

// Start begins to prune all partitions now and every interval, until [Service.Stop]; the
// end of ctx ends the starting only. However many processes do so on one database, one
// prunes at a time: who finds another at it leaves the rest to it. What goes wrong is
// logged, and tried again the next time. It does nothing when Config.Interval is negative
// or the schedule is running.
func (s *Service) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cfg.Interval < 0 || s.stop != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	s.stop, s.done = cancel, done
	go func() {
		defer close(done)
		s.schedule(ctx)
	}()
	return nil
}

// Stop ends what [Service.Start] began, in the middle of a batch if need be, which the
// database then does whole or not at all. It returns when that has ended, or with the error
// of ctx.
func (s *Service) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop == nil {
		return nil
	}
	s.stop()
	select {
	case <-s.done:
		s.stop = nil
		return nil
	case <-ctx.Done():
		return ctx.Err() //nolint:wrapcheck // the caller's own
	}
}

func (s *Service) schedule(ctx context.Context) {
	ticks, stop := s.ticks(s.cfg.Interval)
	defer stop()
	for {
		total, err := s.pruneAll(ctx, true, nil)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errBusy):
			s.cfg.Logger.DebugContext(ctx, "another process prunes the logs")
		case err != nil:
			s.cfg.Logger.ErrorContext(ctx, "cannot prune the logs", "error", err)
		}
		if total.Commits > 0 || total.Compacted > 0 {
			s.cfg.Logger.InfoContext(ctx, "pruned the logs", "partitions", total.Partitions, "commits", total.Commits,
				"changes", total.Changes, "tombstones", total.Tombstones, "compacted", total.Compacted)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		}
	}
}

func newTicks(every time.Duration) (ticks <-chan time.Time, stop func()) {
	t := time.NewTicker(every)
	return t.C, t.Stop
}
