package syncpg

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// ErrStarted says that a server is started already.
var ErrStarted = errors.New("syncpg: the server is started already")

// background is work of a server that no request waits for.
type background interface {
	// Start begins the work and returns. The work lasts until Stop: the end of ctx ends
	// the starting only.
	Start(ctx context.Context) error
	// Stop ends the work and returns when it has ended, or with an error when ctx ends
	// first. It may be called more than once, and before Start.
	Stop(ctx context.Context) error
}

// Start begins the work of a server that no request asks for, such as pruning on a
// schedule. A server answers requests without it, and only those. What it starts lasts
// until [Server.Stop]; the end of ctx ends the starting only. When a part does not start,
// those that did are stopped again. The error is [ErrStarted] when it is called twice.
func (s *Server) Start(ctx context.Context) error {
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	if s.started {
		return ErrStarted
	}
	for i, b := range s.background {
		if err := b.Start(ctx); err != nil {
			return errors.Join(fmt.Errorf("syncpg: start: %w", err), stopAll(context.WithoutCancel(ctx), s.background[:i]))
		}
	}
	s.started = true
	return nil
}

// Stop ends what [Server.Start] began, in reverse order, and waits for its end, but no
// longer than ctx. Requests are the host's to end first: it shuts its HTTP server down and
// then stops this one. Stopping a server that is not started does nothing; a stopped one
// may be started again.
func (s *Server) Stop(ctx context.Context) error {
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	if !s.started {
		return nil
	}
	if err := stopAll(ctx, s.background); err != nil {
		return err
	}
	s.started = false
	return nil
}

// stopAll stops every part, whatever becomes of the others.
func stopAll(ctx context.Context, parts []background) error {
	var errs []error
	for _, b := range slices.Backward(parts) {
		if err := b.Stop(ctx); err != nil {
			errs = append(errs, fmt.Errorf("syncpg: stop: %w", err))
		}
	}
	return errors.Join(errs...)
}
