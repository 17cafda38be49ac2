package syncpg

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// background is work that a server does besides answering requests. Start does not wait
// for it; Stop ends it and waits.
type background interface {
	Start(ctx context.Context) error
	Stop(ctx context.Context) error
}

// lifecycle is what of a server's background work runs.
type lifecycle struct {
	mu      sync.Mutex
	work    []background // in the order in which they start
	running []background
	started bool
}

var errStarted = errors.New("syncpg: the server was started before")

// Start begins the server's background work and returns. It goes on until
// [Server.Stop], or until ctx ends, after which Stop still has to be called. A server is
// started once. Without Start it answers requests, and does nothing else.
func (s *Server) Start(ctx context.Context) error {
	l := &s.life
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.started {
		return errStarted
	}
	l.started = true
	for _, w := range l.work {
		if err := w.Start(ctx); err != nil {
			return errors.Join(fmt.Errorf("syncpg: start: %w", err), l.stop(context.WithoutCancel(ctx)))
		}
		l.running = append(l.running, w)
	}
	return nil
}

// Stop ends what [Server.Start] began, waits for it until ctx ends, and returns what did
// not end as it should. Stop it after the HTTP server, before the pool is closed. It may
// be called on a server that was not started, and more than once.
func (s *Server) Stop(ctx context.Context) error {
	s.life.mu.Lock()
	defer s.life.mu.Unlock()
	return s.life.stop(ctx)
}

// stop stops the last one first.
func (l *lifecycle) stop(ctx context.Context) error {
	var errs []error
	for len(l.running) > 0 {
		last := len(l.running) - 1
		if err := l.running[last].Stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("syncpg: stop: %w", err))
		}
		l.running = l.running[:last]
	}
	return errors.Join(errs...)
}
