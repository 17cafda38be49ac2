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

// Instance is the id by which other processes know this one.
func (f *Fanout) Instance() string { return f.outbox.instance }

// Watched is how many partitions are watched.
func (f *Fanout) Watched() int {
	f.watched.mu.Lock()
	defer f.watched.mu.Unlock()
	return len(f.watched.byName)
}
