package ssp2

import (
	"encoding/binary"
	"fmt"
	"math"
	"unicode/utf8"
)

// MaxSafeInteger is the largest value an i64 may have on the wire; the smallest
// is -MaxSafeInteger (Conventions).
const MaxSafeInteger = 1<<53 - 1

// maxLength is the largest byte length or count a u32 prefix can hold.
const maxLength = math.MaxUint32

func safeInteger(v int64) bool { return v >= -MaxSafeInteger && v <= MaxSafeInteger }

// AppendU16 appends a u16.
func AppendU16(dst []byte, v uint16) []byte { return binary.LittleEndian.AppendUint16(dst, v) }

// AppendU32 appends a u32.
func AppendU32(dst []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(dst, v) }

// AppendI32 appends an i32.
func AppendI32(dst []byte, v int32) []byte {
	return binary.LittleEndian.AppendUint32(dst, uint32(v))
}

// AppendI64 appends an i64. The caller keeps v within ±[MaxSafeInteger].
func AppendI64(dst []byte, v int64) []byte {
	return binary.LittleEndian.AppendUint64(dst, uint64(v))
}

// AppendF64 appends an f64, bit for bit.
func AppendF64(dst []byte, v float64) []byte {
	return binary.LittleEndian.AppendUint64(dst, math.Float64bits(v))
}

// AppendBool appends a bool.
func AppendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// AppendStr appends a str. The caller passes well-formed UTF-8 shorter than
// 4 GiB.
func AppendStr(dst []byte, s string) []byte {
	return append(AppendU32(dst, uint32(len(s))), s...)
}

// AppendBytes appends a bytes value. The caller passes less than 4 GiB.
func AppendBytes(dst, b []byte) []byte {
	return append(AppendU32(dst, uint32(len(b))), b...)
}

// invalid makes the error of every structural failure.
func invalid(format string, args ...any) *Error {
	return Errorf(CodeInvalidRequest, format, args...)
}

// cursor reads primitives off a byte slice. The first failure sticks and
// empties the cursor, so a caller may read a whole record and look at err once;
// loops look at it in every turn.
type cursor struct {
	buf  []byte
	off  int
	name string // what is decoded, for messages
	item string // element of a list, "" outside one
	idx  int
	err  *Error
}

// fail records the first failure.
func (c *cursor) fail(format string, args ...any) { c.failCode(CodeInvalidRequest, format, args...) }

func (c *cursor) failCode(code Code, format string, args ...any) {
	if c.err != nil {
		return
	}
	where := c.name
	if c.item != "" {
		where = fmt.Sprintf("%s: %s %d", c.name, c.item, c.idx)
	}
	c.err = Errorf(code, "%s: %s", where, fmt.Sprintf(format, args...))
	c.buf, c.off = nil, 0
}

// ok tells a loop to go on, and names the element it is about to read.
func (c *cursor) ok(item string, idx int) bool {
	c.item, c.idx = item, idx
	return c.err == nil
}

// leave ends the elements of a list.
func (c *cursor) leave() { c.item = "" }

func (c *cursor) left() int { return len(c.buf) - c.off }

// take returns the next n bytes, without room to append.
func (c *cursor) take(n int, what string) []byte {
	if n > c.left() {
		c.fail("%s: %d bytes needed, %d left", what, n, c.left())
		return nil
	}
	b := c.buf[c.off : c.off+n : c.off+n]
	c.off += n
	return b
}

func (c *cursor) u8(what string) uint8 {
	if b := c.take(1, what); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) u16(what string) uint16 {
	if b := c.take(2, what); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) u32(what string) uint32 {
	if b := c.take(4, what); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) i32(what string) int32 { return int32(c.u32(what)) }

func (c *cursor) i64(what string) int64 {
	b := c.take(8, what)
	if b == nil {
		return 0
	}
	v := int64(binary.LittleEndian.Uint64(b))
	if !safeInteger(v) {
		c.fail("%s: %d is outside ±(2^53−1)", what, v)
		return 0
	}
	return v
}

func (c *cursor) bool(what string) bool {
	b := c.u8(what)
	if b > 1 {
		c.fail("%s: bool byte 0x%02x is neither 0x00 nor 0x01", what, b)
	}
	return b == 1
}

// present reads the presence byte of an opt().
func (c *cursor) present(what string) bool {
	b := c.u8(what)
	if b > 1 {
		c.fail("%s: presence byte 0x%02x is neither 0x00 nor 0x01", what, b)
	}
	return b == 1
}

// bytes reads a bytes value, which aliases the input.
func (c *cursor) bytes(what string) []byte {
	n := c.u32(what)
	if uint64(n) > uint64(c.left()) {
		c.fail("%s: %d bytes announced, %d left", what, n, c.left())
		return nil
	}
	return c.take(int(n), what)
}

