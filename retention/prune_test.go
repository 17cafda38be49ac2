package retention_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// few keeps ten commits, so that logs can be short.
var few = retention.Policy{KeepCommits: 10}

// TestHorizon: how far pruning goes (§4.6), and that a plan says the same. Each log has 40
// commits that are 40 days old, then 30 of 20 days, then 30 of today: 100.
func TestHorizon(t *testing.T) {
	t.Parallel()
	b := setup(t)
	type client struct {
		cursor int64
		age    time.Duration
	}
	for i, tc := range []struct {
		name    string
		policy  retention.Policy
		clients []client
		want    int64
	}{
		{"the newest commits stay", few, nil, 90},
		{"the newest 1000 by default", retention.Policy{}, nil, 0},
		{"as many as there are", retention.Policy{KeepCommits: 100}, nil, 0},
		{"none when none are to be kept", retention.Policy{KeepCommits: -1}, nil, 100},
		{"an active client's cursor holds the log", few, []client{{60, time.Hour}}, 60},
		{"the least of them does", few, []client{{80, 0}, {55, 13 * day}, {70, 0}}, 55},
		{"a cursor that nothing was ever sent for holds everything young", few, []client{{0, 0}}, 40},
		{"a client is active for 14 days", few, []client{{60, 14 * day}}, 60},
		{"and no longer", few, []client{{60, 14*day + time.Millisecond}}, 90},
		{"or for as long as the host says", retention.Policy{KeepCommits: 10, ActiveWindow: 15 * day}, []client{{60, 14*day + time.Millisecond}}, 60},
		{"no client counts when none is to", retention.Policy{KeepCommits: 10, ActiveWindow: -1}, []client{{60, 0}}, 90},
		{"a client that never pulled holds nothing", few, []client{{-1, 0}}, 90},
		{"commits of over 30 days go under an active client", few, []client{{20, 0}}, 40},
		{"not when the host says never", retention.Policy{KeepCommits: 10, ForceAge: -1}, []client{{20, 0}}, 20},
		{"nor earlier than it says", retention.Policy{KeepCommits: 10, ForceAge: 41 * day}, []client{{20, 0}}, 20},
		{"a cursor among old commits does not hold", retention.Policy{KeepCommits: 10, ForceAge: 10 * day}, []client{{20, 0}}, 70},
		{"old commits stay when they are the newest", retention.Policy{KeepCommits: 70}, []client{{0, 0}}, 30},
		{"a cursor from the future holds nothing", few, []client{{1000, 0}}, 90},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			partition := fmt.Sprint("p", i)
			b.open(t, partition)
			b.append(t, partition, 40, 40*day)
			b.append(t, partition, 30, 20*day)
			b.append(t, partition, 30, 0)
			for i, c := range tc.clients {
				cursor := &c.cursor
				if c.cursor < 0 {
					cursor = nil
				}
				b.client(t, partition, fmt.Sprint("c", i), cursor, c.age)
			}
			// Any size of batch comes to the same end.
			for _, rows := range []int{7, 2000} {
				s := b.service(t, retention.Config{Policy: tc.policy, BatchRows: rows})
				plan, err := s.Plan(t.Context(), partition)
				require.NoError(t, err)
				require.Equal(t, tc.want, plan.Target)
				require.Equal(t, int64(100), plan.Newest)
				_, err = s.Prune(t.Context(), partition, nil)
				require.NoError(t, err)
				require.Equal(t, tc.want, b.left(t, partition).Horizon)
			}
		})
	}
}

// TestClocksOfCommits: a commit that says it is young keeps what follows it, however old
// that is: clocks jump.
func TestClocksOfCommits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.append(t, "p", 10, 40*day)
	b.append(t, "p", 1, 0)
	b.append(t, "p", 10, 40*day)
	b.client(t, "p", "c", new(int64(3)), 0)
	s := b.service(t, retention.Config{Policy: retention.Policy{KeepCommits: -1}})
	_, err := s.Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	require.Equal(t, int64(10), b.left(t, "p").Horizon)
}

