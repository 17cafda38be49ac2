package realtime

import (
	"maps"

	"github.com/syncpg/syncpg/ssp2"
)

// install makes these subscriptions the registrations of a connection (§8.7). It returns
// the presence that the connection did not see before, and the newest commit that the
// client missed before it was registered, 0 for none. p.mu is held.
func (h *Hub) install(c *conn, subs []registered) (snapshot []*presenceEvent, missed int64) {
	p := c.p
	before := c.regs
	regs := make([]*registration, 0, len(subs))
	budget := maxLookups
	for _, s := range subs {
		table, ok := h.cfg.Schema.Table(s.table)
		if !ok {
			continue
		}
		g, err := p.index.groupOf(table, s.scopes)
		if err != nil {
			h.logFailure("registering a subscription failed", c, err)
			continue
		}
		r := &registration{conn: c, id: s.id, order: s.order, from: s.from, quiet: s.quiet}
		p.index.join(g, r)
		regs = append(regs, r)
		if !r.quiet {
			missed = max(missed, p.recent.missed(g, r.from, p.head, &budget))
		}
	}
	held := make(map[*group]struct{}, len(before))
	for _, r := range before {
		held[r.group] = struct{}{}
	}
	c.regs = regs
	var known map[string]struct{} // scope keys that the connection was on, or has the snapshot of
	for _, r := range regs {
		if _, same := held[r.group]; same {
			continue
		}
		held[r.group] = struct{}{} // once, when two subscriptions have it
		if len(p.presence) == 0 {
			continue
		}
		if known == nil {
			known = keysOf(before)
		}
		snapshot = h.acquired(p, c, known, r.group, snapshot)
	}
	for key := range c.presence {
		if !c.holds(key) {
			delete(c.held, key)
			h.leavePresence(p, c, key)
		}
	}
	for _, r := range before {
		p.index.leave(r)
	}
	return snapshot, missed
}

// keysOf returns the scope keys of registrations.
func keysOf(regs []*registration) map[string]struct{} {
	keys := map[string]struct{}{}
	for _, r := range regs {
		maps.Copy(keys, r.group.keys)
	}
	return keys
}

// acquired adds who is on the keys that came with a group, and makes these known.
func (h *Hub) acquired(p *partition, c *conn, known map[string]struct{}, g *group, snapshot []*presenceEvent) []*presenceEvent {
	add := func(key string) {
		if _, ok := known[key]; !ok {
			known[key] = struct{}{}
			snapshot = h.snapshot(p, c, key, snapshot)
		}
	}
	if len(p.presence) < len(g.keys) {
		for key := range p.presence {
			if _, ok := g.keys[key]; ok {
				add(key)
			}
		}
		return snapshot
	}
	for key := range g.keys {
		if p.presence[key] != nil {
			add(key)
		}
	}
	return snapshot
}

// enter opens a connection for its client: it is known to the partition and has its hello
// (§8.1) from the same moment on.
//
// resets are those of the partition before anything was read: when there were more since,
// what was read may be of another log.
func (h *Hub) enter(c *conn, subs []registered, cursor, latest int64, synced bool, resets int) (registrations int, seq int64, err error) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	reset := p.resets != resets
	if reset {
		latest, synced = p.head, false
	}
	if !p.known {
		p.begin(latest)
	}
	if latest > p.latest.Load() {
		p.latest.Store(latest) // on its way, but known
	}
	latest = p.latest.Load()
	behind := cursor != latest
	snapshot, _ := h.install(c, subs)
	hello, err := ssp2.AppendControl(nil, &ssp2.Hello{
		ProtocolVersion: 1, SessionID: c.session, ActorID: c.id.Actor, ClientID: c.name,
		Cursor: cursor, LatestCursor: latest, RequiresSync: behind || !synced, TimestampMs: h.nowMs(),
	})
	if err != nil {
		return 0, 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.acked, c.resets = min(cursor, latest), p.resets
	if behind && len(c.regs) > 0 {
		c.suppressed, c.observed = true, latest
	}
	c.push(item{text: hello})
	if reset {
		c.restart(latest, p.resets)
	}
	for _, ev := range snapshot {
		c.push(item{event: ev})
	}
	return len(c.regs), latest, nil
}
