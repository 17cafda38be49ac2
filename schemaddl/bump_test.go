package schemaddl_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// tableIR is the IR of a table with a string key "id" and a scope column "team".
func tableIR(name, columns, extra string) string {
	if !strings.Contains(extra, `"scopes"`) {
		extra += `,"scopes":[{"pattern":"team:{team}"}]`
	}
	return fmt.Sprintf(`{"name":%q,"primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}%s]%s}`, name, columns, extra)
}

func column(name, typ string, nullable bool) string {
	return fmt.Sprintf(`,{"name":%q,"type":%q,"nullable":%t}`, name, typ, nullable)
}

func version(t testing.TB, n int, tables ...string) *schema.Schema {
	t.Helper()
	return parse(t, fmt.Sprintf(`{"irVersion":1,"schemaVersion":%d,"tables":[%s]}`, n, strings.Join(tables, ",")))
}

func apply(t testing.TB, pool schemaddl.Beginner, s *schema.Schema, o schemaddl.BumpOptions) *schemaddl.Bump {
	t.Helper()
	done, err := schemaddl.Apply(t.Context(), pool, s, o)
	require.NoError(t, err)
	return done
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func list(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// row is a row by column name; what is missing is NULL.
type row map[string]any

func (r row) values(t testing.TB, table *schema.Table) []ssp2.Value {
	t.Helper()
	values := make([]ssp2.Value, len(table.Columns))
	for i, c := range table.Columns {
		switch v := r[c.Name].(type) {
		case nil:
			values[i].Null = true
		case string:
			values[i].Bytes = []byte(v)
		case int:
			values[i].Int = int64(v)
		case float64:
			values[i].Float = v
		default:
			require.Fail(t, "no such value", "%T", v)
		}
	}
	return values
}

func (r row) payload(t testing.TB, table *schema.Table) []byte {
	t.Helper()
	payload, err := ssp2.AppendRow(nil, table.Wire, r.values(t, table))
	require.NoError(t, err)
	return payload
}

// put writes rows of a table in partition p, as a push does; versions is an array literal,
// or "".
func put(t testing.TB, pool *pgxpool.Pool, table *schema.Table, versions string, rows ...row) {
	t.Helper()
	var cv *string
	if versions != "" {
		cv = &versions
	}
	for _, r := range rows {
		texts, integers, floats, booleans, bytes := []*string{}, []*int64{}, []*float64{}, []*bool{}, [][]byte{}
		values := r.values(t, table)
		for _, i := range schemaddl.StoredColumns(table) {
			v := values[i]
			switch schemaddl.KindOf(table.Columns[i].Type) {
			case schemaddl.KindInteger:
				integers = append(integers, some(v.Int, v.Null))
			case schemaddl.KindFloat:
				floats = append(floats, some(v.Float, v.Null))
			case schemaddl.KindBoolean:
				booleans = append(booleans, some(v.Int != 0, v.Null))
			case schemaddl.KindBytes:
				bytes = append(bytes, v.Bytes)
			default:
				texts = append(texts, some(string(v.Bytes), v.Null))
			}
		}
		exec(t, pool, schemaddl.WriteRowsSQL(table), "p", []string{}, []string{r["id"].(string)}, []int64{1}, [][]byte{r.payload(t, table)}, []*string{cv},
			texts, integers, floats, booleans, bytes)
	}
}

func some[T any](v T, null bool) *T {
	if null {
		return nil
	}
	return &v
}

// logged appends a change of a row to the log of partition p.
func logged(t testing.TB, pool *pgxpool.Pool, seq int, table *schema.Table, r row) {
	t.Helper()
	exec(t, pool, `insert into syncpg.sync_partitions (partition) values ('p') on conflict do nothing`)
	exec(t, pool, `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count) values ('p', $1, 'c', 'c', 'a', 0, 1)`, seq)
	exec(t, pool, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		values ('p', $1, 0, $2, $3, 1, 1, '{team=t}', $4)`, seq, table.Name, r["id"], r.payload(t, table))
	exec(t, pool, `insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq) values ('p', $1, 'team=t', $2)`, table.Name, seq)
	exec(t, pool, `update syncpg.sync_partitions set max_commit_seq = $1`, seq)
}

// payloads returns what clients would read of a table: rows and changes of the log, by id.
func served(t testing.TB, pool *pgxpool.Pool, table *schema.Table) (rows, log map[string]string) {
	t.Helper()
	read := func(sql string, args ...any) map[string]string {
		found, err := pool.Query(t.Context(), sql, args...)
		require.NoError(t, err)
		all := map[string]string{}
		var id string
		var payload []byte
		_, err = pgx.ForEachRow(found, []any{&id, &payload}, func() error {
			values, err := ssp2.DecodeRow(table.Wire, payload, nil)
			all[id] = show(table, values)
			return err
		})
		require.NoError(t, err)
		return all
	}
	return read(`select _sync_row_id, _sync_payload from public.` + schemaddl.QuoteIdent(table.Name)),
		read(`select row_id, payload from syncpg.sync_changes where table_name = $1 and payload is not null`, table.Name)
}

// show renders values by column name, without NULLs.
func show(table *schema.Table, values []ssp2.Value) string {
	var b strings.Builder
	for i, c := range table.Columns {
		switch v := values[i]; {
		case v.Null:
		case c.Type == ssp2.TypeInteger, c.Type == ssp2.TypeBoolean:
			fmt.Fprintf(&b, "%s=%d ", c.Name, v.Int)
		case c.Type == ssp2.TypeFloat:
			fmt.Fprintf(&b, "%s=%v ", c.Name, v.Float)
		default:
			fmt.Fprintf(&b, "%s=%s ", c.Name, v.Bytes)
		}
	}
	return strings.TrimSpace(b.String())
}

const indexList = `select tablename || '.' || indexname || ' ' || regexp_replace(indexdef, '^.* USING btree ', '') || case when indexdef like 'CREATE UNIQUE%' then ' unique' else '' end
	from pg_catalog.pg_indexes where schemaname = 'public' and indexname not like '%_pkey' order by tablename collate "C", indexname collate "C"`

// TestABumpOwnsItsIndexes is the table of SEMANTICS §4, "Index ownership".
func TestABumpOwnsItsIndexes(t *testing.T) {
	t.Parallel()
	n := column("n", "integer", true)
	const byN = `,"indexes":[{"name":"by_n","columns":["n"]}]`
	const scope = "a.sync_ix_a__scope_team (_sync_partition, team, _sync_row_id)"
	long := strings.Repeat("x", 60)
	for _, tc := range []struct {
		name       string
		from, to   []string
		ddl        string
		want, gone []string
		rebuilt    []string // names that are another object afterwards
		kept       []string // names that are the same object
	}{
		{
			name: "an added index is created under its prefix",
			from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", n, byN)},
			want: []string{"a.sync_ix_by_n (_sync_partition, n)"}, kept: []string{"sync_ix_a__scope_team"},
		},
		{
			name: "a removed index is dropped",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n, "")},
		},
		{
			name: "an index with other columns is made anew",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n, `,"indexes":[{"name":"by_n","columns":["n","id"],"unique":true}]`)},
			want: []string{"a.sync_ix_by_n (_sync_partition, n, id) unique"}, rebuilt: []string{"sync_ix_by_n"},
		},
		{
			name: "all of a table whose rows are rewritten are rebuilt",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n+column("m", "integer", true), byN)},
			want: []string{"a.sync_ix_by_n (_sync_partition, n)"}, rebuilt: []string{"sync_ix_by_n", "sync_ix_a__scope_team"},
		},
		{
			name: "the prefix alone makes an index owned",
			from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", n, "")},
			ddl: `create index sync_ix_stray on public.a (n)`, gone: []string{"sync_ix_stray"},
		},
		{
			name: "so does the bare name of a declared index, from before the prefix",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n, byN)},
			ddl:  `drop index public.sync_ix_by_n; create index by_n on public.a (_sync_partition, n)`,
			want: []string{"a.sync_ix_by_n (_sync_partition, n)"}, gone: []string{"by_n"},
		},
		{
			name: "and of one that is declared no more",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n, "")},
			ddl: `create index by_n on public.a (_sync_partition, n)`, gone: []string{"by_n"},
		},
		{
			name: "an operator's own index survives",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n+column("m", "integer", true), byN)},
			ddl:  `create index mine on public.a (n) where n > 3`,
			want: []string{"a.mine (n) WHERE (n > 3)", "a.sync_ix_by_n (_sync_partition, n)"}, kept: []string{"mine"},
		},
		{
			name: "an index that a constraint owns survives, whatever its name",
			from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", n, byN)},
			ddl:  `alter table public.a add constraint by_n unique (n, id), add constraint sync_ix_mine unique (id, team)`,
			want: []string{"a.by_n (n, id) unique", "a.sync_ix_by_n (_sync_partition, n)", "a.sync_ix_mine (id, team) unique"},
			kept: []string{"by_n", "sync_ix_mine", "a_pkey"},
		},
		{
			name: "all drops run before all creates: a name moves between tables",
			from: []string{tableIR("a", n, byN), tableIR("b", n, "")}, to: []string{tableIR("a", n, ""), tableIR("b", n, byN)},
			want: []string{"b.sync_ix_b__scope_team (_sync_partition, team, _sync_row_id)", "b.sync_ix_by_n (_sync_partition, n)"},
		},
		{
			name: "and back to a table before it, two names crosswise",
			from: []string{tableIR("a", n, `,"indexes":[{"name":"x","columns":["n"]}]`), tableIR("b", n, `,"indexes":[{"name":"y","columns":["n"]}]`)},
			to:   []string{tableIR("a", n, `,"indexes":[{"name":"y","columns":["n"]}]`), tableIR("b", n, `,"indexes":[{"name":"x","columns":["n"]}]`)},
			want: []string{"a.sync_ix_y (_sync_partition, n)", "b.sync_ix_b__scope_team (_sync_partition, team, _sync_row_id)", "b.sync_ix_x (_sync_partition, n)"},
		},
		{
			name: "a long name is hashed",
			from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", n, `,"indexes":[{"name":"`+long+`","columns":["n"]}]`)},
			want: []string{"a." + schemaddl.IndexName(long) + " (_sync_partition, n)"},
		},
		{
			name: "an owned index that is not what it should be is made anew",
			from: []string{tableIR("a", n, byN)}, to: []string{tableIR("a", n, byN)},
			ddl:  `drop index public.sync_ix_by_n; create index sync_ix_by_n on public.a (_sync_partition, n desc)`,
			want: []string{"a.sync_ix_by_n (_sync_partition, n)"}, rebuilt: []string{"sync_ix_by_n"},
		},
		{
			name: "owned indexes of a removed table are dropped, its others are not",
			from: []string{tableIR("a", n, ""), tableIR("b", n, byN)}, to: []string{tableIR("a", n, "")},
			ddl: `create index mine on public.b (n)`, want: []string{"b.mine (n)"}, kept: []string{"mine", "b_pkey"},
		},
		{
			name: "a reference has an index of its own",
			from: []string{tableIR("a", column("up", "string", true), "")},
			to:   []string{tableIR("a", column("up", "string", true), `,"references":[{"column":"up","parentTable":"a","onDelete":"SET NULL"}]`)},
			want: []string{"a.sync_ix_a__ref_up (_sync_partition, up, _sync_row_id)"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			apply(t, pool, version(t, 1, tc.from...), schemaddl.BumpOptions{})
			if tc.ddl != "" {
				exec(t, pool, tc.ddl)
			}
			oids := func() map[string]string {
				all := map[string]string{}
				for _, line := range list(t, pool, `select relname || ' ' || oid from pg_catalog.pg_class where relkind = 'i' and relnamespace = 'public'::regnamespace`) {
					name, oid, _ := strings.Cut(line, " ")
					all[name] = oid
				}
				return all
			}
			before := oids()
			apply(t, pool, version(t, 2, tc.to...), schemaddl.BumpOptions{})
			require.ElementsMatch(t, append([]string{scope}, tc.want...), list(t, pool, indexList))
			after := oids()
			for _, name := range tc.kept {
				require.Equal(t, before[name], after[name], name)
			}
			for _, name := range tc.rebuilt {
				require.NotEqual(t, before[name], after[name], name)
			}
			for _, name := range tc.gone {
				require.NotContains(t, after, name)
			}
			require.NoError(t, schemaddl.Check(t.Context(), pool, version(t, 2, tc.to...), schemaddl.Options{}))
		})
	}
}

// TestABumpIsAllowed is what a version may change, with rows and log as clients see them
// afterwards.
func TestABumpIsAllowed(t *testing.T) {
	t.Parallel()
	n, note := column("n", "integer", false), column("note", "string", true)
	full := row{"id": "1", "team": "t", "n": 7, "note": "x"}
	bare := row{"id": "2", "team": "t", "n": 8}
	for _, tc := range []struct {
		name     string
		from, to string
		drop     bool
		rows     []string // of table a afterwards
		columns  string   // of table a in the database, typed ones
		versions string   // column versions afterwards; before they are {1,2,3,4}
	}{
		{
			name: "a column at the end", from: tableIR("a", n+note, ""), to: tableIR("a", n+note+column("more", "float", true), ""),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "id! team! n! note more", versions: "{1,2,3,4,1}",
		},
		{
			name: "a column in front, and others moved", from: tableIR("a", n+note, ""),
			to:   `{"name":"a","primaryKey":"id","columns":[{"name":"first","type":"json","nullable":true},{"name":"note","type":"string","nullable":true},{"name":"team","type":"string","nullable":false},{"name":"id","type":"string","nullable":false},{"name":"n","type":"integer","nullable":false}],"scopes":[{"pattern":"team:{team}"}]}`,
			rows: []string{"note=x team=t id=1 n=7", "team=t id=2 n=8"}, columns: "id! team! n! note first", versions: "{1,4,2,1,3}",
		},
		{
			name: "a removed column stays in the database", from: tableIR("a", n+note, ""), to: tableIR("a", note, ""),
			rows: []string{"id=1 team=t note=x", "id=2 team=t"}, columns: "id! team! n note", versions: "{1,2,4}",
		},
		{
			name: "or is dropped", from: tableIR("a", n+note, ""), to: tableIR("a", note, ""), drop: true,
			rows: []string{"id=1 team=t note=x", "id=2 team=t"}, columns: "id! team! note", versions: "{1,2,4}",
		},
		{
			name: "a column that may be NULL now", from: tableIR("a", n+note, ""), to: tableIR("a", column("n", "integer", true)+note, ""),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "id! team! n note", versions: "{1,2,3,4}",
		},
		{
			name: "typed columns no more", from: tableIR("a", n+note, ""), to: tableIR("a", n+note, `,"materialize":false`),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "id team! n note", versions: "{1,2,3,4}",
		},
		{
			name: "typed columns no more, dropped", from: tableIR("a", n+note, ""), to: tableIR("a", n+note, `,"materialize":false`), drop: true,
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "team!", versions: "{1,2,3,4}",
		},
		{
			name: "typed columns from now on", from: tableIR("a", n+note, `,"materialize":false`), to: tableIR("a", column("c", "string", true)+n+note, ""),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "team! id c n note", versions: "{1,2,1,3,4}",
		},
		{
			name: "another scope column", from: tableIR("a", n+note, ""), to: tableIR("a", n+note, `,"scopes":[{"pattern":"number:{n}"}]`),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "id! team! n! note", versions: "{1,2,3,4}",
		},
		{
			name: "another scope column of rows without typed ones", from: tableIR("a", n+note, `,"materialize":false`),
			to:   tableIR("a", n+note, `,"materialize":false,"scopes":[{"pattern":"number:{n}"},{"pattern":"team:{team}"}]`),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "team! n", versions: "{1,2,3,4}",
		},
		{
			name: "nothing", from: tableIR("a", n+note, ""), to: tableIR("a", n+note, ""),
			rows: []string{"id=1 team=t n=7 note=x", "id=2 team=t n=8"}, columns: "id! team! n! note", versions: "{1,2,3,4}",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			old, next := version(t, 1, tc.from), version(t, 2, tc.to)
			apply(t, pool, old, schemaddl.BumpOptions{})
			put(t, pool, old.Tables[0], "{1,2,3,4}", full)
			put(t, pool, old.Tables[0], "", bare)
			logged(t, pool, 1, old.Tables[0], full)
			logged(t, pool, 2, old.Tables[0], bare)
			plan, err := schemaddl.PlanBump(t.Context(), pool, next, schemaddl.BumpOptions{Drop: tc.drop})
			require.NoError(t, err)
			require.Equal(t, plan, apply(t, pool, next, schemaddl.BumpOptions{Drop: tc.drop}))
			require.NoError(t, schemaddl.Check(t.Context(), pool, next, schemaddl.Options{}))

			rows, log := served(t, pool, next.Tables[0])
			require.Equal(t, map[string]string{"1": tc.rows[0], "2": tc.rows[1]}, rows)
			require.Equal(t, rows, log)
			require.Equal(t, []string{tc.columns}, list(t, pool, `select string_agg(attname || case when attnotnull then '!' else '' end, ' ' order by attnum)
				from pg_catalog.pg_attribute where attrelid = 'public.a'::regclass and attnum > 0 and not attisdropped and attname not like '\_sync%'`))
			require.Equal(t, []string{tc.versions, ""}, list(t, pool, `select coalesce(_sync_column_versions::text, '') from public.a order by _sync_row_id`))
			require.Equal(t, []string{"2"}, list(t, pool, `select required_writer_version::text from syncpg.sync_writer_fence where partition = 'p'`))

			// The new version reads and writes what the old one left, and typed columns agree.
			put(t, pool, next.Tables[0], "", row{"id": "3", "team": "t", "n": 9, "note": "y"})
			if next.Tables[0].Materialize {
				require.Empty(t, list(t, pool, `select _sync_row_id from public.a as x where syncpg.sync_encode_a(x) <> _sync_payload`))
			}
			require.Nil(t, apply(t, pool, next, schemaddl.BumpOptions{}), "applying again does nothing")
		})
	}
}

func TestABumpIsRefused(t *testing.T) {
	t.Parallel()
	n, note := column("n", "integer", true), column("note", "string", true)
	withKey := func(key string) string {
		return `{"name":"a","primaryKey":"` + key + `","columns":[{"name":"id","type":"string","nullable":false},{"name":"team","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team}"}]}`
	}
	for _, tc := range []struct {
		name     string
		from, to []string
		ddl      string
		rows     []row
		want     []string
	}{
		{
			name: "a type that changes", from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", column("n", "float", true), "")},
			want: []string{`table "a", column "n": its type was integer and is float; add a column of another name`},
		},
		{
			name: "a column that may not be NULL any more", from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", column("n", "integer", false), "")},
			want: []string{`column "n": it was nullable and is not any more`},
		},
		{
			name: "a new column without a value for rows", from: []string{tableIR("a", "", "")}, to: []string{tableIR("a", column("n", "integer", false), "")},
			rows: []row{{"id": "1", "team": "t"}}, want: []string{`column "n": it is new and not nullable`},
		},
		{
			name: "another key", from: []string{withKey("id")}, to: []string{withKey("team")},
			want: []string{`table "a": its primary key was "id" and is "team"`},
		},
		{
			name: "a new table where there is one", from: []string{tableIR("a", "", "")}, to: []string{tableIR("a", "", ""), tableIR("mine", "", "")},
			ddl: `create table public.mine ()`, want: []string{`table "mine": the database has a table of this name already`},
		},
		{
			name: "a new column where there is one of another type", from: []string{tableIR("a", "", "")}, to: []string{tableIR("a", n, "")},
			ddl: `alter table public.a add column n text`, want: []string{`column "n": the database has a column of this name and of type text`},
		},
		{
			name: "a new column where there is one with values", from: []string{tableIR("a", "", "")}, to: []string{tableIR("a", n, "")},
			rows: []row{{"id": "1", "team": "t"}}, ddl: `alter table public.a add column n bigint; update public.a set n = 1`,
			want: []string{`column "n": it is new, and the database has a column of this name with values`},
		},
		{
			name: "a scope without values", from: []string{tableIR("a", note, "")}, to: []string{tableIR("a", note, `,"scopes":[{"pattern":"team:{team}"},{"pattern":"n:{note}"}]`)},
			rows: []row{{"id": "1", "team": "t"}}, want: []string{`column "note": it becomes a scope column, and rows have no value in it`},
		},
		{
			name: "a scope with an empty value", from: []string{tableIR("a", note, "")}, to: []string{tableIR("a", note, `,"scopes":[{"pattern":"team:{team}"},{"pattern":"n:{note}"}]`)},
			rows: []row{{"id": "1", "team": "t", "note": ""}}, want: []string{`column "note": it becomes a scope column, and rows have no value in it`},
		},
		{
			name: "a reference to no row", from: []string{tableIR("a", note, "")},
			to:   []string{tableIR("a", note, `,"references":[{"column":"note","parentTable":"a","onDelete":"CASCADE"}]`)},
			rows: []row{{"id": "1", "team": "t", "note": "2"}}, want: []string{`column "note": it becomes a reference to table "a", and rows refer to none`},
		},
		{
			name: "a unique index over values that are not", from: []string{tableIR("a", note, "")},
			to:   []string{tableIR("a", note, `,"indexes":[{"name":"u","columns":["note"],"unique":true}]`)},
			rows: []row{{"id": "1", "team": "t", "note": "x"}, {"id": "2", "team": "t", "note": "x"}}, want: []string{`the index "u" is unique, and rows have the same values`},
		},
		{
			name: "values that are nowhere else", from: []string{tableIR("a", note, `,"materialize":false`)}, to: []string{tableIR("a", "", `,"materialize":false`)},
			want: []string{`column "note": it is removed, and its values are nowhere but in the rows`, "give --drop"},
		},
		{
			name: "an index of a name that is taken", from: []string{tableIR("a", n, "")}, to: []string{tableIR("a", n, `,"indexes":[{"name":"by_n","columns":["n"]}]`)},
			ddl: `create sequence public.sync_ix_by_n`, want: []string{`the index "by_n" would be named sync_ix_by_n`},
		},
		{
			name: "a json column that becomes a scope", from: []string{tableIR("a", column("j", "json", false), "")},
			to: []string{tableIR("a", column("j", "json", false), `,"scopes":[{"pattern":"j:{j}"}]`)}, want: []string{`column "j": json scope columns are stored as text`},
		},
		{
			name: "all reasons at once", from: []string{tableIR("a", n+note, ""), tableIR("b", n, "")},
			to:   []string{tableIR("a", column("n", "float", true)+column("note", "json", true), ""), tableIR("b", column("n", "integer", false), "")},
			want: []string{`table "a", column "n"`, `table "a", column "note"`, `table "b", column "n"`},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			old, next := version(t, 1, tc.from...), version(t, 2, tc.to...)
			apply(t, pool, old, schemaddl.BumpOptions{})
			put(t, pool, old.Tables[0], "", tc.rows...)
			if tc.ddl != "" {
				exec(t, pool, tc.ddl)
			}
			before := catalog(t, pool)
			_, planned := schemaddl.PlanBump(t.Context(), pool, next, schemaddl.BumpOptions{})
			_, applied := schemaddl.Apply(t.Context(), pool, next, schemaddl.BumpOptions{})
			for _, err := range []error{planned, applied} {
				var berr *schemaddl.BumpError
				require.ErrorAs(t, err, &berr)
				require.Equal(t, [2]int32{1, 2}, [2]int32{berr.From, berr.To})
				require.Len(t, berr.Problems, max(1, strings.Count(strings.Join(tc.want, ""), `table "`)))
				for _, want := range tc.want {
					require.ErrorContains(t, err, want)
				}
			}
			require.Equal(t, before, catalog(t, pool), "a refusal writes no DDL")
			require.NoError(t, schemaddl.Check(t.Context(), pool, old, schemaddl.Options{}))
		})
	}
}

