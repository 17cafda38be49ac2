package pullsvc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testIR has a table of one scope variable, one of two, and one with a variable of
// every other type.
const testIR = `{
  "irVersion": 1, "schemaVersion": 3,
  "tables": [
    {"name": "items", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "project", "type": "string", "nullable": false},
       {"name": "body", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "project:{project}"}]},
    {"name": "docs", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "string", "nullable": false},
       {"name": "org", "type": "string", "nullable": false},
       {"name": "folder", "type": "integer", "nullable": false},
       {"name": "p_partition", "type": "string", "nullable": true}],
     "scopes": [{"pattern": "org:{org}"}, {"pattern": "folder:{folderId}", "column": "folder"}]},
    {"name": "typed", "primaryKey": "id",
     "columns": [
       {"name": "id", "type": "integer", "nullable": false},
       {"name": "hot", "type": "boolean", "nullable": false},
       {"name": "ratio", "type": "float", "nullable": false},
       {"name": "shape", "type": "json", "nullable": false}],
     "scopes": [{"pattern": "hot:{hot}"}, {"pattern": "ratio:{ratio}"}, {"pattern": "shape:{shape}"}]}
  ]}`

const (
	partition = "p1"
	epoch     = "epoch-1"
)

// bundle is a service on a database of its own, and what was written there.
type bundle struct {
	*pullsvc.Service
	db      *pgtest.DB
	schema  *schema.Schema
	counter *pgtest.Counter
	now     time.Time
	// What was written, to the partition of that name.
	partition string
	rows      map[string]map[string]*row // by table and row id
	seq       int64                      // newest commit
	horizon   int64
}

// row is a row as the server has it.
type row struct {
	version int64
	payload []byte
	scopes  []string
}

func testSchema(t testing.TB) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(testIR))
	require.NoError(t, err)
	return s
}

func setup(t testing.TB, change ...func(*pgtest.Options, *pullsvc.Config)) *bundle {
	t.Helper()
	b := &bundle{
		schema: testSchema(t), counter: &pgtest.Counter{}, now: time.UnixMilli(1_750_000_000_000),
	}
	b.inPartition(partition)
	options := pgtest.Options{
		TemplateKey: "pullsvc", Counter: b.counter,
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			if err := schemaddl.Install(ctx, conn, b.schema, schemaddl.Options{}); err != nil {
				return err
			}
			_, err := conn.Exec(ctx, `select syncpg.sync_open_partition($1, $2, 0)`, partition, epoch)
			return err
		},
	}
	config := pullsvc.Config{Schema: b.schema, Clock: func() time.Time { return b.now }}
	for _, f := range change {
		f(&options, &config)
	}
	b.db = pgtest.New(t, options)
	s, err := pullsvc.New(b.db.Pool, config)
	require.NoError(t, err)
	b.Service = s
	return b
}

// inPartition makes an empty partition the one that is written to.
func (b *bundle) inPartition(name string) {
	b.partition, b.seq, b.horizon = name, 0, 0
	b.rows = map[string]map[string]*row{"items": {}, "docs": {}, "typed": {}}
}

// with changes the configuration of the service.
func with(f func(*pullsvc.Config)) func(*pgtest.Options, *pullsvc.Config) {
	return func(_ *pgtest.Options, c *pullsvc.Config) { f(c) }
}

// withDatabase changes how the test talks to the database.
func withDatabase(f func(*pgtest.Options)) func(*pgtest.Options, *pullsvc.Config) {
	return func(o *pgtest.Options, _ *pullsvc.Config) { f(o) }
}

// change is one change of a commit.
type change struct {
	table  string
	values []any // nil: delete
	id     string
	scopes []string // of a delete; nil: those of the stored row
}

func item(id, project, body string) change {
	return change{table: "items", id: id, values: []any{id, project, body}}
}

func doc(id, org string, folder int) change {
	return change{table: "docs", id: id, values: []any{id, org, folder, nil}}
}

func remove(table, id string) change { return change{table: table, id: id} }

// commit appends one commit to the log, as a push or the host would.
func (b *bundle) commit(t testing.TB, changes ...change) int64 {
	t.Helper()
	b.seq++
	batch := &pgx.Batch{}
	batch.Queue(`update syncpg.sync_partitions set max_commit_seq = $2 where partition = $1`, b.partition, b.seq)
	batch.Queue(`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count)
		values ($1, $2, 'writer', $2::bigint::text, 'actor-' || $2::bigint, $2::bigint * 1000, 3, $3)`, b.partition, b.seq, len(changes))
	for i, c := range changes {
		if c.values == nil {
			b.queueDelete(t, batch, i, c)
		} else {
			b.queueUpsert(t, batch, i, c)
		}
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), b.db.Pool, func(tx pgx.Tx) error {
		return tx.SendBatch(t.Context(), batch).Close()
	}))
	return b.seq
}

