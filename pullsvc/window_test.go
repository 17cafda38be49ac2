package pullsvc_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// TestWindowMatches: a change joins a window when every effective variable matches
// (§3.2).
func TestWindowMatches(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, doc("o1f1", "o1", 1), doc("o1f2", "o1", 2), doc("o2f1", "o2", 1), doc("o2f2", "o2", 2), item("i", "o1", "another table"))
	b.commit(t, doc("o3f1", "o3", 1))
	b.commit(t, doc("o1f3", "o1", 3), doc("o1f1b", "o1", 1))
	b.commit(t, remove("docs", "o1f2"))
	for _, tc := range []struct {
		name   string
		scopes ssp2.ScopeMap
		want   map[int64][]string
	}{
		{"one variable", ssp2.ScopeMap{"org": {"o1"}}, map[int64][]string{1: {"o1f1", "o1f2"}, 3: {"o1f3", "o1f1b"}, 4: {"o1f2"}}},
		{"the other one, an integer", ssp2.ScopeMap{"folderId": {"1"}}, map[int64][]string{1: {"o1f1", "o2f1"}, 2: {"o3f1"}, 3: {"o1f1b"}}},
		{"several values of one", ssp2.ScopeMap{"org": {"o2", "o3"}}, map[int64][]string{1: {"o2f1", "o2f2"}, 2: {"o3f1"}}},
		{"both: every variable must match", ssp2.ScopeMap{"org": {"o1"}, "folderId": {"1"}}, map[int64][]string{1: {"o1f1"}, 3: {"o1f1b"}}},
		{
			"both with several values: all pairs",
			ssp2.ScopeMap{"org": {"o1", "o2"}, "folderId": {"2", "1"}},
			map[int64][]string{1: {"o1f1", "o1f2", "o2f1", "o2f2"}, 3: {"o1f1b"}, 4: {"o1f2"}},
		},
		{"both, where the driving variable matches other changes of a commit", ssp2.ScopeMap{"org": {"o3"}, "folderId": {"2"}}, map[int64][]string{}},
		{"a value nobody has", ssp2.ScopeMap{"org": {"o9"}}, map[int64][]string{}},
		{"a value an integer cannot have", ssp2.ScopeMap{"folderId": {"01"}}, map[int64][]string{}},
		{"values a column can have and cannot have", ssp2.ScopeMap{"folderId": {"x", "3", "1e3", "9007199254740993"}}, map[int64][]string{3: {"o1f3"}}},
		{"a value with U+0000", ssp2.ScopeMap{"org": {"o\x001"}}, map[int64][]string{}},
		{"a value that looks like a key", ssp2.ScopeMap{"org": {"org=o1"}}, map[int64][]string{}},
		{"a value a variable cannot have revokes nothing", ssp2.ScopeMap{"org": {"o1"}, "folderId": {"x"}}, map[int64][]string{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			req := request(sub("s", "docs", 0, tc.scopes))
			req.ClientID = t.Name()
			got := b.pull(t, req)[0]
			require.Equal(t, tc.scopes, got.Start.EffectiveScopes)
			require.Empty(t, cmp.Diff(tc.want, got.seqs()))
			require.Equal(t, int64(4), got.End.NextCursor)
		})
	}
}

