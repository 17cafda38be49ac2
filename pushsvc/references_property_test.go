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
	"github.com/syncpg/syncpg/ssp2"
)

// relation is a reference of referringIR, as the model sees it.
type relation struct{ child, column, parent, onDelete string }

var relations = []relation{
	{"items", "list", "lists", "CASCADE"},
	{"items", "up", "items", "CASCADE"},
	{"pins", "list", "lists", "SET NULL"},
	{"pins", "item", "items", "CASCADE"},
	{"pins", "beside", "items", "SET NULL"},
	{"locks", "list", "lists", "RESTRICT"},
	{"locks", "item", "items", "RESTRICT"},
	{"locks", "beside", "items", "SET NULL"},
}

// related are the rows that the generator writes: few, so that they meet.
var related = map[string][]string{"lists": {"l", "m"}, "items": {"i", "j", "k"}, "pins": {"p", "q"}, "locks": {"x"}}

// columnsOf counts the columns of tables, since an insert names all.
var columnsOf = map[string]int{"lists": 3, "items": 5, "pins": 5, "locks": 5}

const fewAppended = 3

// tooLong is a title that a constraint of the host refuses.
const tooLong = "too long"

// drawRelated draws an operation: a delete, or an upsert of all columns, or of some in a
// wire version that has that.
func drawRelated(t *rapid.T, wire ssp2.WireVersion) intent {
	table := rapid.SampledFrom([]string{"lists", "lists", "items", "items", "pins", "pins", "locks"}).Draw(t, "table")
	in := intent{table: table, id: rapid.SampledFrom(related[table]).Draw(t, "id"), base: -1}
	if rapid.IntRange(0, 2).Draw(t, "delete") == 0 {
		in.remove = true
		return in
	}
	in.whole = wire != ssp2.WireV3 || rapid.IntRange(0, 3).Draw(t, "whole") > 0
	in.values = map[string]any{"id": in.id, "project_id": "pr1"}
	if in.whole && (table == "lists" || table == "items") {
		in.values["title"] = nil
		if rapid.IntRange(0, 5).Draw(t, "too long") == 0 {
			in.values["title"] = tooLong
		}
	}
	for _, r := range relations {
		if r.child == table && (in.whole || rapid.Bool().Draw(t, r.column+" present")) {
			in.values[r.column] = nil
			if rapid.IntRange(0, 2).Draw(t, r.column+" set") > 0 {
				in.values[r.column] = rapid.SampledFrom(related[r.parent]).Draw(t, r.column)
			}
		}
	}
	in.whole = in.whole || len(in.values) == columnsOf[table]
	return in
}

// relatedModel is what references make of commits, in as few words as possible.
type relatedModel map[modelKey]map[string]any

// commit returns what becomes of a commit: nothing, or code and reason. It changes the
// model when the commit is applied.
func (m relatedModel) commit(ops []intent) string {
	next, stored := relatedModel{}, m
	maps.Copy(next, m)
	wrote := map[modelKey]map[string]bool{}
	for _, in := range ops {
		key := modelKey{in.table, in.id}
		if in.remove {
			delete(next, key)
			delete(wrote, key)
			continue
		}
		if next[key] == nil && !in.whole {
			return string(ssp2.CodeRowMissing)
		}
		row := maps.Clone(next[key])
		if row == nil {
			row = map[string]any{}
		}
		if wrote[key] == nil {
			wrote[key] = map[string]bool{}
		}
		for column, v := range in.values {
			row[column], wrote[key][column] = v, true
		}
		next[key] = row
	}
	for key := range next {
		for _, r := range relations {
			if v := next[key][r.column]; r.child == key.table && wrote[key][r.column] && v != nil && next[modelKey{r.parent, v.(string)}] == nil {
				return "missing_parent"
			}
		}
	}
	// The rows without a parent, until there are no more.
	appended := map[modelKey]bool{}
	for changed := true; changed; {
		changed = false
		for key, row := range next {
			for _, r := range relations {
				if v := row[r.column]; r.child == key.table && r.onDelete == "CASCADE" && v != nil && next[modelKey{r.parent, v.(string)}] == nil {
					delete(next, key)
					appended[key], changed = true, true
					break
				}
			}
		}
	}
	restricted := false
	for key, row := range next {
		for _, r := range relations {
			v := row[r.column]
			if r.child != key.table || v == nil || next[modelKey{r.parent, v.(string)}] != nil {
				continue
			}
			if r.onDelete == "RESTRICT" {
				restricted = true
				continue
			}
			if !appended[key] {
				row = maps.Clone(row)
			}
			row[r.column] = nil
			next[key], appended[key] = row, true
		}
	}
	switch {
	case len(appended) > fewAppended:
		return "cascade_limit"
	case restricted:
		return "restricted_delete"
	case slices.ContainsFunc(ops, func(in intent) bool { return in.values["title"] == tooLong }):
		return string(ssp2.CodeConstraintViolation)
	}
	clear(stored)
	maps.Copy(stored, next)
	return ""
}

