package pushsvc_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// TestAuthorizationRow: the row as stored decides for an existing row, the payload
// for a new one, and every declared variable is required (§3.4).
func TestAuthorizationRow(t *testing.T) {
	t.Parallel()
	b := shared(t)
	// The stored row is in project pr1 and org 7.
	row := map[string]any{"id": 1, "project_id": "pr1", "org": 7, "position": 1}
	insert := func(changes map[string]any) func(*testing.T) ssp2.Operation {
		return func(t *testing.T) ssp2.Operation {
			return b.upsert(t, "guarded", changed(row, changes))
		}
	}
	elsewhere := insert(map[string]any{"project_id": "pr2", "org": 8})
	inPlace := insert(nil)
	other := insert(map[string]any{"id": 2})
	del := func(*testing.T) ssp2.Operation { return remove("guarded", "1") }
	absent := func(*testing.T) ssp2.Operation { return remove("guarded", "2") }

	both := scope.Allowed{"project_id": {"pr1", "pr9"}, "org": {"7"}}
	for _, tc := range []struct {
		name    string
		allowed scope.Allowed
		op      func(*testing.T) ssp2.Operation
		denied  bool
	}{
		{"insert: every variable is allowed", both, other, false},
		{"insert: wildcards", everything, other, false},
		{"insert: one variable is missing", scope.Allowed{"project_id": {"pr1"}}, other, true},
		{"insert: one value is missing", scope.Allowed{"project_id": {"pr1"}, "org": {"8"}}, other, true},
		{"insert: nothing is allowed", scope.Allowed{}, other, true},
		{"insert: a star in the row is not a wildcard", scope.Allowed{"project_id": {"pr1"}, "org": {"7"}}, insert(map[string]any{"id": 2, "project_id": "*"}), true},
		{"insert: an empty scope value, even for a wildcard", everything, insert(map[string]any{"id": 2, "project_id": ""}), true},
		{"insert: the integer as text, not as number", scope.Allowed{"project_id": {"*"}, "org": {"07", "7.0"}}, other, true},
		{"update: the stored row is allowed", both, inPlace, false},
		{"update: only the payload is allowed", scope.Allowed{"project_id": {"pr2"}, "org": {"8"}}, elsewhere, true},
		{"update: only the stored row is allowed", both, elsewhere, false},
		{"update: one variable of the stored row is denied", scope.Allowed{"project_id": {"pr1"}, "org": {"8"}}, inPlace, true},
		{"delete: the stored row is allowed", both, del, false},
		{"delete: the stored row is denied", scope.Allowed{"project_id": {"pr1"}, "org": {"8"}}, del, true},
		{"delete of an absent row: nothing to authorize", scope.Allowed{}, absent, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV2)
			c.apply(t, b.upsert(t, "guarded", row))
			c.req.Scopes = allow(tc.allowed)
			result := c.push(t, tc.op(t))
			if tc.denied {
				requireRejected(t, result, 0, ssp2.CodeForbidden)
				require.Equal(t, row, c.stored(t, "guarded", "1").Values)
				require.Nil(t, c.stored(t, "guarded", "2"))
				return
			}
			requireApplied(t, result)
		})
	}
}

// TestFailedResolverDeniesEverything (§3.4 rule 4); replays are answered all the same.
//
//nolint:paralleltest // the cases share a client
func TestFailedResolverDeniesEverything(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	known := c.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, c.send(t, known)...)
	for name, failed := range map[string]scope.Resolution{
		"error":                  {Err: errors.New("directory is down")},
		"error beside of grants": {Err: errors.New("directory is down"), Grants: scope.Compile(everything)},
		"no grants":              {},
	} {
		t.Run(name, func(t *testing.T) {
			c := c.with(func(r *pushsvc.Request) { r.Scopes = failed })
			results := c.send(t, known,
				c.commit(b.upsert(t, "notes", note("n", "b"))), c.commit(b.upsert(t, "notes", note("m", "b"))),
				c.commit(remove("notes", "n")), c.commit(remove("notes", "m")))
			require.Equal(t, ssp2.PushCached, results[0].Status)
			for _, r := range results[1:4] {
				requireRejected(t, r, 0, ssp2.CodeForbidden)
			}
			requireApplied(t, results[4])
		})
	}
}

// TestConflictNeverLeaksAnotherScope: the winner of an insert race is authorized
// before anything of it is told (§6.2).
func TestConflictNeverLeaksAnotherScope(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV3)
	c.apply(t, b.patch(t, "notes", fullNote("n", "secret", map[string]any{"project_id": "pr2"})))
	c.req.Scopes = allow(scope.Allowed{"project_id": {"pr1"}})
	for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} {
		op := b.upsert(t, "notes", note("n", "mine"))
		if wire == ssp2.WireV3 {
			op = b.patch(t, "notes", fullNote("n", "mine"))
		}
		for _, version := range []int64{0, 1, 2} {
			result := c.as(wire).push(t, base(op, version))
			requireRejected(t, result, 0, ssp2.CodeForbidden)
			require.Empty(t, result.Results[0].ServerRow)
			require.Zero(t, result.Results[0].ServerVersion)
		}
	}
}

// TestScopesOfEveryType: stored scopes are the texts of §3.1, in the log as well.
func TestScopesOfEveryType(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	for _, tc := range []struct {
		project string
		org     int64
		want    []string
	}{
		{"pr1", 7, []string{"org=7", "project_id=pr1"}},
		{"a=b", -1, []string{"org=-1", "project_id=a=b"}},
		{`quote " backslash \ brace {} comma , NULL`, 0, []string{"org=0", `project_id=quote " backslash \ brace {} comma , NULL`}},
		{"NULL", ssp2.MaxSafeInteger, []string{"org=9007199254740991", "project_id=NULL"}},
		{" ", -ssp2.MaxSafeInteger, []string{"org=-9007199254740991", "project_id= "}},
		{"ünï😀\t\n", 1, []string{"org=1", "project_id=ünï😀\t\n"}},
	} {
		c.apply(t, b.upsert(t, "guarded", map[string]any{"id": 1, "project_id": tc.project, "org": tc.org}), remove("guarded", "1"))
		for _, seq := range []int64{c.seq(t) - 1, c.seq(t)} {
			require.Equal(t, tc.want, scalar[[]string](t, b, `select scopes from syncpg.sync_changes where partition = $1 and commit_seq = $2`, c.req.Partition, seq))
			require.Equal(t, tc.want, scalar[[]string](t, b, `select array_agg(scope_key order by scope_key) from syncpg.sync_change_scopes
				where partition = $1 and commit_seq = $2 and table_name = 'guarded'`, c.req.Partition, seq))
		}
	}
}
