package pushsvc_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// court is a validator of whole commits that tests tell what to do.
type court struct {
	mu   sync.Mutex
	rule pushsvc.CommitValidator
	runs int
}

func (j *court) validate(ctx context.Context, c *pushsvc.Candidate) error {
	j.mu.Lock()
	rule := j.rule
	j.runs++
	j.mu.Unlock()
	if rule == nil {
		return nil
	}
	return rule(ctx, c)
}

// say sets the rule and forgets how often the last one ran.
func (j *court) say(rule pushsvc.CommitValidator) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rule, j.runs = rule, 0
}

func (j *court) ran() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.runs
}

// judging returns a bundle with a validator of whole commits.
func judging(t testing.TB, change ...func(*pgtest.Options, *pushsvc.Config)) (*bundle, *court) {
	t.Helper()
	j := &court{}
	return setup(t, append(change, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.ValidateCommit = j.validate })...), j
}

// deposed is Evidence for comparing.
type deposed struct {
	OpIndex             int
	Op                  ssp2.Op
	Table, RowID        string
	Row, Stored         map[string]any
	StoredVersion, Next int64
}

func TestEvidence(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("old", "a")), b.upsert(t, "notes", note("gone", "a")), b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1"}))
	var got []deposed
	var who pushsvc.Candidate
	j.say(func(_ context.Context, c *pushsvc.Candidate) error {
		who = *c
		for _, e := range c.Operations {
			got = append(got, deposed{e.OpIndex, e.Op, e.Table, e.RowID, rowMap(e.Row), rowMap(e.Stored), e.StoredVersion, e.NextVersion})
		}
		return nil
	})
	k := c.commit(
		b.upsert(t, "notes", changed(note("old", "b"), map[string]any{"project_id": "other"})),
		remove("notes", "absent"),
		remove("notes", "gone"),
		b.upsert(t, "notes", note("new", "a")),
		b.upsert(t, "notes", note("new", "b")),
		remove("slugs", "s"))
	requireApplied(t, c.send(t, k)...)
	row := func(id, title string) map[string]any {
		return map[string]any{"id": id, "project_id": "pr1", "title": title}
	}
	require.Empty(t, cmp.Diff([]deposed{
		{0, ssp2.OpUpsert, "notes", "old", row("old", "b"), row("old", "a"), 1, 2},
		{1, ssp2.OpDelete, "notes", "absent", nil, nil, 0, 0},
		{2, ssp2.OpDelete, "notes", "gone", nil, row("gone", "a"), 1, 0},
		{3, ssp2.OpUpsert, "notes", "new", row("new", "a"), nil, 0, 1},
		{4, ssp2.OpUpsert, "notes", "new", row("new", "b"), row("new", "a"), 1, 2},
		{5, ssp2.OpDelete, "slugs", "s", nil, map[string]any{"id": "s", "project_id": "pr1"}, 1, 0},
	}, got))
	require.Equal(t, []string{c.req.Partition, "alice", "c1", k.ClientCommitID}, []string{who.Partition, who.Actor, who.ClientID, who.ClientCommitID})
}

