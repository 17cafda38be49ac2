package ssp2

import (
	"encoding/binary"
	"io"
	"math"
	"unicode/utf8"
)

// Targets for the blocks of a segment: whichever comes first ends a block
// (§5.2). A single row may exceed the bytes.
const (
	SegmentBlockRows  = 1000
	SegmentBlockBytes = 256 << 10
)

const (
	segmentPrefixLen = 8
	segmentFormat    = 1
	blockHeaderLen   = 8
	columnNullable   = 0x01
)

// SegmentHeader is the header of a rows segment (§5.2).
type SegmentHeader struct {
	Table         string
	SchemaVersion int32
	Columns       []Column
}

// SegmentRow is one row record of a segment (§5.2).
type SegmentRow struct {
	ServerVersion int64  // at least 1
	Row           []byte // full row, see DecodeRow
}

// Segment is a whole rows segment (§5.2).
type Segment struct {
	SegmentHeader
	Blocks [][]SegmentRow // none is empty
}

// AppendSegmentHeader appends the magic, format and header of a segment. It
// refuses what a decoder would refuse with an [*Error], and then returns dst as
// it was.
func AppendSegmentHeader(dst []byte, h *SegmentHeader) ([]byte, error) {
	e := encoder{buf: append(dst, "SSG2"...), name: "segment"}
	e.u16(segmentFormat)
	e.u16(0)
	e.str(h.Table, "table")
	e.i32(h.SchemaVersion)
	if len(h.Columns) > math.MaxUint16 {
		e.fail("%d columns", len(h.Columns))
	}
	e.u16(uint16(len(h.Columns)))
	for i := range h.Columns {
		col := &h.Columns[i]
		if !col.Type.valid() {
			e.fail("column %q: type %d is unknown", col.Name, col.Type)
		}
		e.str(col.Name, "column name")
		e.u8(uint8(col.Type))
		e.bool(col.Nullable)
	}
	if e.err != nil {
		return dst, e.err
	}
	return e.buf, nil
}

// SegmentWriter appends the rows of a segment to a buffer of the caller, in
// blocks of the target size.
//
//	buf, w, err := ssp2.BeginSegment(buf, &header)
//	for … {
//		buf, err = w.AppendRow(buf, serverVersion, row)
//	}
//	buf = w.End(buf)
//
// While [SegmentWriter.InBlock] is false the caller may write the buffer out and
// go on with an empty one; so a block is all that has to be in memory.
type SegmentWriter struct {
	block int    // offset of the open block's header
	rows  uint32 // in the open block, 0 when none is open
	total int64
}

// BeginSegment appends the header of a segment (see [AppendSegmentHeader]) and
// returns the writer of its rows.
func BeginSegment(dst []byte, h *SegmentHeader) ([]byte, SegmentWriter, error) {
	dst, err := AppendSegmentHeader(dst, h)
	return dst, SegmentWriter{}, err
}

// InBlock reports whether a block is open.
func (w *SegmentWriter) InBlock() bool { return w.rows > 0 }

// Rows returns how many rows have been appended.
func (w *SegmentWriter) Rows() int64 { return w.total }

// AppendRow appends one row record and keeps the targets for blocks. The row
// itself is copied unseen: the caller passes what the row codec has written. It
// fails for a server version outside 1 to [MaxSafeInteger] and for a row over
// 4 GiB, and then returns dst as it was.
func (w *SegmentWriter) AppendRow(dst []byte, serverVersion int64, row []byte) ([]byte, error) {
	if serverVersion < 1 || serverVersion > MaxSafeInteger {
		return dst, invalid("segment: serverVersion %d is not within 1 and 2^53−1", serverVersion)
	}
	if uint64(len(row)) > maxLength-8 {
		return dst, invalid("segment: a row of %d bytes does not fit in a block", len(row))
	}
	if w.rows > 0 && len(dst)-w.block-blockHeaderLen+8+len(row) > SegmentBlockBytes {
		dst = w.EndBlock(dst)
	}
	if w.rows == 0 {
		w.block = len(dst)
		dst = appendZeros(dst, blockHeaderLen)
	}
	dst = append(AppendI64(dst, serverVersion), row...)
	w.rows++
	w.total++
	if w.rows == SegmentBlockRows || len(dst)-w.block-blockHeaderLen >= SegmentBlockBytes {
		dst = w.EndBlock(dst)
	}
	return dst, nil
}

// EndBlock completes the open block, if there is one.
func (w *SegmentWriter) EndBlock(dst []byte) []byte {
	if w.rows > 0 {
		binary.LittleEndian.PutUint32(dst[w.block:], w.rows)
		binary.LittleEndian.PutUint32(dst[w.block+4:], uint32(len(dst)-w.block-blockHeaderLen))
		w.rows = 0
	}
	return dst
}

