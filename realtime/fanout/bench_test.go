package fanout_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

const benchIR = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [{
    "name": "items", "primaryKey": "id",
    "columns": [{"name": "id", "type": "string", "nullable": false}, {"name": "team", "type": "string", "nullable": false}],
    "scopes": [{"pattern": "team:{team}", "column": "team"}]
  }]
}`

// arrivals is a sink that notes when a commit came.
type arrivals struct {
	fanout.Sink
	came chan time.Time
}

func (a *arrivals) Commits(_ string, _ int64, commits []fanout.Commit) {
	for range commits {
		a.came <- time.Now()
	}
}

// BenchmarkPushToDelta measures when a commit reaches the sink of the process that took
// the push and of another one, from the beginning of the push, as multiples of the time
// the push itself takes. Medians.
func BenchmarkPushToDelta(b *testing.B) {
	s, err := schema.Parse([]byte(benchIR))
	require.NoError(b, err)
	db := pgtest.New(b, pgtest.Options{MaxConns: 8, Setup: func(ctx context.Context, conn *pgx.Conn) error {
		return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
	}})
	start := func(pool *pgxpool.Pool) (*fanout.Fanout, *arrivals) {
		sink := &arrivals{came: make(chan time.Time, 1)}
		f, err := fanout.New(pool, fanout.Config{Sink: sink, Listen: fanout.FromPool(pool)})
		require.NoError(b, err)
		require.NoError(b, f.Start(b.Context()))
		b.Cleanup(func() { require.NoError(b, f.Stop(context.Background())) })
		_, err = f.Watch(b.Context(), "p1")
		require.NoError(b, err)
		return f, sink
	}
	near, nearSink := start(db.Pool)
	_, farSink := start(db.Pool)
	(&bundle{db: db}).listening(b, 2)
	push, err := pushsvc.New(db.Pool, pushsvc.Config{Schema: s, Committed: near.Committed})
	require.NoError(b, err)
	b.Cleanup(push.Wait)
	table, _ := s.Table("items")
	var answer, local, remote []time.Duration
	n := 0
	for b.Loop() {
		n++
		id := fmt.Sprint("i", n)
		row, err := ssp2.AppendRow(nil, table.Wire, []ssp2.Value{{Bytes: []byte(id)}, {Bytes: []byte("red")}})
		require.NoError(b, err)
		began := time.Now()
		_, err = push.Push(b.Context(), pushsvc.Request{
			Partition: "p1", Actor: "ada", ClientID: "c1", WireVersion: ssp2.WireV1,
			Scopes:  scope.Resolution{Grants: scope.Compile(scope.Allowed{"team": {"*"}})},
			Commits: []ssp2.PushCommit{{ClientCommitID: id, Operations: []ssp2.Operation{{Table: "items", RowID: id, Op: ssp2.OpUpsert, Payload: row}}}},
		})
		answer = append(answer, time.Since(began))
		require.NoError(b, err)
		local = append(local, (<-nearSink.came).Sub(began))
		remote = append(remote, (<-farSink.came).Sub(began))
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2])
	}
	b.ReportMetric(median(answer)/1e6, "ms/push")
	b.ReportMetric(median(local)/median(answer), "x_push_local")
	b.ReportMetric(median(remote)/median(answer), "x_push_remote")
}
