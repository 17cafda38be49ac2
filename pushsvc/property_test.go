package pushsvc_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// intent is an operation as the generator and the model see it.
type intent struct {
	table, id string
	remove    bool
	base      int64          // -1: absent
	values    map[string]any // of the present columns
	whole     bool           // every column is present
}

// Values of the columns that operations change. Some cannot be stored, and those of
// slug and position are unique.
var domains = map[string]map[string][]any{
	"notes":   {"project_id": {"pr1", "pr1", "pr2"}, "title": {nil, "a", "b"}, "rank": {nil, 1, 2}, "meta": {nil, `{"a": 1}`, `[]`, `"\u0000"`}},
	"slugs":   {"project_id": {"pr1", "pr1", "pr2"}, "slug": {nil, "x", "y", "z"}, "meta": {nil, `1`}},
	"guarded": {"project_id": {"pr1", "pr1", "pr2"}, "org": {7, 7, 8}, "position": {nil, 1, 2, 3}},
}

// ids are the rows that operations meet on.
var ids = map[string][]any{"notes": {"a", "b", "c"}, "slugs": {"a", "b", "c"}, "guarded": {1, 2, 3}}

// columns that are never written, but present in a whole row.
var untouched = map[string][]string{"notes": {"weight", "done", "thumb", "file", "body"}}

func drawIntent(t *rapid.T, tables []string) intent {
	table := rapid.SampledFrom(tables).Draw(t, "table")
	id := rapid.SampledFrom(ids[table]).Draw(t, "id")
	in := intent{table: table, id: fmt.Sprint(id), base: -1}
	if rapid.IntRange(0, 4).Draw(t, "delete") == 0 {
		in.remove = true
		return in
	}
	in.base = rapid.SampledFrom([]int64{-1, -1, 0, 0, 1, 1, 2, 3}).Draw(t, "base")
	in.whole = rapid.IntRange(0, 2).Draw(t, "whole") > 0
	in.values = map[string]any{"id": id}
	for _, column := range slices.Sorted(maps.Keys(domains[table])) {
		if in.whole || rapid.Bool().Draw(t, column+" present") {
			in.values[column] = rapid.SampledFrom(domains[table][column]).Draw(t, column)
		}
	}
	if in.whole {
		for _, column := range untouched[table] {
			in.values[column] = nil
		}
	}
	in.whole = len(in.values) == 1+len(domains[table])+len(untouched[table])
	return in
}

// drawCommits draws the commits of a request.
func drawCommits(t *rapid.T) [][]intent {
	tables := rapid.SampledFrom([][]string{{"notes", "slugs"}, {"notes", "slugs", "guarded"}, {"guarded"}}).Draw(t, "tables")
	commits := make([][]intent, rapid.IntRange(1, 5).Draw(t, "commits"))
	for i := range commits {
		commits[i] = make([]intent, rapid.IntRange(1, 4).Draw(t, "operations"))
		for j := range commits[i] {
			commits[i][j] = drawIntent(t, tables)
		}
	}
	return commits
}

// operation encodes an intent for a wire version; older ones need a whole row, in
// which columns that are absent are NULL or their first value.
func (b *bundle) operation(t testing.TB, wire ssp2.WireVersion, in intent) ssp2.Operation {
	t.Helper()
	op := ssp2.Operation{Table: in.table, RowID: in.id, Op: ssp2.OpDelete}
	if !in.remove {
		op.Op = ssp2.OpUpsert
		if wire == ssp2.WireV3 {
			op.Payload = b.sparse(t, in.table, in.values)
		} else {
			row := maps.Clone(in.values)
			for column, domain := range domains[in.table] {
				if _, ok := row[column]; !ok {
					row[column] = domain[0]
				}
			}
			op.Payload = b.full(t, in.table, row)
		}
	}
	if in.base >= 0 {
		op.BaseVersion = &in.base
	}
	return op
}

func (b *bundle) commits(t testing.TB, wire ssp2.WireVersion, prefix string, commits [][]intent) []ssp2.PushCommit {
	t.Helper()
	list := make([]ssp2.PushCommit, len(commits))
	for i, c := range commits {
		list[i].ClientCommitID = fmt.Sprint(prefix, i)
		for _, in := range c {
			list[i].Operations = append(list[i].Operations, b.operation(t, wire, in))
		}
	}
	return list
}

