package pullsvc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/pullsvc/segment/image"
	"github.com/syncpg/syncpg/ssp2"
)

// image builds and stores the image of the chain's scope (§5.3). Its rows are read as one
// snapshot, so that each comes once; storing it needs a connection of its own, so it is
// finished on disk before.
func (c *chain) image(ctx context.Context) error {
	p, sub := c.reader(), c.sub
	sub.scan = c.s.newScan(&sub, math.MaxInt32)
	var file *image.File
	err := p.flush(ctx, work{stream: &sub, rows: math.MaxInt32, bytes: math.MaxInt32, all: func(rows iter.Seq2[ssp2.SegmentRow, error]) (err error) {
		file, err = image.Build(ctx, image.Spec{
			Table: sub.as.table, SchemaVersion: c.key.SchemaVersion, AsOfCommitSeq: p.gate.MaxCommitSeq,
			ScopeDigest: c.key.ScopeDigest, Dir: c.s.imageDir,
		}, sub.as.all(rows))
		return err
	}}, func() error { return nil })
	if file != nil {
		defer func() { _ = file.Close() }() // nothing is lost with it
	}
	switch {
	case errors.Is(err, image.ErrUnsupported) || errors.Is(err, image.ErrTooLarge):
		c.s.shared.unfitFor(c.key)
		return err
	case err != nil:
		return err
	case p.Reset:
		return errReplaced()
	}
	c.pinAt(p.gate.MaxCommitSeq)
	if others, complete, err := c.others(ctx); err != nil {
		return err
	} else if len(others) > 0 {
		c.add(complete, others...)
		return nil
	}
	m := segment.Meta{
		Key: c.key.Key, ID: file.ID(), AsOfCommitSeq: p.gate.MaxCommitSeq,
		RowCount: file.Rows(), ByteLength: file.Size(),
	}
	if err := c.s.segments.Put(ctx, m, io.NewSectionReader(file, 0, file.Size())); err != nil {
		if errors.Is(err, segment.ErrTooLarge) {
			c.s.shared.unfitFor(c.key)
		}
		return fmt.Errorf("storing an image: %w", err)
	}
	c.add(true, m)
	return nil
}

func (sh *shared) unfitFor(key chainKey) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	remember(sh.unfit, key)
}

// segmentRows returns the rows that queueStream asked for. A row is valid until the next.
func segmentRows(rows pgx.Rows) iter.Seq2[ssp2.SegmentRow, error] {
	return func(yield func(ssp2.SegmentRow, error) bool) {
		c := newCells(rows)
		for c.next(rows) {
			row := ssp2.SegmentRow{ServerVersion: c.integer(2), Row: c.bytes(3)}
			if c.err != nil {
				break
			}
			if !yield(row, nil) {
				return
			}
		}
		err := rows.Err()
		if err == nil {
			err = c.err
		}
		if err != nil {
			yield(ssp2.SegmentRow{}, fmt.Errorf("reading rows: %w", err))
		}
	}
}

// all returns stored rows as they are sent. A row is valid until the next.
func (l *layout) all(rows iter.Seq2[ssp2.SegmentRow, error]) iter.Seq2[ssp2.SegmentRow, error] {
	if l.rows == nil {
		return rows
	}
	return func(yield func(ssp2.SegmentRow, error) bool) {
		var buf []byte
		for row, err := range rows {
			if err == nil && row.Row != nil {
				if buf, err = l.row(buf, row.Row); err == nil {
					row.Row = buf
				}
			}
			if !yield(row, err) || err != nil {
				return
			}
		}
	}
}
