package integration_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// The newest version has moved and added columns, and a table.
const (
	oldIR = `{"irVersion":1,"schemaVersion":2,"tables":[
		{"name":"tasks","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},
			{"name":"team_id","type":"string","nullable":false},
			{"name":"title","type":"string","nullable":false},
			{"name":"points","type":"integer","nullable":true}],
		 "scopes":[{"pattern":"team:{team_id}"}]}]}`
	newIR = `{"irVersion":1,"schemaVersion":3,"tables":[
		{"name":"labels","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},
			{"name":"team_id","type":"string","nullable":false}],
		 "scopes":[{"pattern":"team:{team_id}"}]},
		{"name":"tasks","primaryKey":"id","columns":[
			{"name":"due","type":"float","nullable":true},
			{"name":"points","type":"integer","nullable":true},
			{"name":"id","type":"string","nullable":false},
			{"name":"team_id","type":"string","nullable":false},
			{"name":"color","type":"string","nullable":true},
			{"name":"title","type":"string","nullable":false}],
		 "scopes":[{"pattern":"team:{team_id}"}]}]}`
)

// versioned is a server of two schema versions.
type versioned struct {
	url      string
	pool     *pgxpool.Pool
	old, new *syncpg.Schema
}

func newVersioned(t *testing.T, change func(*syncpg.Config)) *versioned {
	t.Helper()
	v := &versioned{}
	var err error
	v.old, err = syncpg.ParseSchema([]byte(oldIR))
	require.NoError(t, err)
	v.new, err = syncpg.ParseSchema([]byte(newIR))
	require.NoError(t, err)
	db := pgtest.New(t, pgtest.Options{TemplateKey: "two schema versions", Setup: func(ctx context.Context, conn *pgx.Conn) error {
		return schemaddl.Install(ctx, conn, v.new, schemaddl.Options{})
	}})
	v.pool = db.Pool
	cfg := syncpg.Config{
		Schema: v.new, OlderSchemas: []*syncpg.Schema{v.old},
		Authenticate: func(*http.Request) (syncpg.Identity, error) {
			return syncpg.Identity{Actor: "ada", Partition: "acme"}, nil
		},
		ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team_id": {"*"}}, nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	server, err := syncpg.New(db.Pool, cfg)
	require.NoError(t, err)
	require.NoError(t, server.Ready(t.Context()))
	listener := httptest.NewServer(server.Handler())
	t.Cleanup(func() {
		listener.Close()
		server.Push().Wait()
	})
	v.url = listener.URL
	return v
}

// versionedDevice is a client of a version that has the tasks of a team.
type versionedDevice struct {
	*client.Client
	t      *testing.T
	schema *syncpg.Schema
	wire   ssp2.WireVersion
	n      int
	id     string
}

func (v *versioned) device(t *testing.T, id string, s *syncpg.Schema, wire ssp2.WireVersion) *versionedDevice {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c, err := client.New(client.Config{URL: v.url, ClientID: id, Schema: s, Wire: wire, HTTP: &http.Client{Transport: transport}})
	require.NoError(t, err)
	require.NoError(t, c.Acquire(t.Context()))
	require.NoError(t, c.Subscribe("tasks", "tasks", ssp2.ScopeMap{"team_id": {"a"}}))
	return &versionedDevice{Client: c, t: t, schema: s, wire: wire, id: id}
}

type cells map[string]any

func (c cells) value(name string) ssp2.Value {
	switch v := c[name].(type) {
	case string:
		return ssp2.Value{Bytes: []byte(v)}
	case int:
		return ssp2.Value{Int: int64(v)}
	case float64:
		return ssp2.Value{Float: v}
	}
	return ssp2.Value{Null: true}
}

// commit is an upsert of a task: sparse in wire version 3, else of the whole row.
func (d *versionedDevice) commit(base *int64, row cells) ssp2.PushCommit {
	d.t.Helper()
	table, _ := d.schema.Table("tasks")
	values, present := make([]ssp2.Value, len(table.Columns)), ssp2.NewBitmap(len(table.Columns))
	for i, c := range table.Columns {
		values[i] = row.value(c.Name)
		if _, ok := row[c.Name]; ok {
			present.Set(i)
		}
	}
	var payload []byte
	var err error
	if d.wire == ssp2.WireV3 {
		payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values)
	} else {
		payload, err = ssp2.AppendRow(nil, table.Wire, values)
	}
	require.NoError(d.t, err)
	d.n++
	id, _ := row["id"].(string)
	return ssp2.PushCommit{ClientCommitID: fmt.Sprintf("%s-%d", d.id, d.n), Operations: []ssp2.Operation{
		{Table: "tasks", RowID: id, Op: ssp2.OpUpsert, BaseVersion: base, Payload: payload},
	}}
}

