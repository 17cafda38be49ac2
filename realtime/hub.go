package realtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	Notify(n fanout.Notice)
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
	relisted   map[client]int // how often Listed was told of one of perClient
	era        int            // how often actors were disconnected
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
		conns: map[*conn]struct{}{}, perClient: map[client]int{}, relisted: map[client]int{}, partitions: map[string]*partition{},
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

// stopGrace is how long the last write of acknowledgements, and then what other processes are
// told, may take when the time to stop is up.
const stopGrace = 2 * time.Second

// Stop lets rounds in flight finish, tells every client to pull, closes the connections
// (1001) and returns when all is over. What is left when ctx ends is cut off; then the
// error is that of ctx. What failed is tried again by the next call. Stopping a hub that is
// not started does nothing.
func (h *Hub) Stop(ctx context.Context) error {
	h.mu.Lock()
	switch h.state {
	case serving:
	case stopped:
		h.mu.Unlock()
		return errors.Join(h.acks.flush(ctx), h.stopTransport(ctx)) // which may have failed before
	default:
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

	h.going.Store(false)
	err := errors.Join(cut, atLast(ctx, h.acks.flush), atLast(ctx, h.stopTransport))
	h.mu.Lock()
	h.state = stopped
	clear(h.partitions)
	h.mu.Unlock()
	return err
}

// atLast gives something the time that there is, and no less than stopGrace.
func atLast(ctx context.Context, do func(context.Context) error) error {
	if deadline, ok := ctx.Deadline(); ctx.Err() != nil || ok && time.Until(deadline) < stopGrace {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
	}
	return do(ctx)
}

// Disconnect ends the connections of an actor, in all processes that serve the database,
// and returns how many there were in this one. Registrations are resolved when a connection
// is opened and by its rounds (§8.1, §8.7), so that an actor who lost a scope would get
// deltas of it until then; the client that connects again gets what the actor may see now.
//
// The others are told by a notification, for which nobody waits. A process that does not
// hear it, since its listener is being replaced, asks for it afterwards, for as long as this
// process runs and for about ten minutes. With Options.PollOnly nothing leaves the process,
// nor does it before Start or after Stop.
func (h *Hub) Disconnect(partition, actor string) int {
	now := time.Now()
	if h.going.Load() {
		h.fan.Notify(fanout.Notice{Partition: partition, Actor: actor, At: now})
	}
	return h.end(now, func(c *conn) bool { return c.id.Partition == partition && c.id.Actor == actor })
}

// end ends those of the connections that are older, and returns how many.
func (h *Hub) end(older time.Time, those func(*conn) bool) int {
	if time.Since(older) < openWithin {
		h.mu.Lock()
		h.era++ // for those that are being opened, with what was resolved before
		h.mu.Unlock()
	}
	found := h.open(func(c *conn) bool { return !c.opened.After(older) && those(c) })
	for _, c := range found {
		c.mu.Lock()
		c.closed = true // what is offered from here on is not for it
		c.mu.Unlock()
		c.kill()
	}
	return len(found)
}

// Listed says that a pull in this process, over whichever binding, recorded another list of
// subscriptions for a client, in a schema version. A connection of the client, here or in
// another process, whose deltas are in another version gets wake-ups from now on, until a
// round of its own tells: the device may have been given another version of its program.
// For pullsvc.Config.Listed.
func (h *Hub) Listed(partition, clientID string, schemaVersion int32) {
	if !h.going.Load() || h.cfg.Versions.Single() {
		return
	}
	h.fan.Notify(fanout.Notice{Partition: partition, Client: clientID, SchemaVersion: schemaVersion, At: time.Now()})
	h.unlearn(client{partition, clientID}, schemaVersion)
}

// unlearn makes the connections of a client forget their schema version if it is another.
func (h *Hub) unlearn(of client, version int32) {
	h.mu.Lock()
	var those []*conn
	if h.perClient[of] > 0 {
		h.relisted[of]++ // for those that are being opened, with what was recorded before
		for c := range h.conns {
			if c.client() == of {
				those = append(those, c)
			}
		}
	}
	h.mu.Unlock()
	for _, c := range those {
		c.unlearn(version)
	}
}

// unlearn forgets the schema version if it is another, and takes back what is queued in it.
func (c *conn) unlearn(version int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.version == 0 || c.version == version {
		return
	}
	c.version = 0
	last := int64(0)
	c.queue = slices.DeleteFunc(c.queue, func(it item) bool {
		if it.delta != nil {
			last = it.delta.seq
			c.deltaBytes -= it.delta.size
		}
		return it.delta != nil
	})
	if last > 0 {
		c.suppress(last, ssp2.WakeCatchupRequired)
	}
}

// Notice implements [fanout.Sink].
func (h *Hub) Notice(n fanout.Notice) {
	defer h.activity.changed()
	switch {
	case n.Actor != "":
		h.end(n.At, func(c *conn) bool { return c.id.Partition == n.Partition && c.id.Actor == n.Actor })
	case n.Client != "":
		h.unlearn(client{n.Partition, n.Client}, n.SchemaVersion)
	case n.Partition == "":
		h.end(n.At, func(*conn) bool { return true })
	}
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