func TestABumpOfADatabaseThatIsNotTheStoredSchemaIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	n := column("n", "integer", true)
	apply(t, pool, version(t, 1, tableIR("a", n+column("m", "integer", true), "")), schemaddl.BumpOptions{})
	exec(t, pool, `alter table public.a drop column n, drop column m`)
	_, err := schemaddl.Apply(t.Context(), pool, version(t, 2, tableIR("a", n, "")), schemaddl.BumpOptions{})
	var lerr *schemaddl.LayoutError
	require.ErrorAs(t, err, &lerr)
	require.Equal(t, [2]string{"n", "missing column"}, [2]string{lerr.Column, lerr.Reason})
	// A column that the next version does not have may be gone already.
	exec(t, pool, `alter table public.a add column n bigint`)
	apply(t, pool, version(t, 2, tableIR("a", n, "")), schemaddl.BumpOptions{})
}

func TestABumpToAnEarlierVersionIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	apply(t, pool, version(t, 2, tableIR("a", "", "")), schemaddl.BumpOptions{})
	for _, f := range []func() error{
		func() error {
			_, err := schemaddl.PlanBump(t.Context(), pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
			return err
		},
		func() error {
			_, err := schemaddl.Apply(t.Context(), pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
			return err
		},
	} {
		var verr *schemaddl.VersionError
		require.ErrorAs(t, f(), &verr)
		require.ErrorContains(t, verr, "cannot go back")
	}
}

// A column may be new and not nullable as long as there is nothing that lacks it.
func TestATableWithoutRowsMayGetAnyColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	apply(t, pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
	next := version(t, 2, tableIR("a", column("n", "integer", false), `,"scopes":[{"pattern":"n:{n}"}]`))
	apply(t, pool, next, schemaddl.BumpOptions{})
	require.NoError(t, schemaddl.Check(t.Context(), pool, next, schemaddl.Options{}))
}

func TestTablesThatLeaveTheSchema(t *testing.T) {
	t.Parallel()
	for _, drop := range []bool{false, true} {
		t.Run(fmt.Sprintf("drop %t", drop), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			o := schemaddl.BumpOptions{Drop: drop}
			one, two, three := version(t, 1, tableIR("a", "", ""), tableIR("b", "", "")), version(t, 2, tableIR("a", "", "")),
				version(t, 3, tableIR("a", "", ""), tableIR("b", column("n", "integer", false), ""))
			apply(t, pool, one, o)
			r := row{"id": "1", "team": "t"}
			put(t, pool, one.Tables[1], "", r)
			logged(t, pool, 1, one.Tables[1], r)
			exec(t, pool, `insert into syncpg.sync_tombstones (partition, table_name, row_id, commit_seq) values ('p', 'b', '2', 1)`)
			exec(t, pool, `insert into syncpg.sync_blob_refs (partition, table_name, row_id, blob_id) values ('p', 'a', '1', 'x'), ('p', 'b', '1', 'x')`)
			apply(t, pool, two, o)
			require.Equal(t, []string{"a"}, list(t, pool, `select table_name from syncpg.sync_blob_refs`))
			require.Empty(t, list(t, pool, `select proname::text from pg_catalog.pg_proc where proname like '%\_b' and pronamespace = 'syncpg'::regnamespace`), "nothing generated is left")
			require.Len(t, list(t, pool, `select row_id from syncpg.sync_changes`), 1, "the log of others goes on")
			if !drop {
				require.Equal(t, []string{"1"}, list(t, pool, `select _sync_row_id from public.b`))
				_, err := schemaddl.Apply(t.Context(), pool, three, o)
				require.ErrorContains(t, err, "it is left from an earlier version; rename it, or drop it")
				exec(t, pool, `drop table public.b`)
			}
			// A table of the same name is another one: what was logged of the first is of no use.
			apply(t, pool, three, o)
			require.Empty(t, list(t, pool, `select row_id from syncpg.sync_changes`))
			require.Empty(t, list(t, pool, `select scope_key from syncpg.sync_change_scopes`))
			require.Empty(t, list(t, pool, `select row_id from syncpg.sync_tombstones`))
		})
	}
}