func TestCommitValidatorRejects(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	read := func(ctx context.Context, c *pushsvc.Candidate) error {
		_, err := c.ScanRows(ctx, inProject("pr1"))
		return err
	}
	for _, reads := range []bool{false, true} {
		for name, tc := range map[string]struct {
			err     error
			op      int
			code    ssp2.Code
			details string
		}{
			"plainly":                       {pushsvc.Reject("app.no", "m", hint), 0, "app.no", hintJSON},
			"an operation":                  {pushsvc.RejectOperation(1, "app.no", "m", hint), 1, "app.no", hintJSON},
			"without details":               {fmt.Errorf("wrapped: %w", pushsvc.RejectOperation(1, "app.no", "m", nil)), 1, "app.no", ""},
			"an operation it has not":       {pushsvc.RejectOperation(2, "app.no", "m", hint), 0, ssp2.CodeConstraintViolation, ""},
			"by mistake":                    {errors.New("secret"), 0, ssp2.CodeConstraintViolation, ""},
			"with a code of the protocol's": {pushsvc.Reject("sync.no", "m", hint), 0, ssp2.CodeConstraintViolation, ""},
		} {
			c := b.client(t, ssp2.WireV2)
			j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
				if len(cand.Operations) == 1 {
					return nil
				}
				if reads {
					if err := read(ctx, cand); err != nil {
						return err
					}
				}
				return tc.err
			})
			req := c.request(
				c.commit(b.upsert(t, "notes", note("before", "a"))),
				c.commit(b.upsert(t, "notes", note("n", "a")), b.upsert(t, "slugs", map[string]any{"id": "n", "project_id": "pr1"})),
				c.commit(b.upsert(t, "notes", note("after", "a"))))
			first := b.push(t, req)
			requireApplied(t, first.Results[0], first.Results[2])
			require.Equal(t, []int64{1, 2}, []int64{*first.Results[0].CommitSeq, *first.Results[2].CommitSeq}, "a rejection consumes no seq")
			require.Equal(t, ssp2.PushRejected, first.Results[1].Status, name)
			require.Equal(t, string(tc.code), first.Results[1].Results[0].Code, name)
			require.EqualValues(t, tc.op, first.Results[1].Results[0].OpIndex, name)
			require.NotContains(t, first.Results[1].Results[0].Message, "secret")
			if tc.details == "" {
				require.Nil(t, first.Details[1], name)
			} else {
				require.Equal(t, []ssp2.DetailEntry{{OpIndex: int32(tc.op), DetailsJSON: tc.details}}, first.Details[1].Entries, name)
			}
			require.Nil(t, c.stored(t, "notes", "n"))
			require.Nil(t, c.stored(t, "slugs", "n"))
			require.Equal(t, 3, j.ran())
			again := b.push(t, req)
			require.Equal(t, 3, j.ran(), "a known outcome asks nobody")
			require.Equal(t, encoded(t, ssp2.WireV2, first.Results[1]), encoded(t, ssp2.WireV2, again.Results[1]))
			require.Equal(t, first.Details, again.Details)
		}
	}
	requireSoundLog(t, b)
}

// inProject scans the notes of a project.
func inProject(id string) pushsvc.ScopeScan {
	return pushsvc.ScopeScan{Table: "notes", Scopes: map[string][]string{"project_id": {id}}}
}

func TestCommitValidatorRunsAfterEveryOperation(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	c := b.client(t, ssp2.WireV2)
	result := c.push(t, b.upsert(t, "notes", note("n", "a")), base(b.upsert(t, "notes", note("m", "a")), 7))
	requireRejected(t, result, 1, ssp2.CodeRowMissing)
	require.Zero(t, j.ran())
}

// titles renders candidate rows.
func titles(rows []pushsvc.CandidateRow) []string {
	list := make([]string, len(rows))
	for i, r := range rows {
		list[i] = fmt.Sprintf("%s %v v%d", r.RowID, r.Row.Value("title"), r.Version)
	}
	return list
}

