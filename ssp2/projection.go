package ssp2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Projection turns rows of one layout into rows of another (§2.4): columns are matched by
// name, those that the other layout lacks are left out, and those that it has more are
// NULL. It is safe for concurrent use.
type Projection struct {
	from, to []Column
	source   []int // by column of to: its index in from, -1 for none
}

// NewProjection returns the projection between two layouts. It fails when a column has
// another type, or when a NULL would get into a column that is not nullable.
func NewProjection(from, to []Column) (*Projection, error) {
	p := &Projection{from: from, to: to, source: make([]int, len(to))}
	for i := range to {
		col := &to[i]
		j := slices.IndexFunc(from, func(c Column) bool { return c.Name == col.Name })
		p.source[i] = j
		switch {
		case j < 0 && !col.Nullable:
			return nil, fmt.Errorf("column %q: there is no value for it and it is not nullable", col.Name)
		case j < 0:
		case from[j].Type != col.Type:
			return nil, fmt.Errorf("column %q: its type is %v here and %v there", col.Name, from[j].Type, col.Type)
		case from[j].Nullable && !col.Nullable:
			return nil, fmt.Errorf("column %q: it is nullable here and not there", col.Name)
		}
	}
	return p, nil
}

// Identical says that both layouts are the same, so that a row is its own projection.
func (p *Projection) Identical() bool { return slices.Equal(p.from, p.to) }

// Has says that a row of the first layout has a value for the column at that index of the
// other one.
func (p *Projection) Has(column int) bool { return p.source[column] >= 0 }

// span is where a cell lies in a row; end is negative for NULL.
type span struct{ start, end int }

// AppendRow appends the projection of a stored row. The cells are copied as they are: what
// is in them was checked when the row was written. On an error dst is as it was.
func (p *Projection) AppendRow(dst, src []byte) ([]byte, error) {
	nulls, err := splitBitmap(src, len(p.from), "null bitmap")
	if err != nil {
		return dst, errors.New("projecting a row: " + err.Error())
	}
	var few [64]span
	cells := few[:0]
	n := len(nulls)
	for i := range p.from {
		if nulls.Has(i) {
			cells = append(cells, span{end: -1})
			continue
		}
		end, ok := cellEnd(p.from[i].Type, src, n)
		if !ok {
			return dst, fmt.Errorf("projecting a row: it ends in column %q", p.from[i].Name)
		}
		cells = append(cells, span{n, end})
		n = end
	}
	if n != len(src) {
		return dst, fmt.Errorf("projecting a row: %d bytes left over", len(src)-n)
	}
	at := len(dst)
	buf := appendZeros(dst, bitmapLen(len(p.to)))
	for i, j := range p.source {
		if j >= 0 && cells[j].end >= 0 {
			buf = append(buf, src[cells[j].start:cells[j].end]...)
			continue
		}
		if !p.to[i].Nullable {
			return dst, fmt.Errorf("projecting a row: NULL in column %q, which is not nullable", p.to[i].Name)
		}
		Bitmap(buf[at:]).Set(i)
	}
	return buf, nil
}

// cellEnd returns the offset behind the cell at src[n:], false when src ends in it.
func cellEnd(t ColumnType, src []byte, n int) (int, bool) {
	size := uint64(0)
	switch t {
	case TypeInteger, TypeFloat:
		size = 8
	case TypeBoolean:
		size = 1
	default: // length-prefixed
		if len(src)-n < 4 {
			return 0, false
		}
		size = 4 + uint64(binary.LittleEndian.Uint32(src[n:]))
	}
	if size > uint64(len(src)-n) {
		return 0, false
	}
	return n + int(size), true
}

// Values appends to dst[:0] the projection of a decoded row, and of the columns that are
// present in it: nil for all. Columns that the row does not know are NULL and absent; the
// bitmap is nil when all are present.
func (p *Projection) Values(dst, vals []Value, present Bitmap) ([]Value, Bitmap) {
	dst = dst[:0]
	out, all := NewBitmap(len(p.to)), true
	for i, j := range p.source {
		v := Value{Null: j < 0}
		if j >= 0 {
			v = vals[j]
		}
		dst = append(dst, v)
		if j < 0 || present != nil && !present.Has(j) {
			all = false
			continue
		}
		out.Set(i)
	}
	if all {
		out = nil
	}
	return dst, out
}

// Columns returns the projection of a set of columns.
func (p *Projection) Columns(set Bitmap) Bitmap {
	out := NewBitmap(len(p.to))
	for i, j := range p.source {
		if j >= 0 && set.Has(j) {
			out.Set(i)
		}
	}
	return out
}