// Columns that left and come back have no values that clients would not have.
func TestAColumnThatComesBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	note := column("note", "string", true)
	one, two, three := version(t, 1, tableIR("a", note, "")), version(t, 2, tableIR("a", "", "")), version(t, 3, tableIR("a", note, ""))
	apply(t, pool, one, schemaddl.BumpOptions{})
	put(t, pool, one.Tables[0], "", row{"id": "1", "team": "t", "note": "x"})
	apply(t, pool, two, schemaddl.BumpOptions{})
	_, err := schemaddl.Apply(t.Context(), pool, three, schemaddl.BumpOptions{})
	require.ErrorContains(t, err, "which no client has")
	exec(t, pool, `update public.a set note = null`)
	apply(t, pool, three, schemaddl.BumpOptions{})
	rows, _ := served(t, pool, three.Tables[0])
	require.Equal(t, map[string]string{"1": "id=1 team=t"}, rows)

	// Clients of version 1 would keep what is gone.
	var oerr *schemaddl.OlderError
	require.ErrorAs(t, schemaddl.Check(t.Context(), pool, three, schemaddl.Options{Older: []*schema.Schema{one}}), &oerr)
	require.NoError(t, schemaddl.Check(t.Context(), pool, three, schemaddl.Options{Older: []*schema.Schema{two}}))
}

