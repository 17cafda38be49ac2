package pushsvc_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

var wires = []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3}

// encoded renders a result as it goes over the wire, with the status of a replay.
func encoded(t testing.TB, wire ssp2.WireVersion, r ssp2.PushResult) []byte {
	t.Helper()
	if r.Status == ssp2.PushApplied {
		r.Status = ssp2.PushCached
	}
	frame, err := ssp2.AppendFrame(nil, wire, &r)
	require.NoError(t, err)
	return frame
}

// TestReplay: the stored outcome comes back byte for byte, an applied one as cached
// and a rejected one as rejected, in whatever wire version it is asked for (§2.3).
func TestReplay(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for _, tc := range []struct {
		name   string
		commit func(t *testing.T) []ssp2.Operation
		status ssp2.PushStatus
	}{
		{"applied", func(t *testing.T) []ssp2.Operation {
			return []ssp2.Operation{b.upsert(t, "notes", note("m", "a")), remove("notes", "none"), remove("notes", "m")}
		}, ssp2.PushApplied},
		{"applied without a change", func(*testing.T) []ssp2.Operation { return []ssp2.Operation{remove("notes", "none")} }, ssp2.PushApplied},
		{"conflict", func(t *testing.T) []ssp2.Operation {
			return []ssp2.Operation{remove("notes", "none"), base(b.upsert(t, "notes", note("n", "b")), 7)}
		}, ssp2.PushRejected},
		{"error", func(t *testing.T) []ssp2.Operation {
			return []ssp2.Operation{{Table: "nope", RowID: "x", Op: ssp2.OpDelete}}
		}, ssp2.PushRejected},
		{"refused by the database", func(t *testing.T) []ssp2.Operation {
			return []ssp2.Operation{b.upsert(t, "slugs", map[string]any{"id": "2", "project_id": "pr1", "slug": "taken"})}
		}, ssp2.PushRejected},
	} {
		for _, first := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2} {
			t.Run(fmt.Sprintf("%s/%d", tc.name, first), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, first)
				c.apply(t, b.upsert(t, "notes", note("n", "a")), b.upsert(t, "slugs", map[string]any{"id": "1", "project_id": "pr1", "slug": "taken"}))
				commit := c.commit(tc.commit(t)...)
				original := c.send(t, commit)[0]
				require.Equal(t, tc.status, original.Status)
				seq := c.seq(t)
				// What happened since, and what the replay says, play no part.
				c.apply(t, remove("notes", "n"), remove("slugs", "1"))
				changed := commit
				changed.Operations = []ssp2.Operation{b.upsert(t, "notes", note("other", "x"))}
				for _, wire := range wires {
					for _, again := range []ssp2.PushCommit{commit, changed} {
						replay := c.as(wire).send(t, again)[0]
						require.Equal(t, original.CommitSeq, replay.CommitSeq)
						require.Equal(t, encoded(t, wire, original), encoded(t, wire, replay))
						if tc.status == ssp2.PushApplied {
							require.Equal(t, ssp2.PushCached, replay.Status)
						} else {
							require.Equal(t, ssp2.PushRejected, replay.Status)
						}
					}
				}
				require.Nil(t, c.stored(t, "notes", "other"))
				require.Equal(t, seq+2, c.seq(t))
			})
		}
	}
}

// TestConflictColumnsOfReplays: a conflict found in one wire version is told in
// another, where a full row conflicts with every column but key and crdt.
func TestConflictColumnsOfReplays(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV1)
	c.apply(t, b.upsert(t, "notes", note("n", "a")))
	old := c.commit(base(b.upsert(t, "notes", note("n", "b")), 9))
	requireRejected(t, c.send(t, old)[0], 0, ssp2.CodeVersionConflict)
	replay := c.as(ssp2.WireV3).send(t, old)[0]
	require.Equal(t, []string{"project_id", "title", "rank", "weight", "done", "meta", "thumb", "file"},
		b.columnsOf(t, "notes", replay.Results[0].ConflictColumns))

	sparse := c.commit(base(b.patch(t, "notes", map[string]any{"id": "n", "title": "b"}), 0))
	original := c.as(ssp2.WireV3).send(t, sparse)[0]
	require.Equal(t, encoded(t, ssp2.WireV1, original), encoded(t, ssp2.WireV1, c.send(t, sparse)[0]))
}