// dump renders everything a partition holds, table by table, but for the identities
// of outcomes.
func (b *bundle) dump(t testing.TB, partition string) map[string][]string {
	t.Helper()
	var parts []string
	for _, table := range []string{"notes", "slugs", "guarded"} {
		parts = append(parts, fmt.Sprintf(`select '%[1]s', to_jsonb(r) - '_sync_partition' from public.%[1]s as r where _sync_partition = $1`, table))
	}
	for _, table := range []string{"commits", "changes", "change_scopes", "tombstones", "push_results", "clients", "partitions"} {
		parts = append(parts, fmt.Sprintf(`select '%[1]s', to_jsonb(r) - '{partition,outcome_id}'::text[] from syncpg.sync_%[1]s as r where partition = $1`, table))
	}
	rows, err := b.db.Pool.Query(t.Context(), strings.Join(parts, " union all ")+` order by 1, 2`, partition)
	require.NoError(t, err)
	all := map[string][]string{}
	var table, row string
	_, err = pgx.ForEachRow(rows, []any{&table, &row}, func() error {
		all[table] = append(all[table], row)
		return nil
	})
	require.NoError(t, err)
	return all
}

// uniquePositions makes the positions of guarded unique, checked when a commit ends.
const uniquePositions = `alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable initially deferred`

// hookings are ways to configure the hooks of a service.
var hookings = map[string]func(t *testing.T) func(*pgtest.Options, *pushsvc.Config){
	"no hooks": func(*testing.T) func(*pgtest.Options, *pushsvc.Config) {
		return func(*pgtest.Options, *pushsvc.Config) {}
	},
	"hooks that read": func(t *testing.T) func(*pgtest.Options, *pushsvc.Config) {
		return func(_ *pgtest.Options, cfg *pushsvc.Config) {
			cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
				if v.Op == ssp2.OpUpsert && v.RowID == "c" && v.Row.Value("title") == "b" {
					return pushsvc.Reject("app.no_b_for_c", "", nil)
				}
				return nil
			}}
			cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error { return fewNotes(ctx, t, c) }
		}
	},
}

// fewNotes allows at most one note in the project pr1, and looks at that when a commit
// has an operation on note "a". It fails the test when the views of the candidate state
// do not agree.
func fewNotes(ctx context.Context, t *testing.T, c *pushsvc.Candidate) error {
	for i, e := range c.Operations {
		if e.Table != "notes" || e.RowID != "a" {
			continue
		}
		rows, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "notes", Scopes: map[string][]string{"project_id": {"pr1"}}})
		if err != nil {
			return err
		}
		for _, row := range rows {
			if same, err := c.GetRow(ctx, "notes", row.RowID); err != nil || same == nil ||
				same.Version != row.Version || !maps.EqualFunc(same.Row.Map(), row.Row.Map(), func(a, b any) bool { return a == b }) {
				t.Errorf("%s: GetRow found %v, the scan %v", row.RowID, same, row)
			}
		}
		if len(rows) > 1 {
			return pushsvc.RejectOperation(i, "app.too_many", "", nil)
		}
	}
	return nil
}

// TestBatchingChangesNothing: the commits of one request come to exactly what they
// come to in a request each: results, rows, log, tombstones, outcomes.
func TestBatchingChangesNothing(t *testing.T) {
	t.Parallel()
	for name, change := range hookings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireBatchingChangesNothing(t, setup(t, change(t)))
		})
	}
}

func requireBatchingChangesNothing(t *testing.T, b *bundle) {
	t.Helper()
	b.exec(t, uniquePositions)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		together, apart := fmt.Sprint("together ", run), fmt.Sprint("apart ", run)
		for r := range rapid.IntRange(1, 3).Draw(rt, "requests") {
			wire := rapid.SampledFrom([]ssp2.WireVersion{ssp2.WireV1, ssp2.WireV3, ssp2.WireV3}).Draw(rt, "wire")
			req := request(b.commits(t, wire, fmt.Sprint("r", r, "k"), drawCommits(rt))...)
			req.WireVersion = wire
			if rapid.Bool().Draw(rt, "restricted") {
				req.Scopes = allow(scope.Allowed{"project_id": {"pr1"}, "org": {"7"}})
			}
			req.Partition = together
			want := b.alone(t, req, apart)
			got := b.results(t, req)
			if diff := cmp.Diff(want, got); diff != "" {
				rt.Fatalf("results (-apart +together):\n%s", diff)
			}
		}
		if diff := cmp.Diff(b.dump(t, apart), b.dump(t, together)); diff != "" {
			rt.Fatalf("database (-apart +together):\n%s", diff)
		}
	})
	requireSoundLog(t, b)
}

