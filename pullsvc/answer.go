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
	var buf []byte // for rows of an older schema version
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
			sub.cut = seq < p.gate.MaxCommitSeq
			continue
		}
		if err := w.commit(seq, c.integer(2), c.text(3)); err != nil {
			return err
		}
		row := c.bytes(8)
		if sub.as.rows != nil && row != nil {
			if row, err = sub.as.row(buf, row); err != nil {
				return err
			}
			buf = row
		}
		w.sub.frames = w.frame.AppendChange(w.sub.frames, 0, string(c.text(4)), ssp2.Op(c.integer(5)), c.integer(6), scopes.texts(c, 7), row)
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

// readPages adds what was read to the scans of the subscriptions.
func (p *Pull) readPages(results pgx.BatchResults, tasks []pageTask) error {
	rows, err := results.Query()
	if err != nil {
		return fmt.Errorf("reading pages: %w", unscoped(err))
	}
	defer rows.Close()
	c := newCells(rows)
	for c.next(rows) {
		t, err := taken(tasks, c.integer(0))
		if err != nil {
			return err
		}
		sc := t.sub.scan
		if len(c.text(2)) > 0 {
			if err := sc.add(c.integer(1), c.text(2), c.integer(3), c.bytes(4)); err != nil {
				return err
			}
			continue
		}
		// A page with room left goes on with what is read next.
		t.sub.answered = true
		if more := c.integer(1) != 0; !more || sc.open != nil && sc.full() {
			if err := sc.end(more); err != nil {
				return err
			}
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading pages: %w", unscoped(err))
	}
	return c.err
}
