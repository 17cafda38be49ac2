package pushsvc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// withCommitted notes what Config.Committed is told.
func withCommitted(told *[]string) func(*pgtest.Options, *pushsvc.Config) {
	return func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Committed = func(partition string, seq int64) { *told = append(*told, fmt.Sprint(partition, " ", seq)) }
	}
}

// TestCommittedIsToldBeforeTheAnswer: the slice is read without a lock, so that the race
// detector finds a call that comes later.
func TestCommittedIsToldBeforeTheAnswer(t *testing.T) {
	t.Parallel()
	var told []string
	b := setup(t, withCommitted(&told))
	c := b.client(t, ssp2.WireV2)
	name := c.req.Partition
	require.Empty(t, told, "nothing was pushed")

	three := []ssp2.PushCommit{
		c.commit(b.upsert(t, "notes", note("a", "x"))),
		c.commit(remove("no_such_table", "x")),
		c.commit(b.upsert(t, "notes", note("b", "x"))),
	}
	c.send(t, three...)
	require.Equal(t, []string{name + " 2"}, told, "a transaction is told once, with its newest seq")

	c.send(t, three...)
	require.Len(t, told, 1, "replays are not told")
	requireRejected(t, c.push(t, remove("no_such_table", "x")), 0, ssp2.CodeUnknownTable)
	require.Len(t, told, 1, "rejections are not told")

	c.send(t, three[0], c.commit(remove("notes", "a")))
	require.Equal(t, []string{name + " 2", name + " 3"}, told)
}

// TestCommittedIsToldWithoutALockOrAConnection: it can use the only connection, and finds
// the outcome durable and nothing locked.
func TestCommittedIsToldWithoutALockOrAConnection(t *testing.T) {
	t.Parallel()
	var b *bundle
	looked := errors.New("nobody was told")
	b = setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
		o.MaxConns = 1
		cfg.Committed = func(partition string, seq int64) {
			looked = b.db.Pool.QueryRow(context.WithoutCancel(t.Context()), `select 1 from syncpg.sync_partitions as p
				join syncpg.sync_push_results as r using (partition)
				where p.partition = $1 and p.max_commit_seq = $2 and r.commit_seq = $2 for update nowait`, partition, seq).Scan(new(int))
		}
	})
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "x")))
	require.NoError(t, looked)
}

// TestCommittedOfManyFlushes: a transaction that is written in pieces is one.
func TestCommittedOfManyFlushes(t *testing.T) {
	t.Parallel()
	var told []string
	b := setup(t, withCommitted(&told))
	b.PlanAtMost(1)
	c := b.client(t, ssp2.WireV2)
	requireApplied(t, c.send(t, c.commit(b.upsert(t, "notes", note("a", "x"))), c.commit(b.upsert(t, "notes", note("b", "x"))))...)
	require.Equal(t, []string{c.req.Partition + " 2"}, told)
}

func TestAPanicOfCommittedChangesNothing(t *testing.T) {
	t.Parallel()
	var logged bytes.Buffer
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Committed = func(string, int64) { panic("nobody listens") }
		cfg.Logger = slog.New(slog.NewTextHandler(&logged, nil))
	})
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "x")), remove("notes", "n"))
	b.Wait()
	require.Contains(t, logged.String(), "nobody listens")
	require.Zero(t, b.db.Pool.Stat().AcquiredConns())
}
