package pushsvc_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(suite{m}) }

// suite drops the common database before goroutines are counted.
type suite struct{ *testing.M }

func (s suite) Run() int {
	code := s.M.Run()
	if err := common.close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// common is a bundle for the tests that touch nothing but a partition of their own.
var common commonBundle

type commonBundle struct {
	sync.Mutex
	*bundle
}

func (c *commonBundle) close() error {
	c.Lock()
	defer c.Unlock()
	if c.bundle == nil {
		return nil
	}
	c.Wait()
	return c.db.Close(context.Background())
}

// shared returns the common bundle.
func shared(t testing.TB) *bundle {
	t.Helper()
	common.Lock()
	defer common.Unlock()
	if common.bundle == nil {
		b, options, config := newBundle(t)
		cluster, err := pgtest.Open(t.Context())
		require.NoError(t, err)
		// Not of this test: it outlives it.
		b.db, err = cluster.Create(context.WithoutCancel(t.Context()), options)
		require.NoError(t, err)
		b.Service, err = pushsvc.New(b.db.Pool, config)
		require.NoError(t, err)
		common.bundle = b
	}
	return common.bundle
}

// testIR has one table of each write mode: notes (no constraint of its own), slugs
// (a unique index), and two more that tests give triggers and constraints. sealed keeps
// no typed columns.
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
     "scopes": [{"pattern": "project:{project_id}"}, {"pattern": "org:{org}"}]},
    {"name": "sealed", "primaryKey": "id", "materialize": false,
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project_id", "type": "string", "nullable": false}],
     "scopes": [{"pattern": "project:{project_id}"}]}
  ]}`

// bundle is a service on a database of its own.
type bundle struct {
	*pushsvc.Service
	db      *pgtest.DB
	schema  *schema.Schema
	counter *pgtest.Counter
	now     time.Time

	mu    sync.Mutex
	named map[string]int // partitions by name of the test
}

func testSchema(t testing.TB) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(testIR))
	require.NoError(t, err)
	return s
}

func newBundle(t testing.TB) (*bundle, pgtest.Options, pushsvc.Config) {
	t.Helper()
	b := &bundle{schema: testSchema(t), counter: &pgtest.Counter{}, now: time.UnixMilli(1_750_000_000_000)}
	options := pgtest.Options{
		TemplateKey: "pushsvc", Counter: b.counter,
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, b.schema, schemaddl.Options{})
		},
	}
	return b, options, pushsvc.Config{Schema: b.schema, Clock: func() time.Time { return b.now }}
}

// setup returns a bundle of the test's own.
func setup(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) *bundle {
	t.Helper()
	b, options, config := newBundle(t)
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

// beside returns a bundle with a pool of its own on the database of b.
func (b *bundle) beside(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) *bundle {
	t.Helper()
	other, options, config := newBundle(t)
	for _, f := range change {
		f(&options, &config)
	}
	cfg, err := pgxpool.ParseConfig(b.db.DSN)
	require.NoError(t, err)
	cfg.MaxConns = max(options.MaxConns, 1)
	options.Counter.Attach(&cfg.ConnConfig.Config)
	if options.Configure != nil {
		options.Configure(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	other.db = &pgtest.DB{Name: b.db.Name, DSN: b.db.DSN, Pool: pool}
	other.Service, err = pushsvc.New(pool, config)
	require.NoError(t, err)
	t.Cleanup(other.Wait)
	return other
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

// fullNote names every column of a note, which a sparse row has to do to insert.
func fullNote(id, title string, more ...map[string]any) map[string]any {
	row := map[string]any{
		"id": id, "project_id": "pr1", "title": title, "rank": nil, "weight": nil,
		"done": nil, "meta": nil, "thumb": nil, "file": nil, "body": nil,
	}
	for _, m := range more {
		maps.Copy(row, m)
	}
	return row
}

func remove(table, id string) ssp2.Operation {
	return ssp2.Operation{Table: table, RowID: id, Op: ssp2.OpDelete}
}

func base(op ssp2.Operation, version int64) ssp2.Operation {
	op.BaseVersion = &version
	return op
}

// everything grants every scope of the test schema.
var everything = scope.Allowed{"project_id": {"*"}, "org": {"*"}}

func allow(a scope.Allowed) scope.Resolution { return scope.Resolution{Grants: scope.Compile(a)} }

// client pushes to a partition of its own, so that tests can share a database.
type client struct {
	b   *bundle
	req pushsvc.Request
	ids *int // commit ids given so far; shared by copies of the client
}

// partition names a partition after the test, and tells its repetitions apart.
func (b *bundle) partition(t testing.TB) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.named == nil {
		b.named = map[string]int{}
	}
	b.named[t.Name()]++
	if n := b.named[t.Name()]; n > 1 {
		return fmt.Sprint(t.Name(), " ", n)
	}
	return t.Name()
}

// client returns a client that is allowed everything in the partition named after
// the test, and knows the partition's log epoch.
func (b *bundle) client(t testing.TB, wire ssp2.WireVersion) *client {
	t.Helper()
	c := &client{b: b, ids: new(int), req: pushsvc.Request{
		Partition: b.partition(t), Actor: "alice", ClientID: "c1", WireVersion: ssp2.WireV3, Scopes: allow(everything),
	}}
	resp, err := b.Push(t.Context(), c.req)
	require.NoError(t, err)
	require.True(t, resp.Reset, "a request without an epoch acquires it")
	c.req.LogEpoch = &resp.LogEpoch
	return c.as(wire)
}

// as returns the client speaking another wire version.
func (c *client) as(wire ssp2.WireVersion) *client {
	return c.with(func(r *pushsvc.Request) { r.WireVersion = wire })
}

// with returns a copy of the client whose requests are changed by f.
func (c *client) with(f func(*pushsvc.Request)) *client {
	other := *c
	f(&other.req)
	return &other
}

// commit makes a commit with an id of its own.
func (c *client) commit(ops ...ssp2.Operation) ssp2.PushCommit {
	*c.ids++
	return commit(fmt.Sprintf("k%d", *c.ids), ops...)
}

// request makes a request of this client.
func (c *client) request(commits ...ssp2.PushCommit) pushsvc.Request {
	req := c.req
	req.Commits = commits
	return req
}

// send pushes commits in one request and returns their results.
func (c *client) send(t testing.TB, commits ...ssp2.PushCommit) []ssp2.PushResult {
	t.Helper()
	return c.b.push(t, c.request(commits...)).Results
}

// push pushes one commit and returns its result.
func (c *client) push(t testing.TB, ops ...ssp2.Operation) ssp2.PushResult {
	t.Helper()
	return c.send(t, c.commit(ops...))[0]
}

// apply pushes commits of one operation that must be applied.
func (c *client) apply(t testing.TB, ops ...ssp2.Operation) {
	t.Helper()
	for _, op := range ops {
		requireApplied(t, c.push(t, op))
	}
}

func requireApplied(t testing.TB, results ...ssp2.PushResult) {
	t.Helper()
	for i := range results {
		require.Equal(t, ssp2.PushApplied, results[i].Status, "%s: %+v", results[i].ClientCommitID, results[i].Results)
	}
}

// requireRejected checks a rejection: one record, of this operation.
func requireRejected(t testing.TB, r ssp2.PushResult, op int, code ssp2.Code) {
	t.Helper()
	require.Equal(t, ssp2.PushRejected, r.Status)
	require.Nil(t, r.CommitSeq)
	require.Len(t, r.Results, 1)
	require.Equal(t, string(code), r.Results[0].Code, r.Results[0].Message)
	require.EqualValues(t, op, r.Results[0].OpIndex)
	if code != ssp2.CodeVersionConflict {
		info, ok := ssp2.Lookup(code)
		require.True(t, ok)
		require.Equal(t, ssp2.OpError, r.Results[0].Status)
		require.Equal(t, info.Retryable, r.Results[0].Retryable)
		require.NotEmpty(t, r.Results[0].Message)
	}
}

// storedRow is a row of an app table as the server keeps it.
type storedRow struct {
	Version int64
	Columns []int64        // column versions; nil: none stored
	Values  map[string]any // from the payload, NULLs left out
}

// stored reads a row, nil when there is none.
func (c *client) stored(t testing.TB, table, id string) *storedRow {
	t.Helper()
	var r storedRow
	var payload []byte
	err := c.b.db.Pool.QueryRow(t.Context(), `select _sync_server_version, _sync_column_versions, _sync_payload from public.`+
		schemaddl.QuoteIdent(table)+` where _sync_partition = $1 and _sync_row_id = $2`, c.req.Partition, id).Scan(&r.Version, &r.Columns, &payload)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	require.NoError(t, err)
	r.Values = c.b.decoded(t, table, payload)
	return &r
}

// decoded decodes a full row into Go values by column name, NULLs left out.
func (b *bundle) decoded(t testing.TB, table string, payload []byte) map[string]any {
	t.Helper()
	tab, ok := b.schema.Table(table)
	require.True(t, ok)
	row, err := ssp2.DecodeRow(tab.Wire, payload, nil)
	require.NoError(t, err)
	named := map[string]any{}
	for i, col := range tab.Columns {
		switch v := row[i]; {
		case v.Null:
		case col.Type == ssp2.TypeInteger:
			named[col.Name] = int(v.Int)
		case col.Type == ssp2.TypeFloat:
			named[col.Name] = v.Float
		case col.Type == ssp2.TypeBoolean:
			named[col.Name] = v.Int != 0
		default:
			named[col.Name] = string(v.Bytes)
		}
	}
	return named
}

// columnsOf names the columns of a presence bitmap.
func (b *bundle) columnsOf(t testing.TB, table string, bitmap ssp2.Bitmap) []string {
	t.Helper()
	tab, ok := b.schema.Table(table)
	require.True(t, ok)
	require.Len(t, bitmap, len(ssp2.NewBitmap(len(tab.Columns))))
	var names []string
	for i, col := range tab.Columns {
		if bitmap.Has(i) {
			names = append(names, col.Name)
		}
	}
	return names
}

// seq is the partition's newest seq.
func (c *client) seq(t testing.TB) int64 {
	t.Helper()
	return scalar[int64](t, c.b, `select max_commit_seq from syncpg.sync_partitions where partition = $1`, c.req.Partition)
}

// log renders the partition's changes: seq, index, op, row id, version.
func (c *client) log(t testing.TB) []string {
	t.Helper()
	rows, err := c.b.db.Pool.Query(t.Context(), `
		select commit_seq || ' ' || change_index || case op when 1 then ' upsert ' else ' delete ' end || row_id || ' ' || coalesce(row_version::text, '-')
		  from syncpg.sync_changes where partition = $1 order by commit_seq, change_index`, c.req.Partition)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

// tombstones counts the partition's tombstones.
func (c *client) tombstones(t testing.TB) int {
	t.Helper()
	return scalar[int](t, c.b, `select count(*) from syncpg.sync_tombstones where partition = $1`, c.req.Partition)
}

// exec runs statements of the host.
func (b *bundle) exec(t testing.TB, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		_, err := b.db.Pool.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
}

// scalar reads one value from the database.
func scalar[T any](t testing.TB, b *bundle, sql string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// requireConnectionsBack waits until the pool has given out every connection it may
// have: a closed one is given back in the background.
func requireConnectionsBack(t testing.TB, b *bundle) {
	t.Helper()
	for range b.db.Pool.Config().MaxConns {
		conn, err := b.db.Pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
	}
}
