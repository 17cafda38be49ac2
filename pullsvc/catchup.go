package pullsvc

import (
	"context"
	"fmt"
	"iter"

	"github.com/syncpg/syncpg/ssp2"
)

// shorten answers a subscription whose window was cut with reset, when a bootstrap is the
// shorter way to where it has to go (§8.4). Segments themselves are no answer to a cursor:
// its client would not clear what it has (§5.6), and keep rows that were deleted since;
// after a reset it asks again from the start, and clears.
func (p *Pull) shorten(ctx context.Context, out *pieces, sub *subscription) error {
	most := p.s.catchUp
	if most < 0 {
		return nil
	}
	if err := out.flush(); err != nil {
		return err
	}
	cursor := sub.req.Cursor
	changes, err := p.s.countChanges(ctx, p.req.Partition, sub, cursor, most)
	if err != nil || changes <= int64(most) {
		return err
	}
	rows, err := p.countRows(ctx, sub, most)
	if err != nil || rows > int64(most) {
		return err
	}
	sub.mode, sub.next = modeReset, cursor
	sub.commits, sub.changes, sub.bytes = 0, 0, 0
	start := &ssp2.SubStart{ID: sub.req.ID, Status: ssp2.SubReset, ReasonCode: string(ssp2.CodeCursorExpired)}
	if sub.frames, err = p.frame(sub.frames[:0], start); err != nil {
		return err
	}
	return p.finish(sub, cursor)
}

// countRows counts the rows of a subscription's scope, up to one more than most.
func (p *Pull) countRows(ctx context.Context, sub *subscription, most int32) (n int64, err error) {
	counted := *sub
	counted.scan = p.s.newScan(sub, 1)
	w := work{stream: &counted, rows: int64(most) + 1, all: func(rows iter.Seq2[ssp2.SegmentRow, error]) error {
		for _, err := range rows {
			if err != nil {
				return err
			}
			n++
		}
		return nil
	}}
	if err := p.flush(ctx, w, func() error { return nil }); err != nil {
		return 0, fmt.Errorf("counting rows: %w", err)
	}
	if p.Reset {
		return 0, errReplaced()
	}
	return n, nil
}