// TestCandidateReads: reads see what the commit and those before it in the transaction
// have staged, and nothing of what was rejected.
func TestCandidateReads(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	c := b.client(t, ssp2.WireV2)
	other := b.client(t, ssp2.WireV2)
	other.apply(t, b.upsert(t, "notes", note("elsewhere", "other partition")))
	c.apply(t, b.upsert(t, "notes", note("a", "stored")), b.upsert(t, "notes", note("b", "stored")), b.upsert(t, "notes", note("d", "stored")),
		b.upsert(t, "notes", changed(note("x", "other project"), map[string]any{"project_id": "pr2"})),
		b.upsert(t, "slugs", map[string]any{"id": "s1", "project_id": "pr1", "slug": "one"}))
	var scans [][]string
	var slugs []string
	get := map[string]string{}
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		for _, scan := range []pushsvc.ScopeScan{
			inProject("pr1"),
			{Table: "notes", Scopes: map[string][]string{"project_id": {"pr2", "pr1", "\x00", "\xff"}}, After: "b"},
			{Table: "notes", Scopes: map[string][]string{"project_id": {"pr1"}}, After: "a\x00b", Limit: 1},
			{Table: "notes", Scopes: map[string][]string{"project_id": {"nobody"}}},
			{Table: "notes", Scopes: map[string][]string{"project_id": {""}}},
		} {
			rows, err := cand.ScanRows(ctx, scan)
			if err != nil {
				return err
			}
			scans = append(scans, titles(rows))
		}
		for _, value := range []any{"one", "two", nil, "\x00"} {
			rows, err := cand.ScanRowsByIndex(ctx, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug", Values: []any{value}})
			if err != nil {
				return err
			}
			for _, r := range rows {
				slugs = append(slugs, r.RowID)
			}
		}
		for _, id := range []string{"a", "b", "d", "x", "n", "elsewhere", "\x00", "\xff"} {
			row, err := cand.GetRow(ctx, "notes", id)
			if err != nil {
				return err
			}
			if row != nil {
				get[id] = titles([]pushsvc.CandidateRow{*row})[0]
			}
		}
		if cand.Operations[0].RowID == "rejected" {
			return pushsvc.Reject("app.no", "", nil)
		}
		return nil
	})
	push := func(commits ...ssp2.PushCommit) []ssp2.PushResult {
		scans, slugs, get = nil, nil, map[string]string{}
		return c.send(t, commits...)
	}
	requireApplied(t, push(c.commit(
		b.upsert(t, "notes", note("a", "staged")), remove("notes", "b"), b.upsert(t, "notes", note("n", "staged")),
		remove("slugs", "s1"), b.upsert(t, "slugs", map[string]any{"id": "s2", "project_id": "pr1", "slug": "two"}),
		b.upsert(t, "slugs", map[string]any{"id": "s3", "project_id": "pr1"})))...)
	require.Empty(t, cmp.Diff([][]string{
		{"a staged v2", "d stored v1", "n staged v1"},
		{"d stored v1", "n staged v1", "x other project v1"},
		{"d stored v1"},
		{},
		{},
	}, scans))
	require.Equal(t, []string{"s2", "s3"}, slugs)
	require.Equal(t, map[string]string{"a": "a staged v2", "d": "d stored v1", "n": "n staged v1", "x": "x other project v1"}, get)

	results := push(
		c.commit(b.upsert(t, "notes", note("b", "back")), remove("notes", "d")),
		c.commit(b.upsert(t, "notes", note("rejected", "x")), remove("notes", "x")),
		c.commit(b.upsert(t, "notes", note("last", "x"))))
	requireApplied(t, results[0], results[2])
	require.Equal(t, "app.no", results[1].Results[0].Code)
	require.Len(t, scans, 15)
	require.Equal(t, []string{"a staged v2", "b back v1", "n staged v1", "rejected x v1"}, scans[5])
	require.Equal(t, []string{"n staged v1", "rejected x v1"}, scans[6])
	require.Equal(t, []string{"a staged v2", "b back v1", "last x v1", "n staged v1"}, scans[10])
	requireSoundLog(t, b)
}

