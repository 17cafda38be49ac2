package image_test

import (
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"

	"github.com/syncpg/syncpg/pullsvc/segment/image"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

type (
	object = map[string]any
	list   = []any
)

// column is one column of a table under test.
func column(name, typ string, nullable bool) object {
	c := object{"name": name, "type": typ, "nullable": nullable}
	if typ == "crdt" {
		c["crdtType"] = "yjs-doc"
	}
	return c
}

// tableOf compiles a table whose first column is the key.
func tableOf(tb testing.TB, name string, columns ...object) *schema.Table {
	tb.Helper()
	var all list
	for _, c := range columns {
		all = append(all, c)
	}
	ir, err := json.Marshal(object{"irVersion": 1, "schemaVersion": 1, "tables": list{object{
		"name": name, "primaryKey": columns[0]["name"], "columns": all, "scopes": list{object{"pattern": "key:{key}", "column": columns[0]["name"]}},
	}}})
	require.NoError(tb, err)
	s, err := schema.Parse(ir)
	require.NoError(tb, err)
	return s.Tables[0]
}

func text(s string) ssp2.Value   { return ssp2.Value{Bytes: []byte(s)} }
func number(n int64) ssp2.Value  { return ssp2.Value{Int: n} }
func float(f float64) ssp2.Value { return ssp2.Value{Float: f} }
func null() ssp2.Value           { return ssp2.Value{Null: true} }

// row is one row of a table under test.
func row(tb testing.TB, t *schema.Table, version int64, vals ...ssp2.Value) ssp2.SegmentRow {
	tb.Helper()
	b, err := ssp2.AppendRow(nil, t.Wire, vals)
	require.NoError(tb, err)
	return ssp2.SegmentRow{ServerVersion: version, Row: b}
}

// feed hands out rows from one buffer, as a stream does.
func feed(rows []ssp2.SegmentRow) iter.Seq2[ssp2.SegmentRow, error] {
	return func(yield func(ssp2.SegmentRow, error) bool) {
		var buf []byte
		for _, r := range rows {
			buf = append(buf[:0], r.Row...)
			if !yield(ssp2.SegmentRow{ServerVersion: r.ServerVersion, Row: buf}, nil) {
				return
			}
			for i := range buf {
				buf[i] = 0xee
			}
		}
	}
}

func spec(tb testing.TB, t *schema.Table) image.Spec {
	tb.Helper()
	return image.Spec{Table: t, SchemaVersion: 3, AsOfCommitSeq: 77, ScopeDigest: "d1", Dir: tb.TempDir()}
}

// save writes an image where SQLite can open it.
func save(tb testing.TB, f *image.File) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "image.db")
	out, err := os.Create(path)
	require.NoError(tb, err)
	_, err = io.Copy(out, io.NewSectionReader(f, 0, f.Size()))
	require.NoError(tb, err)
	require.NoError(tb, out.Close())
	return path
}

// open opens an image in a real SQLite, which finds nothing wrong with it.
func open(tb testing.TB, f *image.File) *sqlite.Conn {
	tb.Helper()
	c, err := sqlite.OpenConn(save(tb, f), sqlite.OpenReadOnly)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	require.Equal(tb, []string{"ok"}, query(tb, c, "pragma integrity_check"))
	return c
}

// query returns the rows of a query, one text each.
func query(tb testing.TB, c *sqlite.Conn, sql string, args ...any) []string {
	tb.Helper()
	rows := []string{}
	err := sqlitex.Execute(c, sql, &sqlitex.ExecOptions{Args: args, ResultFunc: func(s *sqlite.Stmt) error {
		line := make([]string, s.ColumnCount())
		for i := range line {
			line[i] = cell(s, i)
		}
		rows = append(rows, strings.Join(line, "|"))
		return nil
	}})
	require.NoError(tb, err)
	return rows
}

// cell renders what SQLite has stored, so that different values differ.
func cell(s *sqlite.Stmt, i int) string {
	switch s.ColumnType(i) {
	case sqlite.TypeInteger:
		return strconv.FormatInt(s.ColumnInt64(i), 10)
	case sqlite.TypeFloat:
		return fmt.Sprintf("float %x", math.Float64bits(s.ColumnFloat(i)))
	case sqlite.TypeText:
		return s.ColumnText(i)
	case sqlite.TypeBlob:
		b := make([]byte, s.ColumnLen(i))
		s.ColumnBytes(i, b)
		return fmt.Sprintf("x'%x'", b)
	case sqlite.TypeNull:
	}
	return "NULL"
}

// stored renders a value as cell renders what should be stored of it.
func stored(typ ssp2.ColumnType, v ssp2.Value) string {
	switch {
	case v.Null:
		return "NULL"
	case typ == ssp2.TypeInteger || typ == ssp2.TypeBoolean:
		return strconv.FormatInt(v.Int, 10)
	case typ == ssp2.TypeFloat:
		return fmt.Sprintf("float %x", math.Float64bits(v.Float))
	case typ == ssp2.TypeBytes || typ == ssp2.TypeCRDT:
		return fmt.Sprintf("x'%x'", v.Bytes)
	}
	return string(v.Bytes)
}