// TestWindowTypes: scopes of every column type match by their text (§3.1), in the
// log and among the rows.
func TestWindowTypes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	typed := func(id int, hot bool, ratio float64, shape string) change {
		return change{table: "typed", id: strconv.Itoa(id), values: []any{id, hot, ratio, shape}}
	}
	b.commit(t, typed(-3, true, 0.1, `{"a": 1}`), typed(2, false, 1e21, `[]`), typed(9007199254740991, true, -0.5, `"x=y"`))
	table, _ := b.schema.Table("typed")
	for _, tc := range []struct {
		scopes ssp2.ScopeMap
		want   []string
	}{
		{ssp2.ScopeMap{"hot": {"true"}}, []string{"-3", "9007199254740991"}},
		{ssp2.ScopeMap{"hot": {"false"}}, []string{"2"}},
		{ssp2.ScopeMap{"hot": {"t", "TRUE", "1"}}, []string{}},
		{ssp2.ScopeMap{"ratio": {"0.1", "1e+21"}}, []string{"-3", "2"}},
		{ssp2.ScopeMap{"ratio": {"-0.5"}}, []string{"9007199254740991"}},
		{ssp2.ScopeMap{"ratio": {"0.10", ".1", "1e21"}}, []string{}},
		{ssp2.ScopeMap{"shape": {`{"a": 1}`}}, []string{"-3"}},
		{ssp2.ScopeMap{"shape": {`{"a":1}`}}, []string{}},
		{ssp2.ScopeMap{"shape": {`"x=y"`}, "hot": {"true"}, "ratio": {"-0.5", "0.1"}}, []string{"9007199254740991"}},
	} {
		got := b.pull(t, request(sub("w", "typed", 0, tc.scopes), sub("b", "typed", -1, tc.scopes)))
		require.ElementsMatch(t, tc.want, append([]string{}, got[0].seqs()[1]...), "window of %v", tc.scopes)
		require.ElementsMatch(t, tc.want, got[1].ids(t, table), "page of %v", tc.scopes)
	}
}

// TestWindowFrames: a COMMIT frame says all that the log has (§4.5).
func TestWindowFrames(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, doc("d", "o1", 7))
	b.commit(t, doc("d", "o1", 7), doc("e", "o=2", 7))
	d, e := b.rows["docs"]["d"], b.rows["docs"]["e"]
	b.commit(t, remove("docs", "d"))
	got := b.one(t, sub("s", "docs", 1, ssp2.ScopeMap{"folderId": {"7"}}))
	require.Empty(t, cmp.Diff([]ssp2.Commit{
		{CommitSeq: 2, CreatedAtMs: 2000, ActorID: "actor-2", Tables: []string{"docs"}, Changes: []ssp2.Change{
			{RowID: "d", Op: ssp2.OpUpsert, RowVersion: new(int64(2)), Scopes: map[string]string{"folderId": "7", "org": "o1"}, Row: d.payload},
			{RowID: "e", Op: ssp2.OpUpsert, RowVersion: new(int64(1)), Scopes: map[string]string{"folderId": "7", "org": "o=2"}, Row: e.payload},
		}},
		{CommitSeq: 3, CreatedAtMs: 3000, ActorID: "actor-3", Tables: []string{"docs"}, Changes: []ssp2.Change{
			{RowID: "d", Op: ssp2.OpDelete, Scopes: map[string]string{"folderId": "7", "org": "o1"}},
		}},
	}, got.Commits))
}

// TestScopeMove: a row that moves is deleted under its old scopes and written under
// its new ones in one commit (§2.2); each side sees its half.
func TestScopeMove(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("i", "old", "body"))
	b.commit(t, change{table: "items", id: "i", scopes: []string{"project=old"}}, item("i", "new", "body"))
	got := b.pull(t, request(sub("old", "items", 1, project("old")), sub("new", "items", 1, project("new")), sub("both", "items", 1, project("new", "old"))))
	ops := func(s section) (ops []ssp2.Op) {
		for _, ch := range s.Commits[0].Changes {
			ops = append(ops, ch.Op)
		}
		return ops
	}
	require.Equal(t, []ssp2.Op{ssp2.OpDelete}, ops(got[0]))
	require.Equal(t, []ssp2.Op{ssp2.OpUpsert}, ops(got[1]))
	require.Equal(t, []ssp2.Op{ssp2.OpDelete, ssp2.OpUpsert}, ops(got[2]))
}

