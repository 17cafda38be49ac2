package realtime

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/syncpg/syncpg/db"
)

// acks holds what clients acknowledged until it is written, for all of them at once. A
// cursor that is written late, or never, is only an older cursor: more of the log is kept
// for its client (§4.6).
type acks struct {
	store store
	clock func() time.Time
	log   *slog.Logger

	writing sync.Mutex // one write at a time

	mu      sync.Mutex
	pending map[client]acked
	flying  map[client]acked // being written
	landed  chan struct{}    // closed when flying is written
}

// acked is an acknowledgement.
type acked struct {
	actor  string
	cursor int64
	atMs   int64
}

// forgotten is the cursor of what was acknowledged of another log.
const forgotten = -1

// writeAcksWithin bounds one write.
const writeAcksWithin = 10 * time.Second

func newAcks(s store, clock func() time.Time, log *slog.Logger) *acks {
	return &acks{store: s, clock: clock, log: log, pending: map[client]acked{}}
}

// note keeps the newest acknowledgement of a client.
func (a *acks) note(of client, actor string, cursor int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pending[of] = acked{actor, cursor, a.clock().UnixMilli()}
}

// newest returns what a client acknowledged and is not known to be written.
func (a *acks) newest(of client, actor string) (int64, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	entry, ok := a.pending[of]
	if !ok {
		entry, ok = a.flying[of]
	}
	return entry.cursor, ok && entry.actor == actor
}

// settle forgets what a client acknowledged, and returns when none of it is being written:
// a pull is about to record where the client is.
func (a *acks) settle(ctx context.Context, of client) error {
	for {
		a.mu.Lock()
		delete(a.pending, of) // and what a write that failed put back
		_, flying := a.flying[of]
		landed := a.landed
		a.mu.Unlock()
		if !flying {
			return nil
		}
		select {
		case <-landed:
		case <-ctx.Done():
			return fmt.Errorf("waiting for a write: %w", context.Cause(ctx))
		}
	}
}

// forget drops what was acknowledged of a log that is another one now.
func (a *acks) forget(partition string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for of := range a.pending {
		if of.partition == partition {
			delete(a.pending, of)
		}
	}
	for of := range a.flying {
		if of.partition == partition {
			a.flying[of] = acked{cursor: forgotten}
		}
	}
}

// run writes once per interval while there is something to write.
func (a *acks) run(ctx context.Context, t timing, every time.Duration) {
	ticks, stop := t.ticks(every)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		}
		if err := a.flush(ctx); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "writing acknowledgements failed; they are tried again", "error", err)
		}
	}
}

// flush writes what is pending, in one statement. What cannot be written stays.
func (a *acks) flush(ctx context.Context) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	a.mu.Lock()
	flying := a.pending
	if len(flying) == 0 {
		a.mu.Unlock()
		return nil
	}
	landed := make(chan struct{})
	a.flying, a.landed, a.pending = flying, landed, map[client]acked{}
	// Ascending, so that two processes never wait for each other.
	clients := make([]client, 0, len(flying))
	for of := range flying {
		clients = append(clients, of)
	}
	slices.SortFunc(clients, func(x, y client) int {
		return cmp.Or(cmp.Compare(x.partition, y.partition), cmp.Compare(x.id, y.id))
	})
	var params db.RealtimeRecordAcksParams
	for _, of := range clients {
		entry := flying[of]
		params.Partitions = append(params.Partitions, of.partition)
		params.ClientIds = append(params.ClientIds, of.id)
		params.ActorIds = append(params.ActorIds, entry.actor)
		params.Cursors = append(params.Cursors, entry.cursor)
		params.AtMs = append(params.AtMs, entry.atMs)
	}
	a.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, writeAcksWithin)
	defer cancel()
	err := a.store.RealtimeRecordAcks(bounded, params)

	a.mu.Lock()
	defer a.mu.Unlock()
	a.flying, a.landed = nil, nil
	close(landed)
	if err == nil {
		return nil
	}
	for of, entry := range flying {
		if _, newer := a.pending[of]; !newer && entry.cursor != forgotten {
			a.pending[of] = entry
		}
	}
	return fmt.Errorf("recording acknowledgements: %w", err)
}
