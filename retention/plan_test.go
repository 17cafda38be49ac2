package retention_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// touched is what a statement costs in buffers. It fails on a sequential scan, and undoes
// what the statement did.
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

// TestPlanCliff: plans made while the tables were empty serve as well as fresh ones when
// two logs of 50,000 commits are there, without ANALYZE; and a batch costs what it deletes,
// however long the log is and however much of it earlier batches deleted.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := b.connect(t)
	const most = `9000000000000000`
	statements := []struct {
		name string
		sql  string
		rows int
		most int // buffers
	}{
		{"a batch of 300 commits", `select * from syncpg.sync_prune_log('p', 'epoch-1', null, null, 1000, 900, false)`, 1, 12_000},
		{"a batch that 2000 clients hold", `select * from syncpg.sync_prune_log('q', 'epoch-1', 0, null, 1000, 900, false)`, 1, 1300},
		{"nothing to prune", `select * from syncpg.sync_prune_log('p', 'epoch-1', null, null, 60000, 900, false)`, 1, 60},
		{"another epoch", `select * from syncpg.sync_prune_log('p', 'epoch-2', null, null, 1000, 900, false)`, 1, 60},
		{"plan, nobody holds", `select * from syncpg.sync_plan_prune('p', null, null, 1000)`, 1, 60},
		{"plan, young commits", `select * from syncpg.sync_plan_prune('q', 0, 0, 1000)`, 1, 1300},
		{"compact 900 changes", `select * from syncpg.sync_compact_log('p', 'epoch-1', 30000, ` + most + `, 900, false)`, 1, 14_000},
		{"compact nothing", `select * from syncpg.sync_compact_log('p', 'epoch-1', 30000, 0, 900, false)`, 1, 150},
		{"partitions", `select * from syncpg.sync_list_prunable_partitions('', 1000, 100)`, 2, 20_000},
		{"partitions after one", `select * from syncpg.sync_list_prunable_partitions('p', 1000, 100)`, 1, 60},
		{"rotate", `select * from syncpg.sync_rotate_epoch('p')`, 1, 100},
	}
	for range 7 {
		for _, s := range statements {
			_, err := old.Exec(t.Context(), s.sql)
			require.NoError(t, err)
		}
	}
	for _, p := range []string{"p", "q"} {
		b.open(t, p)
		b.append(t, p, 50_000, 0)
		b.exec(t, `update syncpg.sync_changes set row_id = (commit_seq % 10)::text where partition = $1 and commit_seq > 30000 and change_index = 0`, p)
	}
	for _, sql := range []string{
		`insert into syncpg.sync_clients (partition, client_id, actor_id, cursor, created_at_ms, updated_at_ms)
		 select 'q', 'c' || i, 'ada', 10, 0, 1 from generate_series(1, 2000) as i`,
		`insert into syncpg.sync_clients (partition, client_id, actor_id, cursor, created_at_ms, updated_at_ms)
		 select 'r', 'c' || i, 'ada', 10, 0, 1 from generate_series(1, 20000) as i`,
		`insert into syncpg.sync_partitions (partition) select 'o' || i from generate_series(1, 5000) as i`,
		`insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) select 'o' || i, 'e', 0, 0 from generate_series(1, 5000) as i`,
		`vacuum`,
	} {
		b.exec(t, sql)
	}
	fresh := b.connect(t)
	for _, s := range statements {
		_, _ = touched(t, fresh, s.sql) // what a connection reads of the catalog, once
		_, _ = touched(t, old, s.sql)
		now, _ := touched(t, fresh, s.sql)
		then, rows := touched(t, old, s.sql)
		t.Logf("%-32s %4d rows %6d buffers, fresh plan %6d", s.name, rows, then, now)
		require.Equal(t, s.rows, rows, s.name)
		require.LessOrEqual(t, then, 2*now, s.name)
		require.LessOrEqual(t, then, s.most, s.name)
	}

	// The tenth batch costs what the first does, although nothing was vacuumed.
	batch := statements[0].sql
	first, _ := touched(t, old, batch)
	for range 9 {
		_, err := old.Exec(t.Context(), batch)
		require.NoError(t, err)
	}
	tenth, _ := touched(t, old, batch)
	t.Logf("the tenth batch %d buffers, the first %d", tenth, first)
	require.LessOrEqual(t, tenth, first+first/2)
	require.Equal(t, int64(2700), b.left(t, "p").Horizon)
}
