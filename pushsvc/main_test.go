package pushsvc_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testIR has one table of each write mode: notes (no constraint of its own), slugs
// (a unique index), and two more that tests give triggers and constraints.
const testIR = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [
    {"name": "notes", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "title", "type": "string", "nullable": true},
       {"name": "rank", "type": "integer", "nullable": true},
       {"name": "weight", "type": "float", "nullable": true},
       {"name": "done", "type": "boolean", "nullable": true},
       {"name": "meta", "type": "json", "nullable": true},
       {"name": "thumb", "type": "bytes", "nullable": true},
       {"name": "file", "type": "blob_ref", "nullable": true},
       {"name": "body", "type": "crdt", "nullable": true, "crdtType": "yjs-doc"}],
     "scopes": [{"pattern": "project:{project_id}"}]},
    {"name": "slugs", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "slug", "type": "string", "nullable": true},
       {"name": "meta", "type": "json", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}],
     "indexes": [{"name": "slugs_by_slug", "columns": ["slug"], "unique": true}]},
    {"name": "guarded", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "integer", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false},
       {"name": "org", "type": "integer", "nullable": false},
       {"name": "position", "type": "integer", "nullable": true}],
     "scopes": [{"pattern": "project:{project_id}"}, {"pattern": "org:{org}"}]}
  ]}`

// bundle is a service on a database of its own.
type bundle struct {
	*pushsvc.Service
	db      *pgtest.DB
	schema  *schema.Schema
	counter *pgtest.Counter
	now     time.Time
}

func testSchema(t testing.TB) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(testIR))
	require.NoError(t, err)
	return s
}

func setup(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) *bundle {
	t.Helper()
	b := &bundle{schema: testSchema(t), counter: &pgtest.Counter{}, now: time.UnixMilli(1_750_000_000_000)}
	options := pgtest.Options{
		TemplateKey: "pushsvc", Counter: b.counter,
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, b.schema, schemaddl.Options{})
		},
	}
	config := pushsvc.Config{Schema: b.schema, Clock: func() time.Time { return b.now }}
	for _, f := range change {
		f(&options, &config)
	}
	b.db = pgtest.New(t, options)
	s, err := pushsvc.New(b.db.Pool, config)
	require.NoError(t, err)
	t.Cleanup(s.Wait)
	b.Service = s
	return b
}

// request is a wire version 1 request of client c1 in partition p1, with every
// scope allowed.
func request(commits ...ssp2.PushCommit) pushsvc.Request {
	return pushsvc.Request{
		Partition: "p1", Actor: "alice", ClientID: "c1", WireVersion: ssp2.WireV1,
		Scopes:  scope.Resolution{Grants: scope.Compile(scope.Allowed{"project_id": {"*"}, "org": {"*"}})},
		Commits: commits,
	}
}

func commit(id string, ops ...ssp2.Operation) ssp2.PushCommit {
	return ssp2.PushCommit{ClientCommitID: id, Operations: ops}
}

func (b *bundle) push(t testing.TB, req pushsvc.Request) *pushsvc.Response {
	t.Helper()
	resp, err := b.Push(t.Context(), req)
	require.NoError(t, err)
	require.False(t, resp.Reset)
	require.Len(t, resp.Results, len(req.Commits))
	return resp
}

// values builds a row of a table from Go values by column name; the rest is NULL.
func (b *bundle) values(t testing.TB, table string, named map[string]any) []ssp2.Value {
	t.Helper()
	tab, ok := b.schema.Table(table)
	require.True(t, ok)
	row := make([]ssp2.Value, len(tab.Columns))
	for i, c := range tab.Columns {
		switch v := named[c.Name].(type) {
		case nil:
			row[i] = ssp2.Value{Null: true}
		case string:
			row[i] = ssp2.Value{Bytes: []byte(v)}
		case int:
			row[i] = ssp2.Value{Int: int64(v)}
		case int64:
			row[i] = ssp2.Value{Int: v}
		case float64:
			row[i] = ssp2.Value{Float: v}
		case bool:
			if v {
				row[i].Int = 1
			}
		default:
			require.FailNow(t, "no such value", "%T", v)
		}
	}
	return row
}

// full encodes a full row (wire versions 1 and 2).
func (b *bundle) full(t testing.TB, table string, named map[string]any) []byte {
	t.Helper()
	tab, _ := b.schema.Table(table)
	row, err := ssp2.AppendRow(nil, tab.Wire, b.values(t, table, named))
	require.NoError(t, err)
	return row
}

// sparse encodes a sparse row (wire version 3) of exactly the named columns.
func (b *bundle) sparse(t testing.TB, table string, named map[string]any) []byte {
	t.Helper()
	tab, _ := b.schema.Table(table)
	present := ssp2.NewBitmap(len(tab.Columns))
	for i, c := range tab.Columns {
		if _, ok := named[c.Name]; ok {
			present.Set(i)
		}
	}
	row, err := ssp2.AppendSparseRow(nil, tab.Wire, tab.PrimaryKey, present, b.values(t, table, named))
	require.NoError(t, err)
	return row
}

func (b *bundle) upsert(t testing.TB, table string, named map[string]any) ssp2.Operation {
	t.Helper()
	return ssp2.Operation{Table: table, RowID: fmt.Sprint(named["id"]), Op: ssp2.OpUpsert, Payload: b.full(t, table, named)}
}

func (b *bundle) patch(t testing.TB, table string, named map[string]any) ssp2.Operation {
	t.Helper()
	return ssp2.Operation{Table: table, RowID: fmt.Sprint(named["id"]), Op: ssp2.OpUpsert, Payload: b.sparse(t, table, named)}
}

func note(id, title string) map[string]any {
	return map[string]any{"id": id, "project_id": "pr1", "title": title}
}

func remove(table, id string) ssp2.Operation {
	return ssp2.Operation{Table: table, RowID: id, Op: ssp2.OpDelete}
}

func base(op ssp2.Operation, version int64) ssp2.Operation {
	op.BaseVersion = &version
	return op
}

// scalar reads one value from the database.
func scalar[T any](t testing.TB, b *bundle, sql string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}
