package pushsvc_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// changed returns the values of a row with some replaced; nil removes one.
func changed(row map[string]any, changes map[string]any) map[string]any {
	row = maps.Clone(row)
	maps.Copy(row, changes)
	for name, v := range row {
		if v == nil {
			delete(row, name)
		}
	}
	return row
}

// TestUpsertOnExistingRowV3 has the rules of a sparse upsert in their order: a case
// breaks the rule it is named after and every later one it can.
func TestUpsertOnExistingRowV3(t *testing.T) {
	t.Parallel()
	b := shared(t)
	// The row is at version 4: title was last written at 3, rank at 4, the rest at 1.
	history := func(t *testing.T) []ssp2.Operation {
		return []ssp2.Operation{
			b.patch(t, "notes", fullNote("n", "a", map[string]any{"rank": 1, "weight": 0.5, "done": false, "meta": "{}", "thumb": "t"})),
			b.patch(t, "notes", map[string]any{"id": "n", "title": "b"}),
			b.patch(t, "notes", map[string]any{"id": "n", "title": "c"}),
			b.patch(t, "notes", map[string]any{"id": "n", "rank": 2}),
		}
	}
	stored := map[string]any{"id": "n", "project_id": "pr1", "title": "c", "rank": 2, "weight": 0.5, "done": false, "meta": "{}", "thumb": "t"}
	at := []int64{1, 1, 3, 4, 1, 1, 1, 1, 1, 1}

	for _, tc := range []struct {
		name    string
		allowed scope.Allowed
		base    int64 // -1: absent
		patch   map[string]any
		code    ssp2.Code // "": applied
		marked  []string  // conflictColumns
		values  map[string]any
		columns []int64
	}{
		{
			name: "1 authorizes against the stored row", allowed: scope.Allowed{"project_id": {"pr2"}, "org": {"*"}},
			base: 9, patch: map[string]any{"project_id": "pr2", "title": "d"}, code: ssp2.CodeForbidden,
		},
		{
			name: "1 the payload's own scope does not help", allowed: scope.Allowed{"project_id": {"pr2"}},
			base: -1, patch: map[string]any{"project_id": "pr2"}, code: ssp2.CodeForbidden,
		},
		{name: "2 a scope column with another value", base: 9, patch: map[string]any{"project_id": "pr2"}, code: ssp2.CodeInvalidRequest},
		{name: "2 a scope column emptied", base: 4, patch: map[string]any{"project_id": ""}, code: ssp2.CodeInvalidRequest},
		{
			name: "2 a scope column with the stored value", base: -1, patch: map[string]any{"project_id": "pr1"},
			columns: []int64{1, 5, 3, 4, 1, 1, 1, 1, 1, 1},
		},
		{name: "3 a base above the row", base: 5, patch: map[string]any{"title": "d", "body": "u"}, code: ssp2.CodeInvalidRequest},
		{
			name: "4 base 0: the lost insert race marks what is present", base: 0, patch: map[string]any{"title": "c", "weight": 0.5},
			code: ssp2.CodeVersionConflict, marked: []string{"title", "weight"},
		},
		{name: "4 base 0: nothing but the key", base: 0, patch: map[string]any{}, code: ssp2.CodeVersionConflict},
		{
			name: "5 a column written after the base", base: 2, patch: map[string]any{"title": "d", "weight": 1.0},
			code: ssp2.CodeVersionConflict, marked: []string{"title"},
		},
		{
			name: "5 every such column and no other", base: 1, patch: map[string]any{"title": "d", "rank": 7, "done": true, "project_id": "pr1"},
			code: ssp2.CodeVersionConflict, marked: []string{"title", "rank"},
		},
		{
			name: "5 the same value still conflicts", base: 3, patch: map[string]any{"rank": 2},
			code: ssp2.CodeVersionConflict, marked: []string{"rank"},
		},
		{
			name: "6 another column was written after the base", base: 3, patch: map[string]any{"title": "d"},
			values: map[string]any{"title": "d"}, columns: []int64{1, 1, 5, 4, 1, 1, 1, 1, 1, 1},
		},
		{
			name: "6 an old base and an older column", base: 1, patch: map[string]any{"weight": 9.0, "done": true},
			values: map[string]any{"weight": 9.0, "done": true}, columns: []int64{1, 1, 3, 4, 5, 5, 1, 1, 1, 1},
		},
		{
			name: "6 without a base the last write wins", base: -1, patch: map[string]any{"title": "d", "rank": 3},
			values: map[string]any{"title": "d", "rank": 3}, columns: []int64{1, 1, 5, 5, 1, 1, 1, 1, 1, 1},
		},
		{
			name: "6 NULL is a value", base: 4, patch: map[string]any{"title": nil, "meta": nil},
			values: map[string]any{"title": nil, "meta": nil}, columns: []int64{1, 1, 5, 4, 1, 1, 5, 1, 1, 1},
		},
		{name: "6 nothing but the key", base: 4, patch: map[string]any{}, columns: at},
		{
			name: "6 every column", base: 4, patch: fullNote("n", "a", map[string]any{"rank": 1}),
			values:  map[string]any{"title": "a", "rank": 1, "weight": nil, "done": nil, "meta": nil, "thumb": nil},
			columns: nil, // all at the row's version
		},
		{
			name: "crdt only: never a conflict, but nobody merges yet", base: 1, patch: map[string]any{"body": "u"},
			code: ssp2.CodeCRDTMergeFailed,
		},
		{
			name: "4 a crdt column is not marked", base: 0, patch: map[string]any{"body": "u", "title": "d"},
			code: ssp2.CodeVersionConflict, marked: []string{"title"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV3)
			c.apply(t, history(t)...)
			require.Equal(t, &storedRow{Version: 4, Columns: at, Values: stored}, c.stored(t, "notes", "n"))
			if tc.allowed != nil {
				c.req.Scopes = allow(tc.allowed)
			}
			patch := maps.Clone(tc.patch)
			patch["id"] = "n"
			op := b.patch(t, "notes", patch)
			if tc.base >= 0 {
				op = base(op, tc.base)
			}
			result := c.push(t, op)
			if tc.code == "" {
				requireApplied(t, result)
				require.Equal(t, []ssp2.OpResult{{Status: ssp2.OpApplied}}, result.Results)
				require.Equal(t, &storedRow{Version: 5, Columns: tc.columns, Values: changed(stored, tc.values)}, c.stored(t, "notes", "n"))
				return
			}
			requireRejected(t, result, 0, tc.code)
			require.Equal(t, &storedRow{Version: 4, Columns: at, Values: stored}, c.stored(t, "notes", "n"))
			require.EqualValues(t, 4, c.seq(t))
			if tc.code == ssp2.CodeVersionConflict {
				got := result.Results[0]
				require.Equal(t, ssp2.OpConflict, got.Status)
				require.EqualValues(t, 4, got.ServerVersion)
				require.Equal(t, stored, b.decoded(t, "notes", got.ServerRow))
				require.Equal(t, tc.marked, b.columnsOf(t, "notes", got.ConflictColumns))
			}
		})
	}
}

