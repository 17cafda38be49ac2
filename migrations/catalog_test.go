package migrations_test

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// functions are the functions of the schema with their volatility: "immutable" is one that depends on its arguments
// alone, "stable" one that reads tables or settings, "volatile" one that writes, or that reads what it waited for.
// A new function is entered here with the answer that its author gives.
var functions = map[string]string{
	"sync_admit_push":               "volatile",
	"sync_append_commits":           "volatile",
	"sync_check_writer_fence":       "volatile",
	"sync_claim_reactions":          "volatile",
	"sync_compact_log":              "volatile",
	"sync_count_changes":            "stable",
	"sync_delete_expired_segments":  "volatile",
	"sync_enqueue_reactions":        "volatile",
	"sync_extend_reaction":          "volatile",
	"sync_find_children":            "stable",
	"sync_find_lease":               "stable",
	"sync_find_news":                "stable",
	"sync_find_outcomes":            "stable",
	"sync_find_segments":            "stable",
	"sync_issue_lease":              "volatile",
	"sync_list_due_partitions":      "stable",
	"sync_list_prunable_partitions": "stable",
	"sync_list_reactions":           "stable",
	"sync_live_rows":                "stable",
	"sync_lock_tables":              "volatile",
	"sync_open_partition":           "volatile",
	"sync_open_segment":             "stable",
	"sync_plan_prune":               "stable",
	"sync_prefetch_rows":            "stable",
	"sync_prune_log":                "volatile",
	"sync_prune_reactions":          "volatile",
	"sync_put_segment":              "volatile",
	"sync_read_client":              "stable",
	"sync_read_news":                "stable",
	"sync_read_pull_gate":           "stable",
	"sync_read_segment_chunk":       "stable",
	"sync_read_windows":             "stable",
	"sync_record_acks":              "volatile",
	"sync_record_client":            "volatile",
	"sync_record_outcomes":          "volatile",
	"sync_renew_epoch":              "volatile",
	"sync_retry_reaction":           "volatile",
	"sync_rotate_epoch":             "volatile",
	"sync_rotate_epochs":            "volatile",
	"sync_scan_rows":                "stable",
	"sync_settle_reaction":          "volatile",
	"sync_wire_bool":                "immutable",
	"sync_wire_bytes":               "immutable",
	"sync_wire_f64":                 "immutable",
	"sync_wire_i64":                 "immutable",
	"sync_wire_null_bitmap":         "immutable",
	"sync_wire_reverse8":            "immutable",
	"sync_wire_str":                 "stable", // convert_to looks conversions up in the catalog
	"sync_wire_u32":                 "immutable",
	"sync_writes_singly":            "stable",
}

// securityDefiners run with the rights of their owner. There is none.
var securityDefiners = map[string]bool{}

// notByPartition are the tables that have no partition, and why.
var notByPartition = map[string]string{
	"schema_version":  "made by tern",
	"sync_migrations": "about the schema, not about a partition",
}

type function struct {
	Name, Signature, Language, Volatility, Source string
	Config                                        []string
	Comment                                       *string
	Definer, Public                               bool
}

func catalogFunctions(t *testing.T, pool *pgxpool.Pool) []function {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		select p.proname::text, p.oid::regprocedure::text, l.lanname::text,
		       case p.provolatile when 'i' then 'immutable' when 's' then 'stable' else 'volatile' end,
		       p.prosrc, p.proconfig, obj_description(p.oid, 'pg_proc'), p.prosecdef,
		       p.proacl is null or exists (select from aclexplode(p.proacl) as a where a.grantee = 0)
		  from pg_proc as p join pg_language as l on l.oid = p.prolang
		 where p.pronamespace = 'syncpg'::regnamespace
		 order by 2`)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	return list
}

var (
	sqlComment     = regexp.MustCompile(`--[^\n]*|(?s:/\*.*?\*/)`)
	sqlText        = regexp.MustCompile(`'(?:[^']|'')*'`)
	dynamicExecute = regexp.MustCompile(`(?i)\bexecute\b`)
)