// TestResultsOfARejection: only the terminating operation is told; those before it
// are taken back, those after it are not attempted (§6.3).
func TestResultsOfARejection(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV1)
	c.apply(t, b.upsert(t, "notes", note("n", "a")))
	bad := func(n string) ssp2.Operation { return base(b.upsert(t, "notes", note(n, "x")), 9) }
	fine := func(n string) ssp2.Operation { return b.upsert(t, "notes", note(n, "x")) }
	for at := range 4 {
		ops := []ssp2.Operation{fine("f0"), fine("n"), fine("f2"), fine("f3")}
		ops[at] = bad("absent")
		ops = append(ops, bad("n"), ssp2.Operation{Table: "nope", Op: ssp2.OpDelete})
		requireRejected(t, c.push(t, ops...), at, ssp2.CodeRowMissing)
	}
	require.Equal(t, &storedRow{Version: 1, Values: note("n", "a")}, c.stored(t, "notes", "n"))
	require.EqualValues(t, 1, c.seq(t))
}

// TestRejections has the refusals that need no stored row.
//
//nolint:paralleltest // the cases share a client
func TestRejections(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV3)
	old := c.as(ssp2.WireV2)
	raw := func(id string, payload []byte) ssp2.Operation {
		return ssp2.Operation{Table: "notes", RowID: id, Op: ssp2.OpUpsert, Payload: payload}
	}
	renamed := func(op ssp2.Operation, id string) ssp2.Operation { op.RowID = id; return op }
	blob := `{"blobId":"sha256:` + strings.Repeat("a", 64) + `","byteLength":1,"mediaType":"text/plain"}`
	sparse := b.sparse(t, "notes", map[string]any{"id": "n", "title": "a"})
	padded := slices.Clone(sparse)
	padded[1] |= 0x80

	for _, tc := range []struct {
		name string
		c    *client
		op   ssp2.Operation
		code ssp2.Code
	}{
		{"unknown table", old, ssp2.Operation{Table: "nope", RowID: "n", Op: ssp2.OpUpsert, Payload: []byte{0}}, ssp2.CodeUnknownTable},
		{"unknown table with U+0000", old, ssp2.Operation{Table: "no\x00pe", RowID: "n", Op: ssp2.OpDelete}, ssp2.CodeUnknownTable},
		{"a table of ours", old, ssp2.Operation{Table: "sync_commits", RowID: "n", Op: ssp2.OpDelete}, ssp2.CodeUnknownTable},
		{"key is not the row id", old, renamed(b.upsert(t, "notes", note("n", "a")), "m"), ssp2.CodeInvalidRequest},
		{"key is not the row id, sparse", c, renamed(b.patch(t, "notes", note("n", "a")), "m"), ssp2.CodeInvalidRequest},
		{"integer key, spelled otherwise", old, renamed(b.upsert(t, "guarded", map[string]any{"id": 7, "project_id": "pr1", "org": 1}), "07"), ssp2.CodeInvalidRequest},
		{"empty key", old, b.upsert(t, "notes", note("", "a")), ssp2.CodeInvalidRequest},
		{"payload is empty", old, raw("n", []byte{}), ssp2.CodeInvalidRequest},
		{"payload is cut off", old, raw("n", b.full(t, "notes", note("n", "a"))[:9]), ssp2.CodeInvalidRequest},
		{"payload has bytes left over", old, raw("n", append(b.full(t, "notes", note("n", "a")), 0)), ssp2.CodeInvalidRequest},
		{"sparse payload in an older version", old, raw("n", sparse), ssp2.CodeInvalidRequest},
		{"full payload in version 3", c, raw("n", b.full(t, "notes", note("n", "a"))), ssp2.CodeInvalidRequest},
		{"sparse: padding bit", c, raw("n", padded), ssp2.CodeInvalidRequest},
		{"sparse: no primary key", c, raw("n", []byte{0x04, 0x00, 0x01}), ssp2.CodeInvalidRequest},
		{"sparse: NULL for a column that is not nullable", c, raw("n", []byte{0x03, 0x00, 0x02, 1, 0, 0, 0, 'n'}), ssp2.CodeInvalidRequest},
		{"crdt column", c, b.patch(t, "notes", fullNote("n", "a", map[string]any{"body": "u"})), ssp2.CodeCRDTMergeFailed},
		{"crdt column, full row", old, b.upsert(t, "notes", map[string]any{"id": "n", "project_id": "pr1", "body": "u"}), ssp2.CodeCRDTMergeFailed},
		{"blob reference", old, b.upsert(t, "notes", map[string]any{"id": "n", "project_id": "pr1", "file": blob}), ssp2.CodeBlobNotFound},
		{
			"forbidden comes before what is in the row", old.with(func(r *pushsvc.Request) { r.Scopes = allow(scope.Allowed{}) }),
			b.upsert(t, "notes", map[string]any{"id": "n", "project_id": "pr1", "file": blob}), ssp2.CodeForbidden,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			commit := tc.c.commit(tc.op)
			requireRejected(t, tc.c.send(t, commit)[0], 0, tc.code)
			requireRejected(t, tc.c.send(t, commit)[0], 0, tc.code)
		})
	}
	require.Zero(t, c.seq(t))
	// NULL references nothing.
	requireApplied(t, c.push(t, b.patch(t, "notes", fullNote("n", "a"))))
}

