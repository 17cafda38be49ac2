package pullsvc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

const (
	windowSQL = `select * from syncpg.sync_read_windows('p1', '{docs}', array[$1::text], array[$2::bigint], $3::integer, 1e9::bigint, 1e9::bigint)`
	pageSQL   = `select * from syncpg.sync_scan_rows('p1', '{docs}', array[$1::text], array[null::bigint], '{1}', array[$2::text], $3::integer, 1e9::bigint, 1e9::bigint)`
	openSQL   = `select * from syncpg.sync_open_partition('p1', 'e', $1::bigint)`
	gateSQL   = `select * from syncpg.sync_read_pull_gate('p1', $1::text, '\x00'::bytea)`
	leaseSQL  = `select * from syncpg.sync_find_lease('p1', $1::text, false)`
	issueSQL  = `select syncpg.sync_issue_lease('p1', $1::text, 'alice', $2::text, 'new ' || $1::text, '{}', 0, 1, '\x00', true)`
	recordSQL = `select syncpg.sync_record_client('p1', 'epoch-1', $1::text, 'alice', 2::smallint, 1, null, 0, true)`
)

// touched is what a statement costs: buffers, and sequential scans by table.
func touched(t *testing.T, conn *pgx.Conn, sql string, args ...any) (buffers, rows int) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	before := scans(t, tx)
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
	require.Equal(t, before, scans(t, tx), "sequential scans of %s %v", sql, args)
	require.NoError(t, tx.Rollback(t.Context()))
	return parsed[0].Plan.Hit + parsed[0].Plan.Read, parsed[0].Plan.Rows
}

// scans counts the sequential scans of the session that are not yet in the
// statistics, by table.
func scans(t *testing.T, tx pgx.Tx) map[string]int64 {
	t.Helper()
	rows, err := tx.Query(t.Context(), `select relname::text, seq_scan from pg_stat_xact_user_tables
		where schemaname in ('syncpg', 'public') and seq_scan > 0`)
	require.NoError(t, err)
	all := map[string]int64{}
	var table string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&table, &n}, func() error {
		all[table] = n
		return nil
	})
	require.NoError(t, err)
	return all
}

