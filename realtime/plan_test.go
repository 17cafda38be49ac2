package realtime_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// touched is what a statement costs in buffers. It fails on a sequential scan, and undoes
// what the statement did.
func touched(t *testing.T, conn *pgx.Conn, sql string) int {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	scans := func() (n int64) {
		require.NoError(t, tx.QueryRow(t.Context(), `select coalesce(sum(seq_scan), 0)::bigint from pg_stat_xact_user_tables where schemaname = 'syncpg'`).Scan(&n))
		return n
	}
	before := scans()
	var plan []byte
	require.NoError(t, tx.QueryRow(t.Context(), `explain (analyze, buffers, timing off, format json) `+sql, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
	var parsed []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal(plan, &parsed))
	require.Equal(t, before, scans(), "sequential scans of %s", sql)
	require.NoError(t, tx.Rollback(t.Context()))
	return parsed[0].Plan.Hit + parsed[0].Plan.Read
}

// TestPlanCliff: plans made while the tables were empty serve as well as fresh ones when
// 40,000 clients are there, without ANALYZE.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	connect := func() *pgx.Conn {
		conn, err := pgx.Connect(t.Context(), db.DSN)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(t.Context()) })
		return conn
	}
	old := connect()
	statements := []struct {
		name     string
		sql      string
		recorded int
		most     int // buffers
	}{
		{"one acknowledgement", `select syncpg.sync_record_acks('{p}', '{c7}', '{ada}', '{9}', '{2}')`, 1, 60},
		{"one that is old", `select syncpg.sync_record_acks('{p}', '{c7}', '{ada}', '{1}', '{2}')`, 0, 60},
		{"200 of one partition", `select syncpg.sync_record_acks(array_fill('p'::text, array[200]), array(select 'c' || i from generate_series(1, 200) as i),
			array_fill('ada'::text, array[200]), array_fill(9::bigint, array[200]), array_fill(2::bigint, array[200]))`, 200, 200 * 25},
		{"200 of as many partitions", `select syncpg.sync_record_acks(array(select 'o' || i from generate_series(1, 200) as i), array_fill('c'::text, array[200]),
			array_fill('ada'::text, array[200]), array_fill(9::bigint, array[200]), array_fill(2::bigint, array[200]))`, 200, 200 * 25},
		{"what a client left", `select * from syncpg.sync_read_client('p', 'c7')`, -1, 40},
	}
	for range 7 {
		for _, s := range statements {
			_, err := old.Exec(t.Context(), s.sql)
			require.NoError(t, err)
		}
	}
	for _, sql := range []string{
		`insert into syncpg.sync_partitions (partition, max_commit_seq) select 'o' || i, 10 from generate_series(1, 20000) as i union all select 'p', 10`,
		`insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		 select 'p', 'c' || i, 'ada', 2, 5, '[]', 0, 1 from generate_series(1, 20000) as i`,
		`insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		 select 'o' || i, 'c', 'ada', 2, 5, '[]', 0, 1 from generate_series(1, 20000) as i`,
	} {
		_, err := old.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	fresh := connect()
	for _, s := range statements {
		touched(t, fresh, s.sql) // what a connection reads of the catalog, once
		touched(t, old, s.sql)
		now, then := touched(t, fresh, s.sql), touched(t, old, s.sql)
		t.Logf("%-28s %6d buffers, fresh plan %6d", s.name, then, now)
		require.LessOrEqual(t, then, 2*now, s.name)
		require.LessOrEqual(t, then, s.most, s.name)
		if s.recorded >= 0 {
			tx, err := old.Begin(t.Context())
			require.NoError(t, err)
			var n int
			require.NoError(t, tx.QueryRow(t.Context(), s.sql).Scan(&n))
			require.Equal(t, s.recorded, n, s.name)
			require.NoError(t, tx.Rollback(t.Context()))
		}
	}
}