// TestUpsertOnAbsentRow is the second table of the wire version rules: base version
// by tombstone by wire version.
func TestUpsertOnAbsentRow(t *testing.T) {
	t.Parallel()
	b := shared(t)
	const insert, missing, deleted = "", ssp2.CodeRowMissing, ssp2.CodeRowDeleted
	for _, tc := range []struct {
		name      string
		base      int64 // -1: absent
		tombstone string
		v3, old   ssp2.Code
	}{
		{"base 0, never was", 0, "none", insert, insert},
		{"base 0, deleted inside the horizon", 0, "inside", insert, insert},
		{"base 0, deleted below the horizon", 0, "below", insert, insert},
		{"base 1, never was", 1, "none", missing, missing},
		{"base 1, deleted inside the horizon", 1, "inside", missing, missing},
		{"base 9, deleted below the horizon", 9, "below", missing, missing},
		{"base absent, never was", -1, "none", insert, insert},
		{"base absent, deleted inside the horizon", -1, "inside", deleted, insert},
		{"base absent, deleted below the horizon", -1, "below", insert, insert},
	} {
		for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} {
			t.Run(tc.name+"/"+string('0'+rune(wire)), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, wire)
				if tc.tombstone != "none" {
					c.as(ssp2.WireV2).apply(t, b.upsert(t, "notes", note("n", "old")), b.upsert(t, "notes", note("n", "older")), remove("notes", "n"))
				}
				if tc.tombstone == "below" {
					b.exec(t, `update syncpg.sync_partitions set horizon_seq = max_commit_seq where partition = '`+c.req.Partition+`'`)
				}
				op := b.upsert(t, "notes", note("n", "new"))
				want := tc.old
				if wire == ssp2.WireV3 {
					op, want = b.patch(t, "notes", fullNote("n", "new")), tc.v3
				}
				if tc.base >= 0 {
					op = base(op, tc.base)
				}

				// Absence is not disclosed to those who may not write the payload.
				stranger := c.with(func(r *pushsvc.Request) { r.Scopes = allow(scope.Allowed{"project_id": {"pr2"}}) })
				requireRejected(t, stranger.push(t, op), 0, ssp2.CodeForbidden)

				result := c.push(t, op)
				if want != "" {
					requireRejected(t, result, 0, want)
					require.Nil(t, c.stored(t, "notes", "n"))
					return
				}
				requireApplied(t, result)
				require.Equal(t, &storedRow{Version: 1, Values: map[string]any{"id": "n", "project_id": "pr1", "title": "new"}}, c.stored(t, "notes", "n"))
				require.Zero(t, c.tombstones(t))
			})
		}
	}
}

