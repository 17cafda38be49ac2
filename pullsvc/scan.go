package pullsvc

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// probeBytes bounds the payloads of the first page of each bootstrap, which share a
	// round trip. What follows is read at full speed, one subscription at a time.
	probeBytes = 256 << 10
	// fewestRows is what a stream asks for at least, so that rows of a misleading size do
	// not make it creep.
	fewestRows = 64
	// leftOut and leftOutTimes bound the payloads that a stream returns, in bytes and as a
	// multiple of the average: how many rows to ask for follows from the average, and what
	// was asked for is sent, wanted or not.
	leftOut, leftOutTimes = 4 << 10, 16
	// rowRoom is what a row takes in a page beside its payload, block headers included.
	rowRoom = 64
	// streamBytes bounds what a stream can send that nobody wants.
	streamBytes = 64 << 20
)

// page is a bootstrap page that was read: one rows segment.
type page struct {
	inline []byte // as SEGMENT_INLINE frame
	at     int    // where in it the segment begins
	rows   int64
	bytes  int64 // of payloads
	from   position
	next   position
	more   bool // rows follow, at next
}

func (pg *page) segment() []byte { return pg.inline[pg.at:] }

// scan reads the rows of a table and scope in pages, in scan order. A page ends once it
// has rows rows, or bytes bytes of payload.
type scan struct {
	table  *schema.Table
	scopes string   // JSON of the scopes that a row can have
	values []string // of the driving variable within scopes, in scan order
	stream pgtx.Statement
	header ssp2.SegmentHeader
	as     layout
	buf    []byte // for rows of an older schema version
	rows   int64
	bytes  int64

	pages []*page // complete ones that nobody has taken yet
	open  *page   // the one that is being filled
	ended bool    // no row follows

	mark    ssp2.Mark
	segment ssp2.SegmentWriter
	first   int64    // index into values of the value that the database calls 1
	value   int64    // index into values of the last row, and
	rowID   []byte   // its id; empty before the first row
	start   position // where the scan begins
	spare   [][]byte // the memory of pages that are done with
	longest int      // bytes of the longest page

	n, size, largest int64 // rows seen, bytes of their payloads, the largest of these
	tooLarge         bool  // the next row is too large for a stream
}

// newScan returns the scan of a subscription's rows, from the start on.
func (s *Service) newScan(sub *subscription, rows int64) *scan {
	return &scan{
		table: sub.table, scopes: sub.scopes, values: sub.values, rows: rows, bytes: s.bufferBytes,
		stream: s.streams[sub.table.Index][sub.driver],
		header: ssp2.SegmentHeader{Table: sub.table.Name, SchemaVersion: sub.as.version, Columns: sub.as.table.Wire},
		as:     sub.as,
	}
}

// place is where the scan goes on.
func (sc *scan) place() position {
	if len(sc.rowID) == 0 {
		return sc.start
	}
	return position{value: sc.values[sc.value], row: string(sc.rowID)}
}

// restart makes the scan begin at a place.
func (sc *scan) restart(from position) {
	sc.drop()
	sc.start, sc.rowID, sc.ended, sc.tooLarge = from, sc.rowID[:0], false, false
}

func (sc *scan) full() bool { return sc.open.rows >= sc.rows || sc.open.bytes >= sc.bytes }

// begin opens a page at the place of the scan.
func (sc *scan) begin() (err error) {
	pg := &page{from: sc.place()}
	var buf []byte
	if n := len(sc.spare); n > 0 {
		buf, sc.spare = sc.spare[n-1], sc.spare[:n-1]
	} else if sc.longest > 0 {
		buf = make([]byte, 0, sc.longest+sc.longest/32) // pages are of about the same size
	}
	buf, sc.mark = ssp2.BeginFrame(buf[:0], ssp2.FrameSegmentInline)
	pg.at = len(buf)
	if pg.inline, sc.segment, err = ssp2.BeginSegment(buf, &sc.header); err != nil {
		return encoding(err)
	}
	sc.open = pg
	return nil
}

// add appends a row; value is counted from 1.
func (sc *scan) add(value int64, rowID []byte, version int64, payload []byte) (err error) {
	value += sc.first - 1
	if value < 0 || value >= int64(len(sc.values)) {
		return fmt.Errorf("the database answers for value %d of %d", value+1, len(sc.values))
	}
	if len(sc.rowID) > 0 && (value < sc.value || value == sc.value && bytes.Compare(rowID, sc.rowID) <= 0) {
		return fmt.Errorf("the database returned rows of the table %q out of order", sc.table.Name)
	}
	if sc.open != nil && sc.full() {
		if err := sc.end(true); err != nil {
			return err
		}
	}
	if sc.open == nil {
		if err := sc.begin(); err != nil {
			return err
		}
	}
	row := payload
	if sc.as.rows != nil {
		if row, err = sc.as.row(sc.buf, payload); err != nil {
			return err
		}
		sc.buf = row
	}
	sc.grow(len(row))
	if sc.open.inline, err = sc.segment.AppendRow(sc.open.inline, version, row); err != nil {
		return encoding(err)
	}
	sc.value, sc.rowID = value, append(sc.rowID[:0], rowID...)
	size := int64(len(payload))
	sc.open.rows++
	sc.open.bytes += size
	sc.n++
	sc.size += size
	sc.largest = max(sc.largest, size)
	return nil
}

