package realtime

import (
	"context"
	"sync"

	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/ssp2"
)

// peer is the identity that others see (§8.6.1).
type peer struct{ actor, client string }

// present is the newest document of a peer on a scope key.
type present struct {
	key   string
	peer  peer
	doc   []byte // shared, never changed
	owner *conn  // nil: a connection of another process
	from  string // the other process
}

// presenceEvent is one change as receivers see it. The text is made once for all of them.
type presenceEvent struct {
	key  string
	peer peer
	kind ssp2.PresenceKind
	doc  []byte
	at   int64

	encode func() ([]byte, error)
}

func newPresenceEvent(key string, who peer, kind ssp2.PresenceKind, doc []byte, at int64) *presenceEvent {
	ev := &presenceEvent{key: key, peer: who, kind: kind, doc: doc, at: at}
	ev.encode = sync.OnceValues(func() ([]byte, error) {
		return ssp2.AppendControl(nil, &ssp2.Presence{
			ScopeKey: key, Kind: kind, ActorID: who.actor, ClientID: who.client, Doc: doc, TimestampMs: at,
		})
	})
	return ev
}

func (ev *presenceEvent) text() ([]byte, error) { return ev.encode() }

// heldBack is a document that waits for the end of its interval.
type heldBack struct {
	last    int64 // when one was let through, epoch ms
	doc     []byte
	waiting bool
}

// publish handles a presence message of a client (§8.6.2).
func (c *conn) publish(m *ssp2.PresencePublish) {
	h, p := c.hub, c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !c.holds(m.ScopeKey):
		c.refuse(m.ScopeKey, ssp2.PresenceForbidden)
	case len(m.Doc) > h.cfg.MaxPresenceBytes:
		c.refuse(m.ScopeKey, ssp2.PresenceTooLarge)
	case m.Doc == nil:
		delete(c.held, m.ScopeKey)
		h.leavePresence(p, c, m.ScopeKey)
	case h.cfg.PresenceInterval > 0 && c.holdBack(m):
	default:
		h.setPresence(p, c, m.ScopeKey, m.Doc)
	}
}

// holds says whether the connection is registered on a scope key.
func (c *conn) holds(key string) bool {
	for _, r := range c.regs {
		if _, ok := r.group.keys[key]; ok {
			return true
		}
	}
	return false
}

func (c *conn) refuse(key string, code ssp2.Code) {
	text, err := ssp2.AppendControl(nil, &ssp2.PresenceError{ScopeKey: key, Code: code, TimestampMs: c.hub.nowMs()})
	if err != nil {
		c.hub.logFailure("encoding presence failed", c, err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.push(item{text: text})
}

// holdBack keeps a document for later when one was let through just now.
func (c *conn) holdBack(m *ssp2.PresencePublish) bool {
	now := c.hub.nowMs()
	held, known := c.held[m.ScopeKey]
	if c.held == nil {
		c.held = map[string]heldBack{}
	}
	if !known || !held.waiting && now-held.last >= c.hub.cfg.PresenceInterval.Milliseconds() {
		c.held[m.ScopeKey] = heldBack{last: now}
		return false
	}
	held.doc, held.waiting = m.Doc, true
	c.held[m.ScopeKey] = held
	return true
}

// releasePresence lets held back documents through, once per interval.
func (h *Hub) releasePresence(ctx context.Context) {
	ticks, stop := h.timing.ticks(h.cfg.PresenceInterval)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		}
		for _, c := range h.open(func(*conn) bool { return true }) {
			h.releaseHeld(c)
		}
	}
}

func (h *Hub) releaseHeld(c *conn) {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	for key, held := range c.held {
		if !held.waiting {
			continue
		}
		c.held[key] = heldBack{last: h.nowMs()}
		if c.holds(key) {
			h.setPresence(c.p, c, key, held.doc)
		}
	}
}

// setPresence stores a document and tells the others (§8.6.4). p.mu is held.
func (h *Hub) setPresence(p *partition, c *conn, key string, doc []byte) {
	who := peer{c.id.Actor, c.name}
	d := &present{key: key, peer: who, doc: doc, owner: c}
	if before := p.presence[key][who]; before != nil && before.owner != nil && before.owner != c {
		delete(before.owner.presence, key)
		delete(before.owner.held, key) // it is older
	}
	if c.presence == nil {
		c.presence = map[string]*present{}
	}
	c.presence[key] = d
	h.show(p, d, c)
	h.fan.PublishPresence(fanout.PresenceKey{Partition: p.name, ScopeKey: key, ActorID: who.actor, ClientID: who.client}, doc)
}