func (b *bundle) queueLog(batch *pgx.Batch, i int, c change, op ssp2.Op, version *int64, scopes []string, payload []byte) {
	batch.Queue(`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9)`, b.partition, b.seq, i, c.table, c.id, int16(op), version, scopes, payload)
	batch.Queue(`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
		select $1, $2, k, $3 from unnest($4::text[]) as k on conflict do nothing`, b.partition, c.table, b.seq, scopes)
}

func (b *bundle) queueDelete(t testing.TB, batch *pgx.Batch, i int, c change) {
	t.Helper()
	scopes := c.scopes
	if scopes == nil {
		require.Contains(t, b.rows[c.table], c.id)
		scopes = b.rows[c.table][c.id].scopes
		delete(b.rows[c.table], c.id)
		batch.Queue(`delete from public.`+c.table+` where _sync_partition = $1 and _sync_row_id = $2`, b.partition, c.id)
	}
	b.queueLog(batch, i, c, ssp2.OpDelete, nil, scopes, nil)
}

func (b *bundle) queueUpsert(t testing.TB, batch *pgx.Batch, i int, c change) {
	t.Helper()
	table, _ := b.schema.Table(c.table)
	values := wireValues(t, c.values)
	payload, err := ssp2.AppendRow(nil, table.Wire, values)
	require.NoError(t, err)
	scopes, ok := table.RowScopes(values, nil)
	require.True(t, ok)
	r := &row{version: 1, payload: payload, scopes: scopes}
	if old := b.rows[c.table][c.id]; old != nil {
		r.version = old.version + 1
	}
	b.rows[c.table][c.id] = r
	args := []any{b.partition, c.id, r.version, payload}
	names := []string{"_sync_partition", "_sync_row_id", "_sync_server_version", "_sync_payload"}
	for k, col := range table.Columns {
		args = append(args, c.values[k])
		names = append(names, col.Name)
	}
	places, sets := make([]string, len(names)), make([]string, len(names))
	for k, name := range names {
		places[k] = fmt.Sprintf("$%d", k+1)
		sets[k] = name + " = excluded." + name
	}
	batch.Queue(fmt.Sprintf(`insert into public.%s (%s) values (%s) on conflict (_sync_partition, _sync_row_id) do update set %s`,
		c.table, strings.Join(names, ", "), strings.Join(places, ", "), strings.Join(sets, ", ")), args...)
	b.queueLog(batch, i, c, ssp2.OpUpsert, &r.version, scopes, payload)
}

func wireValues(t testing.TB, values []any) []ssp2.Value {
	t.Helper()
	wire := make([]ssp2.Value, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case nil:
			wire[i].Null = true
		case string:
			wire[i].Bytes = []byte(v)
		case int:
			wire[i].Int = int64(v)
		case bool:
			if v {
				wire[i].Int = 1
			}
		case float64:
			wire[i].Float = v
		default:
			require.FailNow(t, "no such value", "%T", v)
		}
	}
	return wire
}

// prune deletes the log up to a seq (§4.6).
func (b *bundle) prune(t testing.TB, horizon int64) {
	t.Helper()
	b.horizon = horizon
	keep := b.seq - horizon
	if keep == 0 {
		keep = -1
	}
	s, err := retention.New(b.db.Pool, retention.Config{Policy: retention.Policy{KeepCommits: keep, ActiveWindow: -1}})
	require.NoError(t, err)
	result, err := s.Prune(t.Context(), b.partition, nil)
	require.NoError(t, err)
	require.Equal(t, horizon, result.Horizon)
}

// everything grants every scope.
var everything = scope.Allowed{
	"project": {"*"}, "org": {"*"}, "folderId": {"*"}, "hot": {"*"}, "ratio": {"*"}, "shape": {"*"},
}

func granted(a scope.Allowed) scope.Resolution { return scope.Resolution{Grants: scope.Compile(a)} }

// request is a wire version 2 request of client c1 with every scope allowed.
func request(subs ...ssp2.Subscription) pullsvc.Request {
	e := epoch
	return pullsvc.Request{
		Partition: partition, Actor: "alice", ClientID: "c1", WireVersion: ssp2.WireV2, LogEpoch: &e,
		Scopes: granted(everything), Header: ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows},
		Subscriptions: subs,
	}
}