// End completes the open block and appends the end marker.
func (w *SegmentWriter) End(dst []byte) []byte { return AppendU32(w.EndBlock(dst), 0) }

// AppendSegment appends a whole segment with the blocks it is given. It refuses
// what a decoder would refuse with an [*Error], and then returns dst as it was.
func AppendSegment(dst []byte, s *Segment) ([]byte, error) {
	buf, w, err := BeginSegment(dst, &s.SegmentHeader)
	if err != nil {
		return dst, err
	}
	for _, block := range s.Blocks {
		if len(block) == 0 {
			return dst, invalid("segment: an empty block")
		}
		for i := range block {
			n, err := ScanRow(s.Columns, block[i].Row)
			if err != nil {
				return dst, err
			}
			if n != len(block[i].Row) {
				return dst, invalid("row: %d bytes left over", len(block[i].Row)-n)
			}
		}
		if buf, err = appendBlock(buf, block); err != nil {
			return dst, err
		}
	}
	return w.End(buf), nil
}

// appendBlock appends rows as one block, whatever the targets say.
func appendBlock(dst []byte, block []SegmentRow) ([]byte, error) {
	e := encoder{buf: dst, name: "segment"}
	e.count(len(block), "rows")
	at := len(e.buf)
	e.buf = AppendU32(e.buf, 0)
	for i := range block {
		if block[i].ServerVersion < 1 {
			e.fail("serverVersion %d is below 1", block[i].ServerVersion)
		}
		e.i64(block[i].ServerVersion, "serverVersion")
		e.buf = append(e.buf, block[i].Row...)
	}
	size := len(e.buf) - at - 4
	if uint64(size) > maxLength {
		e.fail("a block of %d bytes", size)
	}
	if e.err != nil {
		return dst, e.err
	}
	binary.LittleEndian.PutUint32(e.buf[at:], uint32(size))
	return e.buf, nil
}

func checkSegmentPrefix(b []byte) error {
	switch {
	case string(b[:4]) != "SSG2":
		return invalid("segment: the magic is not SSG2")
	case binary.LittleEndian.Uint16(b[4:]) != segmentFormat:
		return invalid("segment: format version %d is not supported (1 is)", binary.LittleEndian.Uint16(b[4:]))
	case binary.LittleEndian.Uint16(b[6:]) != 0:
		return invalid("segment: flags are 0x%04x, not 0", binary.LittleEndian.Uint16(b[6:]))
	}
	return nil
}

// setType checks and stores the type and flag bytes of a column record.
func (col *Column) setType(tag, flags byte) error {
	col.Type, col.Nullable = ColumnType(tag), flags&columnNullable != 0
	switch {
	case !col.Type.valid():
		return invalid("segment: column %q: type %d is unknown", col.Name, tag)
	case flags&^columnNullable != 0:
		return invalid("segment: column %q: reserved flags in 0x%02x", col.Name, flags)
	}
	return nil
}

// walkBlock checks the rows of one block and hands each to visit.
func walkBlock(cols []Column, count uint32, rows []byte, visit func(SegmentRow)) error {
	least := 8 + bitmapLen(len(cols))
	if uint64(count)*uint64(least) > uint64(len(rows)) {
		return invalid("segment: a block of %d bytes for %d rows", len(rows), count)
	}
	for ; count > 0; count-- {
		if len(rows) < 8 {
			return invalid("segment: serverVersion: 8 bytes needed, %d left", len(rows))
		}
		version := int64(binary.LittleEndian.Uint64(rows))
		if version < 1 || version > MaxSafeInteger {
			return invalid("segment: serverVersion %d is not within 1 and 2^53−1", version)
		}
		rows = rows[8:]
		n, err := ScanRow(cols, rows)
		if err != nil {
			return err
		}
		visit(SegmentRow{ServerVersion: version, Row: rows[:n:n]})
		rows = rows[n:]
	}
	if len(rows) > 0 {
		return invalid("segment: %d bytes left over in a block", len(rows))
	}
	return nil
}

// walkSegment checks a whole segment; row gets every row with its block's index.
func walkSegment(b []byte, row func(block int, r SegmentRow)) (*SegmentHeader, error) {
	if len(b) < segmentPrefixLen {
		return nil, invalid("the segment is truncated: it ends in the prefix")
	}
	if err := checkSegmentPrefix(b); err != nil {
		return nil, err
	}
	c := cursor{buf: b, off: segmentPrefixLen, name: "segment"}
	h := &SegmentHeader{Table: c.str("table"), SchemaVersion: c.i32("schemaVersion")}
	for n := int(c.u16("columns")); n > 0 && c.err == nil; n-- {
		col := Column{Name: c.str("column name")}
		tag, flags := c.u8("column type"), c.u8("column flags")
		if c.err == nil {
			if err := col.setType(tag, flags); err != nil {
				return nil, err
			}
		}
		h.Columns = append(h.Columns, col)
	}
	for block := 0; c.err == nil; block++ {
		count := c.u32("rowCount (no end marker)")
		if count == 0 {
			break
		}
		rows := c.bytes("block")
		if c.err == nil {
			if err := walkBlock(h.Columns, count, rows, func(r SegmentRow) { row(block, r) }); err != nil {
				return nil, err
			}
		}
	}
	if err := c.done(); err != nil {
		return nil, err
	}
	return h, nil
}

