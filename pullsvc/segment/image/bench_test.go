package image_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"

	"github.com/syncpg/syncpg/pullsvc/segment/image"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// BenchmarkBuild makes images of rows of about 100 bytes and compares with what an
// SQL engine in Go takes for the same file (×engine, below 1 is faster): prepared
// insert, one transaction, no journal.
func BenchmarkBuild(b *testing.B) {
	for _, tc := range []struct {
		key   string
		order string
		n     int
	}{
		{"string", "sorted", 100_000},
		{"string", "random", 100_000},
		{"integer", "random", 100_000},
		{"string", "sorted", 1_000_000},
		{"string", "random", 1_000_000},
	} {
		b.Run(fmt.Sprintf("%s keys, %s, %d rows", tc.key, tc.order, tc.n), func(b *testing.B) {
			table, rows := benchRows(b, tc.key, tc.n)
			if tc.order == "random" {
				rand.New(rand.NewPCG(1, 2)).Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
			}
			s := spec(b, table)
			var ours, engine time.Duration
			var size int64
			for b.Loop() {
				start := time.Now()
				f, err := image.Build(b.Context(), s, feed(rows))
				require.NoError(b, err)
				ours += time.Since(start)
				size = f.Size()
				require.NoError(b, f.Close())
				if tc.n > 100_000 && tc.order == "random" {
					continue // the engine takes half a minute
				}
				start = time.Now()
				insert(b, table, rows)
				engine += time.Since(start)
			}
			if engine > 0 {
				b.ReportMetric(float64(ours)/float64(engine), "×engine")
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(ours.Microseconds())/1e3/float64(b.N), "ms/image")
			b.ReportMetric(float64(size)/1e6, "MB/image")
		})
	}
}

func benchRows(b *testing.B, key string, n int) (*schema.Table, []ssp2.SegmentRow) {
	b.Helper()
	table := tableOf(b, "items", column("id", key, false), column("project", "string", false), column("title", "string", true),
		column("rank", "integer", false), column("done", "boolean", false))
	title := strings.Repeat("t", 40)
	rows := make([]ssp2.SegmentRow, n)
	for i := range rows {
		id := number(int64(i))
		if key == "string" {
			id = text(fmt.Sprintf("%08x-1111-4222-8333-444444444444", i))
		}
		rows[i] = row(b, table, int64(i%50+1), id, text("p1"), text(title), number(int64(i*7)), number(1))
	}
	return table, rows
}

// insert makes the table with an SQL engine.
func insert(b *testing.B, t *schema.Table, rows []ssp2.SegmentRow) {
	b.Helper()
	c, err := sqlite.OpenConn(filepath.Join(b.TempDir(), "engine.db"), sqlite.OpenReadWrite|sqlite.OpenCreate)
	require.NoError(b, err)
	defer func() { require.NoError(b, c.Close()) }()
	typ := "TEXT"
	if t.Columns[0].Type == ssp2.TypeInteger {
		typ = "INTEGER"
	}
	for _, sql := range []string{
		"pragma journal_mode = off", "pragma synchronous = off", "pragma locking_mode = exclusive",
		"create table items (id " + typ + " not null primary key, project text not null, title text, rank integer not null, " +
			"done integer not null, _syncular_version integer not null)",
	} {
		require.NoError(b, sqlitex.ExecuteTransient(c, sql, nil))
	}
	end, err := sqlitex.ExclusiveTransaction(c)
	require.NoError(b, err)
	stmt, err := c.Prepare("insert into items values (?, ?, ?, ?, ?, ?)")
	require.NoError(b, err)
	var vals []ssp2.Value
	for _, r := range rows {
		vals, err = ssp2.DecodeRow(t.Wire, r.Row, vals)
		require.NoError(b, err)
		for i := range vals {
			if len(vals[i].Bytes) > 0 {
				stmt.BindText(i+1, string(vals[i].Bytes))
			} else {
				stmt.BindInt64(i+1, vals[i].Int)
			}
		}
		stmt.BindInt64(6, r.ServerVersion)
		_, err = stmt.Step()
		require.NoError(b, err)
		require.NoError(b, stmt.Reset())
	}
	end(&err)
	require.NoError(b, err)
}