// sub subscribes to a table by "variable=value" pairs, at a cursor.
func sub(id, table string, cursor int64, scopes ssp2.ScopeMap) ssp2.Subscription {
	return ssp2.Subscription{ID: id, Table: table, Cursor: cursor, Scopes: scopes}
}

func project(values ...string) ssp2.ScopeMap { return ssp2.ScopeMap{"project": values} }

// section is the decoded answer to one subscription.
type section struct {
	Start    ssp2.SubStart
	Commits  []ssp2.Commit
	Segments []ssp2.Segment
	Refs     []ssp2.SegmentRef
	End      ssp2.SubEnd
}

// pull runs a whole pull and decodes it.
func (b *bundle) pull(t testing.TB, req pullsvc.Request) []section {
	t.Helper()
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	defer p.Close()
	require.False(t, p.Reset)
	return decode(t, req, collect(t, p))
}

// one pulls one subscription.
func (b *bundle) one(t testing.TB, s ssp2.Subscription) section {
	t.Helper()
	return b.pull(t, request(s))[0]
}

// collect gathers the frames of a stream.
func collect(t testing.TB, p *pullsvc.Pull) []byte {
	t.Helper()
	var frames []byte
	require.NoError(t, p.Stream(t.Context(), func(piece []byte) error {
		require.NotEmpty(t, piece)
		frames = append(frames, piece...)
		return nil
	}))
	return frames
}

// decode reads frames as a client reads a response, and checks their grammar.
func decode(t testing.TB, req pullsvc.Request, frames []byte) []section {
	t.Helper()
	message := ssp2.AppendEnvelope(nil, req.WireVersion, ssp2.KindResponse)
	message, err := ssp2.AppendFrame(message, req.WireVersion, &ssp2.ResponseHeader{LogEpoch: epoch})
	require.NoError(t, err)
	decoded, err := ssp2.DecodeMessage(ssp2.AppendEnd(append(message, frames...)))
	require.NoError(t, err)
	var sections []section
	for _, f := range decoded.Frames[1:] {
		last := len(sections) - 1
		switch f := f.(type) {
		case *ssp2.SubStart:
			sections = append(sections, section{Start: *f})
		case *ssp2.Commit:
			sections[last].Commits = append(sections[last].Commits, *f)
		case *ssp2.SegmentInline:
			segment, err := ssp2.DecodeSegment(f.Payload)
			require.NoError(t, err)
			sections[last].Segments = append(sections[last].Segments, *segment)
		case *ssp2.SegmentRef:
			sections[last].Refs = append(sections[last].Refs, *f)
		case *ssp2.SubEnd:
			sections[last].End = *f
		}
	}
	require.Len(t, sections, len(req.Subscriptions))
	for i := range sections {
		require.Equal(t, req.Subscriptions[i].ID, sections[i].Start.ID)
	}
	return sections
}

// seqs are the commits of a window, with the row ids of their changes.
func (s section) seqs() map[int64][]string {
	all := map[int64][]string{}
	for _, c := range s.Commits {
		for _, ch := range c.Changes {
			all[c.CommitSeq] = append(all[c.CommitSeq], ch.RowID)
		}
	}
	return all
}

// ids are the primary keys of the rows of every segment, in order.
func (s section) ids(t testing.TB, table *schema.Table) []string {
	t.Helper()
	ids := []string{}
	for _, segment := range s.Segments {
		for _, block := range segment.Blocks {
			for _, r := range block {
				ids = append(ids, rowID(t, table, r.Row))
			}
		}
	}
	return ids
}

func rowID(t testing.TB, table *schema.Table, payload []byte) string {
	t.Helper()
	values, err := ssp2.DecodeRow(table.Wire, payload, nil)
	require.NoError(t, err)
	id, ok := table.RowID(values)
	require.True(t, ok)
	return id
}

// token makes a resume token.
func token(pin int64, table string, cursor *string) *string {
	b, err := json.Marshal(map[string]any{"asOfCommitSeq": pin, "tables": []string{table}, "tableIndex": 0, "rowCursor": cursor})
	if err != nil {
		panic(err)
	}
	s := string(b)
	return &s
}

// record is a client's record.
type record struct {
	Actor         string
	Wire          *int16
	Cursor        *int64
	Subscriptions *string
	Updated       int64
}

func (b *bundle) record(t testing.TB, client string) *record {
	t.Helper()
	rows, err := b.db.Pool.Query(t.Context(), `select actor_id, wire_version, cursor, subscriptions, updated_at_ms
		from syncpg.sync_clients where partition = $1 and client_id = $2`, b.partition, client)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[record])
	require.NoError(t, err)
	if len(all) == 0 {
		return nil
	}
	return all[0]
}

func (b *bundle) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := b.db.Pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}