// text reads a str, which aliases the input.
func (c *cursor) text(what string) []byte {
	b := c.bytes(what)
	if !utf8.Valid(b) {
		c.fail("%s: not well-formed UTF-8", what)
		return nil
	}
	return b
}

func (c *cursor) str(what string) string { return string(c.text(what)) }

func (c *cursor) optStr(what string) *string {
	if !c.present(what) {
		return nil
	}
	s := c.str(what)
	return &s
}

func (c *cursor) optI64(what string) *int64 {
	if !c.present(what) {
		return nil
	}
	v := c.i64(what)
	return &v
}

func (c *cursor) optI32(what string) *int32 {
	if !c.present(what) {
		return nil
	}
	v := c.i32(what)
	return &v
}

func (c *cursor) optBytes(what string) []byte {
	if !c.present(what) {
		return nil
	}
	return c.bytes(what)
}

// optJSON reads an opt(json) and keeps its text.
func (c *cursor) optJSON(what string) *string {
	if !c.present(what) {
		return nil
	}
	b := c.text(what)
	if c.err == nil && !ValidJSON(b) {
		c.fail("%s: not a JSON document", what)
	}
	s := string(b)
	return &s
}

// count reads the length of a list whose elements take least bytes or more. A
// count the remaining bytes cannot hold fails here, before anything is
// allocated for it.
func (c *cursor) count(least int, what string) int {
	n := c.u32(what)
	if uint64(n)*uint64(least) > uint64(c.left()) {
		c.fail("%s: %d elements announced, %d bytes left", what, n, c.left())
		return 0
	}
	return int(n)
}

// key checks the order of map keys.
func (c *cursor) key(i int, prev, key string) {
	if c.err == nil && i > 0 && CompareUTF16(prev, key) >= 0 {
		c.fail("map key %q after %q: keys are unique and ascending by UTF-16 code unit", key, prev)
	}
}

// done checks that the input was read whole.
func (c *cursor) done() error {
	c.leave()
	if c.left() > 0 {
		c.fail("%d bytes left over", c.left())
	}
	if c.err != nil {
		return c.err
	}
	return nil
}

// encoder appends primitives to buf and refuses what a decoder would refuse.
// Like a cursor it keeps its first failure.
type encoder struct {
	buf  []byte
	name string
	err  *Error
}

func (e *encoder) fail(format string, args ...any) {
	if e.err == nil {
		e.err = invalid("%s: %s", e.name, fmt.Sprintf(format, args...))
	}
}

func (e *encoder) u8(v uint8)       { e.buf = append(e.buf, v) }
func (e *encoder) u16(v uint16)     { e.buf = AppendU16(e.buf, v) }
func (e *encoder) i32(v int32)      { e.buf = AppendI32(e.buf, v) }
func (e *encoder) bool(v bool)      { e.buf = AppendBool(e.buf, v) }
func (e *encoder) present(yes bool) { e.buf = AppendBool(e.buf, yes) }

func (e *encoder) i64(v int64, what string) {
	if !safeInteger(v) {
		e.fail("%s: %d is outside ±(2^53−1)", what, v)
	}
	e.buf = AppendI64(e.buf, v)
}

// count writes the length of a list or a run of bytes.
func (e *encoder) count(n int, what string) {
	if uint64(n) > maxLength {
		e.fail("%s: %d does not fit in a u32", what, n)
	}
	e.buf = AppendU32(e.buf, uint32(n))
}

func (e *encoder) str(s, what string) {
	if !utf8.ValidString(s) {
		e.fail("%s: not well-formed UTF-8", what)
	}
	e.count(len(s), what)
	e.buf = append(e.buf, s...)
}

func (e *encoder) bytes(b []byte, what string) {
	e.count(len(b), what)
	e.buf = append(e.buf, b...)
}

func (e *encoder) optStr(s *string, what string) {
	e.present(s != nil)
	if s != nil {
		e.str(*s, what)
	}
}

func (e *encoder) optI64(v *int64, what string) {
	e.present(v != nil)
	if v != nil {
		e.i64(*v, what)
	}
}

func (e *encoder) optI32(v *int32) {
	e.present(v != nil)
	if v != nil {
		e.i32(*v)
	}
}

func (e *encoder) optBytes(b []byte, what string) {
	e.present(b != nil)
	if b != nil {
		e.bytes(b, what)
	}
}

func (e *encoder) optJSON(s *string, what string) {
	if s != nil && !ValidJSON([]byte(*s)) {
		e.fail("%s: not a JSON document", what)
	}
	e.optStr(s, what)
}
