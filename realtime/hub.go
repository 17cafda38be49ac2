package realtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// Engine is what a hub uses of round.Engine.
type Engine interface {
	Run(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error
	Resolve(ctx context.Context, req round.ScopeRequest) (scope.Resolution, error)
}

// Gate is what a hub uses of gate.Gate.
type Gate interface {
	Enter(ctx context.Context, partition string) (gate.Epoch, error)
	Forget(partition string)
	ForgetAll()
}

// transport is what a hub uses of fanout.Fanout.
type transport interface {
	Start(ctx context.Context) error
	Stop(ctx context.Context) error
	Committed(partition string, seq int64)
	Look()
	Watch(ctx context.Context, partition string) (int64, error)
	Unwatch(partition string)
	PublishPresence(key fanout.PresenceKey, doc []byte)
}

// store is what a hub uses of the database.
type store interface {
	RealtimeReadClient(ctx context.Context, arg db.RealtimeReadClientParams) (db.RealtimeReadClientRow, error)
	RealtimeRecordAcks(ctx context.Context, arg db.RealtimeRecordAcksParams) error
}

// Hub is the realtime channel of a process. It is safe for concurrent use.
type Hub struct {
	cfg    Config
	log    *slog.Logger
	fan    transport
	store  store
	timing timing
	acks   *acks

	mu         sync.Mutex
	state      hubState
	cancel     context.CancelFunc // ends what Start started
	base       context.Context    //nolint:containedctx // of connections and their rounds, from Start to Stop
	conns      map[*conn]struct{}
	slots      int            // connections, those that are being opened included
	perClient  map[client]int // likewise
	era        int            // how often Disconnect was called
	partitions map[string]*partition
	running    sync.WaitGroup // what Start started
	serving    sync.WaitGroup // connections

	activity activity
	going    atomic.Bool  // from Start to Stop
	encodes  atomic.Int64 // COMMIT frames, for tests
}

type hubState int

const (
	stopped hubState = iota
	serving
	stopping
)

// client is the identity of a client (§1.5).
type client struct{ partition, id string }

// ErrStarted is what Start returns when the hub is started.
var ErrStarted = errors.New("realtime: started already")

func newHub(cfg Config, s store, fan transport) *Hub {
	h := &Hub{
		cfg: cfg, log: cfg.Logger, fan: fan, store: s, timing: realTiming(),
		conns: map[*conn]struct{}{}, perClient: map[client]int{}, partitions: map[string]*partition{},
	}
	h.acks = newAcks(s, cfg.Clock, cfg.Logger)
	return h
}

// Committed says that this process committed to a partition, up to seq. It never blocks.
// It is for pushsvc.Config.Committed.
func (h *Hub) Committed(partition string, seq int64) {
	if h.going.Load() {
		h.fan.Committed(partition, seq)
	}
}

// Start makes the hub accept connections. ctx bounds the start alone.
func (h *Hub) Start(ctx context.Context) error { //nolint:contextcheck // what is started outlives ctx
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.state != stopped {
		return ErrStarted
	}
	if err := h.fan.Start(ctx); err != nil {
		return fmt.Errorf("realtime: %w", err)
	}
	h.state = serving
	h.going.Store(true)
	h.base, h.cancel = context.WithCancel(context.Background())
	base := h.base
	h.running.Go(func() { h.pulse(base) })
	h.running.Go(func() { h.acks.run(base, h.timing, h.cfg.AckInterval) })
	if h.cfg.PresenceInterval > 0 {
		h.running.Go(func() { h.releasePresence(base) })
	}
	return nil
}

// ackGrace is how long the last write of acknowledgements may take when the time to stop
// is up.
const ackGrace = 2 * time.Second

// Stop lets rounds in flight finish, tells every client to pull, closes the connections
// (1001) and returns when all is over. What is left when ctx ends is cut off; then the
// error is that of ctx. Stopping a hub that is not started does nothing.
func (h *Hub) Stop(ctx context.Context) error {
	h.mu.Lock()
	if h.state != serving {
		h.mu.Unlock()
		return nil
	}
	h.state = stopping
	open := make([]*conn, 0, len(h.conns))
	for c := range h.conns {
		open = append(open, c)
	}
	h.mu.Unlock()

	for _, c := range open {
		c.goAway()
	}
	gone := make(chan struct{})
	go func() {
		h.serving.Wait()
		close(gone)
	}()
	var cut error
	select {
	case <-gone:
	case <-ctx.Done():
		cut = fmt.Errorf("realtime: stop: %w", context.Cause(ctx))
		h.cancel() // rounds
		h.mu.Lock()
		for c := range h.conns {
			c.kill()
		}
		h.mu.Unlock()
		<-gone
	}
	h.cancel()
	h.running.Wait()

	flushing, cancel := context.WithTimeout(context.WithoutCancel(ctx), ackGrace)
	defer cancel()
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) > ackGrace {
		flushing = ctx
	}
	h.going.Store(false)
	err := errors.Join(cut, h.acks.flush(flushing), h.stopTransport(ctx))
	h.mu.Lock()
	h.state = stopped
	clear(h.partitions)
	h.mu.Unlock()
	return err
}

