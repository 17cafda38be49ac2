package pullsvc

import (
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/ssp2"
)

// readWindows turns the windows that were read into the sections of their
// subscriptions.
func (p *Pull) readWindows(results pgx.BatchResults, subs []*subscription) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading windows: %w", unscoped(err))
	}
	defer rows.Close()
	c, scopes := newCells(rows), interned{}
	var w windowWriter
	for c.next(rows) {
		sub, err := taken(subs, c.integer(0))
		if err != nil {
			return err
		}
		if sub != w.sub {
			w = windowWriter{sub: sub, tables: []string{sub.table.Name}}
		}
		seq := c.integer(1)
		if len(c.text(4)) == 0 {
			if err := w.end(seq); err != nil {
				return err
			}
			if err := p.finish(sub, seq); err != nil {
				return err
			}
			continue
		}
		if err := w.commit(seq, c.integer(2), c.text(3)); err != nil {
			return err
		}
		w.sub.frames = w.frame.AppendChange(w.sub.frames, 0, string(c.text(4)), ssp2.Op(c.integer(5)), c.integer(6), scopes.texts(c, 7), c.bytes(8))
		w.changes++
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading windows: %w", unscoped(err))
	}
	return c.err
}

// taken returns the subscription of an ordinal of the database.
func taken[T any](of []T, ord int64) (T, error) {
	if ord < 1 || ord > int64(len(of)) {
		var none T
		return none, fmt.Errorf("the database answers for subscription %d of %d", ord, len(of))
	}
	return of[ord-1], nil
}

// windowWriter appends the COMMIT frames of one window.
type windowWriter struct {
	sub    *subscription
	tables []string
	frame  ssp2.CommitFrame
	open   int64 // seq of the open frame, 0 for none
	at     int   // where it begins

	changes int // in it
}

// commit makes the commit of that seq the open one.
func (w *windowWriter) commit(seq, createdAtMs int64, actor []byte) error {
	switch {
	case seq == w.open:
		return nil
	case seq < w.open:
		return fmt.Errorf("commit %d came after commit %d", seq, w.open)
	}
	if err := w.close(); err != nil {
		return err
	}
	w.open, w.at = seq, len(w.sub.frames)
	w.sub.frames, w.frame = ssp2.BeginCommitFrame(w.sub.frames, seq, createdAtMs, string(actor), w.tables)
	return nil
}

func (w *windowWriter) close() (err error) {
	if w.open == 0 {
		return nil
	}
	if w.sub.frames, err = w.frame.End(w.sub.frames); err != nil {
		return encoding(err)
	}
	w.sub.commits++
	w.sub.changes += w.changes
	w.sub.bytes += int64(len(w.sub.frames) - w.at)
	w.changes = 0
	return nil
}

// end ends the window at a cursor; a commit above it was cut and is dropped.
func (w *windowWriter) end(next int64) error {
	if w.open > next {
		w.sub.frames = w.sub.frames[:w.at]
		return nil
	}
	return w.close()
}

// readPages turns the pages that were read into segments.
func (p *Pull) readPages(results pgx.BatchResults, tasks []pageTask) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading pages: %w", unscoped(err))
	}
	defer rows.Close()
	c := newCells(rows)
	var w *pageWriter
	for c.next(rows) {
		t, err := taken(tasks, c.integer(0))
		if err != nil {
			return err
		}
		if w == nil {
			from := t.from
			if t.sub.resume == nil && !t.pinned {
				from = position{}
			}
			if w, err = p.beginPage(t.sub, from); err != nil {
				return err
			}
		}
		if len(c.text(2)) == 0 {
			if err := w.end(c.integer(1) != 0); err != nil {
				return err
			}
			w = nil
			continue
		}
		if err := w.row(c.integer(1), c.text(2), c.integer(3), c.bytes(4)); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading pages: %w", unscoped(err))
	}
	return c.err
}

// pageWriter writes one page as a SEGMENT_INLINE frame.
type pageWriter struct {
	p       *Pull
	sub     *subscription
	page    *page
	buf     []byte
	mark    ssp2.Mark
	at      int // where the segment begins
	segment ssp2.SegmentWriter
	value   int64 // 1-based index into sub.values of the last row
	rowID   []byte
}

func (p *Pull) beginPage(sub *subscription, from position) (*pageWriter, error) {
	w := &pageWriter{p: p, sub: sub, page: &page{from: from}}
	w.buf, w.mark = ssp2.BeginFrame(p.spare[:0], ssp2.FrameSegmentInline)
	p.spare = nil
	w.at = len(w.buf)
	var err error
	w.buf, w.segment, err = ssp2.BeginSegment(w.buf, &ssp2.SegmentHeader{
		Table: sub.table.Name, SchemaVersion: p.s.schema.Version, Columns: sub.table.Wire,
	})
	if err != nil {
		return nil, encoding(err)
	}
	return w, nil
}

func (w *pageWriter) row(value int64, rowID []byte, version int64, payload []byte) (err error) {
	if w.buf, err = w.segment.AppendRow(w.buf, version, payload); err != nil {
		return encoding(err)
	}
	w.value, w.rowID = value, append(w.rowID[:0], rowID...)
	return nil
}

// end completes the page; more says that rows follow.
func (w *pageWriter) end(more bool) error {
	w.page.rows = w.segment.Rows()
	if w.page.more = more; more {
		value, err := taken(w.sub.values, w.value)
		if err != nil {
			return err
		}
		w.page.next = position{value: value, row: string(w.rowID)}
	}
	var err error
	if w.page.inline, err = ssp2.EndFrame(w.segment.End(w.buf), w.mark); err != nil {
		return encoding(err)
	}
	w.page.segment = w.page.inline[w.at:]
	w.sub.page, w.sub.answered = w.page, true
	return nil
}
