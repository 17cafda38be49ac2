package ssp2

import "math/bits"

// Bitmap is a set of column indexes in the layout of null bitmaps, presence
// bitmaps and conflictColumns: bit i is bit i%8 of byte i/8.
type Bitmap []byte

// NewBitmap returns an empty set with room for n columns.
func NewBitmap(n int) Bitmap { return make(Bitmap, bitmapLen(n)) }

func bitmapLen(n int) int { return (n + 7) / 8 }

// Has reports whether i is in the set. Beyond its end there is nothing.
func (b Bitmap) Has(i int) bool { return i/8 < len(b) && b[i/8]>>(i%8)&1 == 1 }

// Set adds i, which must be within the size the set was made for.
func (b Bitmap) Set(i int) { b[i/8] |= 1 << (i % 8) }

// Count returns how many columns are in the set.
func (b Bitmap) Count() int {
	n := 0
	for _, x := range b {
		n += bits.OnesCount8(x)
	}
	return n
}

// splitBitmap returns the bitmap over n bits at the head of src.
func splitBitmap(src []byte, n int, what string) (Bitmap, error) {
	size := bitmapLen(n)
	if len(src) < size {
		return nil, invalid("row: %s: %d bytes needed, %d left", what, size, len(src))
	}
	b := Bitmap(src[:size:size])
	if n%8 != 0 && b[size-1]>>(n%8) != 0 {
		return nil, invalid("row: %s: a padding bit is set", what)
	}
	return b, nil
}

// appendZeros appends n zero bytes.
func appendZeros(dst []byte, n int) []byte {
	for range n {
		dst = append(dst, 0)
	}
	return dst
}

// DecodeSparseRow decodes src, one sparse row and nothing else: the push payload
// of wire version 3. It consists of a presence bitmap over the columns, a null
// bitmap over the present columns, and the present values that are not NULL, in
// declaration order. The column at index primaryKey must be present.
//
// The values are appended to dst[:0], one per column, the zero Value for an
// absent one; with room in dst nothing is allocated. Values and the presence
// bitmap alias src. Errors have the code sync.invalid_request; values and bitmap
// are then nil.
func DecodeSparseRow(cols []Column, primaryKey int, src []byte, dst []Value) (vals []Value, present Bitmap, err error) {
	if primaryKey < 0 || primaryKey >= len(cols) {
		return nil, nil, invalid("row: no column %d for the primary key", primaryKey)
	}
	present, err = splitBitmap(src, len(cols), "presence bitmap")
	if err != nil {
		return nil, nil, err
	}
	if !present.Has(primaryKey) {
		return nil, nil, columnError(&cols[primaryKey], "the primary key is absent")
	}
	nulls, err := splitBitmap(src[len(present):], present.Count(), "null bitmap")
	if err != nil {
		return nil, nil, err
	}
	n := len(present) + len(nulls)
	vals = dst[:0]
	ordinal := 0 // among the present columns
	for i := range cols {
		var v Value
		if present.Has(i) {
			if nulls.Has(ordinal) {
				if !cols[i].Nullable {
					return nil, nil, columnError(&cols[i], "NULL in a column that is not nullable")
				}
				v.Null = true
			} else if n, err = readValue(&cols[i], src, n, &v); err != nil {
				return nil, nil, err
			}
			ordinal++
		}
		vals = append(vals, v)
	}
	if n != len(src) {
		return nil, nil, invalid("row: %d bytes left over", len(src)-n)
	}
	return vals, present, nil
}

// AppendSparseRow appends one sparse row. vals has one value per column, those of
// absent columns are not looked at. It refuses what DecodeSparseRow would refuse
// with an [*Error], and then returns dst as it was.
func AppendSparseRow(dst []byte, cols []Column, primaryKey int, present Bitmap, vals []Value) ([]byte, error) {
	switch {
	case len(vals) != len(cols):
		return dst, invalid("row: %d values for %d columns", len(vals), len(cols))
	case primaryKey < 0 || primaryKey >= len(cols):
		return dst, invalid("row: no column %d for the primary key", primaryKey)
	case len(present) != bitmapLen(len(cols)):
		return dst, invalid("row: a presence bitmap of %d bytes for %d columns", len(present), len(cols))
	case !present.Has(primaryKey):
		return dst, columnError(&cols[primaryKey], "the primary key is absent")
	}
	if _, err := splitBitmap(present, len(cols), "presence bitmap"); err != nil {
		return dst, err
	}
	nulls := len(dst) + len(present)
	buf := appendZeros(append(dst, present...), bitmapLen(present.Count()))
	ordinal := 0
	for i := range cols {
		if !present.Has(i) {
			continue
		}
		if vals[i].Null {
			Bitmap(buf[nulls:]).Set(ordinal)
		}
		ordinal++
		var err error
		if buf, err = appendValue(buf, &cols[i], &vals[i]); err != nil {
			return dst, err
		}
	}
	return buf, nil
}
