package fanout

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
)

// listen keeps a connection that notifications arrive on, until ctx ends.
func (f *Fanout) listen(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		connected, err := f.listenOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		if connected {
			failures = 0
		}
		failures++
		f.log.WarnContext(ctx, "cannot listen for notifications, and will connect again", "failures", failures, "error", err)
		if !f.timing.wait(ctx, backoff(failures)) {
			return
		}
	}
}

// listenOnce takes notifications until the connection breaks or ctx ends.
func (f *Fanout) listenOnce(ctx context.Context) (connected bool, err error) {
	conn, err := f.connect(ctx)
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeWithin)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	f.log.InfoContext(ctx, "listening for notifications")
	// What was committed while nobody listened is found by looking once, and an epoch that
	// was rotated by remembering none.
	f.cfg.Sink.Rotated("")
	f.Look()
	f.presence.connected()
	defer f.presence.disconnected()

	var rounds rounds
	ticking, cancel := context.WithCancel(ctx)
	var ticker sync.WaitGroup
	ticker.Go(func() {
		ticks, stop := f.timing.pings(f.cfg.PollInterval)
		defer stop()
		for {
			select {
			case <-ticking.Done():
				return
			case <-ticks:
				rounds.interrupt()
			}
		}
	})
	defer ticker.Wait()
	defer cancel()
	for {
		waiting, done := rounds.begin(ctx)
		n, err := conn.WaitForNotification(waiting)
		interrupted := waiting.Err() != nil
		done()
		if n != nil {
			f.onNotification(ctx, n.Payload)
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return true, nil
		case !interrupted || conn.IsClosed():
			return true, fmt.Errorf("waiting for a notification: %w", err)
		default:
			// A connection whose other end is gone without a word looks like one on which
			// nothing happens.
			if err := f.ping(ctx, conn); err != nil {
				return true, err
			}
		}
	}
}

func (f *Fanout) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, queryWithin)
	defer cancel()
	conn, err := f.cfg.Listen(ctx)
	if err != nil {
		return nil, fmt.Errorf("connecting: %w", err)
	}
	if conn == nil {
		return nil, errors.New("Config.Listen returned no connection")
	}
	if err := db.New(conn).RealtimeListen(ctx); err != nil {
		_ = conn.Close(ctx)
		return nil, fmt.Errorf("listening: %w", err)
	}
	return conn, nil
}

func (f *Fanout) ping(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, f.pingWithin)
	defer cancel()
	if err := conn.Ping(ctx); err != nil {
		return fmt.Errorf("the connection does not answer: %w", err)
	}
	return nil
}

// rounds are waits that can be interrupted, one after the other.
type rounds struct {
	mu     sync.Mutex
	cancel context.CancelFunc // of the wait under way
}

// begin returns the context of the next wait, and what ends it.
func (r *rounds) begin(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cancel = cancel
	return ctx, cancel
}

func (r *rounds) interrupt() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cancel != nil {
		r.cancel()
	}
}