// TestDuplicateCommitIDInARequest: processed once, answered like a replay (§6.3).
func TestDuplicateCommitIDInARequest(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	good := c.commit(b.upsert(t, "notes", note("n", "a")))
	bad := c.commit(base(b.upsert(t, "notes", note("n", "b")), 5))
	unstorable := commit("a\x00b", remove("notes", "x"))
	results := c.send(t, good, bad, good, unstorable, bad, unstorable, c.commit(b.upsert(t, "notes", note("n", "c"))))
	statuses := make([]ssp2.PushStatus, len(results))
	for i, r := range results {
		statuses[i] = r.Status
	}
	const applied, cached, rejected = ssp2.PushApplied, ssp2.PushCached, ssp2.PushRejected
	require.Equal(t, []ssp2.PushStatus{applied, rejected, cached, rejected, rejected, rejected, applied}, statuses)
	require.Equal(t, encoded(t, ssp2.WireV2, results[0]), encoded(t, ssp2.WireV2, results[2]))
	require.Equal(t, results[1], results[4])
	requireRejected(t, results[3], 0, ssp2.CodeInvalidRequest)
	require.EqualValues(t, 2, c.seq(t))
	require.EqualValues(t, 2, c.stored(t, "notes", "n").Version)
}

// TestUnreadableOutcome: told as a cache miss that may be retried, never stored, and
// never taken for a new commit (§6.3).
func TestUnreadableOutcome(t *testing.T) {
	t.Parallel()
	b := shared(t)
	for name, damage := range map[string]string{
		"results": `results = '\xff00'::bytea`, "results of no length": `results = ''::bytea`, "details": `details = '{'`,
	} {
		for _, applied := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/applied %t", name, applied), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, ssp2.WireV2)
				op := b.upsert(t, "notes", note("n", "a"))
				if !applied {
					op = base(op, 3)
				}
				lost := c.commit(op)
				original := c.send(t, lost)[0]
				const key = ` where partition = $1 and client_id = 'c1' and client_commit_id = $2`
				before := scalar[string](t, b, `select to_jsonb(r)::text from syncpg.sync_push_results as r`+key, c.req.Partition, lost.ClientCommitID)
				_, err := b.db.Pool.Exec(t.Context(), `update syncpg.sync_push_results set `+damage+key, c.req.Partition, lost.ClientCommitID)
				require.NoError(t, err)
				damaged := scalar[string](t, b, `select to_jsonb(r)::text from syncpg.sync_push_results as r`+key, c.req.Partition, lost.ClientCommitID)

				alone := b.push(t, c.request(lost))
				requireRejected(t, alone.Results[0], 0, ssp2.CodeIdempotencyCacheMiss)
				require.True(t, alone.Results[0].Results[0].Retryable)
				require.Zero(t, alone.LastSeq)
				results := c.send(t, c.commit(b.upsert(t, "notes", note("m", "a"))), lost)
				requireApplied(t, results[0])
				requireRejected(t, results[1], 0, ssp2.CodeIdempotencyCacheMiss)
				require.Equal(t, damaged, scalar[string](t, b, `select to_jsonb(r)::text from syncpg.sync_push_results as r`+key, c.req.Partition, lost.ClientCommitID))

				// Readable again, it is the answer again.
				_, err = b.db.Pool.Exec(t.Context(), `update syncpg.sync_push_results as r set results = x.results, details = x.details
					from jsonb_populate_record(null::syncpg.sync_push_results, $3::jsonb) as x
					where r.partition = $1 and r.client_id = 'c1' and r.client_commit_id = $2`, c.req.Partition, lost.ClientCommitID, before)
				require.NoError(t, err)
				require.Equal(t, encoded(t, ssp2.WireV2, original), encoded(t, ssp2.WireV2, c.send(t, lost)[0]))
			})
		}
	}
}