// TestPlanCliff: plans made while the tables were empty serve as well as fresh ones
// when 100,000 rows and 1,000 commits are there, without ANALYZE.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = old.Close(t.Context()) })
	statements := []struct {
		name string
		sql  string
		args []any
		rows int // the row that ends a subscription included
		most int // buffers
	}{
		{"entering", openSQL, []any{0}, 1, 40},
		{"entering after a minute", openSQL, []any{60_001}, 1, 40},
		{"gate", gateSQL, []any{"c500"}, 1, 40},
		{"record", recordSQL, []any{"c501"}, 1, 40},
		{"lease", leaseSQL, []any{"c500"}, 1, 40},
		{"lease, issued", issueSQL, []any{"c502", nil}, 1, 60},
		{"lease, refreshed", issueSQL, []any{"c500", "l500"}, 1, 60},
		{"window, one key", windowSQL, []any{`{"org":["o3"]}`, 0, 100}, 101, 100 * 25},
		{"window, the end of the log", windowSQL, []any{`{"org":["o3"]}`, 990, 1000}, 2, 100},
		{"window, many keys", windowSQL, []any{`{"org":["o1","o2","o3","o4","o5","o6","o7"]}`, 0, 100}, 101, 100 * 25},
		{"window, two variables", windowSQL, []any{`{"folderId":["9","19","29"],"org":["o3"]}`, 0, 100}, 31, 31 * 25},
		{"window, nobody's key", windowSQL, []any{`{"org":["none"]}`, 0, 1000}, 1, 40},
		{"first page", pageSQL, []any{`{"org":["o3"]}`, "", 1000}, 1001, 1500},
		{"a page in the middle", pageSQL, []any{`{"org":["o3"]}`, "d050000", 1000}, 1001, 1500},
		{"page of many values", pageSQL, []any{`{"folderId":["1","2","3","4"]}`, "", 1000}, 1001, 1500},
		{"page of two variables", pageSQL, []any{`{"folderId":["3"],"org":["o3"]}`, "", 100}, 101, 500},
		{"page of nobody's value", pageSQL, []any{`{"org":["none"]}`, "", 1000}, 1, 40},
	}
	for range 7 {
		for _, s := range statements {
			_, err := old.Exec(t.Context(), s.sql, s.args...)
			require.NoError(t, err)
		}
	}
	for _, sql := range []string{
		`insert into public.docs (id, org, folder, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		 select 'd' || lpad(i::text, 6, '0'), 'o' || i % 10, i / 10 % 100, 'p1', 'd' || lpad(i::text, 6, '0'), 1, decode(repeat('00', 100), 'hex')
		   from generate_series(1, 100000) as i`,
		`insert into public.docs (id, org, folder, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		 select id, org, folder, 'p2', _sync_row_id, 1, _sync_payload from public.docs`,
		`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
		 select p, s, 'w', s::text, 'alice', 0, 10 from generate_series(1, 1000) as s, unnest(array['p1', 'p2']) as p`,
		`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		 select p, s, i, 'docs', 'd' || s || i, 1, 1, array['folderId=' || s % 100, 'org=o' || i], decode(repeat('00', 100), 'hex')
		   from generate_series(1, 1000) as s, generate_series(0, 9) as i, unnest(array['p1', 'p2']) as p`,
		`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
		 select distinct partition, table_name, k, commit_seq from syncpg.sync_changes, unnest(scopes) as k
		  where k like 'folderId=%' or commit_seq % 10 = 9 or k not in ('org=o3')`,
		`delete from syncpg.sync_changes where commit_seq % 10 <> 9 and scopes[2] = 'org=o3'`,
		`insert into syncpg.sync_clients (partition, client_id, actor_id, created_at_ms, updated_at_ms)
		 select p, 'c' || i, 'alice', 0, 0 from generate_series(1, 20000) as i, unnest(array['p1', 'p2']) as p on conflict do nothing`,
		`delete from syncpg.sync_leases`,
		`insert into syncpg.sync_leases (partition, client_id, lease_id, actor_id, allowed_scopes, issued_at_ms, expires_at_ms, signature)
		 select p, 'c' || i, 'l' || i, 'alice', '{}', 0, 1, '' from generate_series(1, 20000) as i, unnest(array['p1', 'p2']) as p where i not in (502)`,
		`insert into syncpg.sync_partitions (partition) select 'q' || i from generate_series(1, 5000) as i`,
		`insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) select 'q' || i, 'e', 0, 0 from generate_series(1, 5000) as i`,
		`update syncpg.sync_partitions set max_commit_seq = 1000 where partition = 'p1'`,
		`update syncpg.sync_partition_registry set last_seen_ms = 0 where partition = 'p1'`,
	} {
		_, err := old.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	fresh, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = fresh.Close(t.Context()) })
	for _, s := range statements {
		_, _ = touched(t, fresh, s.sql, s.args...) // what a connection reads of the catalog, once
		_, _ = touched(t, old, s.sql, s.args...)
		now, _ := touched(t, fresh, s.sql, s.args...)
		then, rows := touched(t, old, s.sql, s.args...)
		t.Logf("%-28s %5d rows %6d buffers, fresh plan %6d", s.name, rows, then, now)
		require.Equal(t, s.rows, rows, s.name)
		require.LessOrEqual(t, then, 2*now, s.name)
		require.LessOrEqual(t, then, s.most, s.name)
	}
}

