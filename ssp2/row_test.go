package ssp2_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func TestRowBytes(t *testing.T) {
	t.Parallel()

	cols := []ssp2.Column{
		{Name: "s", Type: ssp2.TypeString},
		{Name: "i", Type: ssp2.TypeInteger},
		{Name: "f", Type: ssp2.TypeFloat},
		{Name: "b", Type: ssp2.TypeBoolean},
		{Name: "j", Type: ssp2.TypeJSON},
		{Name: "y", Type: ssp2.TypeBytes},
		{Name: "n", Type: ssp2.TypeCRDT, Nullable: true},
		{Name: "c", Type: ssp2.TypeCRDT},
		{Name: "m", Type: ssp2.TypeString, Nullable: true},
	}
	vals := []ssp2.Value{
		text("é"), integer(-2), float(1.5), integer(1), text(" 1"), raw(0, 255), null(), raw(), null(),
	}
	want := payload{0b0100_0000, 0b1}.str("é").i64(-2).u8(0, 0, 0, 0, 0, 0, 0xF8, 0x3F).u8(1).str(" 1").bytes(0, 255).bytes()
	row := mustRow(cols, vals)
	require.Equal(t, []byte(want), row)

	got, err := ssp2.DecodeRow(cols, row, nil)
	require.NoError(t, err)
	require.Empty(t, diff(vals, got))

	n, err := ssp2.ScanRow(cols, append(row, "next"...))
	require.NoError(t, err)
	require.Equal(t, len(row), n)
}

func TestRowWithoutColumns(t *testing.T) {
	t.Parallel()

	require.Empty(t, mustRow(nil, nil))
	vals, err := ssp2.DecodeRow(nil, nil, nil)
	require.NoError(t, err)
	require.Empty(t, vals)
}

func TestRowKeepsFloatBits(t *testing.T) {
	t.Parallel()

	cols := []ssp2.Column{{Name: "f", Type: ssp2.TypeFloat}}
	for _, bits := range []uint64{0, 1 << 63, 0x7FF0000000000000, 0xFFF8000000000001, 0x7FF8DEADBEEF0001, 1} {
		row := payload{0}.i64(int64(bits))
		vals, err := ssp2.DecodeRow(cols, row, nil)
		require.NoError(t, err)
		require.Equal(t, bits, math.Float64bits(vals[0].Float))
		require.Equal(t, []byte(row), mustRow(cols, vals))
	}
}

func TestDecodeRowResetsItsBuffer(t *testing.T) {
	t.Parallel()

	dst := []ssp2.Value{integer(9), integer(9), integer(9)}
	vals, err := ssp2.DecodeRow([]ssp2.Column{{Type: ssp2.TypeString, Nullable: true}}, []byte{1}, dst)
	require.NoError(t, err)
	require.Equal(t, []ssp2.Value{{Null: true}}, vals)
	require.Same(t, &dst[0], &vals[0], "room is reused")
}

func TestRowValuesAliasTheInput(t *testing.T) {
	t.Parallel()

	row := mustRow([]ssp2.Column{{Type: ssp2.TypeString}}, []ssp2.Value{text("abc")})
	vals, err := ssp2.DecodeRow([]ssp2.Column{{Type: ssp2.TypeString}}, row, nil)
	require.NoError(t, err)
	require.Same(t, &row[5], &vals[0].Bytes[0])
	require.Equal(t, 3, cap(vals[0].Bytes), "appending cannot write into the row")
}

//nolint:paralleltest // counts what the process allocates
func TestRowCodecDoesNotAllocate(t *testing.T) {
	row := mustRow(specimenColumns, fullSpecimen())
	sparse := sparseSpecimen()
	vals := make([]ssp2.Value, 0, len(specimenColumns))
	buf := make([]byte, 0, 1024)
	for name, work := range map[string]func() error{
		"DecodeRow": func() error {
			_, err := ssp2.DecodeRow(specimenColumns, row, vals)
			return err
		},
		"ScanRow": func() error {
			_, err := ssp2.ScanRow(specimenColumns, row)
			return err
		},
		"DecodeSparseRow": func() error {
			_, _, err := ssp2.DecodeSparseRow(specimenColumns, 0, sparse, vals)
			return err
		},
		"AppendRow": func() error {
			decoded, err := ssp2.DecodeRow(specimenColumns, row, vals)
			if err != nil {
				return err
			}
			_, err = ssp2.AppendRow(buf, specimenColumns, decoded)
			return err
		},
	} {
		var err error
		require.Zero(t, testing.AllocsPerRun(100, func() { err = work() }), name)
		require.NoError(t, err, name)
	}
}

