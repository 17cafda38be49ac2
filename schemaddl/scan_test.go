package schemaddl_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

// scanIR has names that SQL text must quote, columns named like parameters and
// variables of the function, and a table that keeps only its scope columns.
const scanIR = `{"irVersion":1,"schemaVersion":1,"tables":[
	{"name":"Or'der \"%s\\","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},
		{"name":"v_after","type":"string","nullable":false},
		{"name":"Sel'ect \"$1\\","type":"integer","nullable":true},
		{"name":"p_partition","type":"boolean","nullable":false}],
	 "scopes":[{"pattern":"a:{v_after}"},{"pattern":"b:{it's \"b\"}","column":"Sel'ect \"$1\\"},{"pattern":"c:{p_partition}"}]},
	{"name":"secrets","primaryKey":"id","materialize":false,"columns":[
		{"name":"id","type":"string","nullable":false},
		{"name":"team","type":"string","nullable":false},
		{"name":"note","type":"string","nullable":false}],
	 "scopes":[{"pattern":"team:{team}"}]}]}`

// scan reads one page and returns the row ids, and where to go on.
func scan(t *testing.T, pool *pgxpool.Pool, table, scopes string, first int, after string, limit int) (ids []string, more bool) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `select coalesce(row_id, ''), value_ord from syncpg.sync_scan_rows(
		'p', array[$1], array[$2], array[null::bigint], array[$3::integer], array[$4], $5, 1000000, 1000000)`, table, scopes, first, after, limit)
	require.NoError(t, err)
	var id string
	var value *int
	_, err = pgx.ForEachRow(rows, []any{&id, &value}, func() error {
		if id == "" {
			more = value != nil
		} else {
			ids = append(ids, id)
		}
		return nil
	})
	require.NoError(t, err)
	return ids, more
}

func TestScanRowsOfAnyName(t *testing.T) {
	t.Parallel()
	for _, appSchema := range []string{"public", `App "x"`} {
		pool := pgtest.Pool(t)
		quoted := pgx.Identifier{appSchema}.Sanitize()
		if appSchema != "public" {
			_, err := pool.Exec(t.Context(), `create schema `+quoted)
			require.NoError(t, err)
		}
		require.NoError(t, install(t, pool, parse(t, scanIR), schemaddl.Options{AppSchema: appSchema}))
		odd := quoted + "." + pgx.Identifier{`Or'der "%s\`}.Sanitize()
		for i, row := range []struct {
			partition, a string
			b            any
			c            bool
		}{
			{"p", "x", 1, true}, {"p", "x", 2, false}, {"p", "y", 1, true}, {"p", "y", nil, true}, {"other", "x", 1, true}, {"p", "x", 1, false},
		} {
			id := fmt.Sprint("r", i)
			_, err := pool.Exec(t.Context(), `insert into `+odd+` values ($1, $2, $3, $4, $5, $1, 1, '\x00', null)`, id, row.a, row.b, row.c, row.partition)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `insert into `+quoted+`.secrets values ($1, $2, $3, 1, '\x00', null)`, row.a, row.partition, id)
			require.NoError(t, err)
		}
		for _, tc := range []struct {
			table, scopes string
			want          []string
		}{
			{`Or'der "%s\`, `{"v_after":["x"]}`, []string{"r0", "r1", "r5"}},
			{`Or'der "%s\`, `{"v_after":["x","y"]}`, []string{"r0", "r1", "r5", "r2", "r3"}},
			{`Or'der "%s\`, `{"it's \"b\"":["1"]}`, []string{"r0", "r2", "r5"}},
			{`Or'der "%s\`, `{"p_partition":["true"]}`, []string{"r0", "r2", "r3"}},
			{`Or'der "%s\`, `{"it's \"b\"":["1","2"],"v_after":["x"]}`, []string{"r0", "r5", "r1"}},
			{`Or'der "%s\`, `{"it's \"b\"":["1"],"v_after":["x","y"],"p_partition":["false"]}`, []string{"r5"}},
			{`Or'der "%s\`, `{"v_after":["X"]}`, nil},
			{"secrets", `{"team":["y"]}`, []string{"r2", "r3"}},
		} {
			got, more := scan(t, pool, tc.table, tc.scopes, 1, "", 100)
			require.Equal(t, tc.want, got, "%s in %s", tc.scopes, appSchema)
			require.False(t, more)
			for n := range tc.want {
				got, more = scan(t, pool, tc.table, tc.scopes, 1, "", n+1)
				require.Equal(t, tc.want[:n+1], got)
				require.Equal(t, n+1 < len(tc.want), more)
			}
		}
		got, more := scan(t, pool, `Or'der "%s\`, `{"v_after":["x","y"]}`, 1, "r1", 2)
		require.Equal(t, []string{"r5", "r2"}, got)
		require.True(t, more)
		got, more = scan(t, pool, `Or'der "%s\`, `{"v_after":["x","y"]}`, 2, "r2", 2)
		require.Equal(t, []string{"r3"}, got)
		require.False(t, more)
	}
}

func TestScanRowsOfUnknownTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, scanIR), schemaddl.Options{}))
	_, err := pool.Exec(t.Context(), `select * from syncpg.sync_scan_rows('p', '{nope}', array['{"team":["x"]}'], array[null::bigint], '{1}', '{""}', 1, 1, 1)`)
	require.ErrorContains(t, err, "42P01")
}

// TestScanRowsKeepsItsPromises: replacing the function keeps what the migration says
// of it.
func TestScanRowsKeepsItsPromises(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, scanIR), schemaddl.Options{}))
	var volatility, comment string
	var settings []string
	var public bool
	require.NoError(t, pool.QueryRow(t.Context(), `
		select p.provolatile::text, p.proconfig, obj_description(p.oid, 'pg_proc'), exists (
		         select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a where a.grantee = 0)
		  from pg_catalog.pg_proc as p where p.oid = 'syncpg.sync_scan_rows'::regproc`).Scan(&volatility, &settings, &comment, &public))
	require.Equal(t, "s", volatility)
	require.Contains(t, settings, "search_path=pg_catalog, pg_temp")
	for _, way := range []string{"seqscan", "bitmapscan", "sort", "incremental_sort", "hashjoin", "mergejoin"} {
		require.Contains(t, settings, "enable_"+way+"=off")
	}
	require.Contains(t, comment, "Takes no locks.")
	require.False(t, public)
}
