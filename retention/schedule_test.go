package retention_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
)

// told hands events on to a test.
type told chan events.Pruned

func (c told) Emit(_ context.Context, e events.Event) {
	if p, ok := e.(events.Pruned); ok {
		c <- p
	}
}

// TestSchedule: it prunes at the start and with every tick, until it is stopped.
func TestSchedule(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.append(t, "p", 20, 0)
	sink, ticks := make(told), make(chan time.Time)
	s := b.service(t, retention.Config{Policy: few, Events: sink})
	s.SetTicks(ticks)
	require.NoError(t, s.Stop(t.Context()), "before the start")
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, s.Start(ctx))
	require.NoError(t, s.Start(ctx), "twice")
	cancel() // ends the starting only
	require.Equal(t, events.Pruned{Partition: "p", Horizon: 10, RemovedCommits: 10}, <-sink)
	b.append(t, "p", 5, 0)
	ticks <- start
	require.Equal(t, events.Pruned{Partition: "p", PreviousHorizon: 10, Horizon: 15, RemovedCommits: 5}, <-sink)
	require.NoError(t, s.Stop(t.Context()))
	require.NoError(t, s.Stop(t.Context()), "twice")

	b.append(t, "p", 5, 0)
	require.NoError(t, s.Start(t.Context()), "again")
	require.Equal(t, int64(20), (<-sink).Horizon)
	require.NoError(t, s.Stop(t.Context()))

	never := b.service(t, retention.Config{Policy: few, Interval: -1})
	require.NoError(t, never.Start(t.Context()))
	require.NoError(t, never.Stop(t.Context()))
}

// TestStopInTheMiddleOfABatch: it does not wait for a lock that does not come. The session
// that does is ended, and then nothing of the batch is done.
func TestStopInTheMiddleOfABatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.append(t, "p", 20, 0)
	tx, err := b.connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select 1 from syncpg.sync_partitions where partition = 'p' for update`)
	require.NoError(t, err)
	s := b.service(t, retention.Config{Policy: few})
	require.NoError(t, s.Start(t.Context()))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	require.NoError(t, s.Stop(t.Context()))
	require.NoError(t, pgtest.WaitFor(t.Context(), b.db.Pool,
		`select not exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, b.left(t, "p").Horizon)
}

// TestOneProcessPrunesAtATime: the schedule of another process leaves it to the one that
// is at it. Who prunes by hand does not ask.
func TestOneProcessPrunesAtATime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"p", "q"} {
		b.open(t, p)
		b.append(t, p, 20, 0)
	}
	tx, err := b.connect(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select 1 from syncpg.sync_partitions where partition = 'p' for update`)
	require.NoError(t, err)
	first, second := make(told, 2), make(told, 2)
	one := b.service(t, retention.Config{Policy: few, Events: first})
	require.NoError(t, one.Start(t.Context()))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1)) // it is in its first batch

	two, ticks := b.service(t, retention.Config{Policy: few, Events: second}), make(chan time.Time)
	two.SetTicks(ticks)
	require.NoError(t, two.Start(t.Context()))
	ticks <- start // its first pass is over
	require.NoError(t, two.Stop(t.Context()))
	require.Empty(t, second)
	require.Zero(t, b.left(t, "q").Horizon)

	_, err = b.service(t, retention.Config{Policy: few}).Prune(t.Context(), "q", nil)
	require.NoError(t, err)
	require.Equal(t, int64(10), b.left(t, "q").Horizon)

	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, events.Pruned{Partition: "p", Horizon: 10, RemovedCommits: 10}, <-first)
	require.NoError(t, one.Stop(t.Context()))
}