func TestScanBounds(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	c := b.client(t, ssp2.WireV2)
	ops := make([]ssp2.Operation, 150)
	for i := range ops {
		ops[i] = b.upsert(t, "notes", note(fmt.Sprintf("n%03d", i), "a"))
	}
	var lengths []int
	codes := map[string]ssp2.Code{}
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		for _, limit := range []int{0, 1, 150, 1000} {
			scan := inProject("pr1")
			scan.Limit = limit
			rows, err := cand.ScanRows(ctx, scan)
			if err != nil {
				return err
			}
			lengths = append(lengths, len(rows))
		}
		byScope := func(what string, change func(*pushsvc.ScopeScan)) {
			scan := inProject("pr1")
			change(&scan)
			_, err := cand.ScanRows(ctx, scan)
			codes[what] = ssp2.CodeOf(err)
		}
		byScope("a negative limit", func(s *pushsvc.ScopeScan) { s.Limit = -1 })
		byScope("a limit above the largest", func(s *pushsvc.ScopeScan) { s.Limit = pushsvc.MaxScanLimit + 1 })
		byScope("no scope", func(s *pushsvc.ScopeScan) { s.Scopes = nil })
		byScope("a scope without values", func(s *pushsvc.ScopeScan) { s.Scopes["project_id"] = nil })
		byScope("a scope of another table", func(s *pushsvc.ScopeScan) { s.Scopes["org"] = []string{"1"} })
		byScope("no such table", func(s *pushsvc.ScopeScan) { s.Table = "nope" })
		byIndex := func(what, table, index string, limit int, values ...any) {
			_, err := cand.ScanRowsByIndex(ctx, pushsvc.IndexScan{Table: table, Index: index, Values: values, Limit: limit})
			codes[what] = ssp2.CodeOf(err)
		}
		byIndex("by index: a limit", "slugs", "slugs_by_slug", 1001, "x")
		byIndex("by index: no such table", "nope", "slugs_by_slug", 0, "x")
		byIndex("no such index", "notes", "slugs_by_slug", 0, "x")
		byIndex("too few values", "slugs", "slugs_by_slug", 0)
		byIndex("too many values", "slugs", "slugs_by_slug", 0, "x", "y")
		byIndex("a value of another type", "slugs", "slugs_by_slug", 0, 7)
		byIndex("a value of no type", "slugs", "slugs_by_slug", 0, struct{}{})
		byIndex("no typed columns", "sealed", "x", 0, "x")
		_, err := cand.GetRow(ctx, "nope", "x")
		codes["get: no such table"] = ssp2.CodeOf(err)
		return nil
	})
	requireApplied(t, c.push(t, ops...))
	require.Equal(t, []int{100, 1, 150, 150}, lengths)
	require.Empty(t, cmp.Diff(map[string]ssp2.Code{
		"a negative limit": pushsvc.CodeInvalidLimit, "a limit above the largest": pushsvc.CodeInvalidLimit,
		"no scope": ssp2.CodeStorageScanRequiresScope, "a scope without values": ssp2.CodeStorageScanRequiresScope,
		"a scope of another table": pushsvc.CodeScopeNotFound, "no such table": pushsvc.CodeTableNotFound,
		"by index: a limit": pushsvc.CodeInvalidLimit, "by index: no such table": pushsvc.CodeTableNotFound,
		"no such index": pushsvc.CodeIndexNotFound, "too few values": pushsvc.CodeIndexValueCountMismatch,
		"too many values": pushsvc.CodeIndexValueCountMismatch, "a value of another type": pushsvc.CodeIndexValueTypeMismatch,
		"a value of no type": pushsvc.CodeIndexValueTypeMismatch, "no typed columns": pushsvc.CodeIndexNotMaterialized,
		"get: no such table": pushsvc.CodeTableNotFound,
	}, codes))
}

