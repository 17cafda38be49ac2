package pushsvc

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// encode makes an operation of wire version 3. An error is an [*OperationError].
func (s *Service) encode(index int, op *Operation) (ssp2.Operation, error) {
	refuse := func(column, format string, args ...any) (ssp2.Operation, error) {
		return ssp2.Operation{}, &OperationError{OpIndex: index, Table: op.Table, Column: column, Problem: fmt.Sprintf(format, args...)}
	}
	table, ok := s.schema.Table(op.Table)
	if !ok {
		return refuse("", "the schema has no such table")
	}
	key := table.Columns[table.PrimaryKey]
	out := ssp2.Operation{Table: op.Table, RowID: op.RowID, Op: op.Op, BaseVersion: op.BaseVersion}
	switch {
	case op.Op != ssp2.OpUpsert && op.Op != ssp2.OpDelete:
		return refuse("", "it is neither an upsert nor a delete; make it with Upsert or Delete")
	case op.BaseVersion != nil && *op.BaseVersion < 0:
		return refuse("", "the base version is %d, which no row has", *op.BaseVersion)
	case op.Op == ssp2.OpUpsert:
	case op.RowID == "":
		return refuse("", "a delete needs a row id")
	case op.Values != nil || op.BaseVersion != nil:
		return refuse("", "a delete has neither values nor a base version")
	default:
		return out, nil
	}

	values := make([]ssp2.Value, len(table.Columns))
	present := ssp2.NewBitmap(len(table.Columns))
	for _, name := range slices.Sorted(maps.Keys(op.Values)) {
		col, ok := table.ColumnIndex(name)
		if !ok {
			return refuse(name, "the table has no such column")
		}
		value, problem := encodeValue(&table.Columns[col], op.Values[name])
		if problem != "" {
			return refuse(name, "%s", problem)
		}
		values[col] = value
		present.Set(col)
	}
	if !present.Has(table.PrimaryKey) {
		if op.RowID == "" {
			return refuse(key.Name, "an upsert needs the primary key")
		}
		if values[table.PrimaryKey], ok = schema.ParseScopeText(key.Type, op.RowID); !ok {
			return refuse(key.Name, "the row id %.64q is no %v", op.RowID, key.Type)
		}
		present.Set(table.PrimaryKey)
	}
	id, ok := table.RowID(values)
	switch {
	case !ok:
		return refuse(key.Name, "the primary key is empty")
	case op.RowID != "" && id != op.RowID:
		return refuse(key.Name, "the primary key %.64q is not the row id %.64q", id, op.RowID)
	}
	out.RowID = id
	var err error
	if out.Payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values); err != nil {
		return refuse("", "%v", err)
	}
	return out, nil
}

// encodeValue converts a Go value to one of a column.
func encodeValue(col *schema.Column, v any) (value ssp2.Value, problem string) {
	if isNil(v) {
		if !col.Nullable {
			return value, "it is not nullable"
		}
		return ssp2.Value{Null: true}, ""
	}
	if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer {
		return encodeValue(col, p.Elem().Interface())
	}
	var ok bool
	switch col.Type {
	case ssp2.TypeString:
		var text string
		text, ok = stringOf(v)
		value.Bytes = []byte(text)
	case ssp2.TypeInteger:
		value.Int, ok = integerOf(v)
	case ssp2.TypeFloat:
		value.Float, ok = floatOf(v)
	case ssp2.TypeBoolean:
		var b bool
		if b, ok = boolOf(v); b {
			value.Int = 1
		}
	case ssp2.TypeJSON, ssp2.TypeBlobRef:
		if value.Bytes, ok = jsonOf(v); ok && col.Type == ssp2.TypeJSON && !ssp2.ValidJSON(value.Bytes) {
			return value, `the text is not JSON; a JSON string has quotes of its own: "\"text\""`
		}
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		value.Bytes, ok = bytesOf(v)
	}
	if !ok {
		return value, fmt.Sprintf("a value of type %v cannot be made of the %T given", col.Type, v)
	}
	return value, ""
}

func isNil(v any) bool {
	if v == nil {
		return true
	}
	switch p := reflect.ValueOf(v); p.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map:
		return p.IsNil()
	default:
		return false
	}
}

func stringOf(v any) (string, bool) {
	if _, number := v.(json.Number); number {
		return "", false
	}
	r := reflect.ValueOf(v)
	return r.String(), r.Kind() == reflect.String
}

func integerOf(v any) (int64, bool) {
	if n, ok := v.(json.Number); ok {
		if i, err := strconv.ParseInt(string(n), 10, 64); err == nil {
			return i, true
		}
		f, err := n.Float64()
		return int64(f), err == nil && whole(f)
	}
	r := reflect.ValueOf(v)
	switch {
	case r.CanInt():
		return r.Int(), true
	case r.CanUint():
		return int64(r.Uint()), r.Uint() <= math.MaxInt64
	case r.CanFloat():
		return int64(r.Float()), whole(r.Float())
	}
	return 0, false
}

// whole says that a float stands for one integer, and no other.
func whole(f float64) bool { return f == math.Trunc(f) && math.Abs(f) <= ssp2.MaxSafeInteger }

func floatOf(v any) (float64, bool) {
	if n, ok := v.(json.Number); ok {
		f, err := n.Float64()
		return f, err == nil
	}
	r := reflect.ValueOf(v)
	switch {
	case r.CanFloat():
		return r.Float(), true
	case r.CanInt():
		f := float64(r.Int())
		return f, whole(f)
	case r.CanUint():
		f := float64(r.Uint())
		return f, whole(f)
	}
	return 0, false
}

func boolOf(v any) (b, ok bool) {
	r := reflect.ValueOf(v)
	if r.Kind() != reflect.Bool {
		return false, false
	}
	return r.Bool(), true
}

func jsonOf(v any) ([]byte, bool) {
	if text, ok := stringOf(v); ok {
		return []byte(text), true
	}
	if text, ok := sliceOf(v); ok {
		return text, true
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, false
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), true
}

func bytesOf(v any) ([]byte, bool) {
	if text, ok := stringOf(v); ok {
		b, err := base64.StdEncoding.DecodeString(text)
		return b, err == nil
	}
	return sliceOf(v)
}

// sliceOf returns a copy of a slice of bytes.
func sliceOf(v any) ([]byte, bool) {
	r := reflect.ValueOf(v)
	if r.Kind() != reflect.Slice || r.Type().Elem().Kind() != reflect.Uint8 {
		return nil, false
	}
	return append([]byte{}, r.Bytes()...), true
}