// show stores a document and fans it out to every connection on its key but one.
func (h *Hub) show(p *partition, d *present, but *conn) {
	peers := p.presence[d.key]
	if peers == nil {
		peers = map[peer]*present{}
		p.presence[d.key] = peers
	}
	kind := ssp2.PresenceJoin
	if peers[d.peer] != nil {
		kind = ssp2.PresenceUpdate
	}
	peers[d.peer] = d
	h.tell(p, newPresenceEvent(d.key, d.peer, kind, d.doc, h.nowMs()), but)
}

// leavePresence takes the document of a connection on a key back.
func (h *Hub) leavePresence(p *partition, c *conn, key string) {
	d := c.presence[key]
	if d == nil {
		return
	}
	delete(c.presence, key)
	h.hide(p, d, c)
	h.fan.PublishPresence(fanout.PresenceKey{Partition: p.name, ScopeKey: key, ActorID: d.peer.actor, ClientID: d.peer.client}, nil)
}

// hide forgets a document and tells those who saw it.
func (h *Hub) hide(p *partition, d *present, but *conn) {
	peers := p.presence[d.key]
	delete(peers, d.peer)
	if len(peers) == 0 {
		delete(p.presence, d.key)
	}
	h.tell(p, newPresenceEvent(d.key, d.peer, ssp2.PresenceLeave, nil, h.nowMs()), but)
}

// leaveAll takes all documents of a connection back.
func (h *Hub) leaveAll(p *partition, c *conn) {
	c.held = nil
	for key := range c.presence {
		h.leavePresence(p, c, key)
	}
}

// tell gives an event to every connection that is registered on its key, but one.
func (h *Hub) tell(p *partition, ev *presenceEvent, but *conn) {
	p.tick++
	for g := range p.index.holders[ev.key] {
		for _, r := range g.members {
			c := r.conn
			if c == but || c.mark == p.tick {
				continue
			}
			c.mark = p.tick
			c.show(ev)
		}
	}
}

// show queues an event. What has not been written of the same peer is replaced: a client
// that reads slowly sees the newest document, not all of them.
func (c *conn) show(ev *presenceEvent) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	for i := len(c.queue) - 1; i >= 0; i-- {
		before := c.queue[i].event
		if before == nil || before.key != ev.key || before.peer != ev.peer {
			continue
		}
		if before.kind == ssp2.PresenceLeave || ev.kind == ssp2.PresenceJoin {
			break
		}
		switch {
		case ev.kind == ssp2.PresenceUpdate && before.kind == ssp2.PresenceJoin:
			c.queue[i].event = newPresenceEvent(ev.key, ev.peer, ssp2.PresenceJoin, ev.doc, ev.at)
		case ev.kind == ssp2.PresenceLeave && before.kind == ssp2.PresenceJoin:
			c.queue = append(c.queue[:i], c.queue[i+1:]...) // it never came
		default:
			c.queue[i].event = ev
		}
		return
	}
	c.push(item{event: ev})
}

// snapshot returns who is on a key, for a connection that is new there.
func (h *Hub) snapshot(p *partition, c *conn, key string, events []*presenceEvent) []*presenceEvent {
	for who, d := range p.presence[key] {
		if d.owner != c && who != (peer{c.id.Actor, c.name}) {
			events = append(events, newPresenceEvent(key, who, ssp2.PresenceJoin, d.doc, h.nowMs()))
		}
	}
	return events
}

// Presence implements [fanout.Sink].
func (h *Hub) Presence(msg fanout.Presence) {
	p := h.partition(msg.Partition)
	defer h.release(p)
	defer h.activity.changed()
	p.mu.Lock()
	defer p.mu.Unlock()
	who := peer{msg.ActorID, msg.ClientID}
	before := p.presence[msg.ScopeKey][who]
	if msg.Doc != nil {
		if before != nil && before.owner != nil {
			// Its connection here is older. What it published is not told of again.
			delete(before.owner.presence, msg.ScopeKey)
			delete(before.owner.held, msg.ScopeKey)
			h.fan.PublishPresence(msg.PresenceKey, nil)
		}
		h.show(p, &present{key: msg.ScopeKey, peer: who, doc: msg.Doc, from: msg.Instance}, nil)
		return
	}
	if before != nil && before.owner == nil && before.from == msg.Instance {
		h.hide(p, before, nil)
	}
}
