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

// errBusy says that no further image is built for now.
var errBusy = errors.New("as many images are being built as may be at once")

// image builds and stores the image of the chain's scope (§5.3). Storing it needs a
// connection of its own, so it is finished on disk before.
func (c *chain) image(ctx context.Context) error {
	if !c.s.shared.enter(c.s.maxBuilds) {
		return errBusy
	}
	defer c.s.shared.exit()
	begun := c.scan
	c.scan = nil
	file, pin, err := c.build(ctx, begun)
	if begun != nil && errors.Is(err, image.ErrRepeated) {
		// A row moved on between the two reads. One read has each row once.
		file, pin, err = c.build(ctx, nil)
	}
	if errors.Is(err, image.ErrUnsupported) || errors.Is(err, image.ErrTooLarge) {
		c.s.shared.unfitFor(c.key)
	}
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // nothing is lost with it
	c.pinAt(pin)
	if others, complete, err := c.others(ctx); err != nil {
		return err
	} else if len(others) > 0 {
		c.add(complete, others...)
		return nil
	}
	m := segment.Meta{
		Key: c.key.Key, ID: file.ID(), AsOfCommitSeq: pin,
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

// build reads the rows of the chain's scope into an image: those that a probe has read at
// the chain's pin, and behind them the rest as one snapshot.
func (c *chain) build(ctx context.Context, begun *scan) (file *image.File, pin int64, err error) {
	p, sub := c.reader(), c.sub
	sub.scan = c.s.newScan(&sub, math.MaxInt32)
	var first []ssp2.SegmentRow
	if begun != nil {
		if first, err = begun.all(); err != nil {
			return nil, 0, err
		}
		sub.scan.start = begun.place()
	}
	err = p.flush(ctx, work{stream: &sub, rows: math.MaxInt32, bytes: math.MaxInt32, all: func(rows iter.Seq2[ssp2.SegmentRow, error]) (err error) {
		pin = c.pin // what is read may be newer than the pin, not older
		if pin < 0 {
			pin = p.gate.MaxCommitSeq
		}
		file, err = image.Build(ctx, image.Spec{
			Table: sub.as.table, SchemaVersion: c.key.SchemaVersion, AsOfCommitSeq: pin,
			ScopeDigest: c.key.ScopeDigest, Dir: c.s.imageDir,
		}, behind(first, sub.as.all(rows)))
		return err
	}}, func() error { return nil })
	if err == nil && p.Reset {
		err = errReplaced()
	}
	if err != nil && file != nil {
		_ = file.Close()
	}
	return file, pin, err
}

// enter says whether another image may be built.
func (sh *shared) enter(most int) bool {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.images >= most {
		return false
	}
	sh.images++
	return true
}

func (sh *shared) exit() {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.images--
}

// behind returns rows behind those that were read before.
func behind(first []ssp2.SegmentRow, rows iter.Seq2[ssp2.SegmentRow, error]) iter.Seq2[ssp2.SegmentRow, error] {
	return func(yield func(ssp2.SegmentRow, error) bool) {
		for _, row := range first {
			if !yield(row, nil) {
				return
			}
		}
		rows(yield)
	}
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
