package schemaddl_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parse(t testing.TB, ir string) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(ir))
	require.NoError(t, err)
	return s
}

// oneTable is an IR of one table with extra members spliced in.
func oneTable(version int, table, columns, extra string) string {
	return fmt.Sprintf(`{"irVersion":1,"schemaVersion":%d,"tables":[{"name":%q,"primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}%s],
		"scopes":[{"pattern":"team:{team}"}]%s}]}`, version, table, columns, extra)
}

func install(t testing.TB, pool *pgxpool.Pool, s *schema.Schema, o schemaddl.Options) error {
	t.Helper()
	return schemaddl.Install(t.Context(), pool, s, o)
}

// catalog renders every relation, column and function of the database, with their
// row versions, so that any DDL shows.
func catalog(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	var all string
	require.NoError(t, pool.QueryRow(t.Context(), `
		select coalesce(string_agg(line, e'\n' order by line), '') from (
			select format('%s %s %s', c.oid, c.relname, c.xmin) as line from pg_catalog.pg_class as c
			 where c.relnamespace = any(array['public', 'syncpg']::regnamespace[])
			union all
			select format('%s %s %s', p.oid, p.proname, p.xmin) from pg_catalog.pg_proc as p
			 where p.pronamespace = 'syncpg'::regnamespace) as lines`).Scan(&all))
	return all
}

func TestInstallIsIdempotentAtTheSameVersion(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, string(sample.IR()))
	require.ErrorIs(t, schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}), schemaddl.ErrNotInstalled)
	require.NoError(t, install(t, pool, s, schemaddl.Options{Now: time.UnixMilli(7)}))
	before := catalog(t, pool)
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	require.NoError(t, schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}))
	require.Equal(t, before, catalog(t, pool), "reopening writes no DDL")
}

func TestInstallersAtOnceInstallOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 8})
	s := parse(t, string(sample.IR()))
	errs := make(chan error, 8)
	for range 8 {
		go func() { errs <- schemaddl.Install(context.WithoutCancel(t.Context()), db.Pool, s, schemaddl.Options{}) }()
	}
	for range 8 {
		require.NoError(t, <-errs)
	}
}

func TestInstallRefusesAnotherVersion(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, oneTable(2, "a", "", "")), schemaddl.Options{}))
	for _, version := range []int{1, 3} {
		var verr *schemaddl.VersionError
		require.ErrorAs(t, install(t, pool, parse(t, oneTable(version, "a", "", "")), schemaddl.Options{}), &verr)
		require.Equal(t, [2]int32{2, int32(version)}, [2]int32{verr.Installed, verr.Wanted})
	}
}

func TestInstallRefusesToReplaceAHostsTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `create table public.a (mine text)`)
	require.NoError(t, err)
	err = install(t, pool, parse(t, oneTable(1, "a", "", "")), schemaddl.Options{})
	require.ErrorContains(t, err, "not ours to replace")
	require.ErrorIs(t, schemaddl.Check(t.Context(), pool, parse(t, oneTable(1, "a", "", "")), schemaddl.Options{}), schemaddl.ErrNotInstalled)
}

func TestSchemasThatAreNotForAppTablesAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, oneTable(1, "a", "", ""))
	for _, name := range []string{"syncpg", "pg_app", "information_schema", strings.Repeat("x", 64), "a\x00b"} {
		o := schemaddl.Options{AppSchema: name}
		_, err := schemaddl.Plan(s, o)
		require.Error(t, err)
		require.ErrorContains(t, install(t, pool, s, o), err.Error())
	}
	require.ErrorIs(t, schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}), schemaddl.ErrNotInstalled)
}

