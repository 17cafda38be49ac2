package realtime

import (
	"context"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// beatParts is in how many parts the connections have their heartbeats, so that not
	// all of them are written to at once.
	beatParts = 30
	// deadAfter is how many heartbeats of a client may pass in silence.
	deadAfter = 3
	// stalledAfter is how many heartbeats a request may take without a byte.
	stalledAfter = 2
)

// pulse gives every connection its heartbeats (§8.5), and ends those whose client is gone.
func (h *Hub) pulse(ctx context.Context) {
	ticks, stop := h.timing.ticks(max(h.cfg.Heartbeat/beatParts, time.Millisecond))
	defer stop()
	for part := 0; ; part = (part + 1) % beatParts {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
			h.beat(part)
		}
	}
}

// beat is the heartbeat of one part of the connections.
func (h *Hub) beat(part int) {
	text, err := ssp2.AppendControl(nil, &ssp2.Heartbeat{TimestampMs: h.nowMs()})
	if err != nil {
		return // never: the clock is in range
	}
	for _, c := range h.open(func(c *conn) bool { return c.part == part }) {
		c.beat(text)
	}
}

// open returns those of the connections that are open.
func (h *Hub) open(those func(*conn) bool) []*conn {
	h.mu.Lock()
	defer h.mu.Unlock()
	var found []*conn
	for c := range h.conns {
		if those(c) {
			found = append(found, c)
		}
	}
	return found
}

// beat sends a heartbeat and a ping, or ends a connection that is dead.
func (c *conn) beat(text []byte) {
	if c.heard.Swap(false) {
		c.missed = 0
	} else {
		c.missed++
	}
	progress := c.progress.Load()
	if c.uploading.Load() && progress == c.reached {
		c.stalled++
	} else {
		c.stalled = 0
	}
	c.reached = progress
	if c.missed >= deadAfter || c.stalled >= stalledAfter {
		reason := events.DropSilent
		if c.missed < deadAfter {
			reason = events.DropStalled
		}
		c.mu.Lock()
		c.dropped = reason
		c.mu.Unlock()
		c.hub.log.DebugContext(c.values, "client closed: it was not heard of", "client", c.name, "partition", c.id.Partition)
		c.kill()
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	if !c.writing {
		c.push(item{text: text}) // otherwise it hears of us anyway
	}
	if c.pinged {
		return
	}
	c.pinged = true
	c.pings.Go(func() {
		// The answer is looked at by the reader; this ends with it or with the connection.
		_ = c.ws.Ping(c.values)
		c.mu.Lock()
		c.pinged = false
		c.mu.Unlock()
	})
}