// Disconnect ends the connections of an actor in this process, and returns how many there
// were. Registrations are resolved when a connection is opened and by its rounds (§8.1,
// §8.7), so that an actor who lost a scope would get deltas of it until then; the client
// that connects again gets what the actor may see now.
func (h *Hub) Disconnect(partition, actor string) int {
	h.mu.Lock()
	h.era++ // for those that are being opened, with what was resolved before
	h.mu.Unlock()
	those := h.open(func(c *conn) bool { return c.id.Partition == partition && c.id.Actor == actor })
	for _, c := range those {
		c.mu.Lock()
		c.closed = true // what is offered from here on is not for it
		c.mu.Unlock()
		c.kill()
	}
	return len(those)
}

func (h *Hub) stopTransport(ctx context.Context) error {
	if err := h.fan.Stop(ctx); err != nil {
		return fmt.Errorf("realtime: %w", err)
	}
	return nil
}

func (h *Hub) nowMs() int64 { return h.cfg.Clock().UnixMilli() }

// partition is what the connections of a partition share.
type partition struct {
	name string
	refs int // under Hub.mu: connections, and calls at work

	mu       sync.Mutex
	watchers int          // connections
	known    bool         // head is known
	head     int64        // all commits up to here were offered to the connections
	latest   atomic.Int64 // newest commit that is known of
	resets   int          // how often the log became another one
	index    index
	recent   recent
	presence map[string]map[peer]*present // by scope key

	// Scratch of the commit or presence event at hand.
	tick  uint64
	key   []byte
	found []*group
	told  []*conn
}

// partition returns the state of a partition, to be released.
func (h *Hub) partition(name string) *partition {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.partitions[name]
	if p == nil {
		p = &partition{name: name, index: newIndex(), presence: map[string]map[peer]*present{}}
		h.partitions[name] = p
	}
	p.refs++
	return p
}

// existing is partition for one that somebody has use for, or nil.
func (h *Hub) existing(name string) *partition {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.partitions[name]
	if p != nil {
		p.refs++
	}
	return p
}

func (h *Hub) release(p *partition) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.refs--; p.refs > 0 || h.partitions[p.name] != p {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.presence) == 0 {
		delete(h.partitions, p.name)
	}
}

// activity counts what is under way, for whoever waits until nothing is.
type activity struct {
	n       atomic.Int64
	mu      sync.Mutex
	waiters map[chan struct{}]struct{}
	some    atomic.Bool // there are waiters
}

func (a *activity) begin() { a.n.Add(1) }

func (a *activity) end() {
	a.n.Add(-1)
	a.changed()
}

// changed wakes whoever waits.
func (a *activity) changed() {
	if !a.some.Load() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for ch := range a.waiters {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// wait returns when done reports true; it is asked again after every change.
func (a *activity) wait(ctx context.Context, done func() bool) error {
	ch := make(chan struct{}, 1)
	a.mu.Lock()
	if a.waiters == nil {
		a.waiters = map[chan struct{}]struct{}{}
	}
	a.waiters[ch] = struct{}{}
	a.some.Store(true)
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		delete(a.waiters, ch)
		a.some.Store(len(a.waiters) > 0)
		a.mu.Unlock()
	}()
	for !done() {
		select {
		case <-ch:
		case <-ctx.Done():
			return fmt.Errorf("realtime: waiting until nothing is under way: %w", context.Cause(ctx))
		}
	}
	return nil
}

// Settle returns when at most that many connections exist, the connections of each
// partition have been offered all commits up to the seq that seqs gives for it, nothing is
// being handled or waits to be written, and what was acknowledged is stored. It is for
// tests that check what a client did not get.
func (h *Hub) Settle(ctx context.Context, connections int, seqs map[string]int64) error {
	h.fan.Look()
	err := h.activity.wait(ctx, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.slots > connections || h.activity.n.Load() > 0 {
			return false
		}
		for name, seq := range seqs {
			p := h.partitions[name]
			if p == nil {
				continue
			}
			p.mu.Lock()
			behind := p.watchers > 0 && p.head < seq
			p.mu.Unlock()
			if behind {
				return false
			}
		}
		return h.activity.n.Load() == 0
	})
	if err != nil {
		return err
	}
	return h.acks.flush(ctx)
}

// timing is where the ticks of a hub come from.
type timing struct {
	ticks func(every time.Duration) (ticks <-chan time.Time, stop func())
}

func realTiming() timing {
	return timing{ticks: func(every time.Duration) (<-chan time.Time, func()) {
		t := time.NewTicker(every)
		return t.C, t.Stop
	}}
}