// TestPruneDeletes: what is at or below the horizon goes, and nothing else.
func TestPruneDeletes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"o", "p", "q"} {
		b.open(t, p)
		b.append(t, p, 50, 0)
		b.client(t, p, "gone", new(int64(1)), 15*day)
	}
	ring := events.NewRing(10)
	s := b.service(t, retention.Config{Policy: few, BatchRows: 20, Events: ring})
	result, err := s.Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	require.Equal(t, retention.Result{Horizon: 40, Commits: 40, Changes: 80, Tombstones: 40}, result)
	require.Equal(t, left{Horizon: 40, Commits: 10, Changes: 20, Scopes: 20, Tombstones: 10, First: 41}, b.left(t, "p"))
	for _, other := range []string{"o", "q"} {
		require.Equal(t, left{Commits: 50, Changes: 100, Scopes: 100, Tombstones: 50, First: 1}, b.left(t, other))
	}
	require.Equal(t, int64(50), scan[int64](t, b, `select count(*) from syncpg.sync_push_results where partition = 'p'`), "outcomes stay (§2.3)")
	require.Equal(t, int64(1), scan[int64](t, b, `select count(*) from syncpg.sync_clients where partition = 'p' and cursor = 1`))

	again, err := s.Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	require.Equal(t, retention.Result{PreviousHorizon: 40, Horizon: 40}, again)
	var told []events.Event
	for _, r := range ring.Query(events.Filter{}) { // newest first
		told = append(told, r.Event)
	}
	require.Equal(t, []events.Event{
		events.Pruned{Partition: "p", PreviousHorizon: 40, Horizon: 40},
		events.Pruned{Partition: "p", Horizon: 40, RemovedCommits: 40},
	}, told)
}

// TestPruneBatches: a batch ends with the commit that fills it, is one round trip and one
// commit, and horizon and log move together.
func TestPruneBatches(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.append(t, "p", 40, 0)
	// A commit of many changes goes whole, as a batch by itself.
	b.exec(t, `update syncpg.sync_commits set change_count = 1000 where partition = 'p' and commit_seq = 13`)
	s := b.service(t, retention.Config{Policy: few, BatchRows: 15}) // five commits of three rows
	_, err := s.Plan(t.Context(), "p")
	require.NoError(t, err)
	b.exec(t, `select 1`)

	var horizons []int64
	_, err = s.Prune(t.Context(), "p", func(p retention.Progress) {
		require.Equal(t, "p", p.Partition)
		require.Equal(t, int64(30), p.Target)
		l := b.left(t, "p")
		require.Equal(t, p.Horizon, l.Horizon)
		require.Equal(t, p.Horizon+1, l.First)
		require.Equal(t, 40-p.Horizon, l.Commits)
		horizons = append(horizons, p.Horizon)
	})
	require.NoError(t, err)
	require.Equal(t, []int64{0, 5, 10, 13, 18, 23, 28, 30}, horizons)

	b.append(t, "p", 10, 0)
	conn, err := b.db.Pool.Acquire(t.Context()) // whose statements are prepared
	require.NoError(t, err)
	conn.Release()
	b.counter.Reset()
	_, err = s.Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	trips := b.counter.RoundTrips() - b.counter.PrepareRoundTrips()
	require.Equal(t, 4, trips, "the plan, two batches and one that finds nothing")
	require.Equal(t, 3, b.counter.Commits())
}

func TestPruneOfNoPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	s := b.service(t, retention.Config{})
	_, err := s.Prune(t.Context(), "nope", nil)
	require.Equal(t, ssp2.CodeStoragePartitionUnregistered, ssp2.CodeOf(err))
	_, err = s.Plan(t.Context(), "nope")
	require.Equal(t, ssp2.CodeStoragePartitionUnregistered, ssp2.CodeOf(err))
	_, err = s.RotateEpoch(t.Context(), "nope")
	require.Equal(t, ssp2.CodeStoragePartitionUnregistered, ssp2.CodeOf(err))
	total, err := s.PruneAll(t.Context(), nil)
	require.NoError(t, err)
	require.Zero(t, total)
}

