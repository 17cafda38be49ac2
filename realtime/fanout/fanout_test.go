package fanout_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/ssp2"
)

func TestCommittedReachesTheSinkOfItsProcess(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	b.commit(t, "p1", one("before"))
	require.EqualValues(t, 1, a.watch(t, "p1"))
	a.Committed("p1", b.commit(t, "p1", written{[]byte("x"), nil}, written{}))
	a.sink.reaches(t, "p1", 3)
	require.Equal(t, []call{{Kind: "commits", Partition: "p1", From: 1, Seq: 3, Commits: []fanout.Commit{
		{Seq: 2, CreatedAtMs: 1002, ActorID: "ada", Bytes: 1, Changes: []fanout.Change{
			{Table: "items", RowID: "r0", Op: ssp2.OpUpsert, RowVersion: 2, Scopes: []string{"team=red"}, Payload: []byte("x")},
			{Table: "items", RowID: "r1", Op: ssp2.OpDelete, Scopes: []string{"team=red"}},
		}},
		{Seq: 3, CreatedAtMs: 1003, ActorID: "ada"},
	}}}, a.sink.of("p1"))
}

func TestCommittedReachesOtherProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	require.EqualValues(t, 0, c.watch(t, "p1"))
	a.Committed("p1", b.commit(t, "p1", one("x")))
	c.sink.reaches(t, "p1", 1)
	a.Committed("p1", b.commit(t, "p1", one("y"), one("z")))
	c.sink.reaches(t, "p1", 3)
	require.EqualValues(t, 3, requireWhole(t, c.sink.of("p1"), 0, 3))
	require.Empty(t, a.sink.of("p1"), "nobody watches it there")
}

func TestAnEmptyNotificationMakesEverybodyLook(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t)
	b.listening(t, 1)
	a.watch(t, "p1")
	b.commit(t, "p1", one("by SQL"))
	b.exec(t, `notify syncpg`)
	a.sink.reaches(t, "p1", 1)
}

func TestTheListenerIsKilledInBetween(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	c.watch(t, "p1")
	a.Committed("p1", b.commit(t, "p1", one("1")))
	c.sink.reaches(t, "p1", 1)
	b.kill(t, 2)
	// Whether the notification finds a listener or not, the look after connecting finds the commit.
	a.Committed("p1", b.commit(t, "p1", one("2"), one("3")))
	c.sink.reaches(t, "p1", 3)
	b.listening(t, 2)
	a.Committed("p1", b.commit(t, "p1", one("4")))
	c.sink.reaches(t, "p1", 4)
	require.EqualValues(t, 4, requireWhole(t, c.sink.of("p1"), 0, 4), "nothing was lost")
}

func TestThePollFindsWhatNobodyToldOf(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	a.watch(t, "p1")
	a.watch(t, "p2")
	b.commit(t, "p1", one("by SQL"))
	b.commit(t, "p3", one("not watched"))
	require.Empty(t, a.sink.of("p1"))
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 1)
	require.Empty(t, a.sink.of("p2"))
	require.Empty(t, a.sink.of("p3"))
}

func TestWatchIsCounted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	b.commit(t, "p1", one("1"))
	require.EqualValues(t, 1, a.watch(t, "p1"))
	require.EqualValues(t, 1, a.watch(t, "p1"))
	a.Unwatch("p1")
	a.Committed("p1", b.commit(t, "p1", one("2")))
	a.sink.reaches(t, "p1", 2)
	require.EqualValues(t, 2, a.watch(t, "p1"))
	a.Unwatch("p1")
	a.Unwatch("p1")
	require.Zero(t, a.Watched())
	a.Unwatch("p1")
	a.Committed("p1", b.commit(t, "p1", one("3")))
	require.EqualValues(t, 3, a.watch(t, "p1"), "it begins anew")
	a.Committed("p1", b.commit(t, "p1", one("4")))
	a.sink.reaches(t, "p1", 4)
	calls := a.sink.of("p1")
	require.Len(t, calls, 2)
	require.EqualValues(t, 3, calls[1].From)
}

func TestAWatchThatFailsLeavesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	given, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := a.Watch(given, "p1")
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, a.Watched())
	require.EqualValues(t, 0, a.watch(t, "p1"), "the next one finds out by itself")
	a.Committed("p1", b.commit(t, "p1", one("x")))
	a.sink.reaches(t, "p1", 1)
}

