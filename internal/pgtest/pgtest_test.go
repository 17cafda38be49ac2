package pgtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

func scan[T any](t *testing.T, db pgtest.Querier, sql string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, db.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

func TestDatabaseIsMigratedAndPrivate(t *testing.T) {
	t.Parallel()
	a, b := pgtest.New(t, pgtest.Options{}), pgtest.New(t, pgtest.Options{})
	require.NotEqual(t, a.Name, b.Name)
	for _, db := range []*pgtest.DB{a, b} {
		require.Equal(t, db.Name, scan[string](t, db.Pool, `select current_database()::text`))
		require.True(t, scan[bool](t, db.Pool, `select to_regclass('syncpg.sync_commits') is not null`))
	}
	_, err := a.Pool.Exec(t.Context(), `create table public.mine (x int)`)
	require.NoError(t, err)
	require.False(t, scan[bool](t, b.Pool, `select to_regclass('public.mine') is not null`))
}

func TestMissingQualifierFails(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `create table public.mine (x int)`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `select * from mine`)
	require.ErrorContains(t, err, "42P01")

	conn, err := pgx.Connect(t.Context(), pgtest.DSN(t))
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	_, err = conn.Exec(t.Context(), `create table mine (x int)`)
	require.ErrorContains(t, err, "3F000")
}

func TestTextHasNaturalOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{Empty: true})
	if scan[bool](t, db.Pool, `select exists (select from pg_collation where collprovider = 'i')`) {
		require.True(t, scan[bool](t, db.Pool, `select 'a' < 'B'`))
	}
}

func TestEmptyLeavesTheMigrationsOut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{Empty: true})
	require.False(t, scan[bool](t, db.Pool, `select to_regnamespace('syncpg') is not null`))
}

func TestSetup(t *testing.T) {
	t.Parallel()
	var runs atomic.Int32
	opts := pgtest.Options{
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			runs.Add(1)
			_, err := conn.Exec(ctx, `create table public.app as select v from generate_series(1, 3) as v`)
			return err
		},
	}
	for range 2 {
		require.Equal(t, 6, scan[int](t, pgtest.New(t, opts).Pool, `select sum(v)::int from public.app`))
	}
	require.Equal(t, int32(2), runs.Load(), "without a key it runs in each database")

	opts.TemplateKey = pgtest.New(t, pgtest.Options{Empty: true}).Name // a key that no earlier run of this binary had
	for range 3 {
		require.Equal(t, 6, scan[int](t, pgtest.New(t, opts).Pool, `select sum(v)::int from public.app`))
	}
	require.Equal(t, int32(3), runs.Load(), "with a key it runs in the template")
}

func TestFailedSetupLeavesNoDatabase(t *testing.T) {
	t.Parallel()
	cluster, err := pgtest.Open(t.Context())
	require.NoError(t, err)
	broken := errors.New("broken")
	for _, key := range []string{"", "a template"} {
		var name string
		_, err = cluster.Create(t.Context(), pgtest.Options{
			TemplateKey: key,
			Setup: func(ctx context.Context, conn *pgx.Conn) error {
				return errors.Join(conn.QueryRow(ctx, `select current_database()`).Scan(&name), broken)
			},
		})
		require.ErrorIs(t, err, broken)
		pool := pgtest.Pool(t)
		require.False(t, scan[bool](t, pool, `select exists (select from pg_database where datname = $1)`, name))
	}
}

func TestPoolOptions(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{
		MaxConns:  1,
		Configure: func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "a test" },
	})
	require.Equal(t, int32(1), db.Pool.Config().MaxConns)
	require.Equal(t, "a test", scan[string](t, db.Pool, `show application_name`))
	require.Equal(t, int32(4), pgtest.Pool(t).Config().MaxConns)
}

func TestCloseDropsTheDatabaseAndReportsABusyPool(t *testing.T) {
	t.Parallel()
	cluster, err := pgtest.Open(t.Context())
	require.NoError(t, err)
	db, err := cluster.Create(t.Context(), pgtest.Options{})
	require.NoError(t, err)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorContains(t, db.Close(ctx), "1 connections were not released")
	conn.Release()

	require.NoError(t, db.Close(t.Context()))
	pool := pgtest.Pool(t)
	require.False(t, scan[bool](t, pool, `select exists (select from pg_database where datname = $1)`, db.Name))
}