// DecodeSegment decodes a whole rows segment. Rows alias b. Errors have the code
// sync.invalid_request; comparing the columns with a schema is up to the caller
// (§5.2).
func DecodeSegment(b []byte) (*Segment, error) {
	var blocks [][]SegmentRow
	h, err := walkSegment(b, func(block int, r SegmentRow) {
		if block == len(blocks) {
			blocks = append(blocks, nil)
		}
		blocks[block] = append(blocks[block], r)
	})
	if err != nil {
		return nil, err
	}
	return &Segment{SegmentHeader: *h, Blocks: blocks}, nil
}

// CheckSegment reports whether b is a structurally valid rows segment (§5.7),
// like [DecodeSegment] but without keeping the rows.
func CheckSegment(b []byte) error {
	_, err := walkSegment(b, func(int, SegmentRow) {})
	return err
}

// SegmentReader decodes one rows segment from a stream, block by block. It holds
// one block in memory; [Limits.MaxFrameBytes] bounds it. The first error, io.EOF
// included, is repeated for ever.
type SegmentReader struct {
	src    source
	header *SegmentHeader
	err    error
}

// NewSegmentReader returns a SegmentReader of a segment that is all there is in r.
func NewSegmentReader(r io.Reader, limits Limits) *SegmentReader {
	return &SegmentReader{src: newSource(r, limits, "segment", "block")}
}

// Header reads the header on the first call and returns it.
func (s *SegmentReader) Header() (*SegmentHeader, error) {
	if s.header == nil && s.err == nil {
		s.header, s.err = s.readHeader()
	}
	if s.header == nil {
		return nil, s.err
	}
	return s.header, nil
}

func (s *SegmentReader) readHeader() (*SegmentHeader, error) {
	var b [segmentPrefixLen]byte
	if err := s.src.fixed(b[:], "the prefix"); err != nil {
		return nil, err
	}
	if err := checkSegmentPrefix(b[:]); err != nil {
		return nil, err
	}
	var h SegmentHeader
	var err error
	if h.Table, err = s.str("the table name"); err != nil {
		return nil, err
	}
	if err := s.src.fixed(b[:6], "the header"); err != nil {
		return nil, err
	}
	h.SchemaVersion = int32(binary.LittleEndian.Uint32(b[:]))
	for n := binary.LittleEndian.Uint16(b[4:]); n > 0; n-- {
		var col Column
		if col.Name, err = s.str("a column name"); err != nil {
			return nil, err
		}
		if err := s.src.fixed(b[:2], "a column record"); err != nil {
			return nil, err
		}
		if err := col.setType(b[0], b[1]); err != nil {
			return nil, err
		}
		h.Columns = append(h.Columns, col)
	}
	return &h, nil
}

func (s *SegmentReader) str(what string) (string, error) {
	var size [4]byte
	if err := s.src.fixed(size[:], what); err != nil {
		return "", err
	}
	b, err := s.src.payload(binary.LittleEndian.Uint32(size[:]), what)
	if err != nil {
		return "", err
	}
	if !utf8.Valid(b) {
		return "", invalid("segment: %s: not well-formed UTF-8", what)
	}
	return string(b), nil
}

// NextBlock returns the rows of the next block, and io.EOF behind the end marker
// once nothing is known to follow it. The rows have a buffer of their own.
func (s *SegmentReader) NextBlock() ([]SegmentRow, error) {
	if _, err := s.Header(); err != nil {
		return nil, err
	}
	if s.err != nil {
		return nil, s.err
	}
	rows, err := s.nextBlock()
	if err != nil {
		s.err = err
		return nil, err
	}
	return rows, nil
}

func (s *SegmentReader) nextBlock() ([]SegmentRow, error) {
	var b [4]byte
	if err := s.src.fixed(b[:], "a block header (no end marker)"); err != nil {
		return nil, err
	}
	count := binary.LittleEndian.Uint32(b[:])
	if count == 0 {
		if err := s.src.atEnd(); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	if err := s.src.fixed(b[:], "a block header"); err != nil {
		return nil, err
	}
	data, err := s.src.payload(binary.LittleEndian.Uint32(b[:]), "a block")
	if err != nil {
		return nil, err
	}
	var rows []SegmentRow
	err = walkBlock(s.header.Columns, count, data, func(r SegmentRow) { rows = append(rows, r) })
	if err != nil {
		return nil, err
	}
	return rows, nil
}