// grow makes room for a row: twice what there is, but no more than a page takes. Growing in
// the small steps of append costs as much as reading.
func (sc *scan) grow(row int) {
	buf := sc.open.inline
	if cap(buf)-len(buf) < row+rowRoom {
		left := max(0, sc.bytes-sc.open.bytes)
		sc.open.inline = slices.Grow(buf, max(row+rowRoom, min(len(buf), int(left+left/8))))
	}
}

// end completes the open page; more says that rows follow.
func (sc *scan) end(more bool) (err error) {
	if sc.open == nil {
		if err := sc.begin(); err != nil {
			return err
		}
	}
	pg := sc.open
	pg.more, sc.ended = more, !more
	pg.next = sc.place()
	sc.longest = max(sc.longest, len(pg.inline))
	if pg.inline, err = ssp2.EndFrame(sc.segment.End(pg.inline), sc.mark); err != nil {
		return encoding(err)
	}
	sc.pages, sc.open = append(sc.pages, pg), nil
	return nil
}

// take returns the next complete page; nil when more has to be read.
func (sc *scan) take() *page {
	if len(sc.pages) == 0 {
		return nil
	}
	pg := sc.pages[0]
	sc.pages = sc.pages[1:]
	return pg
}

// all returns the rows of all pages, the open one included, as they are sent.
func (sc *scan) all() (rows []ssp2.SegmentRow, err error) {
	if sc.open != nil {
		if err := sc.end(true); err != nil {
			return nil, err
		}
	}
	for _, pg := range sc.pages {
		decoded, err := ssp2.DecodeSegment(pg.segment())
		if err != nil {
			return nil, encoding(err)
		}
		for _, block := range decoded.Blocks {
			rows = append(rows, block...)
		}
	}
	return rows, nil
}

// release takes back the memory of a page that was taken.
func (sc *scan) release(pg *page) {
	if pg.inline != nil {
		sc.spare = append(sc.spare, pg.inline)
		pg.inline = nil
	}
}

// drop forgets what was read.
func (sc *scan) drop() {
	for _, pg := range sc.pages {
		sc.release(pg)
	}
	if sc.open != nil {
		sc.release(sc.open)
	}
	sc.pages, sc.open = nil, nil
}

// ask returns for how many rows to ask the stream, of at most that many bytes each, to
// get what is wanted: up to pages pages, and one row that tells whether others follow.
func (sc *scan) ask(pages int32) (rows, most int64) {
	average := int64(1 << 10)
	if sc.n > 0 {
		average = max(1, sc.size/sc.n)
	}
	left := sc.rows
	if sc.open != nil {
		left -= sc.open.rows
	}
	room := max(0, left+int64(pages-1)*sc.rows)
	rows = max(sc.bytes/average, fewestRows)
	if rows > left { // whole pages
		rows = left + (rows-left)/sc.rows*sc.rows
	}
	most = max(leftOut, leftOutTimes*average, 2*sc.largest)
	return max(1, min(rows, room, streamBytes/most)) + 1, most
}

// queueStream asks for the rows that follow, through the stream.
func (sc *scan) queueStream(queue func(pgtx.Statement, ...any), partition string, rows, most int64) {
	at := sc.place()
	first, after := at.after(sc.values)
	sc.first = int64(first)
	queue(sc.stream, partition, sc.values[first:], after, sc.scopes, int32(most), int32(rows))
}

// readStream reads what queueStream asked for. It stops at a payload that was left out,
// and when it holds twice as much as was wanted.
func (sc *scan) readStream(rows pgx.Rows, asked int64) error {
	c := newCells(rows)
	held, n := int64(0), int64(0)
	for c.next(rows) {
		n++
		if sc.tooLarge || held > 2*sc.bytes {
			continue
		}
		payload := c.bytes(3)
		if payload == nil {
			sc.tooLarge = true
			continue
		}
		held += int64(len(payload))
		if err := sc.add(c.integer(0), c.text(1), c.integer(2), payload); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("reading rows: %w", err)
	}
	if c.err != nil {
		return c.err
	}
	if n < asked && !sc.tooLarge && held <= 2*sc.bytes {
		return sc.end(false)
	}
	return nil
}

// after returns the index of the value at which the scan goes on and the row
// behind which it does. Values, ascending by UTF-16 code unit, may have changed
// since the position was taken: scopes may have been granted or withdrawn.
func (p position) after(values []string) (first int, row string) {
	first, found := slices.BinarySearchFunc(values, p.value, ssp2.CompareUTF16)
	if found {
		row = p.row
	}
	return first, row
}
