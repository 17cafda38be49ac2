package retention

import (
	"cmp"
	"fmt"
	"time"
)

// Defaults of Policy, which are the floors of §4.6.
const (
	DefaultActiveWindow = 14 * 24 * time.Hour
	DefaultForceAge     = 30 * 24 * time.Hour
	DefaultKeepCommits  = 1000
)

// Policy says how much of a log is kept. The zero value has the defaults.
type Policy struct {
	// ActiveWindow is for how long after its newest pull a client's cursor holds the log.
	// Clients that never pulled hold nothing. Default 14 days. Negative: no cursor does.
	ActiveWindow time.Duration
	// ForceAge is the age at which commits are deleted although an active client's cursor
	// is behind them. Default 30 days. Negative: never.
	ForceAge time.Duration
	// KeepCommits is how many of the newest commits stay in any case. Default 1000.
	// Negative: none.
	KeepCommits int64
	// CompactAfter is the age at which a commit's superseded changes may go, the window of
	// full history. Default: no compaction.
	CompactAfter time.Duration
}

// Check returns an error when the policy keeps less than §4.6 wants.
func (p Policy) Check() error {
	d := p.withDefaults()
	switch {
	case d.ActiveWindow < DefaultActiveWindow:
		return fmt.Errorf("the active window is %v; the protocol wants 14 days at least", p.ActiveWindow)
	case d.ForceAge >= 0 && d.ForceAge < DefaultForceAge:
		return fmt.Errorf("the age at which commits are deleted in any case is %v; the protocol wants 30 days at least", p.ForceAge)
	case d.KeepCommits < DefaultKeepCommits:
		return fmt.Errorf("%d commits are kept; the protocol wants 1000 at least", p.KeepCommits)
	}
	return d.valid()
}

func (p Policy) withDefaults() Policy {
	p.ActiveWindow = cmp.Or(p.ActiveWindow, DefaultActiveWindow)
	p.ForceAge = cmp.Or(p.ForceAge, DefaultForceAge)
	p.KeepCommits = cmp.Or(p.KeepCommits, DefaultKeepCommits)
	return p
}

func (p Policy) valid() error {
	if p.CompactAfter < 0 {
		return fmt.Errorf("the window of full history is %v; it must be positive, or 0 for no compaction", p.CompactAfter)
	}
	return nil
}

// bounds are a policy at a point in time, as the statements take it.
type bounds struct {
	activeSince *int64 // epoch ms; nil: no client counts
	olderThan   *int64 // epoch ms; nil: no cursor is passed
	keep        int64
	compact     *int64 // epoch ms; nil: nothing is compacted
}

func (p Policy) at(now time.Time) bounds {
	before := func(d time.Duration) *int64 { return new(now.Add(-d).UnixMilli()) }
	b := bounds{keep: max(p.KeepCommits, 0)}
	if p.ActiveWindow >= 0 {
		b.activeSince = before(p.ActiveWindow)
	}
	if p.ForceAge >= 0 {
		b.olderThan = before(p.ForceAge)
	}
	if p.CompactAfter > 0 {
		b.compact = before(p.CompactAfter)
	}
	return b
}