func (d *versionedDevice) push(commits ...ssp2.PushCommit) client.Result {
	d.t.Helper()
	results, err := d.Push(d.t.Context(), commits...)
	require.NoError(d.t, err)
	return results[0]
}

func (d *versionedDevice) requireApplied(base *int64, row cells) {
	d.t.Helper()
	require.Equal(d.t, ssp2.PushApplied, d.push(d.commit(base, row)).Status)
}

// rows pulls, and returns the rows by column name, without NULLs.
func (d *versionedDevice) rows() map[string]cells {
	d.t.Helper()
	_, err := d.CatchUp(d.t.Context())
	require.NoError(d.t, err)
	rows := map[string]cells{}
	for id, r := range d.Rows("tasks") {
		rows[id] = d.cells(r.Values)
	}
	return rows
}

func (d *versionedDevice) cells(values []ssp2.Value) cells {
	table, _ := d.schema.Table("tasks")
	row := cells{}
	for i, c := range table.Columns {
		switch v := values[i]; {
		case v.Null:
		case c.Type == ssp2.TypeInteger:
			row[c.Name] = int(v.Int)
		case c.Type == ssp2.TypeFloat:
			row[c.Name] = v.Float
		default:
			row[c.Name] = string(v.Bytes)
		}
	}
	return row
}

// TestOlderClientsSyncInTheirRowCodec is §2.4 and §9 for a client at an older served
// version, in every wire version: it gets every row by name, in bootstraps and windows,
// and what it writes leaves the columns alone that it does not know.
func TestOlderClientsSyncInTheirRowCodec(t *testing.T) {
	t.Parallel()
	for wire := ssp2.WireV1; wire <= ssp2.WireV3; wire++ {
		t.Run(fmt.Sprintf("wire version %d", wire), func(t *testing.T) {
			t.Parallel()
			v := newVersioned(t, nil)
			fresh, aged := v.device(t, "new", v.new, wire), v.device(t, "old", v.old, wire)
			full := cells{"id": "1", "team_id": "a", "title": "one", "points": 7, "due": 1.5, "color": "red"}
			fresh.requireApplied(nil, full)
			seen := cells{"id": "1", "team_id": "a", "title": "one", "points": 7}
			require.Equal(t, map[string]cells{"1": seen}, aged.rows(), "the bootstrap")
			require.Equal(t, map[string]cells{"1": full}, fresh.rows())

			// An insert: what the older version does not have is NULL.
			aged.requireApplied(nil, cells{"id": "2", "team_id": "a", "title": "two", "points": nil})
			require.Equal(t, cells{"id": "2", "team_id": "a", "title": "two"}, fresh.rows()["2"])

			// An update of the row it knows: color and due stay.
			aged.requireApplied(new(int64(1)), cells{"id": "1", "team_id": "a", "title": "uno", "points": nil})
			require.Equal(t, cells{"id": "1", "team_id": "a", "title": "uno", "due": 1.5, "color": "red"}, fresh.rows()["1"])
			require.Equal(t, cells{"id": "1", "team_id": "a", "title": "uno"}, aged.rows()["1"], "a window")

			// A column that only the newer version has.
			fresh.requireApplied(new(int64(2)), cells{"id": "1", "team_id": "a", "title": "uno", "color": "blue", "due": 1.5, "points": nil})
			require.Equal(t, map[string]cells{
				"1": {"id": "1", "team_id": "a", "title": "uno"}, "2": {"id": "2", "team_id": "a", "title": "two"},
			}, aged.rows())
			require.EqualValues(t, 3, aged.Rows("tasks")["1"].Version)
			require.Equal(t, map[string]cells{
				"1": {"id": "1", "team_id": "a", "title": "uno", "due": 1.5, "color": "blue"}, "2": {"id": "2", "team_id": "a", "title": "two"},
			}, fresh.rows())
		})
	}
}

