package fanout_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// touched is what a statement costs in buffers. It fails on a sequential scan.
func touched(t *testing.T, conn *pgx.Conn, sql string) (buffers, rows int) {
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
			Rows int `json:"Actual Rows"`
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal(plan, &parsed))
	require.Equal(t, before, scans(), "sequential scans of %s", sql)
	require.NoError(t, tx.Rollback(t.Context()))
	return parsed[0].Plan.Hit + parsed[0].Plan.Read, parsed[0].Plan.Rows
}

// TestPlanCliff: plans made while the log was empty serve as well as fresh ones when
// 100,000 changes of 5,000 partitions are there, without ANALYZE.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = old.Close(t.Context()) })
	statements := []struct {
		name string
		sql  string
		rows int // the one that ends a partition included
		most int // buffers
	}{
		{"the position of a partition", `select * from syncpg.sync_read_news('{p1}', '{0}', -1, 0, 0, 1)`, 1, 40},
		{"the newest commit", `select * from syncpg.sync_read_news('{p1}', '{9999}', 1000, 256, 1e9::bigint, 1e9::bigint)`, 12, 100},
		{"100 commits in the middle", `select * from syncpg.sync_read_news('{p1}', '{5000}', 10000, 100, 1e9::bigint, 1e9::bigint)`, 1101, 100 * 25},
		{"100 commits that are too large", `select * from syncpg.sync_read_news('{p1}', '{5000}', 10000, 100, 10, 1e9::bigint)`, 1101, 100 * 25},
		{"nothing new", `select * from syncpg.sync_read_news('{p1,q1}', '{10000,0}', 1000, 256, 1e9::bigint, 1e9::bigint)`, 2, 40},
		{"1000 partitions, one with news", `select * from syncpg.sync_read_news(array(select case i when 500 then 'p1' else 'q' || i end from generate_series(1, 1000) as i),
			array(select case i when 500 then 9999 else 0 end from generate_series(1, 1000) as i), 1000, 256, 1e9::bigint, 1e9::bigint)`, 1011, 10_000},
		{"looking at 1000 partitions", `select * from syncpg.sync_find_news(array(select case i when 500 then 'p1' else 'q' || i end from generate_series(1, 1000) as i),
			array(select 0 from generate_series(1, 1000) as i), array(select 'e' from generate_series(1, 1000) as i), 0)`, 1, 10_000},
		{"looking at one", `select * from syncpg.sync_find_news('{p1}', '{0}', '{e}', 0)`, 1, 40},
	}
	for range 7 {
		for _, s := range statements {
			_, err := old.Exec(t.Context(), s.sql)
			require.NoError(t, err)
		}
	}
	for _, sql := range []string{
		`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
		 select p, s, 'w', s::text, 'alice', 0, 10 from generate_series(1, 10000) as s, unnest(array['p1', 'p2']) as p`,
		`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		 select p, s, i, 'docs', 'd' || s || i, 1, 1, array['org=o' || i], decode(repeat('00', 100), 'hex')
		   from generate_series(1, 10000) as s, generate_series(0, 9) as i, unnest(array['p1', 'p2']) as p`,
		`insert into syncpg.sync_partitions (partition) select 'q' || i from generate_series(1, 5000) as i`,
		`insert into syncpg.sync_partitions (partition, max_commit_seq) values ('p1', 10000), ('p2', 10000)`,
		`insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) select partition, 'e', 0, 0 from syncpg.sync_partitions`,
	} {
		_, err := old.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	fresh, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = fresh.Close(t.Context()) })
	for _, s := range statements {
		_, _ = touched(t, fresh, s.sql) // what a connection reads of the catalog, once
		_, _ = touched(t, old, s.sql)
		now, _ := touched(t, fresh, s.sql)
		then, rows := touched(t, old, s.sql)
		t.Logf("%-32s %5d rows %6d buffers, fresh plan %6d", s.name, rows, then, now)
		require.Equal(t, s.rows, rows, s.name)
		require.LessOrEqual(t, then, 2*now, s.name)
		require.LessOrEqual(t, then, s.most, s.name)
	}
}
