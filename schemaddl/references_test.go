package schemaddl_test

import (
	"math"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

// childrenIR has parents by every type of key, and names that SQL text must quote.
const childrenIR = `{"irVersion":1,"schemaVersion":1,"tables":[
	{"name":"s","primaryKey":"id","columns":[{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]},
	{"name":"i","primaryKey":"id","columns":[{"name":"id","type":"integer","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]},
	{"name":"f","primaryKey":"id","columns":[{"name":"id","type":"float","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]},
	{"name":"b","primaryKey":"id","columns":[{"name":"id","type":"boolean","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]},
	{"name":"p_tables's \"%s\\","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false},
		{"name":"p_parents","type":"string","nullable":true},{"name":"Ke'y \"$1\\","type":"integer","nullable":true},
		{"name":"row_id","type":"float","nullable":true},{"name":"ord","type":"boolean","nullable":true}],
	 "scopes":[{"pattern":"team:{team}"}],
	 "references":[
		{"column":"p_parents","parentTable":"s","onDelete":"CASCADE"},{"column":"Ke'y \"$1\\","parentTable":"i","onDelete":"SET NULL"},
		{"column":"row_id","parentTable":"f","onDelete":"RESTRICT"},{"column":"ord","parentTable":"b","onDelete":"CASCADE"}]}]}`

// child is what FindChildrenSQL returns of a row.
type child struct {
	Ord     int
	RowID   string
	Version int64
	Payload []byte
	Columns string
}

func children(t *testing.T, pool *pgxpool.Pool, args ...any) []child {
	t.Helper()
	rows, err := pool.Query(t.Context(), schemaddl.FindChildrenSQL, args...)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[child])
	require.NoError(t, err)
	return found
}

func TestFindChildren(t *testing.T) {
	t.Parallel()
	for _, appSchema := range []string{"public", `App "x"`} {
		pool := pgtest.Pool(t)
		require.NoError(t, install(t, pool, parse(t, childrenIR), schemaddl.Options{AppSchema: appSchema}))
		const table, key = `p_tables's "%s\`, `Ke'y "$1\`
		name := pgx.Identifier{appSchema, table}.Sanitize()
		for _, row := range []struct {
			partition, id string
			s             any
			i             any
			f             any
			b             any
			columns       any
		}{
			{"p", "r2", "x", 1, 1e21, true, nil},
			{"p", "r10", "x", nil, 0, nil, []int64{1, 2}},
			{"p", "r3", "x2", 1, nil, false, nil},
			{"p", "r4", "7", 7, 0.1, nil, nil},
			{"other", "r1", "x", 1, 0, true, nil},
		} {
			_, err := pool.Exec(t.Context(), `insert into `+name+` values ('', 'x', $2, $3, $4, $5, $1, $6, 3, '\x0102', $7)`,
				row.partition, row.s, row.i, row.f, row.b, row.id, row.columns)
			require.NoError(t, err)
		}
		payload := []byte{1, 2}
		tables := []string{table, table, table, table, table, table}
		columns := []string{"p_parents", key, "row_id", "ord", "p_parents", "p_parents"}
		parents := []string{"x", "1", "0", "true", "7", "nobody"}
		require.Equal(t, []child{
			{1, "r10", 3, payload, "{1,2}"},
			{1, "r2", 3, payload, ""},
			{5, "r4", 3, payload, ""},
			{2, "r2", 3, payload, ""},
			{2, "r3", 3, payload, ""},
			{3, "r10", 3, nil, ""},
			{4, "r2", 3, payload, ""},
		}, children(t, pool, "p", tables, columns, parents, 100, 100, 1000), appSchema)
		require.Equal(t, []child{{1, "r2", 3, nil, ""}}, children(t, pool, "p", []string{table}, []string{"row_id"}, []string{"1e+21"}, 100, 100, 0))

		found := children(t, pool, "p", tables, columns, parents, 2, 2, 5)
		require.Len(t, found, 6, "two of each reference")
		require.NotNil(t, found[1].Payload)
		require.Nil(t, found[2].Payload, "more bytes than asked for")
		require.Empty(t, children(t, pool, "p", []string{}, []string{}, []string{}, 100, 100, 1000))
		ordinals := func(limit, most int) (ords []int) {
			for _, c := range children(t, pool, "p", []string{table, table, table, table}, []string{"p_parents", "p_parents", key, "p_parents"}, []string{"x", "7", "1", "x2"}, limit, most, 1000) {
				ords = append(ords, c.Ord)
			}
			return ords
		}
		require.Equal(t, []int{1, 2, 4, 3}, ordinals(1, 100), "one of each parent")
		require.Equal(t, []int{1, 1, 2, 3, 3}, ordinals(100, 3), "three of each reference, those of the first parents")

		for _, parent := range []struct{ table, id string }{{"s", "a"}, {"i", "7"}} {
			_, err := pool.Exec(t.Context(), `insert into `+pgx.Identifier{appSchema, parent.table}.Sanitize()+
				` (id, team, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload) values (`+map[string]string{"s": "'a'", "i": "7"}[parent.table]+`, 'x', 'p', $1, 1, '')`, parent.id)
			require.NoError(t, err)
		}
		var live []int
		require.NoError(t, pool.QueryRow(t.Context(), `select array(select unnest(syncpg.sync_live_rows($1, $2, $3)) order by 1)`, "p",
			[]string{"i", "s", "i", "s", "f"}, []string{"a", "a", "7", "7", "7"}).Scan(&live))
		require.Equal(t, []int{2, 3}, live)
		require.NoError(t, pool.QueryRow(t.Context(), `select syncpg.sync_live_rows($1, $2, $3)`, "other", []string{"s"}, []string{"a"}).Scan(&live))
		require.Empty(t, live)
	}
}