// TestPruneRacesARestore: a log that was replaced after it was looked at is not touched,
// whichever batch finds out (SEMANTICS §4); the other partitions are pruned all the same.
func TestPruneRacesARestore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"p", "q"} {
		b.open(t, p)
		b.append(t, p, 40, 0)
	}
	s := b.service(t, retention.Config{Policy: few, BatchRows: 30})
	total, err := s.PruneAll(t.Context(), func(p retention.Progress) {
		if p.Partition == "p" && p.Commits == 10 {
			_, err := s.RotateEpoch(t.Context(), "p")
			require.NoError(t, err)
		}
	})
	require.Equal(t, ssp2.CodeStoragePruneEpochMismatch, ssp2.CodeOf(err))
	require.Equal(t, retention.Total{Partitions: 2, Failed: 1, Commits: 40, Changes: 80, Tombstones: 40}, total)
	require.Equal(t, int64(10), b.left(t, "p").Horizon)
	require.Equal(t, int64(30), b.left(t, "q").Horizon)

	// With the epoch that the log has now it goes on.
	_, err = s.Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	require.Equal(t, int64(30), b.left(t, "p").Horizon)

	// The partition may be gone altogether.
	b.append(t, "p", 10, 0)
	_, err = s.Prune(t.Context(), "p", func(retention.Progress) {
		b.exec(t, `delete from syncpg.sync_partition_registry where partition = 'p'`)
	})
	require.Equal(t, ssp2.CodeStoragePartitionUnregistered, ssp2.CodeOf(err))
	require.Equal(t, int64(30), b.left(t, "p").Horizon)
}

// TestAClientComesBackWhilePruningWaits: what is decided is decided under the lock.
func TestAClientComesBackWhilePruningWaits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.append(t, "p", 50, 0)
	s := b.service(t, retention.Config{Policy: few})
	holder := b.connect(t)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select 1 from syncpg.sync_partitions where partition = 'p' for update`)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := s.Prune(t.Context(), "p", nil)
		done <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	b.client(t, "p", "back", new(int64(7)), 0)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.Equal(t, int64(7), b.left(t, "p").Horizon)
}

// TestAPushWaitsForOneBatch: a push that comes while a log is pruned waits for the batch
// that is under way, and then goes first. Each batch of this pruning stands still until it is
// let go, so the order does not depend on time.
func TestAPushWaitsForOneBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	compiled, err := schema.Parse(sample.IR())
	require.NoError(t, err)
	require.NoError(t, schemaddl.Install(t.Context(), b.db.Pool, compiled, schemaddl.Options{}))
	pushes, err := pushsvc.New(b.db.Pool, pushsvc.Config{Schema: compiled})
	require.NoError(t, err)
	t.Cleanup(pushes.Wait)
	b.open(t, "p")
	b.append(t, "p", 50, 0)
	b.exec(t, `create function public.barrier() returns trigger language plpgsql as $$
		begin
			perform pg_advisory_xact_lock(7, new.horizon_seq::int);
			return new;
		end $$`)
	b.exec(t, `create trigger barrier before update of horizon_seq on syncpg.sync_partitions for each row execute function public.barrier()`)
	barrier := b.connect(t)
	for _, horizon := range []int{10, 20, 30, 40} {
		_, err := barrier.Exec(t.Context(), `select pg_advisory_lock(7, $1)`, horizon)
		require.NoError(t, err)
	}
	letGo := func(horizon int) {
		_, err := barrier.Exec(t.Context(), `select pg_advisory_unlock(7, $1)`, horizon)
		require.NoError(t, err)
	}
	s := b.service(t, retention.Config{Policy: few, BatchRows: 30})
	rests, goOn := make(chan time.Duration), make(chan struct{})
	s.SetRest(func(_ context.Context, d time.Duration) {
		rests <- d
		<-goOn
	})
	pruned := make(chan error, 1)
	go func() {
		_, err := s.Prune(t.Context(), "p", nil)
		pruned <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))

	pushed := make(chan error, 1)
	go func() {
		_, err := pushes.Push(t.Context(), pushsvc.Request{
			Partition: "p", Actor: "ada", ClientID: "c", WireVersion: ssp2.WireV2, LogEpoch: new(epoch),
			Scopes: scope.Resolution{Grants: scope.Compile(scope.Allowed{"team_id": {"*"}})},
			Commits: []ssp2.PushCommit{{
				ClientCommitID: "k", Operations: []ssp2.Operation{{Table: "lists", RowID: "none", Op: ssp2.OpDelete}},
			}},
		})
		pushed <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
	letGo(10)
	require.Positive(t, <-rests)
	require.NoError(t, <-pushed, "after one batch")
	require.Equal(t, int64(10), b.left(t, "p").Horizon)
	require.Equal(t, int64(1), scan[int64](t, b, `select count(*) from syncpg.sync_push_results where partition = 'p' and client_id = 'c'`))
	goOn <- struct{}{}

	// Nobody waits for the others, so none rests.
	letGo(20)
	letGo(30)
	letGo(40)
	require.NoError(t, <-pruned)
	require.GreaterOrEqual(t, b.left(t, "p").Horizon, int64(40))
}

// TestPruneAll: partitions are found page by page, those with nothing to prune left out.
func TestPruneAll(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 7 {
		p := fmt.Sprint("p", i)
		b.open(t, p)
		b.append(t, p, 10+i%2, 0)
	}
	s := b.service(t, retention.Config{Policy: few})
	s.SetSizes(1, 2)
	var partitions []string
	require.NoError(t, s.Each(t.Context(), func(p string) error {
		partitions = append(partitions, p)
		return nil
	}))
	require.Equal(t, []string{"p1", "p3", "p5"}, partitions)
	total, err := s.PruneAll(t.Context(), nil)
	require.NoError(t, err)
	require.Equal(t, retention.Total{Partitions: 3, Commits: 3, Changes: 6, Tombstones: 3}, total)
}

// TestAPartitionThatCannotBePruned: does not keep those behind it from being pruned.
func TestAPartitionThatCannotBePruned(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"o", "p", "q"} {
		b.open(t, p)
		b.append(t, p, 11, 0)
	}
	b.exec(t, `create function public.refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
	b.exec(t, `create trigger refuse before delete on syncpg.sync_commits for each row when (old.partition = 'p') execute function public.refuse()`)
	s := b.service(t, retention.Config{Policy: few})
	total, err := s.PruneAll(t.Context(), nil)
	require.ErrorContains(t, err, "no")
	require.Equal(t, retention.Total{Partitions: 3, Failed: 1, Commits: 2, Changes: 4, Tombstones: 2}, total)

	// A database that is out of reach ends it.
	b.exec(t, `drop trigger refuse on syncpg.sync_commits`)
	b.append(t, "o", 1, 0)
	b.exec(t, `create or replace function public.refuse() returns trigger language plpgsql as $$ begin perform pg_terminate_backend(pg_backend_pid()); return old; end $$`)
	b.exec(t, `create trigger refuse before delete on syncpg.sync_commits for each row execute function public.refuse()`)
	total, err = s.PruneAll(t.Context(), nil)
	require.Error(t, err)
	require.Equal(t, retention.Total{Partitions: 1, Failed: 1}, total)
}

