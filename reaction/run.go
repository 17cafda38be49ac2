package reaction

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"
)

// maxQueued bounds the memory of notifications. What is dropped is found by the poll.
const maxQueued = 65536

// Run delivers reactions until ctx ends: at once in the partitions it is notified of,
// and in those it finds due every poll interval. It owns its goroutines and returns,
// with nil, when they have ended; handlers see the end of ctx. What goes wrong is
// logged and tried again. The only error is [ErrRunning].
func (r *Runner) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer r.running.Store(false)
	var workers sync.WaitGroup
	for range r.cfg.Workers {
		workers.Go(func() { r.work(ctx) })
	}
	r.poll(ctx)
	workers.Wait()
	return nil
}

// Notify says that a partition may have new reactions. It never waits, and costs a query
// when there are none. Without it they are found by the poll. A server in the same
// process calls it after each commit:
//
//	Committed: func(partition string, _ int64) { runner.Notify(partition) }
func (r *Runner) Notify(partition string) {
	if r.cfg.Partitions == nil || slices.Contains(r.cfg.Partitions, partition) {
		r.queue.push(partition)
	}
}

// poll queues the partitions that are due, now and with every tick.
func (r *Runner) poll(ctx context.Context) {
	ticks, stop := r.ticks(r.cfg.PollInterval)
	defer stop()
	for {
		err := r.eachDue(ctx, func(partition string) error {
			r.queue.push(partition)
			return nil
		})
		if err != nil && ctx.Err() == nil {
			r.cfg.Logger.ErrorContext(ctx, "cannot look for due reactions", "error", err)
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

// work makes passes over the partitions that are queued.
func (r *Runner) work(ctx context.Context) {
	for {
		partition, ok := r.queue.take(ctx)
		if !ok {
			return
		}
		if err := r.pass(ctx, partition); err != nil && ctx.Err() == nil {
			r.cfg.Logger.ErrorContext(ctx, "cannot run reactions", "partition", partition, "error", err)
		}
	}
}

func (r *Runner) pass(ctx context.Context, partition string) error {
	owner := rand.Text()
	claimed, err := r.claim(ctx, partition, owner)
	if err != nil {
		return err
	}
	if len(claimed) == r.cfg.Batch {
		// There may be more, for whichever worker is free first.
		r.queue.push(partition)
	}
	_, err = r.deliverAll(ctx, partition, owner, claimed)
	return err
}

// queue holds the partitions to visit, each once, in the order in which they came.
type queue struct {
	mu      sync.Mutex
	waiting []string
	known   map[string]struct{}
	ready   chan struct{} // has a token when something may be waiting
}

func newQueue() *queue {
	return &queue{known: map[string]struct{}{}, ready: make(chan struct{}, 1)}
}

func (q *queue) push(partition string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.known[partition]; ok || len(q.waiting) >= maxQueued {
		return
	}
	q.known[partition] = struct{}{}
	q.waiting = append(q.waiting, partition)
	q.signal()
}

// signal is called with the lock held.
func (q *queue) signal() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// take waits for a partition. It returns false when ctx has ended.
func (q *queue) take(ctx context.Context) (partition string, ok bool) {
	for {
		select {
		case <-ctx.Done():
			return "", false
		case <-q.ready:
		}
		if partition, ok := q.pop(); ok {
			return partition, true
		}
	}
}

// pop returns the first partition, and false when another worker was faster.
func (q *queue) pop() (partition string, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return "", false
	}
	partition = q.waiting[0]
	q.waiting = q.waiting[1:]
	delete(q.known, partition)
	if len(q.waiting) > 0 {
		q.signal()
	}
	return partition, true
}
