package ssp2

import (
	"encoding/binary"
	"fmt"
	"math"
	"unicode/utf8"
)

// ColumnType is the wire tag of a column type (§2.4).
type ColumnType uint8

// The eight column types.
const (
	TypeString  ColumnType = 1
	TypeInteger ColumnType = 2
	TypeFloat   ColumnType = 3
	TypeBoolean ColumnType = 4
	TypeJSON    ColumnType = 5
	TypeBytes   ColumnType = 6
	TypeBlobRef ColumnType = 7
	TypeCRDT    ColumnType = 8
)

// String returns the name of the type (§2.4).
func (t ColumnType) String() string {
	switch t {
	case TypeString:
		return "string"
	case TypeInteger:
		return "integer"
	case TypeFloat:
		return "float"
	case TypeBoolean:
		return "boolean"
	case TypeJSON:
		return "json"
	case TypeBytes:
		return "bytes"
	case TypeBlobRef:
		return "blob_ref"
	case TypeCRDT:
		return "crdt"
	}
	return fmt.Sprintf("ColumnType(%d)", uint8(t))
}

func (t ColumnType) valid() bool { return t >= TypeString && t <= TypeCRDT }

// Column is what the row codec needs to know of a column.
type Column struct {
	Name     string
	Type     ColumnType
	Nullable bool
}

// Value is one column value of a decoded row. Which field holds it follows
// from the column's type; Null wins over all.
type Value struct {
	Null  bool
	Int   int64   // integer; boolean as 0 or 1
	Float float64 // float
	Bytes []byte  // string, json, blob_ref (UTF-8 text), bytes, crdt; aliases the input
}

// DecodeRow decodes src, one full row and nothing else, by §2.4. It appends one
// value per column to dst[:0] and returns that; with room in dst it does not
// allocate. Text and byte values alias src. Errors have the code
// sync.invalid_request; the values are then nil.
func DecodeRow(cols []Column, src []byte, dst []Value) ([]Value, error) {
	vals, n, err := walkRow(cols, src, dst[:0], true)
	if err != nil {
		return nil, err
	}
	if n != len(src) {
		return nil, invalid("row: %d bytes left over", len(src)-n)
	}
	return vals, nil
}

// ScanRow returns the length of the row at the head of src, checked like
// [DecodeRow] checks it. It does not allocate.
func ScanRow(cols []Column, src []byte) (n int, err error) {
	_, n, err = walkRow(cols, src, nil, false)
	return n, err
}

// walkRow reads the row at the head of src, and keeps its values in dst if asked.
func walkRow(cols []Column, src []byte, dst []Value, keep bool) ([]Value, int, error) {
	nulls, err := splitBitmap(src, len(cols), "null bitmap")
	if err != nil {
		return nil, 0, err
	}
	n := len(nulls)
	for i := range cols {
		var v Value
		if nulls.Has(i) {
			if !cols[i].Nullable {
				return nil, 0, columnError(&cols[i], "NULL in a column that is not nullable")
			}
			v.Null = true
		} else if n, err = readValue(&cols[i], src, n, &v); err != nil {
			return nil, 0, err
		}
		if keep {
			dst = append(dst, v)
		}
	}
	return dst, n, nil
}

func columnError(col *Column, format string, args ...any) error {
	return invalid("row: column %q (%v): %s", col.Name, col.Type, fmt.Sprintf(format, args...))
}

// readValue reads the value of col at src[n:] and returns the offset behind it.
func readValue(col *Column, src []byte, n int, v *Value) (int, error) {
	switch col.Type {
	case TypeInteger, TypeFloat:
		if len(src)-n < 8 {
			return 0, columnError(col, "8 bytes needed, %d left", len(src)-n)
		}
		u := binary.LittleEndian.Uint64(src[n:])
		if col.Type == TypeFloat {
			v.Float = math.Float64frombits(u)
			return n + 8, nil
		}
		if v.Int = int64(u); !safeInteger(v.Int) {
			return 0, columnError(col, "%d is outside ±(2^53−1)", v.Int)
		}
		return n + 8, nil
	case TypeBoolean:
		if n >= len(src) {
			return 0, columnError(col, "1 byte needed, none left")
		}
		if src[n] > 1 {
			return 0, columnError(col, "bool byte 0x%02x is neither 0x00 nor 0x01", src[n])
		}
		v.Int = int64(src[n])
		return n + 1, nil
	default: // length-prefixed
	}
	if len(src)-n < 4 {
		return 0, columnError(col, "a length needs 4 bytes, %d left", len(src)-n)
	}
	size := binary.LittleEndian.Uint32(src[n:])
	n += 4
	if uint64(size) > uint64(len(src)-n) {
		return 0, columnError(col, "%d bytes announced, %d left", size, len(src)-n)
	}
	end := n + int(size)
	v.Bytes = src[n:end:end]
	if problem := textProblem(col.Type, v.Bytes); problem != "" {
		return 0, columnError(col, "%s", problem)
	}
	return end, nil
}

// textProblem checks the content of a length-prefixed value.
func textProblem(t ColumnType, b []byte) string {
	switch t {
	case TypeString:
		if !utf8.Valid(b) {
			return "not well-formed UTF-8"
		}
	case TypeJSON:
		if !ValidJSON(b) {
			return "not a JSON document"
		}
	case TypeBlobRef:
		if !ValidBlobRef(b) {
			return "not a canonical BlobRef document"
		}
	case TypeBytes, TypeCRDT:
	default:
		return "the column type is unknown"
	}
	return ""
}

// AppendRow appends one full row by §2.4, one value per column. It refuses what
// DecodeRow would refuse with an [*Error], and then returns dst as it was.
func AppendRow(dst []byte, cols []Column, vals []Value) ([]byte, error) {
	if len(vals) != len(cols) {
		return dst, invalid("row: %d values for %d columns", len(vals), len(cols))
	}
	nulls := len(dst)
	buf := appendZeros(dst, bitmapLen(len(cols)))
	for i := range cols {
		if vals[i].Null {
			Bitmap(buf[nulls:]).Set(i)
		}
		var err error
		if buf, err = appendValue(buf, &cols[i], &vals[i]); err != nil {
			return dst, err
		}
	}
	return buf, nil
}

// appendValue appends one value, nothing for NULL.
func appendValue(dst []byte, col *Column, v *Value) ([]byte, error) {
	if v.Null {
		if !col.Nullable {
			return dst, columnError(col, "NULL in a column that is not nullable")
		}
		return dst, nil
	}
	switch col.Type {
	case TypeInteger:
		if !safeInteger(v.Int) {
			return dst, columnError(col, "%d is outside ±(2^53−1)", v.Int)
		}
		return AppendI64(dst, v.Int), nil
	case TypeFloat:
		return AppendF64(dst, v.Float), nil
	case TypeBoolean:
		if v.Int != 0 && v.Int != 1 {
			return dst, columnError(col, "a boolean is 0 or 1, not %d", v.Int)
		}
		return append(dst, byte(v.Int)), nil
	default: // length-prefixed
	}
	if problem := textProblem(col.Type, v.Bytes); problem != "" {
		return dst, columnError(col, "%s", problem)
	}
	if uint64(len(v.Bytes)) > maxLength {
		return dst, columnError(col, "%d bytes do not fit", len(v.Bytes))
	}
	return AppendBytes(dst, v.Bytes), nil
}