func TestFunctionsOfTheCatalog(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	volatility := map[string]string{}
	for _, f := range catalogFunctions(t, pool) {
		volatility[f.Name] = f.Volatility
		require.Contains(t, f.Config, "search_path=pg_catalog, pg_temp", "%s: pin the search_path", f.Signature)
		require.NotNil(t, f.Comment, "%s: no COMMENT", f.Signature)
		require.NotEmpty(t, strings.TrimSpace(*f.Comment), "%s: empty COMMENT", f.Signature)
		require.False(t, f.Public, "%s: PUBLIC may execute it", f.Signature)
		require.Equal(t, securityDefiners[f.Name], f.Definer, "%s: SECURITY DEFINER", f.Signature)
		require.Contains(t, []string{"sql", "plpgsql"}, f.Language, f.Signature)
		if f.Language == "plpgsql" {
			code := sqlText.ReplaceAllString(sqlComment.ReplaceAllString(f.Source, ""), "''")
			require.NotRegexp(t, dynamicExecute, code, "%s: dynamic EXECUTE", f.Signature)
		}
	}
	require.Empty(t, cmp.Diff(functions, volatility), "functions by volatility")
}

func TestAFreshRoleMayDoNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	tx := pgtest.Tx(t)
	_, err := tx.Exec(ctx, `create role syncpg_test_nobody`)
	require.NoError(t, err)
	for what, sql := range map[string]string{
		"schemas": `select nspname::text from pg_namespace
			where nspname = 'syncpg' and has_schema_privilege('syncpg_test_nobody', oid, 'usage, create')`,
		"functions": `select oid::regprocedure::text from pg_proc
			where pronamespace = 'syncpg'::regnamespace and has_function_privilege('syncpg_test_nobody', oid, 'execute')`,
		"tables": `select oid::regclass::text from pg_class
			where relnamespace = 'syncpg'::regnamespace and relkind in ('r', 'v', 'm', 'p')
			  and has_table_privilege('syncpg_test_nobody', oid, 'select, insert, update, delete, truncate, references, trigger')`,
	} {
		rows, err := tx.Query(ctx, sql)
		require.NoError(t, err)
		granted, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Empty(t, granted, what)
	}
}

func TestTablesOfTheCatalog(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	rows, err := pool.Query(t.Context(), `
		select c.relname::text, obj_description(c.oid, 'pg_class'),
		       (select a.attname::text from pg_attribute as a where a.attrelid = c.oid and a.attnum = k.conkey[1])
		  from pg_class as c
		  left join pg_constraint as k on k.conrelid = c.oid and k.contype = 'p'
		 where c.relnamespace = 'syncpg'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f')`)
	require.NoError(t, err)
	type table struct {
		Name            string
		Comment, Leader *string
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[table])
	require.NoError(t, err)
	require.Greater(t, len(tables), len(notByPartition))
	for _, tb := range tables {
		if notByPartition[tb.Name] == "made by tern" {
			continue
		}
		require.NotNil(t, tb.Comment, "%s: no COMMENT", tb.Name)
		require.NotEmpty(t, strings.TrimSpace(*tb.Comment), "%s: empty COMMENT", tb.Name)
		require.NotNil(t, tb.Leader, "%s: no primary key", tb.Name)
		if notByPartition[tb.Name] == "" {
			require.Equal(t, "partition", *tb.Leader, "%s: first column of the primary key", tb.Name)
		}
	}
}

func TestIndexesOfTheCatalogAreLedByPartition(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	rows, err := pool.Query(t.Context(), `
		select i.indexrelid::regclass::text
		  from pg_index as i join pg_class as c on c.oid = i.indrelid
		  left join pg_attribute as a on a.attrelid = c.oid and a.attnum = i.indkey[0]
		 where c.relnamespace = 'syncpg'::regnamespace and a.attname is distinct from 'partition' and c.relname <> all($1)`,
		slices.Collect(maps.Keys(notByPartition)))
	require.NoError(t, err)
	odd, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, odd)
}