// TestOutcomeRecord: status, seq, results, the time and a random identity.
func TestOutcomeRecord(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	c.send(t, c.commit(b.upsert(t, "notes", note("n", "a"))), c.commit(base(b.upsert(t, "notes", note("n", "a")), 5)), c.commit(remove("notes", "n")))
	require.Equal(t, "k1 1 1|k2 3 -|k3 1 2", scalar[string](t, b, `
		select string_agg(client_commit_id || ' ' || status || ' ' || coalesce(commit_seq::text, '-'), '|' order by client_commit_id)
		  from syncpg.sync_push_results where partition = $1 and client_id = 'c1' and recorded_at_ms = $2`, c.req.Partition, b.now.UnixMilli()))
	require.Equal(t, 3, scalar[int](t, b, `select count(distinct outcome_id) from syncpg.sync_push_results
		where partition = $1 and outcome_id::text ~ '^.{14}4.{4}[89ab]'`, c.req.Partition))
}

// TestAtomicityAndOrder (§6.4): commits are processed in order, each as a whole; one
// that is rejected does not stop the others and leaves nothing behind but its outcome.
func TestAtomicityAndOrder(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV2)
	row := func(title string) ssp2.Operation { return b.upsert(t, "notes", note("n", title)) }
	resp := b.push(t, c.request(
		c.commit(base(row("a"), 0)),
		c.commit(base(row("b"), 1), b.upsert(t, "notes", note("sibling", "x")), base(row("stale"), 1)), // its own write is ahead
		c.commit(base(row("c"), 1)), // as if the one before had not been there
		c.commit(remove("notes", "n"), b.upsert(t, "notes", note("n", "moved"))),
		c.commit(base(row("d"), 1)),
		c.commit(remove("notes", "n")),
		c.commit(base(row("gone"), 2)),
	))
	requireApplied(t, resp.Results[0], resp.Results[2], resp.Results[3], resp.Results[4], resp.Results[5])
	requireRejected(t, resp.Results[1], 2, ssp2.CodeVersionConflict)
	require.EqualValues(t, 2, resp.Results[1].Results[0].ServerVersion, "the conflict is with the commit's own write")
	requireRejected(t, resp.Results[6], 0, ssp2.CodeRowMissing)
	require.EqualValues(t, 5, resp.LastSeq)
	for i, at := range []int{0, 2, 3, 4, 5} {
		require.EqualValues(t, i+1, *resp.Results[at].CommitSeq)
	}
	require.Nil(t, c.stored(t, "notes", "sibling"))
	require.Nil(t, c.stored(t, "notes", "n"))
	require.Equal(t, []string{
		"1 0 upsert n 1", "2 0 upsert n 2", "3 0 delete n -", "3 1 upsert n 1", "4 0 upsert n 2", "5 0 delete n -",
	}, c.log(t))
}

