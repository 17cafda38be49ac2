package ssp2_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/ssp2"
)

// drawnValue is a value of a column.
func drawnValue(rt *rapid.T, col ssp2.Column) ssp2.Value {
	if col.Nullable && rapid.Bool().Draw(rt, "null") {
		return ssp2.Value{Null: true}
	}
	switch col.Type {
	case ssp2.TypeInteger:
		return ssp2.Value{Int: rapid.Int64Range(-1<<53+1, 1<<53-1).Draw(rt, "int")}
	case ssp2.TypeFloat:
		return ssp2.Value{Float: rapid.Float64().Draw(rt, "float")}
	case ssp2.TypeBoolean:
		return ssp2.Value{Int: rapid.Int64Range(0, 1).Draw(rt, "bool")}
	case ssp2.TypeString:
		return ssp2.Value{Bytes: []byte(rapid.String().Draw(rt, "text"))}
	default:
		return ssp2.Value{Bytes: rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(rt, "bytes")}
	}
}

// drawnColumns are up to 20 columns, so that bitmaps have up to three bytes.
func drawnColumns(rt *rapid.T) []ssp2.Column {
	types := []ssp2.ColumnType{ssp2.TypeString, ssp2.TypeInteger, ssp2.TypeFloat, ssp2.TypeBoolean, ssp2.TypeBytes}
	cols := make([]ssp2.Column, rapid.IntRange(1, 20).Draw(rt, "columns"))
	for i := range cols {
		cols[i] = ssp2.Column{
			Name: string(rune('a' + i)), Type: rapid.SampledFrom(types).Draw(rt, "type"),
			Nullable: i > 0 && rapid.Bool().Draw(rt, "nullable"),
		}
	}
	return cols
}

// TestProjectionKeepsEverySharedCell: a row of a newer layout as an older one has it, and
// back, is the row that decoding and encoding by name gives; what the older one lacks is
// NULL on the way back.
func TestProjectionKeepsEverySharedCell(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		newer := drawnColumns(rt)
		var kept []ssp2.Column // the key and some others
		for i, c := range newer {
			if !c.Nullable || i == 0 || rapid.Bool().Draw(rt, "kept") {
				kept = append(kept, c)
			}
		}
		older := rapid.Permutation(kept).Draw(rt, "order")
		down, err := ssp2.NewProjection(newer, older)
		require.NoError(rt, err)
		up, err := ssp2.NewProjection(older, newer)
		require.NoError(rt, err)
		require.Equal(rt, slices.Equal(newer, older), down.Identical())

		values := make([]ssp2.Value, len(newer))
		for i, c := range newer {
			values[i] = drawnValue(rt, c)
		}
		row, err := ssp2.AppendRow(nil, newer, values)
		require.NoError(rt, err)
		by := func(name string) ssp2.Value {
			return values[slices.IndexFunc(newer, func(c ssp2.Column) bool { return c.Name == name })]
		}
		want := make([]ssp2.Value, len(older))
		for i, c := range older {
			want[i] = by(c.Name)
		}
		wantRow, err := ssp2.AppendRow(nil, older, want)
		require.NoError(rt, err)
		got, err := down.AppendRow([]byte("head"), row)
		require.NoError(rt, err)
		require.Equal(rt, append([]byte("head"), wantRow...), got)

		back := make([]ssp2.Value, len(newer))
		known := ssp2.NewBitmap(len(newer))
		for i, c := range newer {
			back[i] = ssp2.Value{Null: true}
			if slices.ContainsFunc(older, func(o ssp2.Column) bool { return o.Name == c.Name }) {
				back[i] = values[i]
				known.Set(i)
			}
			require.Equal(rt, known.Has(i), up.Has(i))
		}
		wantBack, err := ssp2.AppendRow(nil, newer, back)
		require.NoError(rt, err)
		gotBack, err := up.AppendRow(nil, wantRow)
		require.NoError(rt, err)
		require.Equal(rt, wantBack, gotBack)

		vals, present := up.Values(nil, want, nil)
		require.Equal(rt, back, vals)
		if known.Count() == len(newer) {
			require.Nil(rt, present)
		} else {
			require.Equal(rt, known, present)
		}

		// A sparse row says nothing of what it leaves out, and a set of columns keeps its names.
		some := ssp2.NewBitmap(len(older))
		for i := range older {
			if rapid.Bool().Draw(rt, "present") {
				some.Set(i)
			}
		}
		_, present = up.Values(nil, want, some)
		columns := up.Columns(some)
		for i, c := range newer {
			j := slices.IndexFunc(older, func(o ssp2.Column) bool { return o.Name == c.Name })
			is := j >= 0 && some.Has(j)
			require.Equal(rt, is, columns.Has(i))
			require.Equal(rt, is, present == nil || present.Has(i))
		}

		// What is no row of the layout is refused, and leaves the buffer alone.
		broken := row[:rapid.IntRange(0, len(row)-1).Draw(rt, "cut")]
		out, err := down.AppendRow([]byte("head"), broken)
		require.Error(rt, err)
		require.Equal(rt, "head", string(out))
		require.Empty(rt, ssp2.CodeOf(err), "no client's fault")
		_, err = down.AppendRow(nil, append(slices.Clone(row), 0))
		require.Error(rt, err)
	})
}

// TestProjectionTakesAnyBytes: it does not panic.
func TestProjectionTakesAnyBytes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		cols := drawnColumns(rt)
		p, err := ssp2.NewProjection(cols, cols[:1])
		require.NoError(rt, err)
		_, _ = p.AppendRow(nil, rapid.SliceOf(rapid.Byte()).Draw(rt, "row"))
	})
}

//nolint:paralleltest // counts what the process allocates
func TestProjectionAllocatesNothing(t *testing.T) {
	cols := []ssp2.Column{{Name: "id", Type: ssp2.TypeString}, {Name: "n", Type: ssp2.TypeInteger}, {Name: "x", Type: ssp2.TypeFloat, Nullable: true}}
	p, err := ssp2.NewProjection(cols, cols[:2])
	require.NoError(t, err)
	row, err := ssp2.AppendRow(nil, cols, []ssp2.Value{{Bytes: []byte("a")}, {Int: 1}, {Null: true}})
	require.NoError(t, err)
	buf := make([]byte, 0, 64)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = p.AppendRow(buf, row) }))
}

func TestProjectionsThatLoseNull(t *testing.T) {
	t.Parallel()
	a := func(nullable bool, ct ssp2.ColumnType) []ssp2.Column {
		return []ssp2.Column{{Name: "a", Type: ct, Nullable: nullable}}
	}
	_, err := ssp2.NewProjection(a(true, ssp2.TypeString), a(false, ssp2.TypeString))
	require.ErrorContains(t, err, "nullable here and not there")
	_, err = ssp2.NewProjection(a(false, ssp2.TypeString), a(false, ssp2.TypeInteger))
	require.ErrorContains(t, err, "its type is string here and integer there")
	_, err = ssp2.NewProjection(nil, a(false, ssp2.TypeString))
	require.ErrorContains(t, err, "no value for it")
	p, err := ssp2.NewProjection(a(false, ssp2.TypeString), a(true, ssp2.TypeString))
	require.NoError(t, err)
	require.False(t, p.Identical())
}
