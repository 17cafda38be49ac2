package integration_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// evolutions is how many histories TestSchemasEvolve plays: each has databases and servers
// of its own.
const evolutions = 25

// drawnColumn and drawnTable are what a drawn schema consists of. Every table has the key
// "id" and the scope column "team" too, anywhere among its columns.
type drawnColumn struct {
	name, typ string
	nullable  bool
}

type drawnTable struct {
	name        string
	columns     []drawnColumn
	materialize bool
	indexed     string // a column, or none
}

type drawnSchema struct {
	version int
	tables  []drawnTable
	names   int // given so far, none twice
}

func (s *drawnSchema) name(prefix string) string {
	s.names++
	return fmt.Sprintf("%s%d", prefix, s.names)
}

func (s *drawnSchema) compile(t require.TestingT) *schema.Schema {
	tables := make([]string, len(s.tables))
	for i, table := range s.tables {
		columns := make([]string, len(table.columns))
		for j, c := range table.columns {
			columns[j] = fmt.Sprintf(`{"name":%q,"type":%q,"nullable":%t}`, c.name, c.typ, c.nullable)
		}
		indexes := ""
		if table.indexed != "" {
			indexes = fmt.Sprintf(`,"indexes":[{"name":"%s_by_%s","columns":[%q]}]`, table.name, table.indexed, table.indexed)
		}
		tables[i] = fmt.Sprintf(`{"name":%q,"primaryKey":"id","materialize":%t,"columns":[%s],"scopes":[{"pattern":"team:{team}"}]%s}`,
			table.name, table.materialize, strings.Join(columns, ","), indexes)
	}
	compiled, err := schema.Parse(fmt.Appendf(nil, `{"irVersion":1,"schemaVersion":%d,"tables":[%s]}`, s.version, strings.Join(tables, ",")))
	require.NoError(t, err)
	return compiled
}

func (s *drawnSchema) drawColumn(t *rapid.T, nullable bool) drawnColumn {
	return drawnColumn{
		name: s.name("c"), nullable: nullable || rapid.Bool().Draw(t, "nullable"),
		typ: rapid.SampledFrom([]string{"string", "integer", "float", "boolean", "json", "bytes"}).Draw(t, "type"),
	}
}

func (s *drawnSchema) drawTable(t *rapid.T) drawnTable {
	table := drawnTable{name: s.name("t"), materialize: rapid.Bool().Draw(t, "materialize"), columns: []drawnColumn{
		{"id", "string", false}, {"team", "string", false},
	}}
	for range rapid.IntRange(0, 10).Draw(t, "columns") {
		table.columns = append(table.columns, s.drawColumn(t, false))
	}
	table.columns = rapid.Permutation(table.columns).Draw(t, "order")
	return table
}

func drawSchema(t *rapid.T) *drawnSchema {
	s := &drawnSchema{version: 1}
	for range rapid.IntRange(1, 3).Draw(t, "tables") {
		s.tables = append(s.tables, s.drawTable(t))
	}
	return s
}

// evolve draws the next version: what a bump allows. lossy says that it may remove things.
func (s *drawnSchema) evolve(t *rapid.T, lossy, drop bool) *drawnSchema {
	next := &drawnSchema{version: s.version + rapid.IntRange(1, 3).Draw(t, "ahead"), names: s.names}
	for _, was := range s.tables {
		if lossy && len(s.tables) > 1 && len(next.tables) > 0 && rapid.IntRange(0, 3).Draw(t, "remove the table") == 0 {
			continue
		}
		table := drawnTable{name: was.name, materialize: was.materialize}
		for _, c := range was.columns {
			key := c.name == "id" || c.name == "team"
			// What is nowhere but in the rows is removed only on request.
			if lossy && !key && (was.materialize || drop) && rapid.IntRange(0, 3).Draw(t, "remove the column") == 0 {
				continue
			}
			if lossy && !key && rapid.IntRange(0, 5).Draw(t, "make it nullable") == 0 {
				c.nullable = true
			}
			table.columns = append(table.columns, c)
		}
		for range rapid.SampledFrom([]int{0, 0, 1, 2, 9}).Draw(t, "new columns") {
			table.columns = append(table.columns, next.drawColumn(t, true))
		}
		if rapid.Bool().Draw(t, "move columns") {
			table.columns = rapid.Permutation(table.columns).Draw(t, "order")
		}
		if rapid.IntRange(0, 2).Draw(t, "materialize otherwise") == 0 {
			table.materialize = !table.materialize
		}
		if rapid.Bool().Draw(t, "index") {
			table.indexed = rapid.SampledFrom(table.columns).Draw(t, "indexed").name
		}
		next.tables = append(next.tables, table)
	}
	for range rapid.IntRange(0, 1).Draw(t, "new tables") {
		next.tables = append(next.tables, next.drawTable(t))
	}
	return next
}