// TestTriggersOfTheHostAreNotAskedByARewrite: no value changes.
func TestTriggersOfTheHostAreNotAskedByARewrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	one, two := version(t, 1, tableIR("a", "", "")), version(t, 2, tableIR("a", column("n", "integer", true), ""))
	apply(t, pool, one, schemaddl.BumpOptions{})
	put(t, pool, one.Tables[0], "", row{"id": "1", "team": "t"})
	exec(t, pool, `
		create function public.never() returns trigger language plpgsql as $$ begin raise exception 'asked'; end $$;
		create trigger on_origin before update on public.a for each row execute function public.never();
		create trigger on_replica after update on public.a for each row execute function public.never();
		create trigger on_always after update on public.a for each statement execute function public.never();
		create trigger on_never after update on public.a for each statement execute function public.never();
		alter table public.a enable replica trigger on_replica, enable always trigger on_always, disable trigger on_never`)
	const states = `select tgname || ' ' || tgenabled::text from pg_catalog.pg_trigger where tgrelid = 'public.a'::regclass order by 1`
	before := list(t, pool, states)
	require.Equal(t, []string{"on_always A", "on_never D", "on_origin O", "on_replica R"}, before)
	apply(t, pool, two, schemaddl.BumpOptions{})
	require.Equal(t, before, list(t, pool, states))
	rows, _ := served(t, pool, two.Tables[0])
	require.Equal(t, map[string]string{"1": "id=1 team=t"}, rows)
}