// TestSparseUpsertOnAbsentRow: without every column there is nothing to insert; the
// actor must be allowed what is present, and hold something of what is not.
func TestSparseUpsertOnAbsentRow(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for _, tc := range []struct {
		name    string
		allowed scope.Allowed
		patch   map[string]any
		base    int64
		code    ssp2.Code
	}{
		{"a column is absent", everything, map[string]any{"project_id": "pr1", "org": 7}, -1, ssp2.CodeRowMissing},
		{"a column is absent, base 0", everything, map[string]any{"project_id": "pr1", "org": 7}, 0, ssp2.CodeRowMissing},
		{"scope columns are absent", everything, map[string]any{"position": 1}, 3, ssp2.CodeRowMissing},
		{"scope columns are absent, values are granted", scope.Allowed{"project_id": {"pr1"}, "org": {"7"}}, map[string]any{"position": 1}, 3, ssp2.CodeRowMissing},
		{"one scope column is absent", scope.Allowed{"project_id": {"pr1"}, "org": {"7"}}, map[string]any{"project_id": "pr1"}, -1, ssp2.CodeRowMissing},
		{"one is absent, the other denied", scope.Allowed{"project_id": {"pr1"}, "org": {"7"}}, map[string]any{"org": 8}, 3, ssp2.CodeForbidden},
		{"one is absent and nothing is held of it", scope.Allowed{"project_id": {"pr1"}}, map[string]any{"project_id": "pr1"}, 3, ssp2.CodeForbidden},
		{"one is absent and the grant for it is empty", scope.Allowed{"project_id": {"pr1"}, "org": {}}, map[string]any{"project_id": "pr1"}, 3, ssp2.CodeForbidden},
		{"both are present and denied", scope.Allowed{"project_id": {"pr1"}, "org": {"7"}}, map[string]any{"project_id": "pr2", "org": 7}, 3, ssp2.CodeForbidden},
		{"one is empty", everything, map[string]any{"project_id": "", "position": 1}, 3, ssp2.CodeForbidden},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV3)
			c.req.Scopes = allow(tc.allowed)
			op := b.patch(t, "guarded", changed(tc.patch, map[string]any{"id": 5}))
			if tc.base >= 0 {
				op = base(op, tc.base)
			}
			requireRejected(t, c.push(t, op), 0, tc.code)
			require.Nil(t, c.stored(t, "guarded", "5"))
		})
	}
}