// TestACommitWhileWatchLooksIsNotMissed holds the commit until Watch has its snapshot, and
// tells of it before Watch returns.
func TestACommitWhileWatchLooksIsNotMissed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	b.commit(t, "p1", one("1"))
	// The schema's row is read first and the partition's next; a lock on the table of
	// partitions stops Watch after it is known that it watches.
	lock, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), `lock table syncpg.sync_partition_registry in access exclusive mode`)
	require.NoError(t, err)
	watched := make(chan int64)
	go func() {
		seq, err := a.Watch(context.Background(), "p1")
		if err != nil {
			seq = -1
		}
		watched <- seq
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	// The statement has its snapshot; what is committed from here on is not in it.
	_, err = lock.Exec(t.Context(), `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count) values ('p1', 2, 'c', '2', 'ada', 0, 0)`)
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), `update syncpg.sync_partitions set max_commit_seq = 2`)
	require.NoError(t, err)
	a.Committed("p1", 2)
	require.NoError(t, lock.Commit(t.Context()))
	require.EqualValues(t, 1, <-watched)
	a.sink.reaches(t, "p1", 2)
	require.EqualValues(t, 1, requireWhole(t, a.sink.of("p1"), 1, 2))
}

func TestAPartitionThatIsWatchedAgainWhileItIsReadGoesOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.make(t, pollOnly)
	entered, leave := make(chan struct{}), make(chan struct{})
	a.sink.hold = func(c call) {
		if c.Partition == "p1" && c.Seq == 1 {
			close(entered)
			<-leave
		}
	}
	require.NoError(t, a.Start(t.Context()))
	t.Cleanup(func() { a.stop(t) })
	a.watch(t, "p1")
	a.Committed("p1", b.commit(t, "p1", one("1")))
	<-entered
	a.Unwatch("p1")
	start := a.watch(t, "p1")
	a.watch(t, "p2")
	a.Committed("p1", b.commit(t, "p1", one("2")))
	a.Committed("p2", b.commit(t, "p2", one("1")))
	// The other reader takes what comes, but not a partition that is being read.
	a.sink.reaches(t, "p2", 1)
	require.Empty(t, a.sink.of("p1"))
	close(leave)
	a.sink.reaches(t, "p1", 2)
	require.EqualValues(t, 1, start)
	require.EqualValues(t, 2, requireWhole(t, a.sink.of("p1"), 0, 2))
}

func TestWhatIsTooFarBehindIsLost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly, func(c *fanout.Config) { c.MaxBehind = 3 })
	a.watch(t, "p1")
	b.commit(t, "p1", one("1"), one("2"), one("3"), one("4"))
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 4)
	b.commit(t, "p1", one("5"), one("6"), one("7"))
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 7)
	calls := a.sink.of("p1")
	require.Equal(t, call{Kind: "lost", Partition: "p1", Seq: 4}, calls[0])
	require.EqualValues(t, 3, requireWhole(t, calls, 0, 7))
}

func TestWhatIsPrunedIsLost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var logged bytes.Buffer
	a := b.start(t, pollOnly, func(c *fanout.Config) { c.Logger = slog.New(slog.NewTextHandler(&logged, nil)) })
	a.watch(t, "p1")
	b.commit(t, "p1", one("1"), one("2"), one("3"))
	b.exec(t, `delete from syncpg.sync_commits where commit_seq <= 1`)
	b.exec(t, `update syncpg.sync_partitions set horizon_seq = 1`)
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 3)
	require.Equal(t, []call{{Kind: "lost", Partition: "p1", Seq: 3}}, a.sink.of("p1"))
	a.stop(t)
	require.Empty(t, logged.String(), "nothing is wrong with it")
}

func TestAGapIsNeverSkipped(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	a.watch(t, "p1")
	a.watch(t, "p2")
	b.commit(t, "p1", one("1"), one("2"), one("3"))
	b.commit(t, "p2", one("1"))
	b.exec(t, `delete from syncpg.sync_commits where commit_seq = 2 or partition = 'p2'`)
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 3)
	a.sink.reaches(t, "p2", 1)
	calls := a.sink.of("p1")
	require.Len(t, calls, 2)
	require.EqualValues(t, 1, calls[0].Seq)
	require.Equal(t, call{Kind: "lost", Partition: "p1", Seq: 3}, calls[1])
	require.Equal(t, []call{{Kind: "lost", Partition: "p2", Seq: 1}}, a.sink.of("p2"))
}

