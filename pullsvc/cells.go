package pullsvc

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// cells reads the columns of result rows where they lie: bytes alias the
// connection's buffer and are valid until the next row. A connection that prepares
// nothing sends text instead of binary. The first failure sticks.
type cells struct {
	types  *pgtype.Map
	fields []pgconn.FieldDescription
	raw    [][]byte
	err    error
}

func newCells(rows pgx.Rows) *cells {
	return &cells{types: rows.Conn().TypeMap(), fields: rows.FieldDescriptions()}
}

func (c *cells) next(rows pgx.Rows) bool {
	if c.err != nil || !rows.Next() {
		return false
	}
	c.raw = rows.RawValues()
	return true
}

func (c *cells) binary(i int) bool { return c.fields[i].Format == pgtype.BinaryFormatCode }

func (c *cells) fail(i int, err error) {
	if c.err == nil {
		c.err = fmt.Errorf("column %s: %w", c.fields[i].Name, err)
	}
}

// integer reads a smallint, integer or bigint.
func (c *cells) integer(i int) int64 {
	b := c.raw[i]
	if c.binary(i) {
		switch len(b) {
		case 2:
			return int64(int16(binary.BigEndian.Uint16(b)))
		case 4:
			return int64(int32(binary.BigEndian.Uint32(b)))
		case 8:
			return int64(binary.BigEndian.Uint64(b))
		}
		c.fail(i, fmt.Errorf("an integer of %d bytes", len(b)))
		return 0
	}
	v, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		c.fail(i, err)
	}
	return v
}

// text reads a text, whose bytes are the same in both formats.
func (c *cells) text(i int) []byte { return c.raw[i] }

// bytes reads a bytea; nil is NULL.
func (c *cells) bytes(i int) []byte {
	b := c.raw[i]
	if b == nil || c.binary(i) {
		return b
	}
	var v []byte
	c.scan(i, &v)
	return v
}

// texts reads a text[].
func (c *cells) texts(i int) []string {
	var v []string
	c.scan(i, &v)
	return v
}

func (c *cells) scan(i int, into any) {
	if err := c.types.Scan(c.fields[i].DataTypeOID, c.fields[i].Format, c.raw[i], into); err != nil {
		c.fail(i, err)
	}
}

// interned reads a text[] and remembers it by its raw bytes: the changes of a
// window have few different scopes.
type interned map[string][]string

// maxInterned bounds the memory of interned.
const maxInterned = 1024

func (in interned) texts(c *cells, i int) []string {
	if v, ok := in[string(c.raw[i])]; ok {
		return v
	}
	v := c.texts(i)
	if len(in) < maxInterned {
		in[string(c.raw[i])] = v
	}
	return v
}