// TestHowManyDevicesHaveAVersion: the query that OPERATING.md gives for it counts devices,
// and not their subscriptions.
func TestHowManyDevicesHaveAVersion(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "OPERATING.md"))
	require.NoError(t, err)
	query := regexp.MustCompile("(?s)```sql\n([^`]*'schemaVersion'[^`]*)```").FindSubmatch(text)
	require.NotNil(t, query)

	v := newVersioned(t, nil)
	for _, id := range []string{"1", "2"} {
		d := v.device(t, "old "+id, v.old, ssp2.WireV2)
		require.NoError(t, d.Subscribe("more", "tasks", ssp2.ScopeMap{"team_id": {"b"}}))
		d.rows()
	}
	v.device(t, "new", v.new, ssp2.WireV2).rows()
	rows, err := v.pool.Query(t.Context(), string(query[1]))
	require.NoError(t, err)
	type line struct {
		Version string
		Devices int
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	require.NoError(t, err)
	require.ElementsMatch(t, []line{{"2", 2}, {"3", 1}}, found)
}

// TestConflictsOfOlderClients: row and columns of a conflict are those of the client's
// version (§6.3), in the first answer and in every replay, also by the same device in the
// other version.
func TestConflictsOfOlderClients(t *testing.T) {
	t.Parallel()
	for wire := ssp2.WireV1; wire <= ssp2.WireV3; wire++ {
		t.Run(fmt.Sprintf("wire version %d", wire), func(t *testing.T) {
			t.Parallel()
			v := newVersioned(t, nil)
			fresh, aged := v.device(t, "new", v.new, wire), v.device(t, "old", v.old, wire)
			fresh.requireApplied(nil, cells{"id": "1", "team_id": "a", "title": "one", "points": 7, "due": 1.5, "color": "red"})
			fresh.requireApplied(new(int64(1)), cells{"id": "1", "team_id": "a", "title": "two", "points": 7, "due": 1.5, "color": "red"})

			k := aged.commit(new(int64(1)), cells{"id": "1", "team_id": "a", "title": "mine", "points": 7})
			first := aged.push(k)
			require.Equal(t, ssp2.PushRejected, first.Status)
			conflict := first.Results[0]
			require.Equal(t, ssp2.OpConflict, conflict.Status)
			require.EqualValues(t, 2, conflict.ServerVersion)
			old, _ := v.old.Table("tasks")
			values, err := ssp2.DecodeRow(old.Wire, conflict.ServerRow, nil)
			require.NoError(t, err)
			require.Equal(t, cells{"id": "1", "team_id": "a", "title": "two", "points": 7}, aged.cells(values))
			if wire == ssp2.WireV3 {
				want := ssp2.NewBitmap(len(old.Columns))
				for _, name := range []string{"team_id", "title", "points"} {
					i, _ := old.ColumnIndex(name)
					want.Set(i)
				}
				require.Equal(t, []byte(want), conflict.ConflictColumns)
			}
			require.Equal(t, first, aged.push(k), "a replay")

			// The device was upgraded and sends the commit again, encoded anew (§7.4.4).
			upgraded := v.device(t, "old", v.new, wire)
			again := upgraded.commit(new(int64(1)), cells{"id": "1", "team_id": "a", "title": "mine", "points": 7})
			again.ClientCommitID = k.ClientCommitID
			replay := upgraded.push(again).Results[0]
			table, _ := v.new.Table("tasks")
			values, err = ssp2.DecodeRow(table.Wire, replay.ServerRow, nil)
			require.NoError(t, err)
			require.Equal(t, cells{"id": "1", "team_id": "a", "title": "two", "points": 7, "due": 1.5, "color": "red"}, upgraded.cells(values))
		})
	}
}