// reading is a hook for whole commits that compares its evidence with what it reads.
func reading(t *testing.T) pushsvc.CommitValidator {
	return func(ctx context.Context, c *pushsvc.Candidate) error {
		last := map[modelKey]*pushsvc.Row{}
		for _, e := range c.Operations {
			last[modelKey{e.Table, e.RowID}] = e.Row
		}
		for table := range related {
			rows, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: table, Scopes: map[string][]string{"project_id": {"pr1"}}})
			if err != nil {
				return err
			}
			read := map[modelKey]map[string]any{}
			for _, row := range rows {
				read[modelKey{table, row.RowID}] = rowMap(row.Row)
			}
			for key, row := range last {
				if key.table == table && !cmp.Equal(read[key], rowMap(row)) {
					t.Errorf("%v: evidence %v, read %v", key, rowMap(row), read[key])
				}
			}
		}
		return nil
	}
}

// TestReferencesKeepTheirRules: random histories come to what a model says, whether
// commits share a request and a transaction or not, and never leave a row without its
// parent.
func TestReferencesKeepTheirRules(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		hook  pushsvc.CommitValidator
		ahead int // rows read ahead; 0: as many as usual
	}{
		{"no hooks", nil, 0},
		{"a hook that reads", reading(t), 0},
		{"no hooks, and little read ahead", nil, 2},
		{"a hook that reads, and nothing read ahead", reading(t), -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := referring(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
				cfg.MaxCascade, cfg.ValidateCommit = fewAppended, tc.hook
			})
			switch {
			case tc.ahead > 0:
				b.ReadAheadAtMost(tc.ahead, 60)
			case tc.ahead < 0:
				b.ReadAheadAtMost(0, 0)
			}
			b.exec(t, `alter table public.lists add constraint short check (length(title) < 5)`, `alter table public.items add constraint short check (length(title) < 5)`)
			holder := b.session(t)
			run := 0
			rapid.Check(t, func(rt *rapid.T) {
				run++
				var requests []pushsvc.Request
				var commits [][]intent
				for r := range rapid.IntRange(1, 3).Draw(rt, "clients") {
					wire := rapid.SampledFrom([]ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3, ssp2.WireV3}).Draw(rt, "wire")
					related := rapid.Custom(func(rt *rapid.T) intent { return drawRelated(rt, wire) })
					var drawn [][]intent
					for range rapid.IntRange(1, 4).Draw(rt, "commits") {
						drawn = append(drawn, rapid.SliceOfN(related, 1, 4).Draw(rt, "operations"))
					}
					req := request(b.commits(t, wire, fmt.Sprint("c", r, "k"), drawn)...)
					req.WireVersion, req.ClientID = wire, fmt.Sprint("c", r)
					requests = append(requests, req)
					commits = append(commits, drawn...)
				}
				together, apart := fmt.Sprint("together ", run), fmt.Sprint("apart ", run)
				var got []ssp2.PushResult
				for i, results := range b.sharing(t, holder, together, requests) {
					want := b.alone(t, requests[i], apart)
					if diff := cmp.Diff(want, results); diff != "" {
						rt.Fatalf("client %d (-apart +together):\n%s", i, diff)
					}
					got = append(got, results...)
				}
				if diff := cmp.Diff(b.relatedDump(t, apart), b.relatedDump(t, together)); diff != "" {
					rt.Fatalf("database (-apart +together):\n%s", diff)
				}
				b.requireModel(t, rt, together, commits, got)
			})
			requireSoundLog(t, b)
			for _, r := range relations {
				require.Zero(t, scalar[int](t, b, fmt.Sprintf(`select count(*) from public.%s as c where %s is not null and not exists (
					select from public.%s as p where p._sync_partition = c._sync_partition and p._sync_row_id = c.%s)`, r.child, r.column, r.parent, r.column)), "%v", r)
			}
		})
	}
}