// TestPlanOfSkewedTable: a value of few rows is found by its own index even by a plan
// made when the statistics knew one value only, where the primary key would have
// been as good.
func TestPlanOfSkewedTable(t *testing.T) {
	t.Parallel()
	b := setup(t)
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	for _, sql := range []string{
		`insert into public.docs (id, org, folder, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		 select i, 'big', 1, 'p1', i, 1, '\x00' from generate_series(1, 50000) as i`,
		`analyze public.docs`,
		`select * from syncpg.sync_scan_rows('p1', '{docs}', array['{"org":["big"]}'], array[null::bigint], '{1}', '{""}', 10, 1000, 1000)`,
		`insert into public.docs (id, org, folder, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		 select 'z' || i, 'small', 1, 'p1', 'z' || i, 1, '\x00' from generate_series(1, 10) as i`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	buffers, rows := touched(t, conn, pageSQL, `{"org":["small"]}`, "", 1000)
	require.Equal(t, 11, rows)
	require.Less(t, buffers, 60)
}

// TestPlanOfManyKeys: a window over many values costs about what it returns, however
// many commits follow under each of them.
func TestPlanOfManyKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	for _, sql := range []string{
		`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
		 select 'p1', s, 'w', s::text, 'alice', 0, 1 from generate_series(1, 20000) as s`,
		`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		 select 'p1', s, 0, 'docs', 'd' || s, 1, 1, array['folderId=' || s % 200, 'org=o1'], '\x00' from generate_series(1, 20000) as s`,
		`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
		 select partition, table_name, k, commit_seq from syncpg.sync_changes, unnest(scopes) as k`,
		`update syncpg.sync_partitions set max_commit_seq = 20000 where partition = 'p1'`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	folders := make([]string, 200)
	for i := range folders {
		folders[i] = strconv.Itoa(i)
	}
	scopes, err := json.Marshal(map[string][]string{"folderId": folders})
	require.NoError(t, err)
	_, _ = touched(t, conn, windowSQL, string(scopes), 0, 100)
	buffers, rows := touched(t, conn, windowSQL, string(scopes), 0, 100)
	t.Logf("%d buffers for %d rows", buffers, rows)
	require.Equal(t, 101, rows)
	require.Less(t, buffers, 10_000)
}

// TestQuietPullOfALongLog: a pull of ten subscriptions that has nothing new to say is one
// round trip, whether the client is at the end of a long log or before commits of
// others; what it reads of the log, it reads by index alone.
func TestQuietPullOfALongLog(t *testing.T) {
	t.Parallel()
	const commits, others = 1_000_000, 1000
	b := setup(t)
	for _, sql := range []string{
		`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
		 select 'p1', s, 'w', s::text, 'alice', 0, 1 from generate_series(1, $1::integer) as s`,
		// Without the changes themselves, which a quiet pull has no need to look at.
		`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
		 select 'p1', 'docs', 'org=o' || case when s > $1 - 1000 then 'others' else (s % 20)::text end, s from generate_series(1, $1::integer) as s`,
		`update syncpg.sync_partitions set max_commit_seq = $1 where partition = 'p1'`,
	} {
		b.exec(t, sql, commits)
	}
	b.exec(t, `vacuum syncpg.sync_change_scopes`)

	var subs []ssp2.Subscription
	for i := range 10 {
		subs = append(subs, sub(strconv.Itoa(i), "docs", commits, docScopes([]string{fmt.Sprint("o", i)}, nil)))
	}
	b.pull(t, request(subs...))
	b.counter.Reset()
	for _, s := range b.pull(t, request(subs...)) {
		require.Empty(t, s.Commits)
		require.Equal(t, int64(commits), s.End.NextCursor)
	}
	require.Equal(t, 1, b.counter.RoundTrips(), b.counter.Statements())

	// What functions do inside is told by a module of the database.
	config, err := pgx.ParseConfig(b.db.DSN)
	require.NoError(t, err)
	var plans []string
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { plans = append(plans, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	for _, sql := range []string{
		`load 'auto_explain'`, `set auto_explain.log_min_duration = 0`, `set auto_explain.log_nested_statements = on`,
		`set auto_explain.log_analyze = on`, `set client_min_messages = log`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	tables, scopes, cursors := make([]string, 10), make([]string, 10), make([]int64, 10)
	for i := range tables {
		tables[i], scopes[i] = "docs", fmt.Sprintf(`{"org":["o%d"]}`, i)
		cursors[i] = commits - others + int64(i%2)*others
	}
	rows := 0
	require.NoError(t, conn.QueryRow(t.Context(), `select count(*) from syncpg.sync_read_windows('p1', $1, $2, $3, 1000, 1000000, 1000000)`,
		tables, scopes, cursors).Scan(&rows))
	require.Equal(t, 5, rows, "those at the end have no window, the others an empty one")
	log := strings.Join(plans, "\n")
	require.NotContains(t, log, "Seq Scan")
	require.Regexp(t, `Index Only Scan using \S+ on sync_change_scopes`, log)
	for _, scan := range regexp.MustCompile(`Scan .*on (sync_change\w*|sync_commits)\b.*`).FindAllString(log, -1) {
		require.Contains(t, log, "Only "+scan, "a quiet pull reads the log itself: %s", log)
	}
}