// rowValues are values by column name; a column without one is NULL.
type rowValues map[string]ssp2.Value

type modelRow struct {
	version int64
	values  rowValues
}

// showRow renders a row in the columns of a table.
func showRow(table *schema.Table, version int64, values func(i int) ssp2.Value) string {
	var b strings.Builder
	fmt.Fprintf(&b, "@%d", version)
	for i, c := range table.Columns {
		if v := values(i); !v.Null {
			fmt.Fprintf(&b, " %s=%d/%v/%q", c.Name, v.Int, v.Float, v.Bytes)
		}
	}
	return b.String()
}

// age is a history of schema versions in one database, with a model of its rows.
type age struct {
	t       *rapid.T
	ctx     context.Context
	db      *pgtest.DB
	drawn   *drawnSchema
	current *schema.Schema
	earlier []*schema.Schema
	rows    map[string]map[string]*modelRow

	server  *syncpg.Server
	site    *httptest.Server
	http    *http.Client
	devices []*agedDevice
	commits int
}

// agedDevice is a device of one schema version, which keeps its rows and cursors.
type agedDevice struct {
	*client.Client
	schema *schema.Schema
	wire   ssp2.WireVersion
}

// serve replaces the server by one of the present version and of the earlier ones that can
// be served, which it returns.
func (a *age) serve() (older []*schema.Schema) {
	history := append(slices.Clone(a.earlier), a.current)
	for _, s := range a.earlier {
		if _, err := schema.NewVersions(a.current, s); err == nil && schema.CheckHistory(s, history) == nil {
			older = append(older, s)
		}
	}
	a.stop()
	var err error
	a.server, err = syncpg.New(a.db.Pool, syncpg.Config{
		Schema: a.current, OlderSchemas: older,
		Authenticate: func(*http.Request) (syncpg.Identity, error) {
			return syncpg.Identity{Actor: "ada", Partition: "acme"}, nil
		},
		ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team": {"*"}}, nil
		},
	})
	require.NoError(a.t, err)
	require.NoError(a.t, a.server.Ready(a.ctx))
	handler := a.server.Handler()
	a.site.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler.ServeHTTP(w, r) })
	a.site.Start()
	return older
}

func (a *age) stop() {
	if a.server != nil {
		a.http.CloseIdleConnections()
		a.site.Close()
		a.server.Push().Wait()
	}
	a.site = httptest.NewUnstartedServer(nil)
}

// device makes a device of the present version.
func (a *age) device() *agedDevice {
	d := &agedDevice{schema: a.current, wire: rapid.SampledFrom([]ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3}).Draw(a.t, "wire")}
	var err error
	d.Client, err = client.New(client.Config{
		URL: "http://syncpg.invalid", ClientID: fmt.Sprintf("v%d", a.current.Version), Schema: a.current, Wire: d.wire, HTTP: a.http,
	})
	require.NoError(a.t, err)
	require.NoError(a.t, d.Acquire(a.ctx))
	for _, table := range a.current.Tables {
		require.NoError(a.t, d.Subscribe(table.Name, table.Name, ssp2.ScopeMap{"team": {"a", "b"}}))
	}
	a.devices = append(a.devices, d)
	return d
}

func drawValue(t *rapid.T, c *schema.Column) ssp2.Value {
	if c.Nullable && rapid.IntRange(0, 2).Draw(t, "null") == 0 {
		return ssp2.Value{Null: true}
	}
	switch c.Type {
	case ssp2.TypeInteger:
		return ssp2.Value{Int: rapid.Int64Range(-ssp2.MaxSafeInteger, ssp2.MaxSafeInteger).Draw(t, "integer")}
	case ssp2.TypeFloat:
		return ssp2.Value{Float: rapid.Float64().Draw(t, "float")}
	case ssp2.TypeBoolean:
		return ssp2.Value{Int: int64(rapid.IntRange(0, 1).Draw(t, "boolean"))}
	case ssp2.TypeJSON:
		return ssp2.Value{Bytes: []byte(rapid.SampledFrom([]string{`null`, `{"b": 1,  "a":[ ]}`, `"x"`, `1.50`}).Draw(t, "json"))}
	case ssp2.TypeBytes:
		return ssp2.Value{Bytes: rapid.SliceOfN(rapid.Byte(), 0, 8).Draw(t, "bytes")}
	default:
		return ssp2.Value{Bytes: []byte(rapid.SampledFrom([]string{"", "x", "é\n", strings.Repeat("long", 100)}).Draw(t, "string"))}
	}
}