// TestSharingATransactionChangesNothing: what clients push to a busy partition comes
// to exactly what it comes to when each has a transaction to itself.
func TestSharingATransactionChangesNothing(t *testing.T) {
	t.Parallel()
	for name, change := range hookings {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireSharingChangesNothing(t, setup(t, change(t)))
		})
	}
}

func requireSharingChangesNothing(t *testing.T, b *bundle) {
	t.Helper()
	b.exec(t, uniquePositions)
	holder := b.session(t)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		requests := make([]pushsvc.Request, rapid.IntRange(2, 5).Draw(rt, "clients"))
		for i := range requests {
			wire := rapid.SampledFrom(wires).Draw(rt, "wire")
			req := request(b.commits(t, wire, "k", drawCommits(rt))...)
			req.WireVersion, req.ClientID, req.Actor = wire, fmt.Sprint("c", i), fmt.Sprint("actor", i)
			if rapid.Bool().Draw(rt, "restricted") {
				req.Scopes = allow(scope.Allowed{"project_id": {"pr1"}, "org": {"7"}})
			}
			requests[i] = req
		}
		together, apart := fmt.Sprint("together ", run), fmt.Sprint("apart ", run)
		shared := b.sharing(t, holder, together, requests)
		for i, req := range requests {
			req.Partition = apart
			if diff := cmp.Diff(b.results(t, req), shared[i]); diff != "" {
				rt.Fatalf("client %d (-apart +together):\n%s", i, diff)
			}
		}
		if diff := cmp.Diff(b.dump(t, apart), b.dump(t, together)); diff != "" {
			rt.Fatalf("database (-apart +together):\n%s", diff)
		}
	})
	requireSoundLog(t, b)
}