// A rule could keep rows in the old layout.
func TestRowsThatAreNotRewrittenEndABump(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	one, two := version(t, 1, tableIR("a", "", "")), version(t, 2, tableIR("a", column("n", "integer", true), ""))
	apply(t, pool, one, schemaddl.BumpOptions{})
	put(t, pool, one.Tables[0], "", row{"id": "1", "team": "t"}, row{"id": "2", "team": "t"})
	exec(t, pool, `create rule keep as on update to public.a where old.id = '1' do instead nothing`)
	before := catalog(t, pool)
	_, err := schemaddl.Apply(t.Context(), pool, two, schemaddl.BumpOptions{})
	require.ErrorContains(t, err, "keeps rows from being updated")
	require.Equal(t, before, catalog(t, pool))
	require.NoError(t, schemaddl.Check(t.Context(), pool, one, schemaddl.Options{}))
}

// Rows larger than a batch are rewritten by themselves, and small ones in more than one.
func TestRowsOfAllSizesAreRewritten(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	note := column("note", "string", true)
	one, two := version(t, 1, tableIR("a", note, "")), version(t, 2, tableIR("a", column("n", "integer", true)+note, ""))
	apply(t, pool, one, schemaddl.BumpOptions{})
	want := map[string]string{}
	for i, size := range []int{0, 1, 65_000, 70_000, 3 << 20} {
		r := row{"id": fmt.Sprint("large", i), "team": "t", "note": strings.Repeat("é", size/2)}
		put(t, pool, one.Tables[0], "", r)
		logged(t, pool, i+1, one.Tables[0], r)
		want[fmt.Sprint("large", i)] = fmt.Sprintf("id=large%d team=t note=%s", i, strings.Repeat("é", size/2))
	}
	exec(t, pool, `insert into public.a (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, id, team, note)
		select 'p', 's' || i, 1, syncpg.sync_encode_a(r), 's' || i, 't', 'n'
		  from generate_series(1, 9000) as i
		 cross join lateral (select r from (select 's' || i as id, 't' as team, 'n' as note, 'p', 's' || i, 1::bigint, ''::bytea, null::bigint[]) as x
		   cross join lateral (select row(x.*)::public.a as r) as y) as z`)
	for i := range 9000 {
		want[fmt.Sprint("s", i+1)] = fmt.Sprintf("id=s%d team=t note=n", i+1)
	}
	var told []schemaddl.Progress
	apply(t, pool, two, schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) { told = append(told, p) }})
	rows, log := served(t, pool, two.Tables[0])
	require.Equal(t, want, rows)
	require.Len(t, log, 5)
	for id, r := range log {
		require.Equal(t, want[id], r)
	}
	done := int64(0)
	for _, p := range told {
		if p.Stage == schemaddl.StageRows {
			require.GreaterOrEqual(t, p.Done, done)
			done = p.Done
			require.Equal(t, "a", p.Table)
		}
	}
	require.Equal(t, int64(9005), done)
}

func TestAppliersAtOnceBumpOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 8})
	apply(t, db.Pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
	two := version(t, 2, tableIR("a", column("n", "integer", true), ""))
	type result struct {
		done *schemaddl.Bump
		err  error
	}
	results := make(chan result, 8)
	for range 8 {
		go func() {
			done, err := schemaddl.Apply(context.WithoutCancel(t.Context()), db.Pool, two, schemaddl.BumpOptions{})
			results <- result{done, err}
		}()
	}
	did := 0
	for range 8 {
		r := <-results
		require.NoError(t, r.err)
		if r.done != nil {
			did++
		}
	}
	require.Equal(t, 1, did)
	require.Equal(t, []string{"1"}, list(t, db.Pool, `select schema_version::text from syncpg.sync_schema_layouts`))
}

// TestAKilledBumpLeavesEverythingAsItWas kills the backend at every stage.
func TestAKilledBumpLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	for _, stage := range []string{schemaddl.StageWaiting, schemaddl.StageRows, schemaddl.StageChanges, schemaddl.StageLocking, schemaddl.StageTables, schemaddl.StageIndexes} {
		t.Run(stage, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.Options{})
			one, two := version(t, 1, tableIR("a", "", "")), version(t, 2, tableIR("a", column("n", "integer", true), ""), tableIR("b", "", ""))
			apply(t, db.Pool, one, schemaddl.BumpOptions{})
			r := row{"id": "1", "team": "t"}
			put(t, db.Pool, one.Tables[0], "", r)
			logged(t, db.Pool, 1, one.Tables[0], r)
			before := catalog(t, db.Pool)
			conn, err := pgx.Connect(t.Context(), db.DSN)
			require.NoError(t, err)
			defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
			killed := false
			_, err = schemaddl.Apply(t.Context(), conn, two, schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) {
				if p.Stage == stage && !killed {
					killed = true
					exec(t, db.Pool, `select pg_terminate_backend($1, 10000)`, int32(conn.PgConn().PID()))
				}
			}})
			require.Error(t, err)
			require.True(t, killed)
			require.Equal(t, before, catalog(t, db.Pool))
			require.NoError(t, schemaddl.Check(t.Context(), db.Pool, one, schemaddl.Options{}))
			rows, log := served(t, db.Pool, one.Tables[0])
			require.Equal(t, map[string]string{"1": "id=1 team=t"}, rows)
			require.Equal(t, rows, log)
			require.Empty(t, list(t, db.Pool, `select partition from syncpg.sync_writer_fence`))
			apply(t, db.Pool, two, schemaddl.BumpOptions{})
		})
	}
}

