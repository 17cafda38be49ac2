package host

import (
	"sync/atomic"
	"time"
)

// clock is the virtual clock of an instance. It moves only by advance.
type clock struct {
	ms atomic.Int64
}

func newClock(startMs int64) *clock {
	c := &clock{}
	c.ms.Store(startMs)
	return c
}

// now is the clock the server under test is given.
func (c *clock) now() time.Time { return time.UnixMilli(c.ms.Load()) }

// nowMs returns the time in epoch milliseconds.
func (c *clock) nowMs() int64 { return c.ms.Load() }

func (c *clock) advance(ms int64) { c.ms.Add(ms) }