func TestAppendRowRefuses(t *testing.T) {
	t.Parallel()

	one := func(t ssp2.ColumnType) []ssp2.Column { return []ssp2.Column{{Name: "c", Type: t}} }
	for rule, c := range map[string]struct {
		cols []ssp2.Column
		vals []ssp2.Value
	}{
		"too few values":                        {one(ssp2.TypeString), nil},
		"too many values":                       {nil, []ssp2.Value{integer(1)}},
		"NULL in a column that is not nullable": {one(ssp2.TypeString), []ssp2.Value{null()}},
		"text not UTF-8":                        {one(ssp2.TypeString), []ssp2.Value{text("\xff")}},
		"integer above 2^53−1":                  {one(ssp2.TypeInteger), []ssp2.Value{integer(1 << 53)}},
		"integer below −(2^53−1)":               {one(ssp2.TypeInteger), []ssp2.Value{integer(math.MinInt64)}},
		"boolean 2":                             {one(ssp2.TypeBoolean), []ssp2.Value{integer(2)}},
		"boolean -1":                            {one(ssp2.TypeBoolean), []ssp2.Value{integer(-1)}},
		"json that is none":                     {one(ssp2.TypeJSON), []ssp2.Value{text("x")}},
		"json without text":                     {one(ssp2.TypeJSON), []ssp2.Value{{}}},
		"blob_ref that is none":                 {one(ssp2.TypeBlobRef), []ssp2.Value{text("{}")}},
		"unknown type":                          {one(0), []ssp2.Value{{}}},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendRow([]byte("kept"), c.cols, c.vals)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
}

func TestBitmap(t *testing.T) {
	t.Parallel()

	b := ssp2.NewBitmap(11)
	require.Len(t, b, 2)
	for _, i := range []int{0, 7, 8, 10} {
		b.Set(i)
		b.Set(i)
	}
	require.Equal(t, ssp2.Bitmap{0b1000_0001, 0b101}, b)
	require.Equal(t, 4, b.Count())
	require.True(t, b.Has(10))
	require.False(t, b.Has(9))
	require.False(t, b.Has(16), "beyond its end there is nothing")
	require.Empty(t, ssp2.NewBitmap(0))
}

func TestSparseRowBytes(t *testing.T) {
	t.Parallel()

	cols := []ssp2.Column{
		{Name: "a", Type: ssp2.TypeInteger, Nullable: true},
		{Name: "key", Type: ssp2.TypeString},
		{Name: "b", Type: ssp2.TypeString, Nullable: true},
	}
	vals := []ssp2.Value{integer(5), text("k"), null()}
	present := ssp2.Bitmap{0b110}
	row, err := ssp2.AppendSparseRow(nil, cols, 1, present, vals)
	require.NoError(t, err)
	require.Equal(t, []byte(payload{0b110, 0b10}.str("k")), row)

	got, has, err := ssp2.DecodeSparseRow(cols, 1, row, make([]ssp2.Value, 7))
	require.NoError(t, err)
	require.Equal(t, present, has)
	require.Empty(t, diff([]ssp2.Value{{}, text("k"), null()}, got), "an absent column has the zero value")
}

func TestAppendSparseRowRefuses(t *testing.T) {
	t.Parallel()

	cols := []ssp2.Column{{Name: "key", Type: ssp2.TypeString}, {Name: "n", Type: ssp2.TypeInteger}}
	good := []ssp2.Value{text("k"), integer(1)}
	for rule, c := range map[string]struct {
		key     int
		present ssp2.Bitmap
		vals    []ssp2.Value
	}{
		"too few values":                        {0, ssp2.Bitmap{1}, good[:1]},
		"no such key column":                    {2, ssp2.Bitmap{1}, good},
		"negative key column":                   {-1, ssp2.Bitmap{1}, good},
		"primary key absent":                    {0, ssp2.Bitmap{2}, good},
		"presence bitmap short":                 {0, nil, good},
		"presence bitmap long":                  {0, ssp2.Bitmap{1, 0}, good},
		"presence padding bit":                  {0, ssp2.Bitmap{5}, good},
		"NULL in a column that is not nullable": {0, ssp2.Bitmap{3}, []ssp2.Value{text("k"), null()}},
		"integer above 2^53−1":                  {0, ssp2.Bitmap{3}, []ssp2.Value{text("k"), integer(1 << 53)}},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendSparseRow([]byte("kept"), cols, c.key, c.present, c.vals)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
	_, _, err := ssp2.DecodeSparseRow(cols, 2, []byte{1, 0}, nil)
	require.Error(t, err, "no such key column")
}
