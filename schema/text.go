package schema

import (
	"strconv"
	"strings"

	"github.com/syncpg/syncpg/ssp2"
)

// ScopeText renders a column value as text, the form in which scope values
// (§3.1) and row ids (§2.2) appear on the wire and in the log:
//
//   - string: itself
//   - integer: decimal
//   - boolean: true or false
//   - float: as JavaScript's String(number)
//   - json: the JSON text as it was written
//
// It is false for a value without a text: NULL, an empty text, and the types
// that can be neither key nor scope (bytes, blob_ref, crdt).
func ScopeText(t ssp2.ColumnType, v ssp2.Value) (text string, ok bool) {
	var buf [64]byte
	b, ok := appendText(buf[:0], t, v)
	return string(b), ok
}

// ParseScopeText is the inverse of ScopeText: it returns the value of type t
// that renders as exactly this text. It is false when a row can hold no such
// value, which is so for an integer beyond ±(2^53−1) (§0) and for every text
// with U+0000, since Postgres cannot store it. The value's Bytes are a copy.
//
// A text renders from one value only, except "0" of type float, which both
// zeros render as; the positive one is returned.
func ParseScopeText(t ssp2.ColumnType, text string) (ssp2.Value, bool) {
	if text == "" || strings.IndexByte(text, 0) >= 0 {
		return ssp2.Value{}, false
	}
	var v ssp2.Value
	switch t {
	case ssp2.TypeString:
		return ssp2.Value{Bytes: []byte(text)}, true
	case ssp2.TypeJSON:
		v.Bytes = []byte(text)
		return v, ssp2.ValidJSON(v.Bytes)
	case ssp2.TypeInteger:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < -ssp2.MaxSafeInteger || n > ssp2.MaxSafeInteger {
			return ssp2.Value{}, false
		}
		v.Int = n
	case ssp2.TypeBoolean:
		if text == "true" {
			v.Int = 1
		}
	case ssp2.TypeFloat:
		// An error leaves zero or an infinity, neither of which renders as text.
		v.Float, _ = strconv.ParseFloat(text, 64)
	default:
		return ssp2.Value{}, false
	}
	var buf [64]byte
	b, ok := appendText(buf[:0], t, v)
	if !ok || string(b) != text {
		return ssp2.Value{}, false
	}
	return v, true
}

// appendText appends the text of v to dst and says whether it has one.
func appendText(dst []byte, t ssp2.ColumnType, v ssp2.Value) ([]byte, bool) {
	if v.Null {
		return dst, false
	}
	switch t {
	case ssp2.TypeString, ssp2.TypeJSON:
		return append(dst, v.Bytes...), len(v.Bytes) > 0
	case ssp2.TypeInteger:
		return strconv.AppendInt(dst, v.Int, 10), true
	case ssp2.TypeBoolean:
		return strconv.AppendBool(dst, v.Int != 0), true
	case ssp2.TypeFloat:
		return ssp2.AppendNumber(dst, v.Float), true
	case ssp2.TypeBytes, ssp2.TypeBlobRef, ssp2.TypeCRDT:
	}
	return dst, false
}
