package pushsvc

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/syncpg/syncpg/ssp2"
)

// Everything the pushes of a partition need is serial, so they wait in memory, in
// order of arrival, and hold no connection while they do. One transaction per
// partition is in flight; the next takes all requests that wait, so that they share
// its round trips and its flush to disk. Whatever other processes do is decided by
// the partition's row lock.

// queues holds the queue of every partition that has a push in flight.
type queues struct {
	mu          sync.Mutex
	byPartition map[string]*queue
}

// queue holds the requests that wait while one transaction is in flight.
type queue struct{ waiting []*request }

// enter puts a request in the queue of its partition. first says that none is in
// flight, so that the caller has to serve the partition. ok is false when already
// most are waiting.
func (q *queues) enter(r *request, most int) (first, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.byPartition[r.Partition]
	if p == nil {
		q.byPartition[r.Partition] = &queue{waiting: []*request{r}}
		return true, true
	}
	if len(p.waiting) >= most {
		return false, false
	}
	p.waiting = append(p.waiting, r)
	return false, true
}

// leave takes a request out of the queue; false when it is in flight or answered.
func (q *queues) leave(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.byPartition[r.Partition]
	if p == nil {
		return false
	}
	i := slices.Index(p.waiting, r)
	if i < 0 {
		return false
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	return true
}

// take returns the requests of the next transaction: the longest waiting, up to a
// number of operations, and of each client one, so that a client's requests keep
// their order even when one of them fails. nil ends the queue.
func (q *queues) take(partition string, operations int) []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.byPartition[partition]
	var batch, rest []*request
	bytes := maxBatchBytes
	clients := make(map[string]bool, len(p.waiting))
	for i, r := range p.waiting {
		if len(batch) > 0 && (r.operations > operations || r.bytes > bytes) {
			rest = append(rest, p.waiting[i:]...)
			break
		}
		if clients[r.ClientID] {
			rest = append(rest, r)
			continue
		}
		clients[r.ClientID] = true
		operations -= r.operations
		bytes -= r.bytes
		batch = append(batch, r)
	}
	p.waiting = rest
	if batch == nil {
		delete(q.byPartition, partition)
	}
	return batch
}

// submit has a request served and waits for its answer.
func (s *Service) submit(ctx context.Context, r *request) (*Response, error) {
	if s.queueOff {
		s.work.Go(func() { s.serve([]*request{r}) }) //nolint:contextcheck // it has that of its requests
		return r.wait(ctx)
	}
	first, ok := s.queues.enter(r, s.maxWaiting)
	if !ok {
		return nil, rateLimited("too many pushes are waiting for this partition")
	}
	if first {
		s.work.Go(func() { s.serveQueue(r.Partition) }) //nolint:contextcheck // a transaction has that of its requests
		return r.wait(ctx)
	}
	patience := time.NewTimer(s.maxWait)
	defer patience.Stop()
	select {
	case <-r.done:
		return r.resp, r.err
	case <-ctx.Done():
		s.queues.leave(r)
		return nil, fmt.Errorf("waiting for the partition: %w", context.Cause(ctx))
	case <-patience.C:
		if s.queues.leave(r) {
			return nil, rateLimited("this partition has been busy for too long")
		}
		return r.wait(ctx)
	}
}

// serveQueue serves a partition until nobody waits for it. Code of the host may end the
// goroutine (runtime.Goexit); the rest of the queue then gets another.
func (s *Service) serveQueue(partition string) {
	empty := false
	defer func() {
		if !empty {
			s.work.Go(func() { s.serveQueue(partition) })
		}
	}()
	for batch := s.queues.take(partition, s.maxBatchOperations); batch != nil; {
		s.serve(batch)
		batch = s.queues.take(partition, s.maxBatchOperations)
	}
	empty = true
}

// wait waits for the answer of a request that is in flight. Its transaction goes on
// without it when ctx ends first, for the sake of the others.
func (r *request) wait(ctx context.Context) (*Response, error) {
	select {
	case <-r.done:
		return r.resp, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the push: %w", context.Cause(ctx))
	}
}

func rateLimited(message string) error { return ssp2.Errorf(ssp2.CodeRateLimited, "%s", message) }

// serve answers requests of one partition with one transaction, which ends early
// only when none of them is wanted any more.
func (s *Service) serve(batch []*request) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(batch[0].ctx))
	defer cancel()
	var wanted atomic.Int64
	wanted.Store(int64(len(batch)))
	for _, r := range batch {
		stop := context.AfterFunc(r.ctx, func() {
			if wanted.Add(-1) == 0 {
				cancel()
			}
		})
		defer stop()
	}
	ended := false
	defer func() {
		if ended {
			return
		}
		p := recover() // nil: the goroutine is ending
		s.log.ErrorContext(ctx, "a push panicked, or its goroutine was ended", "panic", p, "stack", string(debug.Stack()))
		s.abandon(batch) //nolint:contextcheck // a transaction has that of its requests
	}()
	for attempt := 1; ; attempt++ {
		err := s.attempt(ctx, batch)
		if err == nil || attempt == maxAttempts || !retryable(err) {
			if err != nil {
				s.giveUp(batch, err)
			}
			ended = true
			return
		}
		s.log.DebugContext(ctx, "a push is tried again", "attempt", attempt, "error", err)
	}
}

// abandon answers requests whose transaction came to no end: each gets another to itself,
// and a goroutine that may end with it.
func (s *Service) abandon(batch []*request) {
	if len(batch) == 1 {
		answer(batch, errPanicked)
		return
	}
	for _, r := range batch {
		if r.answered {
			continue
		}
		var alone sync.WaitGroup
		alone.Go(func() { s.serve([]*request{r}) })
		alone.Wait()
	}
}

// giveUp answers requests whose transaction failed. When one of them made it fail,
// each has another to itself, in the same order.
func (s *Service) giveUp(batch []*request, err error) {
	alone := errors.Is(err, errOversized) || errors.Is(err, errRowFailed) && ssp2.CodeOf(err) == ""
	switch {
	case alone && len(batch) > 1:
		for _, r := range batch {
			s.serve([]*request{r})
		}
	case errors.Is(err, errOversized) && len(batch[0].Commits) > 1:
		s.serveSingly(batch[0])
	default:
		answer(batch, err)
	}
}

// serveSingly answers a request with a transaction for each of its commits.
func (s *Service) serveSingly(r *request) {
	all := &Response{}
	for i := range r.Commits {
		one := r.Request
		one.Commits = r.Commits[i : i+1]
		part := s.newRequest(r.ctx, one)
		s.serve([]*request{part})
		if part.err != nil || part.resp.Reset {
			r.resp, r.err = part.resp, part.err
			break
		}
		all.Results = append(all.Results, part.resp.Results...)
		all.Details = append(all.Details, part.resp.Details...)
		all.LastSeq = max(all.LastSeq, part.resp.LastSeq)
	}
	if !r.refused() {
		r.resp = all
	}
	answer([]*request{r}, nil)
}

// answer ends the wait of every request; those that were not decided get err.
func answer(batch []*request, err error) {
	for _, r := range batch {
		if r.answered {
			continue
		}
		if r.resp == nil && r.err == nil {
			r.err = err
		}
		r.answered = true
		close(r.done)
	}
}
