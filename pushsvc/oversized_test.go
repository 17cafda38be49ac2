package pushsvc_test

import (
	"fmt"
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