// TestDeleteOfAnAbsentRow is applied, takes a seq and changes nothing (§6.2).
func TestDeleteOfAnAbsentRow(t *testing.T) {
	t.Parallel()
	b := shared(t)
	c := b.client(t, ssp2.WireV3)
	requireApplied(t, c.push(t, base(remove("notes", "n"), 5), remove("notes", "n"), remove("guarded", "not a number"), remove("notes", "\x00")))
	require.EqualValues(t, 1, c.seq(t))
	require.Empty(t, c.log(t))
	require.Zero(t, c.tombstones(t))
}

// TestTombstones: an applied delete records one, an insert clears it.
func TestTombstones(t *testing.T) {
	t.Parallel()
	b := shared(t)
	up := func(title string) ssp2.Operation { return b.patch(t, "notes", fullNote("n", title)) }
	del := remove("notes", "n")
	stands := func(seq int64) string { return fmt.Sprintf("notes n %d", seq) }
	for _, tc := range []struct {
		name    string
		commits [][]ssp2.Operation // each commit in a request of its own, or all in one
		want    string
	}{
		{"recorded", [][]ssp2.Operation{{up("a")}, {del}}, stands(2)},
		{"a delete of an absent row records none", [][]ssp2.Operation{{del}}, ""},
		{"and leaves the one that stands", [][]ssp2.Operation{{up("a")}, {del}, {del}}, stands(2)},
		{"cleared by an insert", [][]ssp2.Operation{{up("a")}, {del}, {base(up("b"), 0)}}, ""},
		{"recorded anew", [][]ssp2.Operation{{up("a")}, {del}, {base(up("b"), 0)}, {del}}, stands(4)},
		{"inserted and deleted in one commit", [][]ssp2.Operation{{up("a"), del}}, stands(1)},
		{"deleted and inserted in one commit", [][]ssp2.Operation{{up("a")}, {del, base(up("b"), 0)}}, ""},
		{"a commit may bring back what it deleted itself", [][]ssp2.Operation{{up("a")}, {del, up("b")}}, ""},
		{"deleted, inserted and deleted", [][]ssp2.Operation{{up("a")}, {del, up("b"), del}}, stands(2)},
		{"cleared and recorded in one commit", [][]ssp2.Operation{{up("a")}, {del}, {base(up("b"), 0), del}}, stands(3)},
	} {
		for _, together := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/one request %t", tc.name, together), func(t *testing.T) {
				t.Parallel()
				c := b.client(t, ssp2.WireV3)
				var commits []ssp2.PushCommit
				for _, ops := range tc.commits {
					commits = append(commits, c.commit(ops...))
				}
				if together {
					requireApplied(t, c.send(t, commits...)...)
				} else {
					for _, k := range commits {
						requireApplied(t, c.send(t, k)...)
					}
				}
				require.Equal(t, tc.want, scalar[string](t, b, `select coalesce(string_agg(table_name || ' ' || row_id || ' ' || commit_seq, '|'), '')
					from syncpg.sync_tombstones where partition = $1`, c.req.Partition))
			})
		}
	}

	t.Run("what another commit of the request deleted stays deleted", func(t *testing.T) {
		t.Parallel()
		c := b.client(t, ssp2.WireV3)
		results := c.send(t, c.commit(up("a")), c.commit(del), c.commit(up("b")))
		requireApplied(t, results[0], results[1])
		requireRejected(t, results[2], 0, ssp2.CodeRowDeleted)
	})
	t.Run("of a rejected commit: none", func(t *testing.T) {
		t.Parallel()
		c := b.client(t, ssp2.WireV3)
		c.apply(t, up("a"))
		requireRejected(t, c.push(t, del, base(up("b"), 9)), 1, ssp2.CodeRowMissing)
		require.Zero(t, c.tombstones(t))
	})
}