func TestCheckComparesTheLayout(t *testing.T) {
	t.Parallel()
	const columns = `,{"name":"n","type":"integer","nullable":true}`
	for _, tc := range []struct {
		name, ddl string
		ir        string // another schema of the same version
		want      schemaddl.LayoutError
	}{
		{
			name: "missing table", ddl: `drop table public.a cascade`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Reason: "missing table"},
		},
		{
			name: "missing column", ddl: `alter table public.a drop column n cascade`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Column: "n", Reason: "missing column"},
		},
		{
			name: "wrong type", ddl: `alter table public.a alter column n type text`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Column: "n", Reason: "wrong type"},
		},
		{
			name: "missing system column", ddl: `alter table public.a drop column _sync_payload cascade`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Column: "_sync_payload", Reason: "missing column"},
		},
		{
			name: "system column of another type", ddl: `alter table public.a alter column _sync_server_version type numeric`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Column: "_sync_server_version", Reason: "wrong type"},
		},
		{
			name: "system column of other nullability", ddl: `alter table public.a alter column _sync_payload drop not null`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Column: "_sync_payload", Reason: "wrong nullability"},
		},
		{
			name: "other primary key", ddl: `alter table public.a drop constraint a_pkey, add primary key (_sync_row_id, _sync_partition)`,
			want: schemaddl.LayoutError{Code: ssp2.CodeStoragePhysicalLayoutMismatch, Table: "a", Reason: "wrong primary key"},
		},
		{
			name: "stored column of another type", ir: oneTable(1, "a", `,{"name":"n","type":"float","nullable":true}`, ""),
			want: schemaddl.LayoutError{Code: ssp2.CodeStorageStoredLayoutMismatch, Table: "a", Column: "n", Reason: "the schema changed without a new version"},
		},
		{
			name: "stored column is gone", ir: oneTable(1, "a", "", ""),
			want: schemaddl.LayoutError{Code: ssp2.CodeStorageStoredLayoutMismatch, Table: "a", Column: "n", Reason: "the schema changed without a new version"},
		},
		{
			name: "column that is not stored", ir: oneTable(1, "a", columns+`,{"name":"m","type":"float","nullable":true}`, ""),
			want: schemaddl.LayoutError{Code: ssp2.CodeStorageStoredLayoutMismatch, Table: "a", Column: "m", Reason: "the schema changed without a new version"},
		},
		{
			name: "another index than stored", ir: oneTable(1, "a", columns, `,"indexes":[{"name":"a_by_n","columns":["n"]}]`),
			want: schemaddl.LayoutError{Code: ssp2.CodeStorageStoredLayoutMismatch, Table: "a", Reason: "the schema changed without a new version"},
		},
		{
			name: "another table than stored", ir: oneTable(1, "b", columns, ""),
			want: schemaddl.LayoutError{Code: ssp2.CodeStorageStoredLayoutMismatch, Table: "b", Reason: "the schema changed without a new version"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			s := parse(t, oneTable(1, "a", columns, ""))
			require.NoError(t, install(t, pool, s, schemaddl.Options{}))
			if tc.ddl != "" {
				_, err := pool.Exec(t.Context(), tc.ddl)
				require.NoError(t, err)
			}
			if tc.ir != "" {
				s = parse(t, tc.ir)
			}
			before := catalog(t, pool)
			for _, err := range []error{schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}), install(t, pool, s, schemaddl.Options{})} {
				var lerr *schemaddl.LayoutError
				require.ErrorAs(t, err, &lerr)
				got := schemaddl.LayoutError{Code: lerr.Code, Table: lerr.Table, Column: lerr.Column, Reason: lerr.Reason}
				require.Equal(t, tc.want, got)
				require.NotEmpty(t, lerr.Expected)
				require.NotEmpty(t, lerr.Actual)
			}
			require.Equal(t, before, catalog(t, pool), "a refusal writes no DDL")
		})
	}
}

func TestInstallReplacesFunctionsOfAnotherBuild(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, oneTable(1, "a", "", ""))
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	_, err := pool.Exec(t.Context(), `update syncpg.sync_schema_meta set functions_digest = 'older'`)
	require.NoError(t, err)
	require.ErrorIs(t, schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}), schemaddl.ErrFunctionsStale)
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	require.NoError(t, schemaddl.Check(t.Context(), pool, s, schemaddl.Options{}))
}

func TestIndexNames(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ declared, want string }{
		{"tasks_by_done", "sync_ix_tasks_by_done"},
		{strings.Repeat("x", 55), "sync_ix_" + strings.Repeat("x", 55)},
		// FNV-1a 64 of 56 times "x".
		{strings.Repeat("x", 56), "sync_ix_9bebdf7a0cf51405"},
	} {
		got := schemaddl.IndexName(tc.declared)
		require.LessOrEqual(t, len(got), 63)
		require.Equal(t, tc.want, got)
	}
}

func TestOwnedIndexes(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, oneTable(1, "a", `,{"name":"n","type":"integer","nullable":true}`,
		`,"indexes":[{"name":"a_by_n","columns":["n","team"],"unique":true}]`)), schemaddl.Options{}))
	rows, err := pool.Query(t.Context(), `select indexname || ': ' || regexp_replace(indexdef, '^.* USING ', '') from pg_catalog.pg_indexes
		where schemaname = 'public' and indexname like 'sync_ix_%' order by indexname collate "C"`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{
		"sync_ix_a__scope_team: btree (_sync_partition, team, _sync_row_id)",
		"sync_ix_a_by_n: btree (_sync_partition, n, team)",
	}, got)
}

