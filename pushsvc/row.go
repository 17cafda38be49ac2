package pushsvc

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Row is a row as a hook of the host sees it, by column name (§6.7). It cannot be
// changed. Methods panic when the table has no such column or the column is of
// another type: that is a mistake in the hook, and turns into the answer to any
// other.
type Row struct {
	table  *schema.Table
	values []ssp2.Value
}

// view returns the row of a state that is decoded, nil when it is absent.
func view(table *schema.Table, state *rowState) *Row {
	if state == nil || !state.exists() {
		return nil
	}
	return &Row{table, state.values}
}

func (r *Row) value(column string, types ...ssp2.ColumnType) ssp2.Value {
	i, ok := r.table.ColumnIndex(column)
	if !ok {
		panic(fmt.Sprintf("pushsvc: table %q has no column %q", r.table.Name, column))
	}
	if slices.Contains(types, r.table.Columns[i].Type) {
		return r.values[i]
	}
	panic(fmt.Sprintf("pushsvc: column %q of table %q is of another type", column, r.table.Name))
}

// Text returns a string, json or blob_ref column; json is the text as it was
// written. ok is false for NULL.
func (r *Row) Text(column string) (text string, ok bool) {
	v := r.value(column, ssp2.TypeString, ssp2.TypeJSON, ssp2.TypeBlobRef)
	return string(v.Bytes), !v.Null
}

// Int returns an integer column. ok is false for NULL.
func (r *Row) Int(column string) (n int64, ok bool) {
	v := r.value(column, ssp2.TypeInteger)
	return v.Int, !v.Null
}

// Float returns a float column. ok is false for NULL.
func (r *Row) Float(column string) (f float64, ok bool) {
	v := r.value(column, ssp2.TypeFloat)
	return v.Float, !v.Null
}

// Bool returns a boolean column. ok is false for NULL.
func (r *Row) Bool(column string) (b, ok bool) {
	v := r.value(column, ssp2.TypeBoolean)
	return v.Int != 0, !v.Null
}

// Bytes returns a copy of a bytes or crdt column; of an encrypted column it is the
// ciphertext. ok is false for NULL.
func (r *Row) Bytes(column string) (b []byte, ok bool) {
	v := r.value(column, ssp2.TypeBytes, ssp2.TypeCRDT)
	return bytes.Clone(v.Bytes), !v.Null
}

// Value returns a column of any type: nil for NULL, else the Go type that the getter
// of its type returns.
func (r *Row) Value(column string) any {
	i, ok := r.table.ColumnIndex(column)
	if !ok {
		panic(fmt.Sprintf("pushsvc: table %q has no column %q", r.table.Name, column))
	}
	return r.at(i)
}

func (r *Row) at(i int) any {
	v := r.values[i]
	if v.Null {
		return nil
	}
	switch r.table.Columns[i].Type {
	case ssp2.TypeInteger:
		return v.Int
	case ssp2.TypeFloat:
		return v.Float
	case ssp2.TypeBoolean:
		return v.Int != 0
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return append([]byte{}, v.Bytes...)
	default:
		return string(v.Bytes)
	}
}

// Map returns a copy of the row: every column of the table, as [Row.Value] returns it.
func (r *Row) Map() map[string]any {
	m := make(map[string]any, len(r.values))
	for i, c := range r.table.Columns {
		m[c.Name] = r.at(i)
	}
	return m
}