// A reader that holds one table and waits for another must not end the bump, nor it the
// reader: it gives way and tries again.
func TestABumpGivesWayToReaders(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	n := column("n", "integer", true)
	apply(t, db.Pool, version(t, 1, tableIR("a", "", ""), tableIR("b", "", "")), schemaddl.BumpOptions{})
	reader, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = reader.Exec(t.Context(), `select from public.b`)
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	next, applied := version(t, 2, tableIR("a", n, ""), tableIR("b", n, "")), make(chan error, 1)
	go func() {
		_, err := schemaddl.Apply(context.WithoutCancel(t.Context()), conn, next, schemaddl.BumpOptions{})
		applied <- err
	}()
	require.NoError(t, pgtest.WaitBlocked(t.Context(), db.Pool, conn.PgConn().PID()))
	_, err = reader.Exec(t.Context(), `select from public.a`) // waits for the bump, which waits for b
	require.NoError(t, err)
	require.NoError(t, reader.Rollback(t.Context()))
	require.NoError(t, <-applied)
}

// The index and the tables of a bump may be named in any way.
func TestAnyNameCanBeBumped(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`select`, `Größe "x"`, `it's`, `back\slash`, `$body$`, strings.Repeat("t", 63)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			const c = `,{"name":"na'me \"$body$","type":"json","nullable":true}`
			one, two, three := version(t, 1, tableIR(name, "", "")), version(t, 2, tableIR(name, c, `,"indexes":[{"name":"ix","columns":["na'me \"$body$"]}]`)), version(t, 3, tableIR("other", "", ""))
			o := schemaddl.BumpOptions{Options: schemaddl.Options{AppSchema: `app's "schema"`}, Drop: true}
			for _, s := range []*schema.Schema{one, two, three} {
				apply(t, pool, s, o)
				require.NoError(t, schemaddl.Check(t.Context(), pool, s, o.Options))
			}
		})
	}
}

func TestABumpNeedsToSeeWhatOthersCommit(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	apply(t, pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = schemaddl.Apply(t.Context(), tx, version(t, 2, tableIR("a", "", "")), schemaddl.BumpOptions{})
	require.ErrorContains(t, err, "must be read committed")
}

// TestABumpByARoleThatOwnsNothingRewritesNothing: that it may not alter the tables is said
// before the work that would be for nothing.
func TestABumpByARoleThatOwnsNothingRewritesNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t, pgtest.Options{})
	apply(t, db.Pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
	conn, err := pgx.Connect(ctx, db.DSN)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	role := pgx.Identifier{"role of " + db.Name}.Sanitize()
	_, err = db.Pool.Exec(ctx, `create role `+role+`;
		grant usage, create on schema syncpg, public to `+role+`;
		grant select, insert, update, delete on all tables in schema syncpg, public to `+role+`;
		grant execute on all functions in schema syncpg to `+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := db.Pool.Exec(context.WithoutCancel(ctx), `drop owned by `+role+` cascade; drop role `+role)
		require.NoError(t, err)
	})
	two := version(t, 2, tableIR("a", `,{"name":"color","type":"string","nullable":true}`, ""))
	bump := func() error {
		_, err := schemaddl.Apply(ctx, conn, two, schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) {
			require.Equal(t, schemaddl.StageWaiting, p.Stage)
		}})
		return err
	}
	_, err = conn.Exec(ctx, `set session authorization `+role)
	require.NoError(t, err)
	require.ErrorContains(t, bump(), `this user is not the owner of table "public"."a": run it as the owner`)
	_, err = conn.Exec(ctx, `reset session authorization`)
	require.NoError(t, err)
	apply(t, db.Pool, two, schemaddl.BumpOptions{})
}

// TestRoundsGoOnWhileABumpWaitsForAReader: a query of the host that runs for long keeps the bump waiting, but not the rounds,
// for longer than an attempt.
func TestRoundsGoOnWhileABumpWaitsForAReader(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	apply(t, db.Pool, version(t, 1, tableIR("a", "", "")), schemaddl.BumpOptions{})
	next := version(t, 2, tableIR("a", column("n", "integer", true), ""))
	reader, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = reader.Exec(t.Context(), `select from public.a`)
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	applied := make(chan error, 1)
	go func() {
		_, err := schemaddl.Apply(ctx, conn, next, schemaddl.BumpOptions{})
		applied <- err
	}()
	defer func() { cancel(); applied <- <-applied }()
	require.NoError(t, pgtest.WaitBlocked(t.Context(), db.Pool, conn.PgConn().PID()))

	round, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = round.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = round.Exec(t.Context(), `set local lock_timeout = '20s'`)
	require.NoError(t, err)
	_, err = round.Exec(t.Context(), `lock table syncpg.sync_schema_meta in access share mode`) // as a round begins
	require.NoError(t, err)
	require.NoError(t, round.Rollback(t.Context()))

	require.NoError(t, reader.Rollback(t.Context()))
	err = <-applied
	applied <- err
	require.NoError(t, err)
}