func TestTxIsRolledBack(t *testing.T) {
	t.Parallel()
	// Each of the two would meet the row of the other if that were committed.
	for _, name := range []string{"one", "another"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tx := pgtest.Tx(t)
			require.Equal(t, 0, scan[int](t, tx, `select count(*)::int from syncpg.sync_partitions`))
			_, err := tx.Exec(t.Context(), `insert into syncpg.sync_partitions (partition) values ('p')`)
			require.NoError(t, err)
		})
	}
}

func TestClusterDSN(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ server, want string }{
		{"postgres://u:p@h:1/db?sslmode=disable", "postgres://u:p@h:1/x%20%27y%5C?sslmode=disable"},
		{"postgresql:///db?host=/tmp", "postgresql:///x%20%27y%5C?host=/tmp"},
		{"host=h user=u dbname=db", `host=h user=u dbname=db dbname='x \'y\\'`},
	} {
		got, err := pgtest.NewCluster(tc.server).DSN(`x 'y\`)
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(tc.want, got))
		cfg, err := pgx.ParseConfig(got)
		require.NoError(t, err)
		require.Equal(t, `x 'y\`, cfg.Database)
	}
}

func TestLeftoversOfLongAgoAreDropped(t *testing.T) {
	t.Parallel()
	cluster, err := pgtest.Open(t.Context())
	require.NoError(t, err)
	pool := pgtest.Pool(t)
	fresh := pgtest.New(t, pgtest.Options{Empty: true}).Name
	old := []string{"syncpg_test_0_" + fresh, "syncpg_tmpl_0_" + fresh}
	for _, name := range old {
		_, err := pool.Exec(t.Context(), `create database `+pgx.Identifier{name}.Sanitize())
		require.NoError(t, err)
	}
	require.NoError(t, cluster.DropLeftovers(t.Context()))
	require.Equal(t, []string{fresh}, scan[[]string](t, pool, `select array_agg(datname::text) from pg_database where datname = any($1)`, append(old, fresh)))
}

func TestWaitBlocked(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	ctx := t.Context()
	holder, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	_, err = holder.Exec(ctx, `lock table syncpg.sync_commits`)
	require.NoError(t, err)

	waiter, err := db.Pool.Acquire(ctx)
	require.NoError(t, err)
	defer waiter.Release()
	got := make(chan error, 1)
	go func() {
		_, err := waiter.Exec(ctx, `select * from syncpg.sync_commits`)
		got <- err
	}()
	require.NoError(t, pgtest.WaitBlocked(ctx, db.Pool, waiter.Conn().PgConn().PID()))
	require.NoError(t, pgtest.WaitAnyBlocked(ctx, db.Pool, 1))
	require.NoError(t, holder.Rollback(ctx))
	require.NoError(t, <-got)

	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, pgtest.WaitBlocked(short, db.Pool, waiter.Conn().PgConn().PID()), context.DeadlineExceeded)
	require.NoError(t, pgtest.WaitFor(ctx, db.Pool, `select $1 = 1`, 1))
	require.ErrorContains(t, pgtest.WaitFor(ctx, db.Pool, `select 1/0 = 1`), "22012")
}

func BenchmarkClone(b *testing.B) {
	cluster, err := pgtest.Open(b.Context())
	require.NoError(b, err)
	for b.Loop() {
		db, err := cluster.Create(b.Context(), pgtest.Options{})
		require.NoError(b, err)
		require.NoError(b, db.Close(b.Context()))
	}
}

func ExampleCounter() {
	var c pgtest.Counter
	cfg, err := pgxpool.ParseConfig("postgres://localhost/app")
	if err != nil {
		panic(err)
	}
	c.Attach(&cfg.ConnConfig.Config)
	fmt.Println(c.RoundTrips())
	// Output: 0
}

func TestCopyHoldsWhatTheDatabaseHeld(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	_, err := db.Pool.Exec(t.Context(), `create table public.kept as select 1 as n`)
	require.NoError(t, err)
	made := pgtest.Copy(t, db, pgtest.Options{})
	_, err = db.Pool.Exec(t.Context(), `delete from public.kept`)
	require.NoError(t, err)
	var n int
	require.NoError(t, made.Pool.QueryRow(t.Context(), `select count(*) from public.kept`).Scan(&n))
	require.Equal(t, 1, n)
}
