package ssp2_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// BenchmarkDecodeRequest reads a request of 500 operations of about 150 bytes.
func BenchmarkDecodeRequest(b *testing.B) {
	row := mustRow(specimenColumns, edgeSpecimen())
	commit := &ssp2.PushCommit{ClientCommitID: "commit-1"}
	for i := range 500 {
		commit.Operations = append(commit.Operations, ssp2.Operation{
			Table: "specimens", RowID: fmt.Sprintf("specimen-%06d", i), Op: ssp2.OpUpsert, BaseVersion: new(int64(i)), Payload: row,
		})
	}
	bin := mustMessage(request(ssp2.WireV2, &ssp2.RequestHeader{ClientID: "c", SchemaVersion: 1, LogEpoch: new("e")}, commit))
	b.SetBytes(int64(len(bin)))
	b.ReportAllocs()
	for b.Loop() {
		_, err := ssp2.ReadRequest(bytes.NewReader(bin), ssp2.Limits{})
		require.NoError(b, err)
	}
}

// BenchmarkDecodeRow decodes a row with a column of every type.
func BenchmarkDecodeRow(b *testing.B) {
	row := mustRow(specimenColumns, fullSpecimen())
	vals := make([]ssp2.Value, 0, len(specimenColumns))
	b.SetBytes(int64(len(row)))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		vals, err = ssp2.DecodeRow(specimenColumns, row, vals)
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkDecodeSparseRow decodes a sparse row of four columns.
func BenchmarkDecodeSparseRow(b *testing.B) {
	row := sparseSpecimen()
	vals := make([]ssp2.Value, 0, len(specimenColumns))
	b.SetBytes(int64(len(row)))
	b.ReportAllocs()
	for b.Loop() {
		var err error
		vals, _, err = ssp2.DecodeSparseRow(specimenColumns, 0, row, vals)
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAppendCommit writes a COMMIT of 100 changes with the builder.
func BenchmarkAppendCommit(b *testing.B) {
	row := mustRow(specimenColumns, fullSpecimen())
	tables, scopes := []string{"specimens"}, []string{"dig=north", "museum=m-1"}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		dst, frame := ssp2.BeginCommitFrame(buf[:0], 4096, 1_700_000_000_000, "ada", tables)
		for range 100 {
			dst = frame.AppendChange(dst, 0, "specimen-000001", ssp2.OpUpsert, 7, scopes, row)
		}
		var err error
		if buf, err = frame.End(dst); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(int64(len(buf)))
}

// BenchmarkAppendSegment writes 1000 rows with the segment writer.
func BenchmarkAppendSegment(b *testing.B) {
	row := mustRow(specimenColumns, fullSpecimen())
	header := &ssp2.SegmentHeader{Table: "specimens", SchemaVersion: 4, Columns: specimenColumns}
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		dst, w, err := ssp2.BeginSegment(buf[:0], header)
		for range 1000 {
			if err != nil {
				b.Fatal(err)
			}
			dst, err = w.AppendRow(dst, 7, row)
		}
		buf = w.End(dst)
	}
	b.SetBytes(int64(len(buf)))
}