// TestRoundTripsOfHooks: a hook that does not read costs no round trip, and each read
// of a row that the push does not name costs one.
func TestRoundTripsOfHooks(t *testing.T) {
	t.Parallel()
	b, j := judging(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
		o.MaxConns = 1
		cfg.Validators = map[string]pushsvc.Validator{"notes": (&journal{}).validate}
	})
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("w", "")), b.upsert(t, "slugs", map[string]any{"id": "taken", "project_id": "pr1", "slug": "taken"}))
	n := 0
	insert := func(ops ...ssp2.Operation) ssp2.PushCommit {
		n++
		return c.commit(append(ops, b.upsert(t, "notes", note(fmt.Sprint("n", n), "x")))...)
	}
	dup := func() ssp2.PushCommit {
		return insert(b.upsert(t, "slugs", map[string]any{"id": fmt.Sprint("dup", n), "project_id": "pr1", "slug": "taken"}))
	}
	reads := func(n int) pushsvc.CommitValidator {
		return func(ctx context.Context, cand *pushsvc.Candidate) error {
			for range n {
				if _, err := cand.ScanRows(ctx, inProject("pr1")); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for _, tc := range []struct {
		name    string
		rule    pushsvc.CommitValidator
		commits []ssp2.PushCommit
		trips   int
	}{
		{"a hook that does not read", reads(0), []ssp2.PushCommit{insert(), insert()}, 2},
		{"a read of rows that the push names", func(ctx context.Context, cand *pushsvc.Candidate) error {
			for _, id := range []string{"w", "absent"} {
				if _, err := cand.GetRow(ctx, "notes", id); err != nil {
					return err
				}
			}
			return nil
		}, []ssp2.PushCommit{insert(b.upsert(t, "notes", note("w", "y")), remove("notes", "absent"))}, 2},
		{"one read", reads(1), []ssp2.PushCommit{insert()}, 3},
		{"two reads", reads(2), []ssp2.PushCommit{insert()}, 4},
		{"one read in each of three commits", reads(1), []ssp2.PushCommit{insert(), insert(), insert()}, 5},
		{"one read in the last of three commits", func(ctx context.Context, cand *pushsvc.Candidate) error {
			if len(cand.Operations) == 1 {
				return nil
			}
			return reads(1)(ctx, cand)
		}, []ssp2.PushCommit{insert(), insert(), insert(remove("notes", "absent"))}, 3},
		{"one read, then a rejection", func(ctx context.Context, cand *pushsvc.Candidate) error {
			if err := reads(1)(ctx, cand); err != nil {
				return err
			}
			return pushsvc.Reject("app.no", "", nil)
		}, []ssp2.PushCommit{insert()}, 3},
		{"a read of a commit that the database refuses, and the search", reads(1), []ssp2.PushCommit{dup()}, 4},
	} {
		b.Wait()
		j.say(tc.rule)
		b.counter.Reset()
		b.push(t, c.request(tc.commits...))
		b.Wait()
		require.Zero(t, b.counter.PrepareRoundTrips(), tc.name)
		require.Equal(t, tc.trips, b.counter.RoundTrips(), "%s: %v", tc.name, b.counter.Statements())
		require.Equal(t, 1, b.counter.Commits(), tc.name)
	}
	requireSoundLog(t, b)
}

// TestReadsMeetRefusedCommits: whoever the database refuses, before, in or after the
// commit whose hook reads, is rejected alone and exactly.
func TestReadsMeetRefusedCommits(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	for _, first := range []bool{false, true} { // or only the hook of the commit in the middle reads
		c := b.client(t, ssp2.WireV2)
		c.apply(t, b.upsert(t, "slugs", map[string]any{"id": "taken", "project_id": "pr1", "slug": "taken"}))
		slug := func(id, slug string) ssp2.Operation {
			return b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": slug})
		}
		seen := map[string]int{}
		j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
			if !first && cand.Operations[0].RowID != "middle" {
				return nil
			}
			rows, err := cand.ScanRows(ctx, inProject("pr1"))
			seen[cand.Operations[0].RowID] = len(rows)
			return err
		})
		for i, bad := range [][]int{{}, {1}, {2}, {3}, {0, 4}, {1, 2, 3}, {0, 1, 2, 3, 4}} {
			clear(seen)
			names := []string{"head", "before", "middle", "after", "tail"}
			commits := make([]ssp2.PushCommit, len(names))
			for k, name := range names {
				commits[k] = c.commit(b.upsert(t, "notes", note(name, strconv.Itoa(i))), slug(name, fmt.Sprint(name, i)))
			}
			for _, k := range bad {
				commits[k].Operations = append(commits[k].Operations, slug("x", "taken"))
			}
			results := c.send(t, commits...)
			applied := 0
			for k := range commits {
				if len(bad) > 0 && k == bad[0] {
					requireRejected(t, results[k], 2, ssp2.CodeConstraintViolation)
					bad = bad[1:]
					continue
				}
				applied++
				requireApplied(t, results[k])
			}
			require.Equal(t, applied, scalar[int](t, b, `select count(*) from public.notes where _sync_partition = $1 and title = $2`, c.req.Partition, strconv.Itoa(i)))
		}
		requireSoundLog(t, b)
	}
}

// TestReadsOfADeferredConstraint: what is checked when a commit ends is checked before
// its hook reads.
func TestReadsOfADeferredConstraint(t *testing.T) {
	t.Parallel()
	b, j := judging(t)
	b.exec(t, uniquePositions)
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		_, err := cand.ScanRows(ctx, inProject("pr1"))
		return err
	})
	c := b.client(t, ssp2.WireV2)
	at := func(id, position int) ssp2.Operation {
		return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
	}
	results := c.send(t, c.commit(at(1, 1), at(2, 2)), c.commit(at(1, 2), at(2, 1)), c.commit(at(4, 4), at(3, 1)), c.commit(at(3, 3)))
	requireApplied(t, results[0], results[1], results[3])
	requireRejected(t, results[2], 1, ssp2.CodeConstraintViolation)
	requireSoundLog(t, b)
}

func TestReadsInEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b, j := judging(t, func(o *pgtest.Options, _ *pushsvc.Config) {
				o.MaxConns = 1
				o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
			})
			j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
				rows, err := cand.ScanRows(ctx, inProject("pr1"))
				if err != nil {
					return err
				}
				slugs, err := cand.ScanRowsByIndex(ctx, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug", Values: []any{"s"}})
				if err != nil {
					return err
				}
				row, err := cand.GetRow(ctx, "slugs", "unnamed")
				if err != nil {
					return err
				}
				if len(rows) != 1 || len(slugs) != 1 || row != nil {
					return pushsvc.Reject("app.other", fmt.Sprint(len(rows), len(slugs), row), nil)
				}
				return nil
			})
			c := b.client(t, ssp2.WireV2)
			slug := func(id string) ssp2.Operation {
				return b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": "s"})
			}
			for range 2 {
				results := c.send(t,
					c.commit(b.upsert(t, "notes", note("n", "a")), slug("1")),
					c.commit(b.upsert(t, "notes", note("m", "a"))),
					c.commit(slug("3"), slug("2")),
					c.commit(b.upsert(t, "notes", note("n", "b"))))
				requireApplied(t, results[0], results[3])
				require.Equal(t, "app.other", results[1].Results[0].Code, results[1].Results[0].Message)
				requireRejected(t, results[2], 0, ssp2.CodeConstraintViolation)
			}
			requireSoundLog(t, b)
		})
	}
}

// TestHooksThatGoWrong: after whatever a hook does, the transaction has ended, the
// connection is back and the next push works.
func TestHooksThatGoWrong(t *testing.T) {
	t.Parallel()
	b, j := judging(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	read := func(ctx context.Context, cand *pushsvc.Candidate) {
		_, _ = cand.ScanRows(ctx, inProject("pr1"))
	}
	var kept *pushsvc.Candidate
	for name, rule := range map[string]pushsvc.CommitValidator{
		"a panic":              func(context.Context, *pushsvc.Candidate) error { panic("x") },
		"a panic after a read": func(ctx context.Context, cand *pushsvc.Candidate) error { read(ctx, cand); panic("x") },
		"a candidate kept": func(ctx context.Context, cand *pushsvc.Candidate) error {
			read(ctx, cand)
			kept = cand
			return errors.New("x")
		},
		"a misspelt column": func(_ context.Context, cand *pushsvc.Candidate) error {
			cand.Operations[0].Row.Text("nope")
			return nil
		},
	} {
		t.Log(name)
		j.say(rule)
		requireRejected(t, c.push(t, b.upsert(t, "notes", note("n", "a"))), 0, ssp2.CodeConstraintViolation)
		b.Wait()
		requireConnectionsBack(t, b)
		j.say(nil)
		requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "b"))))
	}
	_, err := kept.ScanRows(t.Context(), inProject("pr1"))
	require.Error(t, err)
	_, err = kept.GetRow(t.Context(), "notes", "n")
	require.Error(t, err)

	// Several goroutines may read at once, and one that ignores an error decides nothing.
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() { read(ctx, cand) })
		}
		group.Wait()
		return nil
	})
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "c"))))
	requireSoundLog(t, b)
}

