package retention_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	day   = 24 * time.Hour
	epoch = "epoch-1"
)

// start is the present of these tests.
var start = time.UnixMilli(1_750_000_000_000)

// bundle is a database with logs.
type bundle struct {
	db      *pgtest.DB
	counter *pgtest.Counter
}

func setup(t testing.TB) *bundle {
	t.Helper()
	b := &bundle{counter: &pgtest.Counter{}}
	b.db = pgtest.New(t, pgtest.Options{Counter: b.counter, MaxConns: 8})
	return b
}

// service is a service whose present is start.
func (b *bundle) service(t testing.TB, cfg retention.Config) *retention.Service {
	t.Helper()
	if cfg.Clock == nil {
		cfg.Clock = func() time.Time { return start }
	}
	s, err := retention.New(b.db.Pool, cfg)
	require.NoError(t, err)
	return s
}

func (b *bundle) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := b.db.Pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func scan[T any](t testing.TB, b *bundle, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// open makes a partition.
func (b *bundle) open(t testing.TB, partition string) {
	t.Helper()
	b.exec(t, `select syncpg.sync_open_partition($1, $2, 0)`, partition, epoch)
}

// append appends n commits of the given age, each with the upsert of a row of its own and
// the delete of another one.
func (b *bundle) append(t testing.TB, partition string, n int, age time.Duration) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), b.db.Pool, func(tx pgx.Tx) error {
		for _, sql := range []string{
			`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
			 select p.partition, p.max_commit_seq + i, 'w', (p.max_commit_seq + i)::text, 'ada', $3::bigint, 2
			   from syncpg.sync_partitions as p, generate_series(1, $2::int) as i where p.partition = $1`,
			`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
			 select p.partition, p.max_commit_seq + i, c, 'items', c || '-' || p.max_commit_seq + i, 1 + c,
			        case c when 0 then $3::bigint end, array['project=p' || (p.max_commit_seq + i) % 10, 'team=t'], case c when 0 then '\x01'::bytea end
			   from syncpg.sync_partitions as p, generate_series(1, $2::int) as i, generate_series(0, 1) as c where p.partition = $1`,
			`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
			 select p.partition, 'items', k, p.max_commit_seq + i
			   from syncpg.sync_partitions as p, generate_series(1, $2::int) as i,
			        unnest(array['project=p' || (p.max_commit_seq + i) % 10, 'team=t']) as k where p.partition = $1 and $3::bigint is not null`,
			`insert into syncpg.sync_tombstones (partition, table_name, row_id, commit_seq)
			 select p.partition, 'items', '1-' || p.max_commit_seq + i, p.max_commit_seq + i
			   from syncpg.sync_partitions as p, generate_series(1, $2::int) as i where p.partition = $1 and $3::bigint is not null`,
			`insert into syncpg.sync_push_results (partition, client_id, client_commit_id, status, commit_seq, results, recorded_at_ms, outcome_id, schema_version)
			 select p.partition, 'w', (p.max_commit_seq + i)::text, 1, p.max_commit_seq + i, '\x01', $3::bigint, gen_random_uuid(), 1
			   from syncpg.sync_partitions as p, generate_series(1, $2::int) as i where p.partition = $1`,
			`update syncpg.sync_partitions set max_commit_seq = max_commit_seq + $2::int where partition = $1 and $3::bigint is not null`,
		} {
			if _, err := tx.Exec(t.Context(), sql, partition, n, start.Add(-age).UnixMilli()); err != nil {
				return err
			}
		}
		return nil
	}))
}

// client records the newest pull of a client; a cursor of nil is of one that never pulled.
func (b *bundle) client(t testing.TB, partition, id string, cursor *int64, age time.Duration) {
	t.Helper()
	b.exec(t, `insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		values ($1, $2, 'ada', 2, $3, '[]', 0, $4) on conflict (partition, client_id) do update
		set cursor = excluded.cursor, updated_at_ms = excluded.updated_at_ms`, partition, id, cursor, start.Add(-age).UnixMilli())
}

// left is what is left of a partition's log: how many rows of each kind, and the least seq
// among them.
type left struct {
	Horizon, Commits, Changes, Scopes, Tombstones, First int64
}

func (b *bundle) left(t testing.TB, partition string) left {
	t.Helper()
	rows, err := b.db.Pool.Query(t.Context(), `
		select (select horizon_seq from syncpg.sync_partitions where partition = $1),
		       (select count(*) from syncpg.sync_commits where partition = $1),
		       (select count(*) from syncpg.sync_changes where partition = $1),
		       (select count(*) from syncpg.sync_change_scopes where partition = $1),
		       (select count(*) from syncpg.sync_tombstones where partition = $1),
		       coalesce(least((select min(commit_seq) from syncpg.sync_commits where partition = $1),
		                      (select min(commit_seq) from syncpg.sync_changes where partition = $1),
		                      (select min(commit_seq) from syncpg.sync_change_scopes where partition = $1),
		                      (select min(commit_seq) from syncpg.sync_tombstones where partition = $1)), 0)`, partition)
	require.NoError(t, err)
	l, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[left])
	require.NoError(t, err)
	return l
}

// connect opens a connection of its own.
func (b *bundle) connect(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}