// TestChildrenOfAFullTable: what a connection planned while the tables were empty finds
// children by the index of their reference when they have filled up, and so does what it
// plans then.
func TestChildrenOfAFullTable(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 1})
	require.NoError(t, install(t, db.Pool, parse(t, `{"irVersion":1,"schemaVersion":1,"tables":[
		{"name":"a","primaryKey":"id","columns":[{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]},
		{"name":"c","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false},
			{"name":"owner","type":"string","nullable":true},{"name":"guard","type":"string","nullable":true}],
		 "scopes":[{"pattern":"team:{team}"}],"indexes":[{"name":"by_both","columns":["guard","owner"]}],
		 "references":[{"column":"owner","parentTable":"a","onDelete":"CASCADE"},{"column":"guard","parentTable":"a","onDelete":"RESTRICT"}]}]}`), schemaddl.Options{}))
	probes := []struct {
		name, sql string
		args      []any
		rows      float64
	}{
		{"children of one row", schemaddl.FindChildrenSQL, []any{"p", []string{"c"}, []string{"owner"}, []string{"r77"}, 1001, 1001, 1 << 20}, 10},
		{"children that restrict", schemaddl.FindChildrenSQL, []any{"p", []string{"c"}, []string{"guard"}, []string{"r77"}, 1001, 1001, 1 << 20}, 20},
		{"children of a row without", schemaddl.FindChildrenSQL, []any{"p", []string{"c", "c"}, []string{"owner", "guard"}, []string{"r0", "r0"}, 1001, 1001, 1 << 20}, 0},
		{"a hundred of many", schemaddl.FindChildrenSQL, []any{"p", []string{"c"}, []string{"owner"}, []string{"many"}, 100, 100, 1 << 20}, 100},
		{"parents", `select unnest(syncpg.sync_live_rows($1, $2, $3))`, []any{"p", []string{"a", "a"}, []string{"r77", "nobody"}}, 1},
	}
	for _, p := range probes {
		for range 7 {
			rows, err := db.Pool.Query(t.Context(), p.sql, p.args...)
			require.NoError(t, err)
			rows.Close()
			require.NoError(t, rows.Err())
		}
	}
	_, err := db.Pool.Exec(t.Context(), `
		insert into public.a select 'r' || i, 't', 'p', 'r' || i, 1, '\x00', null from generate_series(1, 20000) as i;
		insert into public.c select 'c' || i, 't', case when i > 50000 then 'many' else 'r' || 1 + i % 5000 end, 'r' || 1 + i % 5000, 'p', 'c' || i, 1, '\x00', null from generate_series(1, 100000) as i;`)
	require.NoError(t, err)
	requireFewBuffers := func() {
		for _, p := range probes {
			var plan []struct {
				Plan struct {
					Hit  int64   `json:"Shared Hit Blocks"`
					Read int64   `json:"Shared Read Blocks"`
					Rows float64 `json:"Actual Rows"`
				}
			}
			buffers := int64(math.MaxInt64)
			for range 3 { // whoever plans anew meanwhile reads the catalog
				require.NoError(t, db.Pool.QueryRow(t.Context(), `explain (analyze, buffers, format json) `+p.sql, p.args...).Scan(&plan))
				buffers = min(buffers, plan[0].Plan.Hit+plan[0].Plan.Read)
			}
			t.Logf("%s: %v rows, %d buffers", p.name, plan[0].Plan.Rows, buffers)
			require.InDelta(t, p.rows, plan[0].Plan.Rows, 0, p.name)
			require.Less(t, buffers, int64(100), p.name)
		}
	}
	requireFewBuffers()
	_, err = db.Pool.Exec(t.Context(), `analyze public.a, public.c`)
	require.NoError(t, err)
	requireFewBuffers()
}

func TestReferenceFunctionsKeepTheRules(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.NoError(t, install(t, pool, parse(t, childrenIR), schemaddl.Options{}))
	for _, name := range []string{"sync_find_children", "sync_live_rows"} {
		var volatility, source, comment string
		var settings []string
		var public bool
		require.NoError(t, pool.QueryRow(t.Context(), `
			select p.provolatile::text, p.prosrc, p.proconfig, obj_description(p.oid, 'pg_proc'), exists (
			         select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a where a.grantee = 0)
			  from pg_catalog.pg_proc as p where p.oid = ('syncpg.' || $1)::regproc`, name).Scan(&volatility, &source, &settings, &comment, &public))
		require.Equal(t, "s", volatility)
		require.NotContains(t, source, "execute")
		require.Contains(t, settings, "search_path=pg_catalog, pg_temp")
		require.Contains(t, settings, "enable_seqscan=off")
		require.Contains(t, comment, "Takes no locks.")
		require.False(t, public)
	}
}