// sharing pushes requests to a partition so that all but the first wait for it and
// then share a transaction, and returns their results.
func (b *bundle) sharing(t *testing.T, holder *pgx.Conn, partition string, requests []pushsvc.Request) [][]ssp2.PushResult {
	t.Helper()
	opened, err := b.Push(t.Context(), pushsvc.Request{Partition: partition, Actor: "nobody", ClientID: "nobody", WireVersion: ssp2.WireV2})
	require.NoError(t, err)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from syncpg.sync_partitions where partition = $1 for update`, partition)
	require.NoError(t, err)
	answers := make([]<-chan answer, len(requests))
	for i, req := range requests {
		req.Partition, req.LogEpoch = partition, &opened.LogEpoch
		answers[i] = (&client{req: req}).pushing(t.Context(), b.Service, req.Commits...)
		if i == 0 {
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
		} else {
			b.WaitQueued(t.Context(), partition, i)
		}
	}
	require.NoError(t, tx.Commit(t.Context()))
	results := make([][]ssp2.PushResult, len(requests))
	for i := range answers {
		a := <-answers[i]
		require.NoError(t, a.err)
		results[i] = a.resp.Results
	}
	return results
}

// results pushes a request, taking up the partition's epoch first.
func (b *bundle) results(t testing.TB, req pushsvc.Request) []ssp2.PushResult {
	t.Helper()
	resp, err := b.Push(t.Context(), req)
	require.NoError(t, err)
	if resp.Reset {
		req.LogEpoch = &resp.LogEpoch
		resp, err = b.Push(t.Context(), req)
		require.NoError(t, err)
	}
	return resp.Results
}

// alone pushes each commit of a request in a request of its own to a partition.
func (b *bundle) alone(t testing.TB, req pushsvc.Request, partition string) []ssp2.PushResult {
	t.Helper()
	req.Partition = partition
	var results []ssp2.PushResult
	for _, c := range req.Commits {
		req.Commits = []ssp2.PushCommit{c}
		results = append(results, b.results(t, req)...)
	}
	return results
}

// TestModel: the server agrees with a model of the version 3 rules on what becomes of
// random histories of two clients, one of which is allowed less.
func TestModel(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.TemplateKey = "pushsvc" })
	b.exec(t, uniquePositions)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		m := newModel()
		req := request()
		req.Partition, req.WireVersion = fmt.Sprint("model ", run), ssp2.WireV3
		for r := range rapid.IntRange(1, 5).Draw(rt, "requests") {
			commits := drawCommits(rt)
			req.Commits = b.commits(t, ssp2.WireV3, fmt.Sprint("r", r, "k"), commits)
			req.ClientID, req.Actor, req.Scopes = "c1", "alice", allow(everything)
			allowed := func(string, any) bool { return true }
			if rapid.Bool().Draw(rt, "restricted") {
				req.ClientID, req.Actor, req.Scopes = "c2", "bob", allow(scope.Allowed{"project_id": {"pr1"}, "org": {"7"}})
				allowed = func(_ string, v any) bool { return v == "pr1" || v == 7 }
			}
			results := b.results(t, req)
			for i, c := range commits {
				want, got := m.commit(c, allowed), b.verdict(t, c, results[i])
				if diff := cmp.Diff(want, got); diff != "" {
					rt.Fatalf("request %d, commit %d %+v (-model +server):\n%s", r, i, c, diff)
				}
			}
		}
		c := &client{b: b, req: req}
		for table, list := range ids {
			for _, id := range list {
				var want *storedRow
				if row := m.rows[modelKey{table, fmt.Sprint(id)}]; row != nil {
					want = row.stored(b, table)
				}
				got := c.stored(t, table, fmt.Sprint(id))
				if got != nil && got.Columns == nil { // none stored: every column is at the row's version
					got.Columns = slices.Repeat([]int64{got.Version}, len(want.Columns))
				}
				if got != nil { // that of the key is never told
					got.Columns[0], want.Columns[0] = 0, 0
				}
				if diff := cmp.Diff(want, got); diff != "" {
					rt.Fatalf("%s %v (-model +server):\n%s", table, id, diff)
				}
			}
		}
	})
	requireSoundLog(t, b)
}

// TestEncodeFunctions: the generated encoders turn typed rows into the bytes that are
// stored, for rows whose JSON is written the way jsonb writes it.
func TestEncodeFunctions(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV1)
	text := rapid.StringN(0, 20, -1).Filter(func(s string) bool { return !strings.ContainsRune(s, 0) })
	optional := func(t *rapid.T, name string, g *rapid.Generator[any]) any {
		if rapid.IntRange(0, 3).Draw(t, name+" null") == 0 {
			return nil
		}
		return g.Draw(t, name)
	}
	json := rapid.SampledFrom([]any{`null`, `true`, `0`, `-1.50`, `1e5`, `"ü\""`, `[1, {"a": [], "bb": {}}]`, `{"b": "x", "aa": null}`})
	rapid.Check(t, func(rt *rapid.T) {
		row := map[string]any{
			"id": rapid.StringN(1, 20, -1).Filter(func(s string) bool { return !strings.ContainsRune(s, 0) }).Draw(rt, "id"), "project_id": "pr1",
			"title":  optional(rt, "title", text.AsAny()),
			"rank":   optional(rt, "rank", rapid.Int64Range(-ssp2.MaxSafeInteger, ssp2.MaxSafeInteger).AsAny()),
			"weight": optional(rt, "weight", rapid.Float64().AsAny()),
			"done":   optional(rt, "done", rapid.Bool().AsAny()),
			"meta":   optional(rt, "meta", json),
			"thumb":  optional(rt, "thumb", rapid.Custom(func(t *rapid.T) string { return string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")) }).AsAny()),
		}
		if row["meta"] == `-1.50` || row["meta"] == `1e5` {
			// Written otherwise, with the same meaning: the encoder renders jsonb's.
			row["meta"] = map[any]any{`-1.50`: `-1.50`, `1e5`: `100000`}[row["meta"]]
		}
		op := b.upsert(t, "notes", row)
		if r := c.push(t, op); r.Status != ssp2.PushApplied {
			rt.Fatalf("%+v", r.Results)
		}
		encoded := scalar[[]byte](t, b, `select syncpg.sync_encode_notes(r) from public.notes as r where _sync_partition = $1 and _sync_row_id = $2`, c.req.Partition, row["id"])
		if diff := cmp.Diff(op.Payload, encoded); diff != "" {
			rt.Fatalf("(-stored +encoded):\n%s", diff)
		}
	})
	for _, table := range []string{"slugs", "guarded"} {
		c.apply(t, b.upsert(t, table, map[string]any{"id": map[string]any{"slugs": "s", "guarded": 1}[table], "project_id": "pr1", "org": 3}))
		require.True(t, scalar[bool](t, b, `select bool_and(syncpg.sync_encode_`+table+`(r) = r._sync_payload) from public.`+table+` as r where _sync_partition = $1`, c.req.Partition))
	}
}
