package ssp2_test

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

var textColumn = []ssp2.Column{{Name: "v", Type: ssp2.TypeString}}

// writeSegment writes rows of a size each with the writer.
func writeSegment(t *testing.T, sizes ...int) *ssp2.Segment {
	t.Helper()
	buf, w, err := ssp2.BeginSegment(nil, &ssp2.SegmentHeader{Table: "t", SchemaVersion: 2, Columns: textColumn})
	require.NoError(t, err)
	require.False(t, w.InBlock())
	for i, size := range sizes {
		row := mustRow(textColumn, []ssp2.Value{{Bytes: bytes.Repeat([]byte("x"), size)}})
		buf, err = w.AppendRow(buf, int64(i+1), row)
		require.NoError(t, err)
	}
	require.EqualValues(t, len(sizes), w.Rows())
	buf = w.End(buf)
	require.False(t, w.InBlock())
	s, err := ssp2.DecodeSegment(buf)
	require.NoError(t, err)
	require.Equal(t, buf, mustSegment(s))
	return s
}

func blockSizes(s *ssp2.Segment) []int {
	var sizes []int
	for _, block := range s.Blocks {
		sizes = append(sizes, len(block))
	}
	return sizes
}

func TestSegmentWriterBlocks(t *testing.T) {
	t.Parallel()

	repeat := func(n, size int) []int {
		sizes := make([]int, n)
		for i := range sizes {
			sizes[i] = size
		}
		return sizes
	}
	const overhead = 8 + 1 + 4 // server version, bitmap, length
	for rule, c := range map[string]struct {
		rows   []int
		blocks []int
	}{
		"no rows":                         {nil, nil},
		"one row":                         {[]int{5}, []int{1}},
		"1000 rows fill a block":          {repeat(1000, 1), []int{1000}},
		"the 1001st opens another":        {repeat(1001, 1), []int{1000, 1}},
		"many blocks":                     {repeat(2500, 1), []int{1000, 1000, 500}},
		"bytes fill a block":              {repeat(5, ssp2.SegmentBlockBytes/2-overhead), []int{2, 2, 1}},
		"a row that does not fit follows": {[]int{10, ssp2.SegmentBlockBytes - overhead, 10}, []int{1, 1, 1}},
		"a row above the target is alone": {[]int{10, 2 * ssp2.SegmentBlockBytes, 10}, []int{1, 1, 1}},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.blocks, blockSizes(writeSegment(t, c.rows...)))
		})
	}
}

// TestSegmentWriterStreams empties the buffer between blocks, as a server does.
func TestSegmentWriterStreams(t *testing.T) {
	t.Parallel()

	var out bytes.Buffer
	row := mustRow(textColumn, []ssp2.Value{text("value")})
	buf, w, err := ssp2.BeginSegment(nil, &ssp2.SegmentHeader{Table: "t", SchemaVersion: 2, Columns: textColumn})
	require.NoError(t, err)
	flush := func() {
		out.Write(buf)
		buf = buf[:0]
	}
	flush()
	for range 2345 {
		buf, err = w.AppendRow(buf, 1, row)
		require.NoError(t, err)
		if !w.InBlock() {
			flush()
		}
	}
	buf = w.End(buf)
	flush()
	s, err := readSegment(out.Bytes())
	require.NoError(t, err)
	require.Equal(t, []int{1000, 1000, 345}, blockSizes(s))
}

func TestSegmentWriterEndBlock(t *testing.T) {
	t.Parallel()

	row := mustRow(textColumn, []ssp2.Value{text("value")})
	buf, w, err := ssp2.BeginSegment(nil, &ssp2.SegmentHeader{Table: "t", SchemaVersion: 2, Columns: textColumn})
	require.NoError(t, err)
	for range 3 {
		buf, err = w.AppendRow(buf, 1, row)
		require.NoError(t, err)
		buf = w.EndBlock(w.EndBlock(buf))
	}
	s, err := ssp2.DecodeSegment(w.End(buf))
	require.NoError(t, err)
	require.Equal(t, []int{1, 1, 1}, blockSizes(s))
}

func TestSegmentEncodersRefuse(t *testing.T) {
	t.Parallel()

	row := mustRow(textColumn, []ssp2.Value{text("v")})
	segment := func(rows ...ssp2.SegmentRow) *ssp2.Segment {
		return &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{Columns: textColumn}, Blocks: [][]ssp2.SegmentRow{rows}}
	}
	header := func(h ssp2.SegmentHeader) *ssp2.Segment { return &ssp2.Segment{SegmentHeader: h} }
	for rule, s := range map[string]*ssp2.Segment{
		"table not UTF-8":            header(ssp2.SegmentHeader{Table: "\xff"}),
		"column name not UTF-8":      header(ssp2.SegmentHeader{Columns: []ssp2.Column{{Name: "\xff", Type: ssp2.TypeString}}}),
		"column type 0":              header(ssp2.SegmentHeader{Columns: []ssp2.Column{{Name: "c"}}}),
		"65536 columns":              header(ssp2.SegmentHeader{Columns: make([]ssp2.Column, 65536)}),
		"empty block":                segment(),
		"serverVersion 0":            segment(ssp2.SegmentRow{Row: row}),
		"serverVersion above 2^53−1": segment(ssp2.SegmentRow{ServerVersion: 1 << 53, Row: row}),
		"row truncated":              segment(ssp2.SegmentRow{ServerVersion: 1, Row: row[:2]}),
		"row with bytes left over":   segment(ssp2.SegmentRow{ServerVersion: 1, Row: append(row, 0)}),
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			dst, err := ssp2.AppendSegment([]byte("kept"), s)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, "kept", string(dst))
		})
	}
	var w ssp2.SegmentWriter
	for _, version := range []int64{0, -1, 1 << 53} {
		dst, err := w.AppendRow([]byte("kept"), version, row)
		require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
		require.Equal(t, "kept", string(dst))
	}
}

func TestSegmentReaderRepeatsItsError(t *testing.T) {
	t.Parallel()

	bin := mustSegment(specimenSegment())
	r := ssp2.NewSegmentReader(bytes.NewReader(bin), ssp2.Limits{})
	for range 2 {
		_, err := r.NextBlock()
		require.NoError(t, err)
	}
	for range 2 {
		_, err := r.NextBlock()
		require.ErrorIs(t, err, io.EOF)
	}
	h, err := r.Header()
	require.NoError(t, err)
	require.Equal(t, "specimens", h.Table)

	broken := ssp2.NewSegmentReader(bytes.NewReader(bin[:9]), ssp2.Limits{})
	_, err = broken.NextBlock()
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	_, again := broken.Header()
	require.Equal(t, err, again)
}

func TestSegmentReaderLimits(t *testing.T) {
	t.Parallel()

	bin := mustSegment(writeSegment(t, 2000, 3000))
	for rule, c := range map[string]struct {
		limits ssp2.Limits
		what   string
	}{
		"block":   {ssp2.Limits{MaxFrameBytes: 4999}, "block"},
		"segment": {ssp2.Limits{MaxMessageBytes: int64(len(bin)) - 1}, "segment"},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			r := ssp2.NewSegmentReader(bytes.NewReader(bin), c.limits)
			var err error
			for err == nil {
				_, err = r.NextBlock()
			}
			var limit *ssp2.LimitError
			require.ErrorAs(t, err, &limit)
			require.Equal(t, c.what, limit.What)
		})
	}
}
