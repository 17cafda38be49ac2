package retention

import (
	"context"
	"time"
)

// SetRest replaces what happens between two batches while somebody waits.
func (s *Service) SetRest(f func(ctx context.Context, d time.Duration)) { s.rest = f }

// SetTicks replaces the ticks of the schedule.
func (s *Service) SetTicks(ticks <-chan time.Time) {
	s.ticks = func(time.Duration) (<-chan time.Time, func()) { return ticks, func() {} }
}

// SetSizes replaces how many changes a batch of compaction looks at, and how many
// partitions one look for partitions returns.
func (s *Service) SetSizes(compactRows, page int) { s.compactRows, s.page = compactRows, page }

// Rest is what happens between two batches by default.
var Rest = rest
