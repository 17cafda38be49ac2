package image

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Serial types of the record format.
const (
	serialNull  = 0
	serialFloat = 7
	serialZero  = 8
	serialOne   = 9
	serialBlob  = 12 // + 2 × length
	serialText  = 13 // + 2 × length
)

// encoder turns wire rows (§2.4) into records. What it returns is valid until the
// next call.
type encoder struct {
	table *schema.Table
	key   int
	// rowid says that SQLite makes the key the rowid, as it does with every key
	// declared INTEGER.
	rowid  bool
	types  []byte // serial types of the record being made
	buf    []byte // room for the record's header, then its body
	room   int
	keyBuf []byte
	index  []byte
}

func newEncoder(t *schema.Table) *encoder {
	e := &encoder{table: t, key: t.PrimaryKey, rowid: affinity(t.Columns[t.PrimaryKey].Type) == "INTEGER"}
	e.room = maxVarint * (len(t.Columns) + 2)
	e.buf = make([]byte, e.room)
	return e
}

// encode returns the record of a row and its key as the sorter wants it.
func (e *encoder) encode(row ssp2.SegmentRow) (record, key []byte, err error) {
	src, columns := row.Row, e.table.Columns
	n := (len(columns) + 7) / 8
	if len(src) < n {
		return nil, nil, e.malformed("too short")
	}
	if used := len(columns) % 8; used > 0 && src[n-1]>>used != 0 {
		return nil, nil, e.malformed("padding bits are set")
	}
	e.types, e.buf, e.keyBuf = e.types[:0], e.buf[:e.room], e.keyBuf[:0]
	for i := range columns {
		c := &columns[i]
		if src[i/8]>>(i%8)&1 == 1 {
			if !c.Nullable || i == e.key {
				return nil, nil, e.malformed("NULL in column %q", c.Name)
			}
			e.types = append(e.types, serialNull)
			continue
		}
		switch c.Type {
		case ssp2.TypeInteger, ssp2.TypeFloat:
			if len(src)-n < 8 {
				return nil, nil, e.malformed("too short")
			}
			u := binary.LittleEndian.Uint64(src[n:])
			n += 8
			if c.Type == ssp2.TypeInteger {
				if v := int64(u); v < -ssp2.MaxSafeInteger || v > ssp2.MaxSafeInteger {
					return nil, nil, e.malformed("column %q holds %d", c.Name, v)
				}
				e.integer(i, int64(u))
			} else if err := e.float(i, math.Float64frombits(u)); err != nil {
				return nil, nil, err
			}
		case ssp2.TypeBoolean:
			if len(src)-n < 1 || src[n] > 1 {
				return nil, nil, e.malformed("no boolean in column %q", c.Name)
			}
			e.integer(i, int64(src[n]))
			n++
		case ssp2.TypeString, ssp2.TypeJSON, ssp2.TypeBlobRef, ssp2.TypeBytes, ssp2.TypeCRDT:
			if len(src)-n < 4 {
				return nil, nil, e.malformed("too short")
			}
			size := binary.LittleEndian.Uint32(src[n:])
			n += 4
			if uint64(size) > uint64(len(src)-n) {
				return nil, nil, e.malformed("too short")
			}
			value := src[n : n+int(size)]
			n += int(size)
			serial := uint64(serialText)
			if c.Type == ssp2.TypeBytes || c.Type == ssp2.TypeCRDT {
				serial = serialBlob
			}
			e.types = appendVarint(e.types, serial+2*uint64(size))
			e.buf = append(e.buf, value...)
			if i == e.key {
				e.keyBuf = append(e.keyBuf, value...)
			}
		default:
			return nil, nil, e.malformed("column %q has type %v", c.Name, c.Type)
		}
	}
	if n != len(src) {
		return nil, nil, e.malformed("%d bytes left over", len(src)-n)
	}
	e.types, e.buf = appendInteger(e.types, e.buf, row.ServerVersion)
	return e.withHeader(), e.keyBuf, nil
}

// withHeader puts the header before the body and returns the record.
func (e *encoder) withHeader() []byte {
	start := e.room - headerLen(len(e.types))
	appendHeader(e.buf[start:start], e.types)
	return e.buf[start:]
}