// requireModel compares results and rows with the model's. A row that was deleted before
// this commit is sync.row_deleted, which the model does not know of: it takes the
// server's word for that.
func (b *bundle) requireModel(t *testing.T, rt *rapid.T, partition string, commits [][]intent, got []ssp2.PushResult) {
	t.Helper()
	m := relatedModel{}
	for i, ops := range commits {
		if got[i].Status == ssp2.PushRejected && got[i].Results[0].Code == string(ssp2.CodeRowDeleted) {
			continue
		}
		want := m.commit(ops)
		is := ""
		if got[i].Status == ssp2.PushRejected {
			is = got[i].Results[0].Code
			if is == string(ssp2.CodeReferenceViolation) {
				is = scalar[string](t, b, `select o.details::jsonb #>> '{0,details}' from syncpg.sync_push_results as o where o.partition = $1 and o.client_commit_id = $2`, partition, got[i].ClientCommitID)
				for _, reason := range []string{"missing_parent", "restricted_delete", "cascade_limit"} {
					if strings.Contains(is, reason) {
						is = reason
					}
				}
			}
		}
		if is != want {
			rt.Fatalf("commit %d %+v: the model says %q, the server %q", i, ops, want, is)
		}
	}
	var want []string
	for key, row := range m {
		want = append(want, fmt.Sprint(key.table, " ", key.id, " ", changed(row, nil)))
	}
	slices.Sort(want)
	var have []string
	for table, list := range related {
		for _, id := range list {
			c := &client{b: b, req: pushsvc.Request{Partition: partition}}
			if row := c.stored(t, table, id); row != nil {
				have = append(have, fmt.Sprint(table, " ", id, " ", row.Values))
			}
		}
	}
	slices.Sort(have)
	if diff := cmp.Diff(want, have); diff != "" {
		rt.Fatalf("rows (-model +server):\n%s", diff)
	}
}

// relatedDump renders everything a partition holds, but for the identities of outcomes
// and the bounds of transactions.
func (b *bundle) relatedDump(t testing.TB, partition string) []string {
	t.Helper()
	var parts []string
	for table := range related {
		parts = append(parts, fmt.Sprintf(`select '%[1]s', to_jsonb(r) - '_sync_partition' from public.%[1]s as r where _sync_partition = $1`, table))
	}
	for _, table := range []string{"commits", "changes", "change_scopes", "tombstones", "push_results"} {
		parts = append(parts, fmt.Sprintf(`select '%[1]s', to_jsonb(r) - '{partition,outcome_id}'::text[] from syncpg.sync_%[1]s as r where partition = $1`, table))
	}
	rows, err := b.db.Pool.Query(t.Context(), `select k || ' ' || r from (`+strings.Join(parts, " union all ")+`) as x(k, r) order by 1`, partition)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}