// TestWhatOlderClientsDoNotKnow: of a table that came later they get nothing, and a row is
// not made of less than their version has.
func TestWhatOlderClientsDoNotKnow(t *testing.T) {
	t.Parallel()
	v := newVersioned(t, nil)
	aged := v.device(t, "old", v.old, ssp2.WireV3)
	result := aged.push(ssp2.PushCommit{ClientCommitID: "delete", Operations: []ssp2.Operation{{Table: "labels", RowID: "1", Op: ssp2.OpDelete}}})
	require.Equal(t, string(ssp2.CodeUnknownTable), result.Results[0].Code)
	result = aged.push(aged.commit(nil, cells{"id": "9", "team_id": "a", "title": "no points"}))
	require.Equal(t, string(ssp2.CodeRowMissing), result.Results[0].Code)
	require.Empty(t, aged.rows())

	labels, err := client.New(client.Config{URL: v.url, ClientID: "labels", Schema: v.new, Wire: ssp2.WireV1})
	require.NoError(t, err)
	require.NoError(t, labels.Subscribe("labels", "labels", ssp2.ScopeMap{"team_id": {"a"}}))
	_, err = labels.CatchUp(t.Context())
	require.NoError(t, err)
}

// TestTheSchemaFloor is §1.6: versions that are not served are told the lowest one that
// they can go on with.
func TestTheSchemaFloor(t *testing.T) {
	t.Parallel()
	v := newVersioned(t, nil)
	for version, required := range map[int32]int32{1: 2, 4: 3} {
		s, err := syncpg.ParseSchema(fmt.Appendf(nil, `{"irVersion":1,"schemaVersion":%d,"tables":[{"name":"tasks","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},{"name":"team_id","type":"string","nullable":false}],"scopes":[{"pattern":"team:{team_id}"}]}]}`, version))
		require.NoError(t, err)
		c, err := client.New(client.Config{URL: v.url, ClientID: "c", Schema: s, Wire: ssp2.WireV1})
		require.NoError(t, err)
		require.NoError(t, c.Subscribe("tasks", "tasks", ssp2.ScopeMap{"team_id": {"a"}}))
		_, err = c.Pull(t.Context())
		var floor *client.FloorError
		require.ErrorAs(t, err, &floor)
		require.Equal(t, required, floor.Required)
		require.EqualValues(t, 3, floor.Latest)
	}
}

// TestOlderClientsBootstrapFromSegments: stored segments are made for each version (§9),
// and read by clients of that version only.
func TestOlderClientsBootstrapFromSegments(t *testing.T) {
	t.Parallel()
	v := newVersioned(t, func(cfg *syncpg.Config) { cfg.InlineSegmentMaxBytes = -1 })
	fresh := v.device(t, "new", v.new, ssp2.WireV2)
	for i := range 30 {
		fresh.requireApplied(nil, cells{"id": strconv.Itoa(i), "team_id": "a", "title": "t", "color": "red", "due": 2.5})
	}
	for _, s := range []*syncpg.Schema{v.old, v.new, v.old} {
		transport := &http.Transport{}
		t.Cleanup(transport.CloseIdleConnections)
		c, err := client.New(client.Config{
			URL: v.url, ClientID: fmt.Sprint("reader of ", s.Version), Schema: s, Wire: ssp2.WireV2,
			HTTP: &http.Client{Transport: transport}, LimitSnapshotRows: 7,
		})
		require.NoError(t, err)
		require.NoError(t, c.Acquire(t.Context()))
		require.NoError(t, c.Subscribe("tasks", "tasks", ssp2.ScopeMap{"team_id": {"a"}}))
		d := &versionedDevice{Client: c, t: t, schema: s}
		rows := d.rows()
		require.Len(t, rows, 30)
		want := cells{"id": "3", "team_id": "a", "title": "t"}
		if s == v.new {
			want["color"], want["due"] = "red", 2.5
		}
		require.Equal(t, want, rows["3"])
	}
}