func (e *encoder) malformed(format string, args ...any) error {
	return fmt.Errorf("image: a row of table %q: %s", e.table.Name, fmt.Sprintf(format, args...))
}

func (e *encoder) integer(column int, n int64) {
	if column == e.key {
		e.keyBuf = integerKey(e.keyBuf, n)
		// The rowid holds the value.
		e.types = append(e.types, serialNull)
		return
	}
	e.types, e.buf = appendInteger(e.types, e.buf, n)
}

func (e *encoder) float(column int, f float64) error {
	if math.IsNaN(f) {
		return fmt.Errorf("%w: column %q of table %q holds a NaN", ErrUnsupported, e.table.Columns[column].Name, e.table.Name)
	}
	if column == e.key {
		e.keyBuf = floatKey(e.keyBuf, f)
	}
	e.types = append(e.types, serialFloat)
	e.buf = binary.BigEndian.AppendUint64(e.buf, math.Float64bits(f))
	return nil
}

// indexRecord returns the record of an index entry: the key and the rowid.
func (e *encoder) indexRecord(key []byte, rowid int64) []byte {
	if e.table.Columns[e.key].Type == ssp2.TypeFloat {
		e.index = appendRecord(e.index[:0], keyFloat(key), rowid)
	} else {
		e.index = appendRecord(e.index[:0], key, rowid)
	}
	return e.index
}

// appendRecord appends a record of int64, float64, and string or []byte, which are
// text.
func appendRecord(dst []byte, values ...any) []byte {
	var typesBuf [64]byte
	var bodyBuf [512]byte
	types, body := typesBuf[:0], bodyBuf[:0]
	for _, v := range values {
		switch v := v.(type) {
		case int64:
			types, body = appendInteger(types, body, v)
		case float64:
			types = append(types, serialFloat)
			body = binary.BigEndian.AppendUint64(body, math.Float64bits(v))
		case string:
			types = appendVarint(types, serialText+2*uint64(len(v)))
			body = append(body, v...)
		case []byte:
			types = appendVarint(types, serialText+2*uint64(len(v)))
			body = append(body, v...)
		case nil:
			types = append(types, serialNull)
		}
	}
	dst = appendHeader(dst, types)
	return append(dst, body...)
}

// headerLen is the length of a record's header, which counts itself.
func headerLen(types int) int {
	n := types + 1
	for varintLen(uint64(n))+types != n {
		n++
	}
	return n
}

func appendHeader(dst, types []byte) []byte {
	dst = appendVarint(dst, uint64(headerLen(len(types))))
	return append(dst, types...)
}

// appendInteger appends the serial type of n to types and n to body, as short as it
// can be.
func appendInteger(types, body []byte, n int64) (typesOut, bodyOut []byte) {
	switch n {
	case 0:
		return append(types, serialZero), body
	case 1:
		return append(types, serialOne), body
	}
	for serial, size := range [...]int{1: 1, 2: 2, 3: 3, 4: 4, 5: 6} {
		if size > 0 && n>>(8*size-1) == n>>63 {
			return append(types, byte(serial)), appendBigEndian(body, n, size)
		}
	}
	return append(types, 6), appendBigEndian(body, n, 8)
}

func appendBigEndian(dst []byte, n int64, size int) []byte {
	for shift := 8 * (size - 1); shift >= 0; shift -= 8 {
		dst = append(dst, byte(n>>shift))
	}
	return dst
}

// maxVarint is the longest varint.
const maxVarint = 9

func varintLen(u uint64) int {
	n := 1
	for u >>= 7; u != 0 && n < maxVarint; u >>= 7 {
		n++
	}
	return n
}

// appendVarint appends u as SQLite does: seven bits a byte, the most significant
// first, and eight in the ninth.
func appendVarint(dst []byte, u uint64) []byte {
	if u < 0x80 {
		return append(dst, byte(u))
	}
	if u>>56 != 0 {
		for shift := 57; shift >= 8; shift -= 7 {
			dst = append(dst, byte(u>>shift&0x7f|0x80))
		}
		return append(dst, byte(u))
	}
	for shift := 7 * (varintLen(u) - 1); shift > 0; shift -= 7 {
		dst = append(dst, byte(u>>shift&0x7f|0x80))
	}
	return append(dst, byte(u&0x7f))
}