// TestWindowLimit: limitCommits counts matching changes and never splits a commit
// (§4.2, §4.5). The log has commits of 3, 1, 5, 2 and 1 changes in scope, each with
// one more out of scope, and then one that is all out of scope.
func TestWindowLimit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for c, n := range []int{3, 1, 5, 2, 1} {
		changes := []change{item(fmt.Sprintf("c%d-other", c), "other", "")}
		for i := range n {
			changes = append(changes, item(fmt.Sprintf("c%d-%d", c, i), "x", ""))
		}
		b.commit(t, changes...)
	}
	b.commit(t, item("last", "other", ""))
	for _, tc := range []struct {
		limit  int32
		cursor int64
		want   []int64
		next   int64
	}{
		{1, 0, []int64{1}, 1},
		{2, 0, []int64{1}, 1},
		{3, 0, []int64{1}, 1},
		{4, 0, []int64{1, 2}, 2},
		{5, 0, []int64{1, 2}, 2},
		{8, 0, []int64{1, 2}, 2},
		{9, 0, []int64{1, 2, 3}, 3},
		{11, 0, []int64{1, 2, 3, 4}, 4},
		{12, 0, []int64{1, 2, 3, 4, 5}, 6},
		{13, 0, []int64{1, 2, 3, 4, 5}, 6},
		{1, 2, []int64{3}, 3}, // larger than the limit: alone and whole
		{4, 2, []int64{3}, 3},
		{6, 2, []int64{3}, 3},
		{7, 2, []int64{3, 4}, 4},
		{8, 2, []int64{3, 4, 5}, 6},
		{1, 4, []int64{5}, 6}, // the limit is met and nothing follows: not cut
		{0, 0, []int64{1, 2, 3, 4, 5}, 6},
		{-7, 0, []int64{1}, 1},
		{5000, 0, []int64{1, 2, 3, 4, 5}, 6},
	} {
		t.Run(fmt.Sprintf("limit %d from %d", tc.limit, tc.cursor), func(t *testing.T) {
			t.Parallel()
			req := request(sub("s", "items", tc.cursor, project("x")), sub("two", "items", tc.cursor, project("x", "y", "z")))
			req.Header.LimitCommits, req.ClientID = tc.limit, t.Name()
			for _, got := range b.pull(t, req) {
				var seqs []int64
				for _, c := range got.Commits {
					seqs = append(seqs, c.CommitSeq)
				}
				require.Equal(t, tc.want, seqs)
				require.Equal(t, tc.next, got.End.NextCursor)
			}
		})
	}
}

// TestWindowOfManyKeys: with several driving values the limit is kept over all of
// them together, in log order, wherever each value's commits lie.
func TestWindowOfManyKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 60 {
		switch {
		case i < 20: // a burst of one value
			b.commit(t, item(strconv.Itoa(i), "a", ""))
		case i%3 == 0:
			b.commit(t, item(strconv.Itoa(i), "b", ""), item(fmt.Sprint(i, "c"), "c", ""))
		default:
			b.commit(t, item(strconv.Itoa(i), "d", ""))
		}
	}
	for limit := int32(1); limit < 40; limit += 3 {
		cursor := int64(0)
		var seqs []int64
		for cursor < b.seq {
			req := request(sub("s", "items", cursor, project("a", "b", "c", "nobody")))
			req.Header.LimitCommits = limit
			got := b.pull(t, req)[0]
			require.Greater(t, got.End.NextCursor, cursor)
			changes := 0
			for _, c := range got.Commits {
				seqs = append(seqs, c.CommitSeq)
				changes += len(c.Changes)
			}
			require.True(t, changes <= int(limit) || len(got.Commits) == 1)
			cursor = got.End.NextCursor
		}
		var want []int64
		for i := range int64(60) {
			if i < 20 || i%3 == 0 {
				want = append(want, i+1)
			}
		}
		require.Equal(t, want, seqs, "limit %d", limit)
	}
}

