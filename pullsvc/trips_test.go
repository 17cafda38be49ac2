package pullsvc_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// many makes n subscriptions over two tables.
func many(n int, cursor int64) []ssp2.Subscription {
	subs := make([]ssp2.Subscription, n)
	for i := range subs {
		if i%2 == 0 {
			subs[i] = sub(strconv.Itoa(i), "items", cursor, project(fmt.Sprint("x", i), "x"))
		} else {
			subs[i] = sub(strconv.Itoa(i), "docs", cursor, docScopes([]string{"o"}, []string{strconv.Itoa(i)}))
		}
	}
	return subs
}

// TestRoundTrips: a pull reads in one round trip and records its client in another,
// whatever the number of subscriptions.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 1 }))
	for i := range 20 {
		b.commit(t, item(fmt.Sprint("i", i), "x", "body"), doc(fmt.Sprint("d", i), "o", i))
	}
	b.pull(t, request(many(2, 0)...)) // prepares every statement
	for _, n := range []int{1, 68, 1000} {
		measure := func(cursor int64, name string, trips, writes int) []section {
			b.counter.Reset()
			got := b.pull(t, request(many(n, cursor)...))
			require.Zero(t, b.counter.PrepareRoundTrips())
			require.Equal(t, trips, b.counter.RoundTrips(), "%s of %d subscriptions: %v", name, n, b.counter.Statements())
			require.Equal(t, writes, b.counter.Autocommits(), name)
			require.Equal(t, 1, b.counter.Commits(), "of the snapshot, which is read only")
			require.Equal(t, "begin isolation level repeatable read, read only", b.counter.Statements()[0])
			require.LessOrEqual(t, len(b.counter.Statements()), 5+writes)
			return got
		}
		measure(-1, "a first bootstrap", 2, 1)
		measure(-1, "a bootstrap again", 1, 0)
		measure(0, "an incremental pull whose client stands there already", 1, 0)
		seq := b.commit(t, item("i0", "x", "new"), item("elsewhere", "y", ""))
		got := measure(seq-1, "an incremental pull", 2, 1)
		require.Len(t, got[0].Commits, 1)
		b.commit(t, item("elsewhere", "y", ""))
		got = measure(seq, "a pull past commits of others", 2, 1)
		require.Empty(t, got[0].Commits)
		measure(seq+1, "a quiet pull", 1, 0)
	}
}

// TestRoundTripsWithAStore: a store costs bootstraps of small scopes, and windows, no
// round trip, whatever the number of subscriptions.
func TestRoundTripsWithAStore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	store, err := segment.NewPostgres(b.db.Pool, segment.PostgresConfig{})
	require.NoError(t, err)
	b.Service, err = pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: store})
	require.NoError(t, err)
	for i := range 20 {
		b.commit(t, item(fmt.Sprint("i", i), "x", "body"), doc(fmt.Sprint("d", i), "o", i))
	}
	for _, n := range []int{1, 68} {
		for _, tc := range []struct {
			cursor int64
			trips  int
		}{{-1, 2}, {0, 1}, {20, 1}} {
			req := request(many(n, tc.cursor)...)
			req.ClientID, req.Header.Accept = fmt.Sprint("client ", n), imageLane
			b.pull(t, request(many(n, tc.cursor)...)) // prepares every statement
			b.counter.Reset()
			b.pull(t, req)
			require.Equal(t, tc.trips, b.counter.RoundTrips(), "%d subscriptions at %d: %v", n, tc.cursor, b.counter.Statements())
		}
	}
}

// TestQuietPullWritesNothing: it reads in a transaction that cannot write, and the
// record stays as it is.
func TestQuietPullWritesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	seq := b.commit(t, item("i", "x", ""))
	b.pull(t, request(sub("s", "items", seq, project("x"))))
	var before, after string
	version := `select xmin::text || ctid::text from syncpg.sync_clients`
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), version).Scan(&before))
	b.pull(t, request(sub("s", "items", seq, project("x"))))
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), version).Scan(&after))
	require.Equal(t, before, after)
}

// TestExecModes: connections that keep no prepared statements, as behind a pooler in
// transaction mode, read the same.
func TestExecModes(t *testing.T) {
	t.Parallel()
	var want []byte
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		b := setup(t, withDatabase(func(o *pgtest.Options) {
			o.Configure = func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
		}))
		writer := *b
		cfg := b.db.Pool.Config()
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		require.NoError(t, err)
		writer.db = &pgtest.DB{Pool: pool}
		writer.commit(t, doc("d\"1", "o,{}\"\\", 1), item("i", "x", "\\x00 'quoted' 😀"))
		writer.commit(t, remove("docs", "d\"1"), doc("e", "NULL", -7))
		pool.Close()

		resume := sub("r", "items", 1, project("x"))
		resume.BootstrapState = token(1, "items", new("1:xa"))
		req := request(sub("w", "docs", 0, docScopes([]string{"o,{}\"\\", "NULL"}, nil)), sub("b", "items", -1, project("x")), resume)
		p, err := b.Begin(t.Context(), req)
		require.NoError(t, err, mode)
		got := collect(t, p)
		p.Close()
		if want == nil {
			want = got
			sections := decode(t, req, got)
			require.Len(t, sections[0].Commits, 2)
			require.Len(t, sections[1].Segments, 1)
		}
		require.Equal(t, want, got, mode)
	}
}