// TestUpsertOnExistingRowV1V2 has §6.2 and §3.4 rule 5.
func TestUpsertOnExistingRowV1V2(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for _, tc := range []struct {
		name    string
		allowed scope.Allowed
		base    int64
		values  map[string]any
		code    ssp2.Code
		want    map[string]any
	}{
		{"at the base version", everything, 2, note("n", "c"), "", note("n", "c")},
		{"without a base the last write wins", everything, -1, note("n", "c"), "", note("n", "c")},
		{"base 0: lost insert race", everything, 0, note("n", "b"), ssp2.CodeVersionConflict, nil},
		{"base below", everything, 1, note("n", "c"), ssp2.CodeVersionConflict, nil},
		{"base above", everything, 3, note("n", "c"), ssp2.CodeVersionConflict, nil},
		{"forbidden before conflict", scope.Allowed{"project_id": {"pr2"}}, 0, note("n", "c"), ssp2.CodeForbidden, nil},
		{
			"a scope column keeps its value", everything, 2,
			map[string]any{"id": "n", "project_id": "pr2", "title": "c"},
			"", note("n", "c"),
		},
		{
			"an emptied one too", everything, -1,
			map[string]any{"id": "n", "project_id": "", "title": "c"},
			"", note("n", "c"),
		},
		{
			"the stored scope decides, not the pushed one",
			scope.Allowed{"project_id": {"pr1"}},
			2,
			map[string]any{"id": "n", "project_id": "pr2", "title": "c"},
			"", note("n", "c"),
		},
		{
			"NULLs overwrite", everything, 2,
			map[string]any{"id": "n", "project_id": "pr1"},
			"",
			map[string]any{"id": "n", "project_id": "pr1"},
		},
	} {
		for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2} {
			t.Run(tc.name+"/"+string('0'+rune(wire)), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, wire)
				c.apply(t, b.upsert(t, "notes", note("n", "a")))
				c.as(ssp2.WireV3).apply(t, b.patch(t, "notes", map[string]any{"id": "n", "title": "b"}))
				c.req.Scopes = allow(tc.allowed)
				op := b.upsert(t, "notes", tc.values)
				if tc.base >= 0 {
					op = base(op, tc.base)
				}
				result := c.push(t, op)
				if tc.code == "" {
					requireApplied(t, result)
					// A full row leaves every column at the row's version.
					require.Equal(t, &storedRow{Version: 3, Values: tc.want}, c.stored(t, "notes", "n"))
					return
				}
				requireRejected(t, result, 0, tc.code)
				require.Equal(t, &storedRow{Version: 2, Columns: []int64{1, 1, 2, 1, 1, 1, 1, 1, 1, 1}, Values: note("n", "b")}, c.stored(t, "notes", "n"))
				if tc.code == ssp2.CodeVersionConflict {
					require.EqualValues(t, 2, result.Results[0].ServerVersion)
					require.Equal(t, note("n", "b"), b.decoded(t, "notes", result.Results[0].ServerRow))
				}
			})
		}
	}
}

