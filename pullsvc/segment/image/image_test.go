package image_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/pullsvc/segment/image"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

func build(tb testing.TB, t *schema.Table, rows ...ssp2.SegmentRow) *image.File {
	tb.Helper()
	f, err := image.Build(tb.Context(), spec(tb, t), feed(rows))
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = f.Close() })
	return f
}

func TestImageHasExactlyTheTwoTables(t *testing.T) {
	t.Parallel()
	table := tableOf(t, `odd "name" [x]`,
		column("id", "string", false), column("n", "integer", true), column("f", "float", false),
		column("b", "boolean", false), column("j", "json", true), column("y", "bytes", false),
		column("ref", "blob_ref", true), column("c", "crdt", true), column(`a "b" 'c' é`, "string", true),
		column("select", "string", true))
	f := build(t, table, row(t, table, 5, text("k1"), number(-3), float(2), number(1), text(` {"a": 1} `),
		text("\x00\xff"), null(), text("\x01"), text("ü"), null()))
	c := open(t, f)

	require.Equal(t, []string{
		`table|odd "name" [x]|odd "name" [x]`,
		`index|sqlite_autoindex_odd "name" [x]_1|odd "name" [x]`,
		`table|_syncular_segment|_syncular_segment`,
	}, query(t, c, "select type, name, tbl_name from sqlite_schema"))
	require.Equal(t, []string{
		"id|TEXT|1|NULL|1", "n|INTEGER|0|NULL|0", "f|REAL|1|NULL|0", "b|INTEGER|1|NULL|0", "j|TEXT|0|NULL|0",
		"y|BLOB|1|NULL|0", "ref|TEXT|0|NULL|0", "c|BLOB|0|NULL|0", `a "b" 'c' é|TEXT|0|NULL|0`,
		"select|TEXT|0|NULL|0", "_syncular_version|INTEGER|1|NULL|0",
	}, query(t, c, `select name, type, "notnull", dflt_value, pk from pragma_table_info(?)`, table.Name))
	require.Equal(t, []string{
		"format|INTEGER|1|NULL|0", "table|TEXT|1|NULL|0", "schemaVersion|INTEGER|1|NULL|0",
		"asOfCommitSeq|INTEGER|1|NULL|0", "scopeDigest|TEXT|1|NULL|0", "rowCount|INTEGER|1|NULL|0",
	}, query(t, c, `select name, type, "notnull", dflt_value, pk from pragma_table_info('_syncular_segment')`))
	require.Equal(t, []string{`1|odd "name" [x]|3|77|d1|1`}, query(t, c, "select * from _syncular_segment"))
	require.Equal(t, []string{`k1|-3|float 4000000000000000|1| {"a": 1} |x'00ff'|NULL|x'01'|ü|NULL|5`},
		query(t, c, `select * from "odd ""name"" [x]"`))
}

func TestIDIsTheHashOfTheBytes(t *testing.T) {
	t.Parallel()
	table := tableOf(t, "items", column("id", "string", false))
	f := build(t, table, row(t, table, 1, text("a")))
	b, err := io.ReadAll(io.NewSectionReader(f, 0, f.Size()))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("sha256:%x", sha256.Sum256(b)), f.ID())
	require.Equal(t, int64(1), f.Rows())
	_, err = f.ReadAt(make([]byte, 1), f.Size())
	require.ErrorIs(t, err, io.EOF)
}

