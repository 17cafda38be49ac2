package fanout

import "time"

// Ticker is a source of ticks that a test has in its hands.
type Ticker struct{ C chan time.Time }

// WithTickers makes polls and beats come when the test says. It must be called before
// Start.
func (f *Fanout) WithTickers() (poll, beat *Ticker) {
	poll, beat = &Ticker{make(chan time.Time)}, &Ticker{make(chan time.Time)}
	ticks := f.timing.ticks
	f.timing.ticks = func(every time.Duration) (<-chan time.Time, func()) {
		if every == f.cfg.PollInterval {
			return poll.C, func() {}
		}
		if every == f.cfg.PresenceInterval {
			return beat.C, func() {}
		}
		return ticks(every)
	}
	return poll, beat
}

// WithCoalescing makes the sender go on after a notification when the test says. It must
// be called before Start.
func (f *Fanout) WithCoalescing() *Ticker {
	coalesced := &Ticker{make(chan time.Time)}
	after := f.timing.after
	f.timing.after = func(d time.Duration) (<-chan time.Time, func()) {
		if d == f.cfg.Coalesce {
			return coalesced.C, func() {}
		}
		return after(d)
	}
	return coalesced
}

// WithPings makes the listener ask its connection when the test says, and wait for an
// answer no longer than that. It must be called before Start.
func (f *Fanout) WithPings(within time.Duration) *Ticker {
	pings := &Ticker{make(chan time.Time)}
	f.timing.pings = func(time.Duration) (<-chan time.Time, func()) { return pings.C, func() {} }
	f.pingWithin = within
	return pings
}

// Instance is the id by which other processes know this one.
func (f *Fanout) Instance() string { return f.outbox.instance }

// Watched is how many partitions are watched.
func (f *Fanout) Watched() int {
	f.watched.mu.Lock()
	defer f.watched.mu.Unlock()
	return len(f.watched.byName)
}