// write pushes a commit of drawn operations from a device, and keeps the model.
func (a *age) write(d *agedDevice) {
	commit := ssp2.PushCommit{ClientCommitID: strconv.Itoa(a.commits)}
	a.commits++
	for range rapid.IntRange(1, 3).Draw(a.t, "operations") {
		table := rapid.SampledFrom(d.schema.Tables).Draw(a.t, "table")
		id := rapid.SampledFrom([]string{"1", "2", "3", "4"}).Draw(a.t, "id")
		row := a.rows[table.Name][id]
		if row != nil && rapid.IntRange(0, 3).Draw(a.t, "delete") == 0 {
			commit.Operations = append(commit.Operations, ssp2.Operation{Table: table.Name, RowID: id, Op: ssp2.OpDelete})
			delete(a.rows[table.Name], id)
			continue
		}
		values, present := make([]ssp2.Value, len(table.Columns)), ssp2.NewBitmap(len(table.Columns))
		for i := range table.Columns {
			switch c := &table.Columns[i]; c.Name {
			case "id":
				values[i].Bytes = []byte(id)
			case "team":
				values[i].Bytes = []byte(map[bool]string{true: "a", false: "b"}[id < "3"])
			default:
				values[i] = drawValue(a.t, c)
			}
			if row == nil || d.wire < ssp2.WireV3 || i == table.PrimaryKey || rapid.Bool().Draw(a.t, "present") {
				present.Set(i)
			}
		}
		op := ssp2.Operation{Table: table.Name, RowID: id, Op: ssp2.OpUpsert}
		if row == nil {
			op.BaseVersion = new(int64)
			row = &modelRow{values: rowValues{}}
			if a.rows[table.Name] == nil {
				a.rows[table.Name] = map[string]*modelRow{}
			}
			a.rows[table.Name][id] = row
		}
		row.version++
		for i := range table.Columns {
			if present.Has(i) {
				row.values[table.Columns[i].Name] = values[i]
			}
		}
		var err error
		if d.wire == ssp2.WireV3 {
			op.Payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values)
		} else {
			op.Payload, err = ssp2.AppendRow(nil, table.Wire, values)
		}
		require.NoError(a.t, err)
		commit.Operations = append(commit.Operations, op)
	}
	results, err := d.Push(a.ctx, commit)
	require.NoError(a.t, err)
	require.Equal(a.t, ssp2.PushApplied, results[0].Status, "%+v", results[0].Results)
}

// want are the rows of the model in the columns of a table.
func (a *age) want(table *schema.Table) map[string]string {
	all := map[string]string{}
	for id, row := range a.rows[table.Name] {
		all[id] = showRow(table, row.version, func(i int) ssp2.Value {
			if v, ok := row.values[table.Columns[i].Name]; ok {
				return v
			}
			return ssp2.Value{Null: true}
		})
	}
	return all
}

// requireSynced lets a device catch up, and compares it with the model. Unless it begins,
// no row may come but by the log.
func (a *age) requireSynced(d *agedDevice, begins bool) {
	p, err := d.CatchUp(a.ctx)
	require.NoError(a.t, err)
	if !begins {
		require.Zero(a.t, p.Segments, "version %d begins anew", d.schema.Version)
	}
	for _, table := range d.schema.Tables {
		got := map[string]string{}
		for id, row := range d.Rows(table.Name) {
			got[id] = showRow(table, row.Version, func(i int) ssp2.Value { return row.Values[i] })
		}
		require.Equal(a.t, a.want(table), got, "table %s of version %d", table.Name, d.schema.Version)
	}
}