// TestSizes goes through the sizes at which pages and levels of the trees fill up.
func TestSizes(t *testing.T) {
	t.Parallel()
	table := tableOf(t, "items", column("id", "string", false), column("body", "bytes", false))
	r := rand.New(rand.NewPCG(1, 2))
	check := func(n int, key func(i int) string, body int) {
		rows := make([]ssp2.SegmentRow, n)
		want := make([]string, n)
		for i := range rows {
			k := key(i)
			rows[i] = row(t, table, int64(i+1), text(k), text(strings.Repeat("b", body)))
			want[i] = fmt.Sprint(k, "|", body, "|", i+1)
		}
		r.Shuffle(n, func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		c := open(t, build(t, table, rows...))
		require.Equal(t, want, query(t, c, "select id, length(body), _syncular_version from items order by id"), "%d rows", n)
		for _, line := range want[:min(n, 3)] {
			k, _, _ := strings.Cut(line, "|")
			require.Equal(t, []string{line}, query(t, c, "select id, length(body), _syncular_version from items where id = ?", k))
		}
		require.Equal(t, []string{strconv.Itoa(n)}, query(t, c, "select rowCount from _syncular_segment"))
	}
	short := func(i int) string { return fmt.Sprintf("%06d", i) }
	long := func(i int) string { return fmt.Sprintf("%06d", i) + strings.Repeat("k", 900) }
	longer := func(i int) string { return fmt.Sprintf("%06d", i) + strings.Repeat("k", 9000) }
	for n := range 32 {
		check(n, long, 0)
	}
	check(300, long, 3000)
	for n := 250; n < 330; n += 5 {
		check(n, short, 1)
	}
	check(70, longer, 5000)
	check(500, longer, 0)
	check(30000, short, 100)
}

func TestPayloadsAtTheEdgeOfOverflow(t *testing.T) {
	t.Parallel()
	table := tableOf(t, "items", column("id", "string", false), column("body", "string", false))
	var rows []ssp2.SegmentRow
	var want []string
	add := func(key, body int) {
		k := fmt.Sprintf("%05d", len(rows)) + strings.Repeat("k", key)
		rows = append(rows, row(t, table, 1, text(k), text(strings.Repeat("b", body))))
		want = append(want, fmt.Sprint(len(k), "|", body))
	}
	for body := 3950; body < 4110; body++ {
		add(0, body)
	}
	for body := 8040; body < 8200; body++ {
		add(0, body)
	}
	for key := 960; key < 1010; key++ {
		add(key, 0)
	}
	for key := 4470; key < 4620; key++ {
		add(key, 0)
	}
	add(10, 3<<20)
	c := open(t, build(t, table, rows...))
	require.Equal(t, want, query(t, c, "select length(id), length(body) from items order by rowid"))
	require.Equal(t, want, query(t, c, "select length(id), length(body) from items order by id"))
}

func TestIntegerKeysAreTheRowid(t *testing.T) {
	t.Parallel()
	const most = ssp2.MaxSafeInteger
	keys := []int64{0, 1, -1, 127, 128, -128, -129, 32767, 32768, 1<<23 - 1, 1 << 23, 1<<31 - 1, 1 << 31, 1<<47 - 1, 1 << 47, most, -most, 1 << 48, 2, 16383, 16384}
	for _, typ := range []string{"integer", "boolean"} {
		table := tableOf(t, "items", column("id", typ, false), column("n", "integer", true))
		keys := keys
		if typ == "boolean" {
			keys = []int64{1, 0}
		}
		var rows []ssp2.SegmentRow
		var want []string
		for _, k := range keys {
			rows = append(rows, row(t, table, 1, number(k), number(k)))
		}
		slices.Sort(keys)
		for _, k := range keys {
			want = append(want, fmt.Sprintf("%d|%d|%d|1", k, k, k))
		}
		c := open(t, build(t, table, rows...))
		require.Equal(t, want, query(t, c, "select rowid, * from items order by id"))
		require.Equal(t, []string{"items", "_syncular_segment"}, query(t, c, "select name from sqlite_schema"))
	}
}

// TestAnyTableAndRows compares what SQLite reads with what was written.
func TestAnyTableAndRows(t *testing.T) {
	t.Parallel()
	types := []string{"string", "integer", "float", "boolean", "json", "bytes", "crdt"}
	rapid.Check(t, func(rt *rapid.T) {
		name := rapid.OneOf(rapid.Just("items"), rapid.StringMatching(`[a-z"'\[\] %;é-]{1,20}`)).Draw(rt, "table")
		columns := []object{column("key", rapid.SampledFrom([]string{"string", "integer", "float", "boolean", "json"}).Draw(rt, "key type"), false)}
		for i := range rapid.IntRange(0, 30).Draw(rt, "columns") {
			columns = append(columns, column(fmt.Sprintf(`c%d " '`, i), rapid.SampledFrom(types).Draw(rt, "type"), rapid.Bool().Draw(rt, "nullable")))
		}
		table := tableOf(t, name, columns...)
		n := rapid.OneOf(rapid.IntRange(0, 5), rapid.IntRange(0, 400)).Draw(rt, "rows")
		seen := map[string]bool{}
		var rows []ssp2.SegmentRow
		want := []string{}
		for range n {
			vals := make([]ssp2.Value, len(table.Columns))
			line := make([]string, 0, len(table.Columns)+1)
			for i := range table.Columns {
				c := &table.Columns[i]
				if c.Nullable && rapid.Bool().Draw(rt, "null") {
					vals[i].Null = true
				} else {
					vals[i] = drawValue(rt, c.Type)
				}
				line = append(line, stored(c.Type, vals[i]))
			}
			id, _ := table.RowID(vals)
			if seen[id] {
				continue
			}
			seen[id] = true
			version := rapid.Int64Range(1, ssp2.MaxSafeInteger).Draw(rt, "version")
			rows = append(rows, row(t, table, version, vals...))
			want = append(want, strings.Join(append(line, strconv.FormatInt(version, 10)), "|"))
		}
		c := open(t, build(t, table, rows...))
		got := query(t, c, `select * from "`+strings.ReplaceAll(name, `"`, `""`)+`"`)
		slices.Sort(want)
		slices.Sort(got)
		require.Equal(t, want, got)
		require.Equal(t, []string{fmt.Sprintf("1|%s|3|77|d1|%d", name, len(rows))}, query(t, c, "select * from _syncular_segment"))
	})
}

func drawValue(rt *rapid.T, typ ssp2.ColumnType) ssp2.Value {
	repeat := rapid.OneOf(rapid.Just(1), rapid.SampledFrom([]int{0, 60, 300, 2000})).Draw(rt, "repeat")
	switch typ { //nolint:exhaustive // the rest is bytes
	case ssp2.TypeInteger:
		return number(rapid.OneOf(rapid.Int64Range(-ssp2.MaxSafeInteger, ssp2.MaxSafeInteger), rapid.Int64Range(-2, 300)).Draw(rt, "n"))
	case ssp2.TypeBoolean:
		return number(rapid.Int64Range(0, 1).Draw(rt, "b"))
	case ssp2.TypeFloat:
		return float(rapid.Float64().Draw(rt, "f"))
	case ssp2.TypeJSON:
		return text(`{"a":"` + strings.Repeat("x", repeat) + `", "b": ` + strconv.Itoa(rapid.IntRange(0, 9).Draw(rt, "j")) + `}`)
	case ssp2.TypeString:
		return text(strings.Repeat(rapid.String().Draw(rt, "s"), repeat))
	}
	return text(strings.Repeat(string(rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(rt, "y")), repeat))
}

func TestTablesWithoutAnImage(t *testing.T) {
	t.Parallel()
	id := column("id", "string", false)
	secret := column("secret", "bytes", true)
	secret["encrypted"], secret["declaredType"] = true, "string"
	for name, table := range map[string]*schema.Table{
		"encrypted column":            tableOf(t, "items", id, secret),
		"columns that differ by case": tableOf(t, "items", id, column("a", "string", true), column("A", "string", true)),
		"the table that describes":    tableOf(t, "_Syncular_segment", id),
		"a table of SQLite":           tableOf(t, "SQLite_x", id),
	} {
		require.ErrorIs(t, image.Check(table), image.ErrUnsupported, name)
		_, err := image.Build(t.Context(), spec(t, table), feed(nil))
		require.ErrorIs(t, err, image.ErrUnsupported, name)
	}
	// Beyond ASCII, SQLite minds the case.
	open(t, build(t, tableOf(t, "items", id, column("é", "string", true), column("É", "string", true))))
}

// TestSchemaTableOfAnyWidth: the statement that makes a table is stored in the file.
func TestSchemaTableOfAnyWidth(t *testing.T) {
	t.Parallel()
	for _, typ := range []string{"string", "integer"} {
		for _, n := range append([]int{0, 1500}, seq(50, 56)...) {
			columns := []object{column("id", typ, false)}
			for i := range n {
				columns = append(columns, column(fmt.Sprintf("c%04d%s", i, strings.Repeat("x", 50)), "integer", true))
			}
			c := open(t, build(t, tableOf(t, "items", columns...)))
			require.Equal(t, []string{strconv.Itoa(n + 2)}, query(t, c, "select count(*) from pragma_table_info('items')"))
			require.Equal(t, []string{"1|items|3|77|d1|0"}, query(t, c, "select * from _syncular_segment"))
		}
	}
}

func seq(from, to int) (s []int) {
	for ; from < to; from++ {
		s = append(s, from)
	}
	return s
}

// TestMoreThanFitsIntoMemory sorts keys, and rows, through the disk.
func TestMoreThanFitsIntoMemory(t *testing.T) {
	t.Parallel()
	const n = 20_000
	body := strings.Repeat("x", 900)
	for typ, key := range map[string]func(i int) ssp2.Value{
		"string":  func(i int) ssp2.Value { return text(fmt.Sprintf("%06d%s", i, body)) },
		"integer": func(i int) ssp2.Value { return number(int64(i)) },
	} {
		table := tableOf(t, "items", column("id", typ, false), column("body", "string", false))
		rows := make([]ssp2.SegmentRow, n)
		for i := range rows {
			rows[i] = row(t, table, int64(i+1), key(i), text(body))
		}
		rand.New(rand.NewPCG(1, 2)).Shuffle(n, func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		s := spec(t, table)
		f, err := image.Build(t.Context(), s, feed(rows))
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.Zero(t, leftovers(t, s.Dir))
		got := query(t, open(t, f), "select _syncular_version from items order by id")
		require.Len(t, got, n)
		for i, version := range got {
			require.Equal(t, strconv.Itoa(i+1), version)
		}
	}
}

func TestBuildEndsWithTheFirstError(t *testing.T) {
	t.Parallel()
	table := tableOf(t, "items", column("id", "string", false), column("f", "float", true), column("n", "integer", false))
	good := row(t, table, 1, text("a"), null(), number(1))
	cut := ssp2.SegmentRow{ServerVersion: 1, Row: good.Row[:len(good.Row)-1]}
	errRead := errors.New("the connection is gone")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx  context.Context
		max  int64
		rows iter.Seq2[ssp2.SegmentRow, error]
		want error
	}{
		"the rows end early":     {rows: func(yield func(ssp2.SegmentRow, error) bool) { yield(ssp2.SegmentRow{}, errRead) }, want: errRead},
		"canceled":               {ctx: canceled, rows: feed([]ssp2.SegmentRow{good}), want: context.Canceled},
		"a NaN":                  {rows: feed([]ssp2.SegmentRow{row(t, table, 1, text("b"), float(math.NaN()), number(1))}), want: image.ErrUnsupported},
		"too large":              {max: 16 << 10, rows: feed([]ssp2.SegmentRow{row(t, table, 1, text(strings.Repeat("b", 20<<10)), null(), number(1))}), want: image.ErrTooLarge},
		"the same key twice":     {rows: feed([]ssp2.SegmentRow{good, good})},
		"a row cut short":        {rows: feed([]ssp2.SegmentRow{cut})},
		"a row too long":         {rows: feed([]ssp2.SegmentRow{{ServerVersion: 1, Row: append(slices.Clone(good.Row), 0)}})},
		"no server version":      {rows: feed([]ssp2.SegmentRow{{Row: good.Row}})},
		"NULL where none may be": {rows: feed([]ssp2.SegmentRow{{ServerVersion: 1, Row: []byte{0b111}}})},
	} {
		ctx := tc.ctx
		if ctx == nil {
			ctx = t.Context()
		}
		s := spec(t, table)
		s.MaxBytes = tc.max
		f, err := image.Build(ctx, s, tc.rows)
		require.Error(t, err, name)
		require.Nil(t, f, name)
		if tc.want != nil {
			require.ErrorIs(t, err, tc.want, name)
		}
		require.Zero(t, leftovers(t, s.Dir), name)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	t.Parallel()
	table := tableOf(t, "items", column("id", "string", false))
	s := spec(t, table)
	f, err := image.Build(t.Context(), s, feed(nil))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Zero(t, leftovers(t, s.Dir))
	s.Dir += "/missing"
	_, err = image.Build(t.Context(), s, feed(nil))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// FuzzBuild feeds bytes that may be no row: an image is made exactly of what the row
// codec takes, but for a NaN and for text, which was checked when it was written.
func FuzzBuild(f *testing.F) {
	table := tableOf(f, "items", column("id", "integer", false), column("f", "float", true),
		column("b", "boolean", true), column("y", "bytes", true), column("c", "crdt", true))
	r := row(f, table, 1, number(7), float(1.5), number(1), text("abc"), null())
	f.Add(r.Row)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		vals, decodeErr := ssp2.DecodeRow(table.Wire, b, nil)
		img, err := image.Build(t.Context(), image.Spec{Table: table, Dir: t.TempDir()},
			feed([]ssp2.SegmentRow{{ServerVersion: 1, Row: b}}))
		if decodeErr == nil && !math.IsNaN(vals[1].Float) {
			require.NoError(t, err)
			require.NoError(t, img.Close())
			return
		}
		require.Error(t, err)
	})
}

func leftovers(tb testing.TB, dir string) int {
	tb.Helper()
	files, err := os.ReadDir(dir)
	require.NoError(tb, err)
	return len(files)
}
