package pushsvc_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// TestMoreDataThanAnAdmissionReads: commits that name too much together get
// transactions of their own, one that does so alone is rejected for good, and
// neighbours notice nothing.
func TestMoreDataThanAnAdmissionReads(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	big := strings.Repeat("x", 40_000)
	for i := range 3 {
		c.apply(t, b.upsert(t, "notes", note(fmt.Sprint("big", i), big)))
	}
	b.AdmitAtMost(100_000)

	each := []ssp2.PushCommit{
		c.commit(remove("notes", "big0")),
		c.commit(base(b.upsert(t, "notes", note("big1", "small")), 9)),
		c.commit(b.upsert(t, "notes", note("big1", "small")), b.upsert(t, "notes", note("new", "small"))),
		c.commit(b.upsert(t, "notes", note("big2", "small"))),
	}
	want := c.send(t, each...)
	requireApplied(t, want[0])
	requireRejected(t, want[1], 0, ssp2.CodeVersionConflict)
	requireApplied(t, want[2], want[3])
	require.EqualValues(t, 4, *want[0].CommitSeq)
	require.EqualValues(t, 6, *want[3].CommitSeq)
	again := c.send(t, each...)
	require.Equal(t, ssp2.PushCached, again[0].Status)
	require.Equal(t, want[1], again[1])
	require.Equal(t, want[3].CommitSeq, again[3].CommitSeq)

	for i := range 3 {
		c.apply(t, b.upsert(t, "notes", note(fmt.Sprint("big", i), big)))
	}
	poison := c.commit(remove("notes", "big0"), remove("notes", "big1"), remove("notes", "big2"))
	clients := c.fleet(2)
	first, rest, release := c.behind(t, b,
		func() <-chan answer { return clients[0].pushing(t.Context(), b.Service, poison) },
		func() <-chan answer {
			return clients[1].pushing(t.Context(), b.Service, clients[1].commit(b.upsert(t, "notes", note("neighbour", "x"))))
		})
	release()
	requireApplied(t, (<-first).resp.Results...)
	rejected := (<-rest[0]).resp.Results[0]
	requireRejected(t, rejected, 0, ssp2.CodeConstraintViolation)
	requireApplied(t, (<-rest[1]).resp.Results...)
	require.Equal(t, rejected, clients[0].send(t, poison)[0], "on every replay")
	require.NotNil(t, c.stored(t, "notes", "big2"))
	requireSoundLog(t, b)
}

// TestACommitThatGrowsWhileItIsDecided: small changes of a large row write all of it.
func TestACommitThatGrowsWhileItIsDecided(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV3)
	b.CommitAtMost(100_000)
	c.apply(t, b.patch(t, "notes", fullNote("n", strings.Repeat("x", 40_000))))
	done := func(v bool) ssp2.Operation {
		return b.patch(t, "notes", map[string]any{"id": "n", "done": v})
	}
	c.apply(t, done(true), done(false))
	grown := c.send(t, c.commit(done(true), done(false), done(true)))
	requireRejected(t, grown[0], 2, ssp2.CodeConstraintViolation)
	require.EqualValues(t, 3, c.stored(t, "notes", "n").Version)
}

// TestPlansAreWrittenInPieces: one transaction, whatever it holds.
func TestPlansAreWrittenInPieces(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("big", strings.Repeat("x", 40_000))),
		b.upsert(t, "slugs", map[string]any{"id": "0", "project_id": "pr1", "slug": "taken"}))
	b.PlanAtMost(100_000)
	var commits []ssp2.PushCommit
	for i := range 24 {
		switch i % 4 {
		case 0, 1: // forty kilobytes of outcome each
			commits = append(commits, c.commit(base(b.upsert(t, "notes", note("big", "y")), 9)))
		case 2:
			commits = append(commits, c.commit(b.upsert(t, "notes", note(fmt.Sprint("n", i), strings.Repeat("y", 40_000)))))
		case 3:
			commits = append(commits, c.commit(b.upsert(t, "slugs", map[string]any{"id": strconv.Itoa(i), "project_id": "pr1", "slug": "taken"})))
		}
	}
	b.counter.Reset()
	results := c.send(t, commits...)
	b.Wait()
	require.Equal(t, 1, b.counter.Commits())
	for i, r := range results {
		switch i % 4 {
		case 0, 1:
			requireRejected(t, r, 0, ssp2.CodeVersionConflict)
		case 2:
			requireApplied(t, r)
			require.EqualValues(t, 3+i/4, *r.CommitSeq)
		case 3:
			requireRejected(t, r, 0, ssp2.CodeConstraintViolation)
		}
	}
	require.Equal(t, len(commits)+2, scalar[int](t, b, `select count(*) from syncpg.sync_push_results`))
	requireSoundLog(t, b)
}

// TestACorruptRowIsNotTheClientsFault.
func TestACorruptRowIsNotTheClientsFault(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "x")))
	b.exec(t, `update public.notes set _sync_payload = '\x00'`)
	a := <-c.pushing(t.Context(), b.Service, c.commit(b.upsert(t, "notes", note("n", "y"))))
	require.Error(t, a.err)
	require.Empty(t, ssp2.CodeOf(a.err))
}

// TestATriggerOnTheLogRefusesACommitWithoutChanges as it does any other.
func TestATriggerOnTheLogRefusesACommitWithoutChanges(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	b.exec(t, `create function public.refuse() returns trigger language plpgsql as $$ begin raise exception 'no' using errcode = '23514'; end $$`,
		`create trigger refuse before insert on syncpg.sync_commits for each row execute function public.refuse()`)
	requireRejected(t, c.send(t, c.commit(remove("notes", "absent")))[0], 0, ssp2.CodeConstraintViolation)
}
