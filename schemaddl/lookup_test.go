package schemaddl_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

// lookupIR has indexes over every type that can be indexed, and names that SQL text
// must quote.
const lookupIR = `{"irVersion":1,"schemaVersion":1,"tables":[
	{"name":"p_partition's \"%s\\","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},
		{"name":"team","type":"string","nullable":false},
		{"name":"p_values","type":"integer","nullable":true},
		{"name":"Ke'y \"$1\\","type":"string","nullable":true},
		{"name":"f","type":"float","nullable":true},
		{"name":"b","type":"boolean","nullable":true},
		{"name":"j","type":"json","nullable":true},
		{"name":"y","type":"bytes","nullable":true}],
	 "scopes":[{"pattern":"team:{team}"},{"pattern":"n:{n}","column":"p_values"}],
	 "indexes":[{"name":"by 'two' %s","columns":["p_values","Ke'y \"$1\\"]},{"name":"by_f","columns":["f"]},
		{"name":"by_all","columns":["b","j","y"]}]}]}`

func lookedUp(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (id string, err error) {
		var version int64
		var payload []byte
		err = r.Scan(&id, &version, &payload)
		return id, err
	})
	require.NoError(t, err)
	return ids
}

func TestLookups(t *testing.T) {
	t.Parallel()
	for _, appSchema := range []string{"public", `App "x"`} {
		pool := pgtest.Pool(t)
		quoted := pgx.Identifier{appSchema}.Sanitize()
		if appSchema != "public" {
			_, err := pool.Exec(t.Context(), `create schema `+quoted)
			require.NoError(t, err)
		}
		require.NoError(t, install(t, pool, parse(t, lookupIR), schemaddl.Options{AppSchema: appSchema}))
		const table = `p_partition's "%s\`
		name := quoted + "." + pgx.Identifier{table}.Sanitize()
		for i, row := range []struct {
			partition, team string
			n, key          any
		}{
			{"p", "x", 1, "a"}, {"p", "y", 1, "b"}, {"p", "x", nil, "a"}, {"p", "y", 1, "a"}, {"other", "x", 1, "a"}, {"p", "x", 1, nil}, {"p", "z", nil, nil},
		} {
			_, err := pool.Exec(t.Context(), `insert into `+name+` values ($1, $2, $3, $4, 0.1, true, '{"a":1}', '\x00ff', $5, $1, 1, '\x00', null)`,
				fmt.Sprint("r", i), row.team, row.n, row.key, row.partition)
			require.NoError(t, err)
		}
		one, two, a, null := "1", "2", "a", (*string)(nil)
		yes, doc, raw, tenth := "true", `{"a": 1}`, `\x00ff`, "0.1"
		for _, tc := range []struct {
			index  string
			values []*string
			after  string
			limit  int
			want   []string
		}{
			{"by 'two' %s", []*string{&one, &a}, "", 100, []string{"r0", "r3"}},
			{"by 'two' %s", []*string{&one, &a}, "r0", 100, []string{"r3"}},
			{"by 'two' %s", []*string{&one, &a}, "", 1, []string{"r0"}},
			{"by 'two' %s", []*string{&two, &a}, "", 100, []string{}},
			{"by 'two' %s", []*string{null, &a}, "", 100, []string{"r2"}},
			{"by 'two' %s", []*string{&one, null}, "", 100, []string{"r5"}},
			{"by 'two' %s", []*string{null, null}, "", 100, []string{"r6"}},
			{"by 'two' %s", []*string{null, null}, "r6", 100, []string{}},
			{"by_f", []*string{&tenth}, "r1", 2, []string{"r2", "r3"}},
			{"by_all", []*string{&yes, &doc, &raw}, "r3", 100, []string{"r5", "r6"}},
			{"by_all", []*string{&yes, null, &raw}, "", 100, []string{}},
		} {
			require.Equal(t, tc.want, lookedUp(t, pool, schemaddl.ScanByIndexSQL, "p", table, tc.index, tc.values, tc.after, tc.limit), "%s in %s", tc.index, appSchema)
		}
		for _, tc := range []struct {
			scopes, after string
			limit         int
			want          []string
		}{
			{`{"team":["x"]}`, "", 100, []string{"r0", "r2", "r5"}},
			{`{"team":["y","x","x"]}`, "", 100, []string{"r0", "r1", "r2", "r3", "r5"}},
			{`{"team":["y","x"]}`, "r1", 2, []string{"r2", "r3"}},
			{`{"n":["1"]}`, "", 100, []string{"r0", "r1", "r3", "r5"}},
			{`{"n":["1"],"team":["x","nobody"]}`, "", 100, []string{"r0", "r5"}},
			{`{"team":["X"]}`, "", 100, []string{}},
		} {
			require.Equal(t, tc.want, lookedUp(t, pool, schemaddl.ScanByScopeSQL, "p", table, tc.scopes, tc.after, tc.limit), "%s in %s", tc.scopes, appSchema)
		}
		require.Equal(t, []string{"r1"}, lookedUp(t, pool, schemaddl.FindRowSQL, "p", []string{table}, []string{"r1"}))
		require.Empty(t, lookedUp(t, pool, schemaddl.FindRowSQL, "p", []string{table}, []string{"r4"}))
		for scopes, state := range map[string]string{`{}`: "SY005", `{"team":[]}`: "SY005", `{"team":["x"],"nope":["x"]}`: "SY005"} {
			_, err := pool.Exec(t.Context(), schemaddl.ScanByScopeSQL, "p", table, scopes, "", 1)
			require.ErrorContains(t, err, state, scopes)
		}
		_, err := pool.Exec(t.Context(), schemaddl.ScanByScopeSQL, "p", "nope", `{"team":["x"]}`, "", 1)
		require.ErrorContains(t, err, "42P01")
		_, err = pool.Exec(t.Context(), schemaddl.ScanByIndexSQL, "p", table, "nope", []string{"x"}, "", 1)
		require.ErrorContains(t, err, "42704")
	}
}

func TestLookupFunctionsKeepTheRules(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, lookupIR), schemaddl.Options{}))
	for _, name := range []string{"sync_scan_by_scope", "sync_scan_by_index"} {
		var volatility, comment string
		var settings []string
		var public bool
		require.NoError(t, pool.QueryRow(t.Context(), `
			select p.provolatile::text, p.proconfig, obj_description(p.oid, 'pg_proc'), exists (
			         select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a where a.grantee = 0)
			  from pg_catalog.pg_proc as p where p.oid = ('syncpg.' || $1)::regproc`, name).Scan(&volatility, &settings, &comment, &public))
		require.Equal(t, "s", volatility)
		require.Contains(t, settings, "search_path=pg_catalog, pg_temp")
		require.Contains(t, settings, "enable_seqscan=off")
		require.Contains(t, comment, "Takes no locks.")
		require.False(t, public)
	}
}

// TestLookupsOfAFullTable: what a connection planned while the table was empty still
// reads no more than it returns when the table has filled up,
// and so does what it plans then.
func TestLookupsOfAFullTable(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 1})
	require.NoError(t, install(t, db.Pool, parse(t, `{"irVersion":1,"schemaVersion":1,"tables":[
		{"name":"a","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false},
			{"name":"state","type":"string","nullable":true},{"name":"n","type":"integer","nullable":true}],
		 "scopes":[{"pattern":"team:{team}"}],"indexes":[{"name":"by_state","columns":["team","state","n"]}]}]}`), schemaddl.Options{}))
	lookups := []struct {
		name, sql string
		args      []any
	}{
		{"row", schemaddl.FindRowSQL, []any{"p", []string{"a"}, []string{"r50000"}}},
		{"scope", schemaddl.ScanByScopeSQL, []any{"p", "a", `{"team":["t1","t2"]}`, "r5", 10}},
		{"index", schemaddl.ScanByIndexSQL, []any{"p", "a", "by_state", []string{"t1", "open", "501"}, "", 10}},
		{"index with NULL", schemaddl.ScanByIndexSQL, []any{"p", "a", "by_state", []any{"t1", nil, "1"}, "", 10}},
	}
	for _, l := range lookups {
		for range 7 {
			require.Empty(t, lookedUp(t, db.Pool, l.sql, l.args...))
		}
	}
	_, err := db.Pool.Exec(t.Context(), `insert into public.a select 'r' || i, 't' || i % 10, case when i % 1000 <> 1 then 'open' end, i % 1000, 'p', 'r' || i, 1, '\x00', null
		from generate_series(1, 100000) as i`)
	require.NoError(t, err)
	requireFewBuffers := func() {
		for _, l := range lookups {
			var plan []struct {
				Plan struct {
					Hit  int64   `json:"Shared Hit Blocks"`
					Read int64   `json:"Shared Read Blocks"`
					Rows float64 `json:"Actual Rows"`
				}
			}
			buffers := int64(math.MaxInt64)
			for range 3 { // whoever plans anew meanwhile reads the catalog
				require.NoError(t, db.Pool.QueryRow(t.Context(), `explain (analyze, buffers, format json) `+l.sql, l.args...).Scan(&plan))
				buffers = min(buffers, plan[0].Plan.Hit+plan[0].Plan.Read)
				require.Positive(t, plan[0].Plan.Rows, l.name)
			}
			t.Logf("%s: %v rows, %d buffers", l.name, plan[0].Plan.Rows, buffers)
			require.Less(t, buffers, int64(400), l.name)
		}
	}
	requireFewBuffers()
	_, err = db.Pool.Exec(t.Context(), `analyze public.a`)
	require.NoError(t, err)
	requireFewBuffers()
}