// requireStored compares rows, typed columns and log in the database with the model.
func (a *age) requireStored() {
	for _, table := range a.current.Tables {
		read := func(sql string, args ...any) map[string]string {
			rows, err := a.db.Pool.Query(a.ctx, sql, args...)
			require.NoError(a.t, err)
			got := map[string]string{}
			var id string
			var version int64
			var payload []byte
			_, err = pgx.ForEachRow(rows, []any{&id, &version, &payload}, func() error {
				values, err := ssp2.DecodeRow(table.Wire, payload, nil)
				got[id] = showRow(table, version, func(i int) ssp2.Value { return values[i] })
				return err
			})
			require.NoError(a.t, err)
			return got
		}
		name := schemaddl.QuoteIdent(table.Name)
		want := a.want(table)
		require.Equal(a.t, want, read(`select _sync_row_id, _sync_server_version, _sync_payload from public.`+name))
		require.Equal(a.t, want, read(`select row_id, row_version, payload from (
			select distinct on (row_id) * from syncpg.sync_changes where table_name = $1 order by row_id, commit_seq desc, change_index desc) as c where op = 1`, table.Name))
		// Every change can be read, also one that a later one supersedes.
		read(`select row_id, row_version, payload from syncpg.sync_changes where table_name = $1 and op = 1`, table.Name)
		if !table.Materialize {
			continue
		}
		for _, c := range table.Columns {
			if c.Type == ssp2.TypeJSON { // typed, it is written in another way
				name = ""
			}
		}
		if name != "" {
			var differ int
			require.NoError(a.t, a.db.Pool.QueryRow(a.ctx, `select count(*) from public.`+name+` as x where syncpg.sync_encode_`+table.Name+`(x) <> x._sync_payload`).Scan(&differ))
			require.Zero(a.t, differ)
		}
	}
}

// bump goes to the next version, and forgets in the model what it removes.
func (a *age) bump(next *drawnSchema, drop bool) {
	a.earlier = append(a.earlier, a.current)
	a.drawn, a.current = next, next.compile(a.t)
	_, err := schemaddl.Apply(a.ctx, a.db.Pool, a.current, schemaddl.BumpOptions{Drop: drop})
	require.NoError(a.t, err)
	maps.DeleteFunc(a.rows, func(name string, _ map[string]*modelRow) bool {
		_, ok := a.current.Table(name)
		return !ok
	})
	for name, rows := range a.rows {
		table, _ := a.current.Table(name)
		for _, row := range rows {
			maps.DeleteFunc(row.values, func(column string, _ ssp2.Value) bool {
				_, ok := table.ColumnIndex(column)
				return !ok
			})
		}
	}
}

// roundTripper sends every request to the server of the moment.
type roundTripper struct {
	http.Transport
	a *age
}

func (r *roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.URL.Host, req.Host = r.a.site.Listener.Addr().String(), ""
	return r.Transport.RoundTrip(req)
}

// TestSchemasEvolve plays histories of schema versions: rows, log and the replicas of
// devices of every version are those of the model after every bump, and go on to be.
// Devices of earlier versions that can be served go on from their cursors; the others are
// told to upgrade.
func TestSchemasEvolve(t *testing.T) {
	t.Parallel()
	cluster, err := pgtest.Open(t.Context())
	require.NoError(t, err)
	passed, failed := 0, false
	rapid.Check(t, func(rt *rapid.T) {
		if passed >= evolutions && !failed {
			return
		}
		good := false
		db, err := cluster.Create(t.Context(), pgtest.Options{})
		require.NoError(rt, err)
		a := &age{t: rt, ctx: t.Context(), db: db, rows: map[string]map[string]*modelRow{}}
		a.http = &http.Client{Transport: &roundTripper{a: a}}
		defer func() {
			a.stop()
			if err := db.Close(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
			if good {
				passed++
			} else {
				failed = true
			}
		}()
		a.drawn = drawSchema(rt)
		a.current = a.drawn.compile(rt)
		_, err = schemaddl.Apply(a.ctx, a.db.Pool, a.current, schemaddl.BumpOptions{})
		require.NoError(rt, err)
		a.serve()
		d := a.device()
		for range rapid.IntRange(0, 4).Draw(rt, "commits") {
			a.write(d)
		}
		a.requireSynced(d, true)
		for range rapid.IntRange(1, 3).Draw(rt, "bumps") {
			for range rapid.IntRange(0, 4).Draw(rt, "commits nobody pulls") {
				a.write(d)
			}
			drop := rapid.Bool().Draw(rt, "drop")
			a.bump(a.drawn.evolve(rt, rapid.Bool().Draw(rt, "lossy"), drop), drop)
			a.requireStored()
			older := a.serve()
			for _, known := range a.devices {
				if slices.Contains(older, known.schema) {
					a.requireSynced(known, false)
					a.write(known)
					continue
				}
				_, err := known.Pull(a.ctx)
				require.ErrorAs(rt, err, new(*client.FloorError))
			}
			a.devices = slices.DeleteFunc(a.devices, func(known *agedDevice) bool { return !slices.Contains(older, known.schema) })
			d = a.device()
			a.requireSynced(d, true)
			a.write(d)
			for _, known := range a.devices {
				a.requireSynced(known, false)
			}
			a.requireStored()
		}
		good = true
	})
}