// TestWindowPastOthers: commits that a driving value has and the other variable does
// not match fill no window, and those of another value wait for their turn.
func TestWindowPastOthers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 9 {
		b.commit(t, doc(fmt.Sprint("other", i), "other", 1))
	}
	b.commit(t, doc("in1", "mine", 1))
	b.commit(t, doc("in2", "mine", 2))
	for i := range 9 {
		b.commit(t, doc(fmt.Sprint("more", i), "other", 1), doc(fmt.Sprint("even", i), "other", 2))
	}
	b.commit(t, doc("in3", "mine", 1))
	for limit := int32(1); limit < 8; limit++ {
		req := request(sub("s", "docs", 0, docScopes([]string{"mine"}, []string{"1", "2"})))
		req.Header.LimitCommits = limit
		got := b.pull(t, req)[0]
		var seqs []int64
		for _, c := range got.Commits {
			seqs = append(seqs, c.CommitSeq)
		}
		want := []int64{10, 11, 21}[:min(limit, 3)]
		require.Equal(t, want, seqs)
		require.Equal(t, want[len(want)-1], got.End.NextCursor)
	}
}

// TestWindowBytes: a window ends at a commit once it holds BufferBytes, and what
// does not fit in a response's buffer is read later; nothing is lost by either.
func TestWindowBytes(t *testing.T) {
	t.Parallel()
	b := setup(t, with(func(c *pullsvc.Config) { c.BufferBytes = 1000 }))
	big := strings.Repeat("x", 300)
	for i := range 10 {
		b.commit(t, item(fmt.Sprint(i, "-1"), "x", big), item(fmt.Sprint(i, "-2"), "x", big), item(fmt.Sprint(i, "-3"), "y", big))
	}
	subs := make([]ssp2.Subscription, 20)
	for i := range subs {
		subs[i] = sub(strconv.Itoa(i), "items", int64(i%10), project([]string{"x", "y"}[i%2]))
	}
	for i, got := range b.pull(t, request(subs...)) {
		cursor := subs[i].Cursor
		for round := 0; ; round++ {
			require.Less(t, round, 20)
			require.LessOrEqual(t, len(got.Commits), 4)
			for _, c := range got.Commits {
				cursor++
				require.Equal(t, cursor, c.CommitSeq)
				require.Len(t, c.Changes, 2-i%2)
			}
			require.Equal(t, cursor, got.End.NextCursor)
			if cursor == b.seq {
				break
			}
			require.NotEmpty(t, got.Commits)
			subs[i].Cursor = cursor
			got = b.one(t, subs[i])
		}
	}
}

// TestSubscriptionOrder: the response has the request's order (§1.6), however the
// answers were read.
func TestSubscriptionOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.commit(t, item("i", "x", ""), doc("d", "o", 1))
	none := ssp2.ScopeMap{"org": {}}
	var subs []ssp2.Subscription
	for i := range 24 {
		id := strconv.Itoa(i)
		switch i % 6 {
		case 0:
			subs = append(subs, sub(id, "items", 0, project("x")))
		case 1:
			subs = append(subs, sub(id, "docs", -1, ssp2.ScopeMap{"org": {"o"}}))
		case 2:
			subs = append(subs, sub(id, "docs", 0, none))
		case 3:
			subs = append(subs, sub(id, "items", -1, project("x")))
		case 4:
			subs = append(subs, sub(id, "items", 99, project("x")))
		case 5:
			subs = append(subs, sub(id, "docs", -1, ssp2.ScopeMap{"folderId": {"zero"}}))
		}
	}
	for i, got := range b.pull(t, request(subs...)) {
		require.Equal(t, []ssp2.SubStatus{1, 1, 2, 1, 1, 1}[i%6], got.Start.Status)
		require.Len(t, got.Commits, []int{1, 0, 0, 0, 0, 0}[i%6])
		require.Len(t, got.Segments, []int{0, 1, 0, 1, 1, 1}[i%6])
	}
}