// TestColumnVersions: rows without column versions count as every column at the
// row's version, whoever wrote them.
func TestColumnVersions(t *testing.T) {
	t.Parallel()
	b := shared(t)
	title := func(t *testing.T, v string) ssp2.Operation {
		return b.patch(t, "slugs", map[string]any{"id": "s", "slug": v})
	}
	meta := func(t *testing.T) ssp2.Operation {
		return b.patch(t, "slugs", map[string]any{"id": "s", "meta": "1"})
	}
	row := map[string]any{"id": "s", "project_id": "pr1", "slug": "a"}
	for _, tc := range []struct {
		name    string
		history func(t *testing.T, c *client)
		columns []int64
		base    int64
		marked  []string // of a patch of slug and meta at that base; nil: applied
	}{
		{
			name:    "inserted: every column is 1",
			history: func(t *testing.T, c *client) { c.apply(t, b.upsert(t, "slugs", row)) }, base: 1,
		},
		{
			name: "a sparse write counts its columns only",
			history: func(t *testing.T, c *client) {
				c.apply(t, b.upsert(t, "slugs", row))
				c.as(ssp2.WireV3).apply(t, meta(t))
			}, columns: []int64{1, 1, 1, 2}, base: 1, marked: []string{"meta"},
		},
		{
			name: "a full write counts all",
			history: func(t *testing.T, c *client) {
				c.apply(t, b.upsert(t, "slugs", row))
				c.as(ssp2.WireV3).apply(t, meta(t))
				c.apply(t, b.upsert(t, "slugs", row))
			}, base: 2, marked: []string{"slug", "meta"},
		},
		{
			name: "a sparse write after a full one",
			history: func(t *testing.T, c *client) {
				c.apply(t, b.upsert(t, "slugs", row), b.upsert(t, "slugs", row), b.upsert(t, "slugs", row))
				c.as(ssp2.WireV3).apply(t, title(t, "b"))
			}, columns: []int64{3, 3, 4, 3}, base: 3, marked: []string{"slug"},
		},
		{
			name: "a row from before there were any",
			history: func(t *testing.T, c *client) {
				c.apply(t, b.upsert(t, "slugs", row))
				c.as(ssp2.WireV3).apply(t, title(t, "b"))
				b.exec(t, `update public.slugs set _sync_column_versions = null where _sync_partition = '`+c.req.Partition+`'`)
			}, base: 1, marked: []string{"slug", "meta"},
		},
		{
			name: "a column that is newer than the array",
			history: func(t *testing.T, c *client) {
				c.apply(t, b.upsert(t, "slugs", row))
				c.as(ssp2.WireV3).apply(t, title(t, "b"))
				b.exec(t, `update public.slugs set _sync_column_versions = '{1,1,1}' where _sync_partition = '`+c.req.Partition+`'`)
			}, columns: []int64{1, 1, 1}, base: 1, marked: []string{"meta"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := b.client(t, ssp2.WireV1)
			tc.history(t, c)
			require.Equal(t, tc.columns, c.stored(t, "slugs", "s").Columns)
			result := c.as(ssp2.WireV3).push(t, base(b.patch(t, "slugs", map[string]any{"id": "s", "slug": "z", "meta": "2"}), tc.base))
			if tc.marked == nil {
				requireApplied(t, result)
				return
			}
			requireRejected(t, result, 0, ssp2.CodeVersionConflict)
			require.Equal(t, tc.marked, b.columnsOf(t, "slugs", result.Results[0].ConflictColumns))
		})
	}
}

// TestColumnVersionsInsideACommit: the operations of a commit and the commits of a
// request meet the versions of those before them.
func TestColumnVersionsInsideACommit(t *testing.T) {
	t.Parallel()
	b := shared(t)
	patch := func(t *testing.T, name string, v any) ssp2.Operation {
		return b.patch(t, "notes", map[string]any{"id": "n", name: v})
	}
	t.Run("one commit", func(t *testing.T) {
		t.Parallel()
		c := b.client(t, ssp2.WireV3)
		requireApplied(t, c.push(t, b.patch(t, "notes", fullNote("n", "a")), patch(t, "title", "b"), base(patch(t, "rank", 1), 1), base(patch(t, "title", "c"), 2)))
		require.Equal(t, &storedRow{Version: 4, Columns: []int64{1, 1, 4, 3, 1, 1, 1, 1, 1, 1}, Values: changed(note("n", "c"), map[string]any{"rank": 1})}, c.stored(t, "notes", "n"))
	})
	t.Run("commits of one request", func(t *testing.T) {
		t.Parallel()
		c := b.client(t, ssp2.WireV3)
		results := c.send(t,
			c.commit(b.patch(t, "notes", fullNote("n", "a"))), c.commit(patch(t, "title", "b")),
			c.commit(base(patch(t, "title", "lost"), 1)), c.commit(base(patch(t, "rank", 1), 1)))
		requireApplied(t, results[0], results[1], results[3])
		requireRejected(t, results[2], 0, ssp2.CodeVersionConflict)
		require.Equal(t, note("n", "b"), b.decoded(t, "notes", results[2].Results[0].ServerRow))
		require.Equal(t, []int64{1, 1, 2, 3, 1, 1, 1, 1, 1, 1}, c.stored(t, "notes", "n").Columns)
	})
}