func TestAnotherLogIsAReset(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"epoch":             `update syncpg.sync_partition_registry set log_epoch = 'another'`,
		"schema version":    `insert into syncpg.sync_schema_meta (schema_version, layout, index_signatures, functions_digest, installed_at_ms) values (2, '', '{}', '', 0) on conflict (partition) do update set schema_version = 2`,
		"the log went back": `update syncpg.sync_partitions set max_commit_seq = 1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec(t, `insert into syncpg.sync_schema_meta (schema_version, layout, index_signatures, functions_digest, installed_at_ms) values (1, '', '{}', '', 0)`)
			b.commit(t, "p1", one("1"), one("2"))
			a := b.start(t, pollOnly)
			a.watch(t, "p1")
			b.exec(t, sql)
			tick(t, a.poll)
			a.sink.until(t, "the reset", func() bool { return len(a.sink.calls) > 0 })
			calls := a.sink.of("p1")
			require.Len(t, calls, 1)
			require.Equal(t, "reset", calls[0].Kind)
			tick(t, a.poll)
			tick(t, a.poll)
			require.Len(t, a.sink.of("p1"), 1, "once")
		})
	}
}

// TestCommitsOfAnotherSchemaVersionAreNotGiven: a process of an earlier version goes on
// watching, and could not read their rows.
func TestCommitsOfAnotherSchemaVersionAreNotGiven(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `insert into syncpg.sync_schema_meta (schema_version, layout, index_signatures, functions_digest, installed_at_ms) values (2, '', '{}', '', 0)`)
	b.commit(t, "p1", one("1"))
	old := b.start(t, pollOnly, func(c *fanout.Config) { c.SchemaVersion, c.Readers = 1, 1 })
	current := b.start(t, pollOnly, func(c *fanout.Config) { c.SchemaVersion = 2 })
	for _, a := range []*instance{old, current} {
		require.EqualValues(t, 1, a.watch(t, "p1")) // the older one began to watch when it was too late
		tick(t, a.poll)
	}
	for seq := int64(2); seq < 4; seq++ {
		b.commit(t, "p1", one("x"))
		for _, a := range []*instance{old, current} {
			tick(t, a.poll)
			a.sink.reaches(t, "p1", seq)
		}
	}
	tick(t, old.poll) // leads to nothing, behind which p2 is read
	old.watch(t, "p2")
	old.Committed("p2", b.commit(t, "p2", one("x")))
	tick(t, old.poll)
	old.sink.reaches(t, "p2", 1)
	require.Equal(t, []call{{Kind: "reset", Partition: "p1", Seq: 2}, {Kind: "reset", Partition: "p1", Seq: 3}}, old.sink.of("p1"))
	require.EqualValues(t, 2, requireWhole(t, current.sink.of("p1"), 1, 3))
}

// TestARotationIsToldOf: whoever rotates, in whatever process, the notification of its
// transaction reaches all that listen, for watched partitions and others (§2.1). No poll
// ticks in this test.
func TestARotationIsToldOf(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, other, apart := b.start(t), b.start(t), b.start(t, pollOnly)
	b.listening(t, 2)
	names := []string{"p1", `o'clock "é" ` + strings.Repeat("\x01", 500)}
	for i, name := range names {
		b.commit(t, name, one("1"))
		a.watch(t, name)
		apart.watch(t, name)
		b.exec(t, `select syncpg.sync_rotate_epoch($1)`, name)
		a.sink.until(t, "the reset", func() bool { return len(a.sink.calls) == i+1 })
		require.Equal(t, []call{{Kind: "reset", Partition: name, Seq: 1}}, a.sink.of(name))
		other.sink.until(t, "the rotation", func() bool { return slices.Contains(other.sink.rotated, name) })
	}
	// As a transaction that is rolled back tells of nothing, this comes next.
	tx, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select syncpg.sync_rotate_epoch('p1')`)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	b.exec(t, `select syncpg.sync_rotate_epoch('nobody''s')`)
	b.exec(t, `select syncpg.sync_rotate_epochs(0)`)
	a.sink.until(t, "the resets", func() bool { return len(a.sink.calls) == 4 })
	want := []string{"", names[0], names[1], ""} // the first for what happened before it listened
	for _, i := range []*instance{a, other} {
		i.sink.until(t, "the rotation of all", func() bool { return len(i.sink.rotated) == len(want) })
		require.Equal(t, want, soFar(i.sink, &i.sink.rotated))
	}
	require.Empty(t, soFar(apart.sink, &apart.sink.rotated), "who does not listen finds it with the poll")
	require.Empty(t, soFar(apart.sink, &apart.sink.calls))
}

func TestTheFirstEpochIsNoReset(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	require.EqualValues(t, 0, a.watch(t, "new"))
	b.commit(t, "new", one("1"))
	tick(t, a.poll)
	a.sink.reaches(t, "new", 1)
	require.EqualValues(t, 1, requireWhole(t, a.sink.of("new"), 0, 1))
}

func TestAnOversizeCommitComesWithoutPayloads(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly, func(c *fanout.Config) { c.MaxCommitBytes = 10 })
	a.watch(t, "p1")
	b.commit(t, "p1", one("0123456789"), written{[]byte("0123456789"), []byte("x"), nil}, one("small"))
	tick(t, a.poll)
	a.sink.reaches(t, "p1", 3)
	var commits []fanout.Commit
	for _, c := range a.sink.of("p1") {
		commits = append(commits, c.Commits...)
	}
	require.False(t, commits[0].Oversize)
	require.True(t, commits[1].Oversize)
	require.EqualValues(t, 11, commits[1].Bytes)
	require.Len(t, commits[1].Changes, 3)
	for _, c := range commits[1].Changes {
		require.Nil(t, c.Payload)
		require.Equal(t, []string{"team=red"}, c.Scopes)
	}
	require.Equal(t, "small", string(commits[2].Changes[0].Payload))
}

// TestReadsAreBounded: what does not fit into a read comes with the next, of the same and
// of other partitions.
func TestReadsAreBounded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t, pollOnly)
	big := one(strings.Repeat("x", 3<<20))
	for _, name := range []string{"p1", "p2"} {
		a.watch(t, name)
		b.commit(t, name, big, big, big, big)
	}
	var many []written
	for range 600 {
		many = append(many, written{})
	}
	a.watch(t, "p3")
	b.commit(t, "p3", many...)
	tick(t, a.poll)
	for name, seq := range map[string]int64{"p1": 4, "p2": 4, "p3": 600} {
		a.sink.reaches(t, name, seq)
		calls := a.sink.of(name)
		require.Equal(t, seq, requireWhole(t, calls, 0, seq))
		require.Greater(t, len(calls), 1, name)
		for _, c := range calls {
			require.LessOrEqual(t, len(c.Commits), 256)
		}
	}
}

func TestAThousandPartitionsAreOneQuery(t *testing.T) {
	t.Parallel()
	var counter pgtest.Counter
	b := &bundle{db: pgtest.New(t, pgtest.Options{Counter: &counter})}
	a := b.start(t, pollOnly)
	b.exec(t, `insert into syncpg.sync_partitions (partition) select 'p' || i from generate_series(1, 1000) as i`)
	b.exec(t, `insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) select 'p' || i, 'e', 0, 0 from generate_series(1, 1000) as i`)
	rows, err := b.db.Pool.Query(t.Context(), `select partition from syncpg.sync_partitions`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, name := range names {
		a.watch(t, name)
	}
	b.exec(t, `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count) select partition, 1, 'c', '1', 'ada', 0, 0 from syncpg.sync_partitions`)
	b.exec(t, `update syncpg.sync_partitions set max_commit_seq = 1`)
	counter.Reset()
	tick(t, a.poll)
	a.sink.until(t, "all partitions", func() bool { return len(a.sink.calls) == 1000 })
	sent := counter.Statements()
	count := func(name string) int {
		return len(slices.DeleteFunc(slices.Clone(sent), func(s string) bool { return !strings.HasPrefix(s, "-- name: "+name) }))
	}
	require.Equal(t, 1, count("RealtimeFindNews"), sent)
	require.LessOrEqual(t, count("RealtimeReadNews"), 2, "one for all, unless a reader came in between")
}

// TestCommitsShareANotification: what is committed while the sender waits is one statement.
func TestCommitsShareANotification(t *testing.T) {
	t.Parallel()
	var counter pgtest.Counter
	b := &bundle{db: pgtest.New(t, pgtest.Options{Counter: &counter})}
	a := b.make(t, pollOnly)
	coalesced := a.WithCoalescing()
	require.NoError(t, a.Start(t.Context()))
	t.Cleanup(func() { a.stop(t) })
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	_, err = conn.Exec(t.Context(), `listen syncpg`)
	require.NoError(t, err)
	next := func() string {
		n, err := conn.WaitForNotification(t.Context())
		require.NoError(t, err)
		return n.Payload
	}
	a.Committed("p", 1)
	require.Equal(t, `c[["p",1]]`, next(), "at once")
	for seq := range int64(1000) {
		a.Committed("p", seq+2)
		a.Committed("q", seq+2)
	}
	a.Committed("q", 7)
	tick(t, coalesced)
	var pairs [][]any
	require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(next(), "c")), &pairs))
	require.ElementsMatch(t, [][]any{{"p", 1001.0}, {"q", 1001.0}}, pairs, "the newest of each")
	tick(t, coalesced)
	var sent int
	for _, s := range counter.Statements() {
		if strings.Contains(s, "pg_notify") {
			sent++
		}
	}
	require.Equal(t, 2, sent)
}

func TestStopAndStartAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t)
	require.ErrorIs(t, a.Start(t.Context()), fanout.ErrStarted)
	a.watch(t, "p1")
	a.stop(t)
	a.stop(t)
	_, err := a.Watch(t.Context(), "p1")
	require.ErrorIs(t, err, fanout.ErrClosed)
	require.NoError(t, a.Start(t.Context()))
	a.watch(t, "p1")
	a.Committed("p1", b.commit(t, "p1", one("x")))
	a.sink.reaches(t, "p1", 1)
}