func TestWrongConfig(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, tc := range []struct {
		name string
		cfg  retention.Config
		want string
	}{
		{"batch", retention.Config{BatchRows: -1}, "Config.BatchRows is -1"},
		{"interval", retention.Config{Interval: time.Millisecond}, "Config.Interval is 1ms"},
		{"full history", retention.Config{Policy: retention.Policy{CompactAfter: -1}}, "full history"},
	} {
		_, err := retention.New(b.db.Pool, tc.cfg)
		require.ErrorContains(t, err, tc.want, tc.name)
	}
	_, err := retention.New(nil, retention.Config{})
	require.ErrorContains(t, err, "a pool is required")
}

// TestPolicyCheck: the floors of §4.6 may be raised and not lowered.
func TestPolicyCheck(t *testing.T) {
	t.Parallel()
	for _, p := range []retention.Policy{
		{},
		{ActiveWindow: 14 * day, ForceAge: 30 * day, KeepCommits: 1000},
		{ActiveWindow: 90 * day, ForceAge: -1, KeepCommits: 1_000_000, CompactAfter: time.Hour},
	} {
		require.NoError(t, p.Check(), "%+v", p)
	}
	for _, p := range []retention.Policy{
		{ActiveWindow: 14*day - 1}, {ActiveWindow: -1}, {ForceAge: 30*day - 1}, {KeepCommits: 999}, {KeepCommits: -1}, {CompactAfter: -1},
	} {
		require.Error(t, p.Check(), "%+v", p)
	}
}
