package fanout

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/syncpg/syncpg/db"
)

// partition is a partition that somebody watches. It is protected by the lock of the
// set, except that at, epoch and schema are changed only by the reader that holds it.
type partition struct {
	name   string
	refs   int
	opened chan struct{} // closed when it is known where the log is, or that this cannot be found out
	ready  bool

	at     int64  // the sink was given everything up to here
	epoch  string // of the log that at belongs to; "" when there was none
	schema int32  // version installed; 0 when there was none

	queued bool // to be read
	held   bool // a reader holds it
	again  bool // there were news while a reader held it, or it was being opened
}

// watched is the set of them. A partition stays in it while a reader holds it, so that
// no two readers ever work on one.
type watched struct {
	mu     sync.Mutex
	byName map[string]*partition
	queue  []*partition  // to be read, in the order in which they came
	ready  chan struct{} // has a token when the queue may hold something
	closed bool
}

func newWatched() watched {
	return watched{byName: map[string]*partition{}, ready: make(chan struct{}, 1)}
}

// Watch begins to give the commits of a partition to the sink, and returns where it begins:
// every commit above that is given. It may be called any number of times
// for one partition, which ends with as many calls of Unwatch. It reads from the
// database, unless the partition is watched already. The error is [ErrClosed], or one of
// the database.
func (f *Fanout) Watch(ctx context.Context, name string) (int64, error) {
	w := &f.watched
	for {
		w.mu.Lock()
		if w.closed {
			w.mu.Unlock()
			return 0, ErrClosed
		}
		p := w.byName[name]
		if p == nil {
			p = &partition{name: name, refs: 1, opened: make(chan struct{})}
			w.byName[name] = p
			w.mu.Unlock()
			return f.open(ctx, p)
		}
		if p.ready {
			p.refs++
			seq := p.at
			w.mu.Unlock()
			return seq, nil
		}
		w.mu.Unlock()
		select {
		case <-p.opened:
		case <-ctx.Done():
			return 0, fmt.Errorf("watching a partition: %w", ctx.Err())
		}
	}
}

// open finds out where the log of a partition is. The partition is in the set already, so
// whatever is committed after this has looked is told of.
func (f *Fanout) open(ctx context.Context, p *partition) (int64, error) {
	// Nothing is asked for, only the position.
	rows, err := f.queries.RealtimeReadNews(ctx, db.RealtimeReadNewsParams{
		Partitions: []string{p.name}, Seqs: []int64{0}, MaxBehind: -1, MaxBytes: 1,
	})
	w := &f.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	defer close(p.opened)
	if err == nil && len(rows) != 1 {
		err = fmt.Errorf("the position has %d rows", len(rows))
	}
	if err == nil && w.closed {
		err = ErrClosed
	}
	if err != nil {
		if w.byName[p.name] == p {
			delete(w.byName, p.name)
		}
		return 0, fmt.Errorf("watching a partition: %w", err)
	}
	p.at, p.epoch, p.schema, p.ready = rows[0].MaxCommitSeq, rows[0].LogEpoch, rows[0].SchemaVersion, true
	if p.again {
		p.again = false
		w.enqueue(p)
	}
	return p.at, nil
}

// Unwatch takes one Watch back.
func (f *Fanout) Unwatch(name string) {
	w := &f.watched
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.byName[name]
	if p == nil || p.refs == 0 {
		return
	}
	p.refs--
	w.forget(p)
}

// forget removes a partition that nobody watches or holds. The lock is held.
func (w *watched) forget(p *partition) {
	if p.refs == 0 && !p.held && w.byName[p.name] == p {
		delete(w.byName, p.name)
	}
}

// news says that a partition has commits up to seq.
func (w *watched) news(name string, seq int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.byName[name]
	if p == nil || seq <= p.at && p.ready {
		return
	}
	w.enqueue(p)
}

// enqueue makes a partition be read. The lock is held.
func (w *watched) enqueue(p *partition) {
	switch {
	case !p.ready, p.held:
		p.again = true
	case !p.queued:
		p.queued = true
		w.queue = append(w.queue, p)
		w.signal()
	}
}

// signal wakes a reader. The lock is held.
func (w *watched) signal() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// take waits for partitions to read, up to most, and holds them. It returns none when
// ctx ends.
func (w *watched) take(ctx context.Context, most int) []*partition {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.ready:
		}
		if taken := w.takeNow(most); len(taken) > 0 {
			return taken
		}
	}
}

func (w *watched) takeNow(most int) []*partition {
	w.mu.Lock()
	defer w.mu.Unlock()
	taken := make([]*partition, 0, min(most, len(w.queue)))
	rest := 0
	for _, p := range w.queue {
		if len(taken) == most {
			break
		}
		rest++
		p.queued = false
		if p.refs > 0 {
			p.held = true
			taken = append(taken, p)
		}
	}
	w.queue = slices.Delete(w.queue, 0, rest)
	if len(w.queue) > 0 {
		w.signal()
	}
	return taken
}

// release gives a partition back after a read. more: there is more to read.
func (w *watched) release(p *partition, more bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	more = more || p.again
	p.held, p.again = false, false
	if p.refs > 0 && more {
		w.enqueue(p)
	}
	w.forget(p)
}

// wanted says whether somebody still watches a partition.
func (w *watched) wanted(p *partition) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return p.refs > 0
}

// moved notes how far the sink was given a partition. The caller holds the partition.
func (w *watched) moved(p *partition, at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.at = at
}

// identify notes which log it is. The caller holds the partition.
func (w *watched) identify(p *partition, epoch string, schema int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p.epoch, p.schema = epoch, schema
}

// positions returns what there is to look for, by schema version; mostly there is one.
func (w *watched) positions() map[int32]*db.RealtimeFindNewsParams {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := map[int32]*db.RealtimeFindNewsParams{}
	for name, p := range w.byName {
		if !p.ready {
			continue
		}
		q := all[p.schema]
		if q == nil {
			q = &db.RealtimeFindNewsParams{SchemaVersion: p.schema}
			all[p.schema] = q
		}
		q.Partitions = append(q.Partitions, name)
		q.Seqs = append(q.Seqs, p.at)
		q.Epochs = append(q.Epochs, p.epoch)
	}
	return all
}

// stale makes partitions be read, whatever is known of them.
func (w *watched) stale(names []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range names {
		if p := w.byName[name]; p != nil {
			w.enqueue(p)
		}
	}
}

// onEpochs takes the partitions whose log epoch was rotated, a JSON array or nothing for
// all of them. The sink is told at once; what watched partitions have become is read.
func (f *Fanout) onEpochs(text string) error {
	if text == "" {
		f.cfg.Sink.Rotated("")
		f.Look()
		return nil
	}
	var names []string
	if err := json.Unmarshal([]byte(text), &names); err != nil {
		return fmt.Errorf("rotated log epochs: %w", err)
	}
	for _, name := range names {
		if name != "" { // which would be all
			f.cfg.Sink.Rotated(name)
		}
	}
	f.watched.stale(names)
	return nil
}

func (w *watched) open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = false
}

// close forgets all partitions. No reader runs.
func (w *watched) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	clear(w.byName)
	w.queue = nil
}