func TestAnyNameCanBeInstalled(t *testing.T) {
	t.Parallel()
	for _, table := range []string{`select`, `Größe "x"`, `it's`, `back\slash`, `$body$`, strings.Repeat("t", 63)} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			s := parse(t, oneTable(1, table, `,{"name":"na'me \"$body$","type":"json","nullable":true}`, ""))
			o := schemaddl.Options{AppSchema: `app's "schema"`}
			require.NoError(t, install(t, pool, s, o))
			require.NoError(t, schemaddl.Check(t.Context(), pool, s, o))
			tab := s.Tables[0]
			_, err := pool.Exec(t.Context(), schemaddl.WriteRowsSQL(tab), "p", []string{}, []string{"r1"}, []int64{1}, [][]byte{{1}}, []*string{nil},
				[]string{"r1", "t1", `{"a":1}`}, []int64{}, []float64{}, []bool{}, [][]byte{})
			require.NoError(t, err)
			var found int
			require.NoError(t, pool.QueryRow(t.Context(), `select count(*) from syncpg.sync_prefetch_rows('p', array[$1::text], array['r1'])`, table).Scan(&found))
			require.Equal(t, 1, found)
		})
	}
}

func TestAColumnMayBeNamedLikeAParameter(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, oneTable(1, "a", `,{"name":"p_partition","type":"string","nullable":true},{"name":"v_rows","type":"string","nullable":true},{"name":"ord","type":"string","nullable":true}`, ""))
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	write := func(deleted []string, ids ...string) {
		var texts []string
		for _, id := range ids {
			texts = append(texts, id, "t1", "other", "v", "o")
		}
		n := len(ids)
		_, err := pool.Exec(t.Context(), schemaddl.WriteRowsSQL(s.Tables[0]), "p", deleted, ids, make([]int64, n), make([][]byte, n), make([]*string, n),
			texts, []int64{}, []float64{}, []bool{}, [][]byte{})
		require.NoError(t, err)
	}
	payloads := func() (n int) {
		require.NoError(t, pool.QueryRow(t.Context(), `select count(*) from syncpg.sync_prefetch_rows('p', array['a', 'a'], array['r1', 'r2'])`).Scan(&n))
		return n
	}
	_, err := pool.Exec(t.Context(), `alter table public.a alter column _sync_payload drop not null`)
	require.NoError(t, err)
	write([]string{}, "r1", "r2")
	require.Equal(t, 2, payloads())
	write([]string{"r1"})
	require.Equal(t, 1, payloads())
}

func TestTablesThatAreNotMaterialized(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, oneTable(1, "vault", `,{"name":"secret","type":"bytes","nullable":true,"encrypted":true,"declaredType":"string"}`, ""))
	require.False(t, s.Tables[0].Materialize)
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	rows, err := pool.Query(t.Context(), `select attname::text from pg_catalog.pg_attribute
		where attrelid = 'public.vault'::regclass and attnum > 0 order by attnum`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"team", "_sync_partition", "_sync_row_id", "_sync_server_version", "_sync_payload", "_sync_column_versions"}, got)
}

func TestAWideTableCanBeInstalled(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var columns strings.Builder
	for i := range 1200 {
		fmt.Fprintf(&columns, `,{"name":"c%d","type":"integer","nullable":true}`, i)
	}
	s := parse(t, oneTable(1, "wide", columns.String(), ""))
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	_, err := pool.Exec(t.Context(), schemaddl.WriteRowsSQL(s.Tables[0]), "p", []string{}, []string{"r1"}, []int64{1}, [][]byte{{1}}, []*string{nil},
		[]string{"r1", "t1"}, make([]*int64, 1200), []float64{}, []bool{}, [][]byte{})
	require.NoError(t, err)
}

// TestMigrationsAppliedAnew: a migration that goes down and up again leaves the
// functions it made without the bodies generated for the schema; serving with those
// would take every row for absent.
func TestMigrationsAppliedAnew(t *testing.T) {
	t.Parallel()
	for _, down := range []int{1, 2, 3} { // 3 and 4 make them
		t.Run(fmt.Sprint("down to ", down), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.Options{})
			s := parse(t, childrenIR)
			conn, err := pgx.Connect(t.Context(), db.DSN)
			require.NoError(t, err)
			defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
			m, err := migrations.New(conn, migrations.Options{})
			require.NoError(t, err)
			functions := func() []string {
				rows, err := conn.Query(t.Context(), `select p.oid::regprocedure::text from pg_catalog.pg_proc as p where p.pronamespace = 'syncpg'::regnamespace order by 1`)
				require.NoError(t, err)
				names, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				return names
			}
			require.NoError(t, m.Down(t.Context(), down))
			without := functions()
			require.NoError(t, m.Up(t.Context()))
			require.NoError(t, install(t, db.Pool, s, schemaddl.Options{}))
			require.NoError(t, m.Down(t.Context(), down))
			if down < 3 {
				require.Equal(t, without, functions(), "nothing generated is left")
			}
			require.NoError(t, m.Up(t.Context()))

			require.ErrorIs(t, schemaddl.Check(t.Context(), db.Pool, s, schemaddl.Options{}), schemaddl.ErrFunctionsStale)
			require.NoError(t, install(t, db.Pool, s, schemaddl.Options{}))
			require.NoError(t, schemaddl.Check(t.Context(), db.Pool, s, schemaddl.Options{}))
		})
	}
}
