package reaction_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// touched is what a statement costs in buffers. It fails on a sequential scan, and
// undoes what the statement did.
func touched(t *testing.T, conn *pgx.Conn, sql string, args ...any) (buffers, rows int) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	scans := func() (n int64) {
		require.NoError(t, tx.QueryRow(t.Context(), `select coalesce(sum(seq_scan), 0)::bigint from pg_stat_xact_user_tables where schemaname = 'syncpg'`).Scan(&n))
		return n
	}
	before := scans()
	var plan []byte
	require.NoError(t, tx.QueryRow(t.Context(), `explain (analyze, buffers, timing off, format json) `+sql, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...).Scan(&plan))
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

// TestPlanCliff: plans made while the table was empty serve as well as fresh ones when
// 100,000 reactions are there, without ANALYZE.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = old.Close(t.Context()) })
	statements := []struct {
		name string
		sql  string
		rows int
		most int // buffers
	}{
		{"claim 10 of a backlog", `select * from syncpg.sync_claim_reactions('p1', '{none,mail,hook}', 'o', 20000, 30000, 10)`, 10, 700},
		{"claim 10 of two types", `select * from syncpg.sync_claim_reactions('p1', '{none,rare,hook}', 'o', 20000, 30000, 10)`, 10, 700},
		{"claim of nothing due", `select * from syncpg.sync_claim_reactions('p1', '{mail,hook}', 'o', 0, 30000, 10)`, 0, 40},
		{"claim in an empty partition", `select * from syncpg.sync_claim_reactions('p3', '{mail,hook}', 'o', 20000, 30000, 10)`, 0, 40},
		{"extend", `select syncpg.sync_extend_reaction('p1', 'c', 'k500', 'r', 'o', 30000)`, 1, 80},
		{"complete", `select syncpg.sync_settle_reaction('p1', 'c', 'k500', 'r', 'o', 1, 'completed', 0, null, null)`, 1, 80},
		{"retry a dead letter", `select syncpg.sync_retry_reaction('p1', 'c', 'k49995', 'r', 1)`, 1, 80},
		{"prune 100 of each", `select * from syncpg.sync_prune_reactions('p1', 10100, 100000, 200)`, 1, 1500},
		{"prune nothing", `select * from syncpg.sync_prune_reactions('p1', 0, 0, 1000)`, 1, 40},
		{"due partitions", `select * from syncpg.sync_list_due_partitions('{mail}', 20000, '', 1000)`, 2, 60},
		{"due partitions, none", `select * from syncpg.sync_list_due_partitions('{none}', 20000, '', 1000)`, 0, 60},
		{"list dead letters", `select * from syncpg.sync_list_reactions('p1', 'dead-letter', null, '', '', '', 100)`, 100, 400},
		{"list completed in the middle", `select * from syncpg.sync_list_reactions('p1', 'completed', 25000, 'c', 'k25000', 'r', 100)`, 100, 400},
		{"list leased", `select * from syncpg.sync_list_reactions('p1', 'leased', null, '', '', '', 100)`, 11, 2000},
	}
	for range 7 {
		for _, s := range statements {
			_, err := old.Exec(t.Context(), s.sql)
			require.NoError(t, err)
		}
	}
	// In p1: 38,000 completed, 1,001 dead letters, 10,988 due, 11 leased. In p2 as many.
	_, err = old.Exec(t.Context(), `
		insert into syncpg.sync_reactions (partition, client_id, client_commit_id, reaction_key, idempotency_key, commit_seq,
			reaction_type, reaction_version, payload, max_attempts, created_at_ms, state, attempts,
			due_at_ms, lease_owner, finished_at_ms, failure_code, failed_at_ms)
		select p, 'c', 'k' || i, 'r', 'i', i, case when i % 1000 = 7 then 'rare' when i % 2 = 0 then 'mail' else 'hook' end, 1,
			json_build_object('text', repeat('x', 200)), 10, 1, s, 1,
			case when s in ('pending', 'leased') then i end, case when s = 'leased' then 'o' end,
			case when s in ('completed', 'dead-letter') then i end, case when s = 'dead-letter' then 'x' end,
			case when s = 'dead-letter' then i end
		  from generate_series(1, 50000) as i
		 cross join unnest(array['p1', 'p2']) as p
		 cross join lateral (select case when i % 1000 = 500 and i < 11000 then 'leased' when i < 11000 then 'pending'
		                                 when i < 49000 then 'completed' else 'dead-letter' end) as x(s)`)
	require.NoError(t, err)
	fresh, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = fresh.Close(t.Context()) })
	for _, s := range statements {
		_, _ = touched(t, fresh, s.sql) // what a connection reads of the catalog, once
		_, _ = touched(t, old, s.sql)
		now, _ := touched(t, fresh, s.sql)
		then, rows := touched(t, old, s.sql)
		t.Logf("%-28s %4d rows %6d buffers, fresh plan %6d", s.name, rows, then, now)
		require.Equal(t, s.rows, rows, s.name)
		require.LessOrEqual(t, then, 2*now, s.name)
		require.LessOrEqual(t, then, s.most, s.name)
	}
}