// TestHooksCutShort: a hook whose caller goes away leaves no outcome, also when it has
// read, and its neighbours go on.
func TestHooksCutShort(t *testing.T) {
	t.Parallel()
	b, j := judging(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 2 })
	c := b.client(t, ssp2.WireV2)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	j.say(func(hook context.Context, cand *pushsvc.Candidate) error {
		if _, err := cand.ScanRows(hook, inProject("pr1")); err != nil {
			return err
		}
		if cand.ClientID == "stuck" && ctx.Err() == nil {
			cancel()
			<-hook.Done()
			_, err := cand.ScanRows(hook, inProject("pr1"))
			return err
		}
		return nil
	})
	stuck := c.with(func(r *pushsvc.Request) { r.ClientID, r.Actor = "stuck", "bob" })
	k := stuck.commit(b.upsert(t, "notes", note("stuck", "a")))
	clients := c.fleet(2)
	neighbour := func(i int) func() <-chan answer {
		k := clients[i].commit(b.upsert(t, "notes", note(fmt.Sprint("n", i), "x")))
		return func() <-chan answer { return clients[i].pushing(t.Context(), b.Service, k) }
	}
	first, rest, release := c.behind(t, b, neighbour(0), func() <-chan answer { return stuck.pushing(ctx, b.Service, k) }, neighbour(1))
	release()
	requireApplied(t, (<-first).resp.Results...)
	requireApplied(t, (<-rest[0]).resp.Results...)
	require.ErrorIs(t, (<-rest[1]).err, context.Canceled)
	requireApplied(t, (<-rest[2]).resp.Results...)
	b.Wait()
	require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where client_id = 'stuck'`), "no outcome")
	require.Nil(t, c.stored(t, "notes", "stuck"))
	requireConnectionsBack(t, b)
	requireApplied(t, stuck.send(t, k)...)
	requireSoundLog(t, b)
}

// TestAReadThatFails: what the system makes impossible rejects nothing.
func TestAReadThatFails(t *testing.T) {
	t.Parallel()
	b, j := judging(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	b.exec(t, `alter function syncpg.sync_scan_by_scope rename to sync_scan_by_scope_away`)
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		_, _ = cand.ScanRows(ctx, inProject("pr1"))
		return pushsvc.Reject("app.no", "says the hook, which does not look at errors", nil)
	})
	k := c.commit(b.upsert(t, "notes", note("n", "a")))
	_, err := b.Push(t.Context(), c.request(k))
	require.Error(t, err)
	b.Wait()
	require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results`))
	b.exec(t, `alter function syncpg.sync_scan_by_scope_away rename to sync_scan_by_scope`)
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		_, err := cand.ScanRows(ctx, inProject("pr1"))
		return err
	})
	requireApplied(t, c.send(t, k)...)
}

// TestManyReaders: pushes whose hooks read, on fewer connections than partitions, end
// all; and a partition whose hook waits holds up no other.
func TestManyReaders(t *testing.T) {
	t.Parallel()
	const pushers, partitions = 200, 20
	waiting, goOn := make(chan struct{}), make(chan struct{})
	b, j := judging(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 4 })
	j.say(func(ctx context.Context, cand *pushsvc.Candidate) error {
		if cand.ClientID == "blocker" {
			close(waiting)
			<-goOn
		}
		_, err := cand.ScanRows(ctx, inProject("pr1"))
		return err
	})
	blocker := request(commit("k", b.upsert(t, "notes", note("n", "x"))))
	blocker.ClientID, blocker.Partition = "blocker", "blocked"
	blocked := (&client{req: blocker}).pushing(t.Context(), b.Service, blocker.Commits...)
	<-waiting
	requests := make([]pushsvc.Request, pushers)
	for i := range requests {
		requests[i] = request(commit("k1", b.upsert(t, "notes", note(strconv.Itoa(i), "x"))), commit("k2", b.upsert(t, "notes", note("shared", strconv.Itoa(i)))))
		requests[i].ClientID, requests[i].Partition = fmt.Sprint("c", i), fmt.Sprint("p", i%partitions)
	}
	parallel(t, pushers, func(i int) error {
		resp, err := b.Push(t.Context(), requests[i])
		if err == nil && (resp.Results[0].Status != ssp2.PushApplied || resp.Results[1].Status != ssp2.PushApplied) {
			err = fmt.Errorf("%v", resp.Results)
		}
		return err
	})
	close(goOn)
	requireApplied(t, (<-blocked).resp.Results...)
	require.Equal(t, 2*pushers+1, scalar[int](t, b, `select count(*) from syncpg.sync_push_results`))
	requireSoundLog(t, b)
}