// TestABumpThatCannotGoOnEnds: a transaction that uses a table, and began to wait for the bump before the bump waited for
// it, is not seen by deadlock detection: the bump ends, and nothing was done.
func TestABumpThatCannotGoOnEnds(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{})
	one := version(t, 1, tableIR("a", "", ""))
	apply(t, db.Pool, one, schemaddl.BumpOptions{})
	put(t, db.Pool, one.Tables[0], "", row{"id": "1", "team": "t"})
	before := catalog(t, db.Pool)
	host, err := pgx.Connect(t.Context(), db.DSN)
	require.NoError(t, err)
	defer func() { _ = host.Close(context.WithoutCancel(t.Context())) }()
	for _, sql := range []string{`set deadlock_timeout = '1h'`, `begin`, `select from public.a`} {
		_, err = host.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	wrote, started := make(chan error, 1), false
	_, err = schemaddl.Apply(t.Context(), db.Pool, version(t, 2, tableIR("a", column("n", "integer", true), "")), schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) {
		if p.Stage != schemaddl.StageRows || started {
			return
		}
		started = true
		go func() {
			_, err := host.Exec(context.WithoutCancel(t.Context()), `update public.a set id = id`) // not a push
			wrote <- err
		}()
		require.NoError(t, pgtest.WaitBlocked(t.Context(), db.Pool, host.PgConn().PID()))
	}})
	require.ErrorContains(t, err, fmt.Sprintf("database process %d uses a table", host.PgConn().PID()))
	require.NoError(t, <-wrote)
	_, err = host.Exec(t.Context(), `rollback`)
	require.NoError(t, err)
	require.Equal(t, before, catalog(t, db.Pool))
	require.NoError(t, schemaddl.Check(t.Context(), db.Pool, one, schemaddl.Options{}))
}

// TestPlanRewritesFindRowsByWhereTheyAre: batches of a rewrite do not scan, in tables that
// were never analyzed: a bump of many batches makes as many scans as one of a single batch.
func TestPlanRewritesFindRowsByWhereTheyAre(t *testing.T) {
	t.Parallel()
	scans := func(rows int) map[string]int64 {
		db := pgtest.New(t, pgtest.Options{})
		one := version(t, 1, tableIR("a", column("n", "integer", true), ""))
		apply(t, db.Pool, one, schemaddl.BumpOptions{})
		payload := row{"id": "1", "team": "t"}.payload(t, one.Tables[0])
		exec(t, db.Pool, `alter table public.a set (autovacuum_enabled = false)`)
		exec(t, db.Pool, `alter table syncpg.sync_changes set (autovacuum_enabled = false)`)
		exec(t, db.Pool, `insert into public.a (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, id, team)
			select 'p', i, 1, $2, i, 't' from generate_series(1, $1::int) as i`, rows, payload)
		exec(t, db.Pool, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
			select 'p', i, 0, 'a', i, 1, 1, '{team=t}', $2 from generate_series(1, $1::int) as i`, rows, payload)
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
		batches := map[string]int{}
		_, err = schemaddl.Apply(t.Context(), tx, version(t, 2, tableIR("a", column("m", "integer", true)+column("n", "integer", true), "")), schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) {
			batches[p.Stage]++
		}})
		require.NoError(t, err)
		if rows > 10_000 {
			require.Greater(t, batches[schemaddl.StageRows], 4)
			require.Greater(t, batches[schemaddl.StageChanges], 4)
		}
		found, err := tx.Query(t.Context(), `select relname, seq_scan from pg_stat_xact_user_tables where relname in ('a', 'sync_changes')`)
		require.NoError(t, err)
		all := map[string]int64{}
		var name string
		var n int64
		_, err = pgx.ForEachRow(found, []any{&name, &n}, func() error { all[name] = n; return nil })
		require.NoError(t, err)
		return all
	}
	few, many := scans(100), scans(20_000)
	require.Len(t, many, 2)
	require.NotZero(t, many["a"])
	for name, n := range many {
		require.LessOrEqual(t, n, few[name], "scans of %s", name)
	}
}

// TestABumpInEveryExecMode: a connection through a pooler may know nothing of the types of
// parameters.
func TestABumpInEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.Options{})
			config, err := pgxpool.ParseConfig(db.DSN)
			require.NoError(t, err)
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			defer pool.Close()
			columns := column("n", "integer", true) + column("f", "float", true) + column("b", "boolean", true) + column("j", "json", true) + column("y", "bytes", true) + column("s", "string", true)
			one := version(t, 1, tableIR("a", columns, `,"materialize":false`), tableIR("gone", "", ""))
			apply(t, pool, one, schemaddl.BumpOptions{})
			full := row{"id": "1", "team": "t", "n": 5, "f": 1.5, "b": 1, "j": `{"a": [1]}`, "y": "\x00\xff", "s": "é"}
			put(t, db.Pool, one.Tables[0], "", full, row{"id": "2", "team": "t"}, row{"id": "3", "team": "t", "s": strings.Repeat("x", 100_000)})
			logged(t, db.Pool, 1, one.Tables[0], full)
			rowsWere, logWas := served(t, db.Pool, one.Tables[0])

			two := version(t, 2, tableIR("a", column("z", "string", true)+columns, ""), tableIR("fresh", "", ""))
			o := schemaddl.BumpOptions{Drop: true}
			_, err = schemaddl.PlanBump(t.Context(), pool, two, o)
			require.NoError(t, err)
			apply(t, pool, two, o)
			require.NoError(t, schemaddl.Check(t.Context(), pool, two, o.Options))
			rows, log := served(t, db.Pool, two.Tables[0])
			require.Equal(t, rowsWere, rows)
			require.Equal(t, logWas, log)
			require.Equal(t, []string{"1 5 1.5 t {\"a\": [1]} 00ff é", "2", "3 100000"},
				list(t, db.Pool, `select concat_ws(' ', id, n, f, b, j, encode(y, 'hex'), case when length(s) > 10 then length(s)::text else s end) from public.a where z is null order by id`))
			apply(t, pool, version(t, 3, tableIR("a", column("z", "string", true)+columns, ""), tableIR("fresh", "", ""), tableIR("gone", "", "")), o)
		})
	}
}

// TestWhatKeepsAColumnIsNamed: the database refuses to drop what objects of the host depend
// on, and the error says which these are.
func TestWhatKeepsAColumnIsNamed(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	apply(t, pool, version(t, 1, tableIR("a", column("n", "integer", true), "")), schemaddl.BumpOptions{})
	exec(t, pool, `create view public.report as select n from public.a`)
	before := catalog(t, pool)
	_, err := schemaddl.Apply(t.Context(), pool, version(t, 2, tableIR("a", "", "")), schemaddl.BumpOptions{Drop: true})
	require.ErrorContains(t, err, "view public.report depends on column n of table public.a")
	require.Equal(t, before, catalog(t, pool))
}
