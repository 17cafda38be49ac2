package syncpg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// part is something of a server that runs besides requests.
type part struct {
	name  string
	start func(ctx context.Context) error // nil: nothing to start; ctx bounds the start alone
	stop  func(ctx context.Context) error // nil: nothing to stop; waits for what it started
}

// lifecycle starts the parts of a server in order and stops them in reverse.
type lifecycle struct {
	parts []part // fixed by New

	mu      sync.Mutex
	state   lifecycleState
	running []part
}

type lifecycleState int

const (
	notStarted lifecycleState = iota
	started
	stopped
)

// ErrStarted is what [Server.Start] returns when it was called before: a server starts
// once, and not again after [Server.Stop].
var ErrStarted = errors.New("syncpg: the server was started before")

// Start starts what runs besides requests. ctx bounds the start, not what was started:
// that ends with [Server.Stop]. When a part fails, those that were started before it are
// stopped again. A server that is not started answers requests over HTTP all the same.
func (s *Server) Start(ctx context.Context) error { return s.life.start(ctx) }

// Stop stops what [Server.Start] started, the last part first, and returns when nothing
// of it runs any more. When ctx ends before, what is left is cut off, and the error says
// so. Call it when the http.Server has shut down; afterwards the pool may be closed. It
// does nothing when the server is not started or already stopped.
func (s *Server) Stop(ctx context.Context) error { return s.life.stop(ctx) }

func (l *lifecycle) start(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != notStarted {
		return ErrStarted
	}
	l.state = started
	for _, p := range l.parts {
		if p.start != nil {
			if err := p.start(ctx); err != nil {
				err = fmt.Errorf("syncpg: start %s: %w", p.name, err)
				return errors.Join(err, l.stopRunning(context.WithoutCancel(ctx)))
			}
		}
		l.running = append(l.running, p)
	}
	return nil
}

func (l *lifecycle) stop(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == started {
		l.state = stopped
	}
	return l.stopRunning(ctx)
}

func (l *lifecycle) stopRunning(ctx context.Context) error {
	var errs []error
	for _, p := range slices.Backward(l.running) {
		if p.stop == nil {
			continue
		}
		if err := p.stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("syncpg: stop %s: %w", p.name, err))
		}
	}
	l.running = nil
	return errors.Join(errs...)
}
