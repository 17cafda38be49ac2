package ssp2_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// publishedDir holds the published vectors of the protocol, which are not part of this
// repository, in a directory for each kind. `make test/vectors` checks them; our own are
// checked by TestVectors.
var publishedDir = os.Getenv("SYNCPG_VECTORS")

// seed adds the committed vectors of some kinds to a fuzz target, and the published ones when
// the environment names them.
func seed(f *testing.F, ext string, kinds ...string) {
	f.Helper()
	paths := committedVectors(f)
	for _, kind := range kinds {
		if publishedDir == "" {
			break
		}
		for _, pattern := range []string{"*", "invalid/*"} {
			found, err := filepath.Glob(filepath.Join(publishedDir, kind, pattern+ext))
			require.NoError(f, err)
			paths = append(paths, found...)
		}
	}
	for _, path := range paths {
		for _, kind := range kinds {
			if !strings.HasSuffix(path, ext) || !strings.Contains(path, string(filepath.Separator)+kind+string(filepath.Separator)) {
				continue
			}
			b, err := os.ReadFile(path)
			require.NoError(f, err)
			f.Add(b)
		}
	}
}

// FuzzMessage decodes messages every way there is; what decodes encodes to the
// same bytes.
func FuzzMessage(f *testing.F) {
	seed(f, ".bin", "request", "response", "v3")
	f.Fuzz(func(t *testing.T, b []byte) {
		requireCanonical(t, b)
	})
}

// fuzzColumns has a column of every type, nullable and not.
func fuzzColumns() []ssp2.Column {
	var cols []ssp2.Column
	for tag := ssp2.TypeString; tag <= ssp2.TypeCRDT; tag++ {
		cols = append(cols,
			ssp2.Column{Name: tag.String(), Type: tag},
			ssp2.Column{Name: tag.String() + "?", Type: tag, Nullable: true})
	}
	return cols
}

// FuzzRow decodes a row of the columns that a mask picks; what decodes encodes to
// the same bytes.
func FuzzRow(f *testing.F) {
	all := fuzzColumns()
	pick := func(mask uint16) []ssp2.Column {
		var cols []ssp2.Column
		for i := range all {
			if mask>>i&1 == 1 {
				cols = append(cols, all[i])
			}
		}
		return cols
	}
	sample := map[ssp2.ColumnType]ssp2.Value{
		ssp2.TypeString: text("é𝄞"), ssp2.TypeInteger: integer(-ssp2.MaxSafeInteger), ssp2.TypeFloat: float(0.5),
		ssp2.TypeBoolean: integer(1), ssp2.TypeJSON: text(`{"a":["\u0000",1e-5]}`), ssp2.TypeBytes: raw(0, 255),
		ssp2.TypeBlobRef: text(blobRefText), ssp2.TypeCRDT: raw(),
	}
	for _, mask := range []uint16{0, 0x5555, 0xAAAA, 0xFFFF, 0x0203} {
		cols := pick(mask)
		full, bare := make([]ssp2.Value, len(cols)), make([]ssp2.Value, len(cols))
		for i := range cols {
			full[i], bare[i] = sample[cols[i].Type], sample[cols[i].Type]
			bare[i].Null = cols[i].Nullable
		}
		f.Add(mask, mustRow(cols, full))
		f.Add(mask, mustRow(cols, bare))
	}
	f.Fuzz(func(t *testing.T, mask uint16, src []byte) {
		cols := pick(mask)
		vals, err := ssp2.DecodeRow(cols, src, nil)
		n, scanErr := ssp2.ScanRow(cols, src)
		if err != nil {
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
			require.True(t, scanErr != nil || n != len(src))
			return
		}
		require.NoError(t, scanErr)
		require.Equal(t, len(src), n)
		again, err := ssp2.AppendRow(nil, cols, vals)
		require.NoError(t, err)
		require.True(t, bytes.Equal(src, again))
	})
}

// FuzzSparseRow decodes sparse rows of the specimen columns, whichever column is
// the key.
func FuzzSparseRow(f *testing.F) {
	seed(f, ".bin", "v3")
	f.Fuzz(func(t *testing.T, src []byte) {
		for key := range specimenColumns {
			vals, present, err := ssp2.DecodeSparseRow(specimenColumns, key, src, nil)
			if err != nil {
				require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
				continue
			}
			again, err := ssp2.AppendSparseRow(nil, specimenColumns, key, present, vals)
			require.NoError(t, err)
			require.Equal(t, src, again)
		}
	})
}

// FuzzSegment decodes segments whole and as a stream; what decodes encodes to the
// same bytes.
func FuzzSegment(f *testing.F) {
	seed(f, ".bin", "segment")
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ssp2.DecodeSegment(b)
		streamed, streamErr := readSegment(b)
		require.Equal(t, ssp2.CodeOf(err), ssp2.CodeOf(streamErr))
		require.Equal(t, err == nil, ssp2.CheckSegment(b) == nil)
		if err != nil {
			return
		}
		for _, decoded := range []*ssp2.Segment{s, streamed} {
			again, err := ssp2.AppendSegment(nil, decoded)
			require.NoError(t, err)
			require.Equal(t, b, again)
		}
		rendered, err := ssp2.Render(b)
		require.NoError(t, err)
		require.True(t, ssp2.ValidJSON(rendered))
	})
}

// FuzzControlEvent parses control events of both directions; what parses is
// written and parsed again to the same event.
func FuzzControlEvent(f *testing.F) {
	seed(f, ".json", "realtime")
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, parse := range []func([]byte) (ssp2.ControlEvent, error){ssp2.ParseServerEvent, ssp2.ParseClientEvent} {
			ev, err := parse(text)
			if err != nil {
				require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
				continue
			}
			written, err := ssp2.AppendControl(nil, ev)
			require.NoError(t, err)
			again, err := parse(written)
			require.NoError(t, err)
			require.Equal(t, ev, again)
		}
	})
}