// TestOneConnection: a pull needs one connection at a time and holds none between
// Begin, Stream and emit.
func TestOneConnection(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 1 }), with(func(c *pullsvc.Config) { c.BufferBytes = 1 }))
	for i := range 5 {
		b.commit(t, item(strconv.Itoa(i), "x", "body"))
	}
	p, err := b.Begin(t.Context(), request(sub("a", "items", -1, project("x")), sub("b", "items", 0, project("x")), sub("c", "items", -1, project("x"))))
	require.NoError(t, err)
	defer p.Close()
	require.Zero(t, b.db.Pool.Stat().AcquiredConns())
	require.NoError(t, p.Stream(t.Context(), func([]byte) error {
		require.Zero(t, b.db.Pool.Stat().AcquiredConns())
		return b.db.Pool.Ping(t.Context())
	}))
	p.Close()
	p.Close()
}

// TestCancel: the end of a request's context ends its work in the database, and the
// pool stays of use.
func TestCancel(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 2 }))
	b.commit(t, item("i", "x", ""))
	req := request(sub("s", "items", 0, project("x")))
	b.pull(t, req)

	blocker, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	defer func() { _ = blocker.Close(context.WithoutCancel(t.Context())) }()
	_, err = blocker.Exec(t.Context(), `begin; lock table syncpg.sync_partitions in access exclusive mode`)
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error)
	go func() {
		_, err := b.Begin(ctx, req)
		ended <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), blocker, 1))
	cancel(errors.New("the client left"))
	require.ErrorIs(t, <-ended, context.Canceled)
	require.NoError(t, pgtest.WaitFor(t.Context(), blocker, `select not exists (
		select from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0)`))
	_, err = blocker.Exec(t.Context(), `rollback`)
	require.NoError(t, err)
	b.pull(t, req)

	p, err := b.Begin(t.Context(), request(sub("s", "items", 99, project("x"))))
	require.NoError(t, err)
	defer p.Close()
	require.ErrorIs(t, p.Stream(ctx, func([]byte) error { return nil }), context.Canceled)
}

// TestEmitFails: the error of emit ends the stream and comes back as it is.
func TestEmitFails(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("i", "x", strings.Repeat("x", 20000)))
	gone := errors.New("gone")
	for _, subs := range [][]ssp2.Subscription{
		{sub("s", "items", 0, project("x"))}, {sub("s", "items", -1, project("x"))}, {sub("s", "items", 1, project("x"))},
	} {
		p, err := b.Begin(t.Context(), request(subs...))
		require.NoError(t, err)
		require.ErrorIs(t, p.Stream(t.Context(), func([]byte) error { return gone }), gone)
		p.Close()
	}
}

// TestManySubscriptions: 10,000 subscriptions are refused before the database is
// asked.
func TestManySubscriptions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.counter.Reset()
	_, err := b.Begin(t.Context(), request(many(10_000, 0)...))
	require.Equal(t, ssp2.CodeInvalidSubscription, ssp2.CodeOf(err))
	require.Zero(t, b.counter.RoundTrips())
}

// TestMemory: a response holds a few times BufferBytes, however much it sends. Not
// parallel: it looks at the memory of the process.
func TestMemory(t *testing.T) { //nolint:paralleltest // see above
	const subscriptions, rowsEach, rowBytes, buffer = 200, 20, 10_000, 1 << 20
	b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = buffer }))
	var subs []ssp2.Subscription
	for i := range subscriptions {
		var changes []change
		for k := range rowsEach {
			changes = append(changes, item(fmt.Sprint(i, "-", k), strconv.Itoa(i), strings.Repeat("x", rowBytes)))
		}
		b.commit(t, changes...)
		cursor := []int64{-1, 0}[i%2]
		subs = append(subs, sub(strconv.Itoa(i), "items", cursor, project(strconv.Itoa(i))))
	}
	b.rows = nil
	var heaps []uint64
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	p, err := b.Begin(t.Context(), request(subs...))
	require.NoError(t, err)
	defer p.Close()
	sent, calls := 0, 0
	require.NoError(t, p.Stream(t.Context(), func(piece []byte) error {
		if sent += len(piece); calls%20 == 0 {
			heaps = append(heaps, heap())
		}
		calls++
		return nil
	}))
	require.Greater(t, sent, subscriptions*rowsEach*rowBytes)
	require.Less(t, slices.Max(heaps), before+8*buffer)
}
