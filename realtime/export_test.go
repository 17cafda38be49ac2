package realtime

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Names for tests.
type (
	// Transport stands in for fanout.Fanout.
	Transport = transport
	// Store stands in for the database.
	Store = store
)

// NewWith is New with stand-ins.
func NewWith(cfg Config, s Store, fan Transport) (*Hub, error) {
	if err := cfg.check(new(pgxpool.Pool)); err != nil {
		return nil, err
	}
	return newHub(cfg, s, fan), nil
}

// Ticks makes the ticks of a hub come from tick, which returns a channel for an interval.
func (h *Hub) Ticks(tick func(every time.Duration) <-chan time.Time) {
	h.timing.ticks = func(every time.Duration) (<-chan time.Time, func()) { return tick(every), func() {} }
}

// BeatAll is one heartbeat of every connection.
func (h *Hub) BeatAll() {
	for part := range beatParts {
		h.beat(part)
	}
}

// ReleasePresence ends the interval of every presence document.
func (h *Hub) ReleasePresence() {
	for _, c := range h.open(func(*conn) bool { return true }) {
		h.releaseHeld(c)
	}
}

// Encodes returns how many COMMIT frames were encoded.
func (h *Hub) Encodes() int64 { return h.encodes.Load() }

// Counts returns the sizes of what a hub holds.
func (h *Hub) Counts() (connections, partitions, groups, queued int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.partitions {
		p.mu.Lock()
		groups += len(p.index.groups) + len(p.index.byTable) + len(p.index.holders)
		p.mu.Unlock()
	}
	for c := range h.conns {
		c.mu.Lock()
		queued += len(c.queue)
		c.mu.Unlock()
	}
	return h.slots, len(h.partitions), groups, queued
}
