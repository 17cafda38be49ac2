package pushsvc_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// emit is a function as a sink.
type emit func(context.Context, events.Event)

func (f emit) Emit(ctx context.Context, e events.Event) { f(ctx, e) }

func withEvents(s events.Sink) func(*pgtest.Options, *pushsvc.Config) {
	return func(_ *pgtest.Options, c *pushsvc.Config) { c.Events = s }
}

// told returns the events of everything pushed so far, in order.
func told(b *bundle, ring *events.Ring) []events.Event {
	b.Wait()
	var all []events.Event
	for _, r := range ring.Query(events.Filter{}) {
		all = append(all, r.Event)
	}
	slices.Reverse(all)
	return all
}

// outcomeRecord reads the identity of a stored outcome, and when it was recorded.
func (c *client) outcomeRecord(t *testing.T, commit string) (events.OutcomeID, time.Time) {
	t.Helper()
	var id [16]byte
	var ms int64
	require.NoError(t, c.b.db.Pool.QueryRow(t.Context(), `select outcome_id, recorded_at_ms from syncpg.sync_push_results
		where partition = $1 and client_id = $2 and client_commit_id = $3`, c.req.Partition, c.req.ClientID, commit).Scan(&id, &ms))
	return id, time.UnixMilli(ms).UTC()
}

func TestEveryAnswerIsToldOnce(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, withEvents(ring))
	c := b.client(t, ssp2.WireV1)
	require.Empty(t, told(b, ring), "nothing was answered")
	first := b.now

	commits := []ssp2.PushCommit{
		commit("applied", b.upsert(t, "slugs", map[string]any{"id": "s", "project_id": "pr1", "slug": "taken"}), b.upsert(t, "notes", note("n", "one"))),
		commit("rejected", b.upsert(t, "notes", note("m", "two")), remove("no_such_table", "x")),
		commit("conflicted", base(b.upsert(t, "notes", note("n", "stale")), 7)),
		commit("refused by the database", b.upsert(t, "slugs", map[string]any{"id": "r", "project_id": "pr1", "slug": "taken"})),
		commit("", remove("notes", "n")), // no record can have this id
		commit("applied", remove("notes", "n")),
	}
	push := func(id string, operations int, replay bool) events.Push {
		p := events.Push{
			Partition: c.req.Partition, Actor: "alice", ClientID: "c1", ClientCommitID: id, Operations: operations, Replay: replay,
		}
		if id != "" {
			p.OutcomeID, p.RecordedAt = c.outcomeRecord(t, id)
			require.NotZero(t, p.OutcomeID)
			require.True(t, first.Equal(p.RecordedAt))
		}
		return p
	}
	want := func(replay bool) []events.Event {
		return []events.Event{
			events.PushApplied{Push: push("applied", 2, replay), CommitSeq: 1},
			events.PushRejected{Push: push("rejected", 2, replay), Code: ssp2.CodeUnknownTable, OpIndex: 1},
			events.PushConflicted{Push: push("conflicted", 1, replay), Code: ssp2.CodeVersionConflict},
			events.PushRejected{Push: push("refused by the database", 1, replay), Code: ssp2.CodeConstraintViolation},
			events.PushRejected{Push: push("", 1, false), Code: ssp2.CodeInvalidRequest},
			events.PushApplied{Push: push("applied", 1, true), CommitSeq: 1},
		}
	}
	c.send(t, commits...)
	got := told(b, ring)
	require.Empty(t, cmp.Diff(want(false), got))

	b.now = b.now.Add(time.Hour)
	c.send(t, commits...)
	require.Empty(t, cmp.Diff(want(true), told(b, ring)[len(got):]), "a replay has the identity and the time of the first answer")
}

func TestARefusedRequestIsNotTold(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, withEvents(ring))
	c := b.client(t, ssp2.WireV1)
	c.apply(t, b.upsert(t, "notes", note("n", "one")))
	before := len(told(b, ring))
	_, err := b.Push(t.Context(), c.with(func(r *pushsvc.Request) { r.Actor = "mallory" }).request(c.commit(remove("notes", "n"))))
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(err))
	require.Len(t, told(b, ring), before)
}

// TestSinksComeLast: when an event comes the answer is out, the outcome is durable,
// nothing is locked, and the push has given its connection back.
func TestSinksComeLast(t *testing.T) {
	t.Parallel()
	answered := make(chan struct{})
	looked := make(chan error, 1)
	var b *bundle
	b = setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 }, withEvents(emit(func(ctx context.Context, _ events.Event) {
		<-answered
		looked <- errors.Join(ctx.Err(), b.db.Pool.QueryRow(ctx, `select 1 from syncpg.sync_push_results for update nowait`).Scan(new(int)))
	})))
	c := b.client(t, ssp2.WireV1)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := b.Push(ctx, c.request(c.commit(b.upsert(t, "notes", note("n", "one")))))
	require.NoError(t, err)
	cancel()
	close(answered)
	require.NoError(t, <-looked, "nor has the end of the caller's context any part in it")
}

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 },
		withEvents(emit(func(context.Context, events.Event) { panic("sink is broken") })))
	c := b.client(t, ssp2.WireV1)
	for range 3 {
		results := c.send(t, c.commit(b.upsert(t, "notes", note("n", "one"))), c.commit(remove("no_such_table", "x")))
		require.Equal(t, ssp2.PushApplied, results[0].Status)
		requireRejected(t, results[1], 0, ssp2.CodeUnknownTable)
	}
	b.Wait()
	require.Zero(t, b.db.Pool.Stat().AcquiredConns())
}

func TestASinkCostsNoRoundTrip(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 }, withEvents(ring))
	c := b.client(t, ssp2.WireV1)
	c.apply(t, b.upsert(t, "notes", note("n", "one"))) // prepares every statement
	b.Wait()
	again := c.commit(b.upsert(t, "notes", note("n", "two")), remove("notes", "n"))
	for range 2 { // the second is a replay: it reads, and closes its transaction behind the answer
		b.counter.Reset()
		c.send(t, again)
		b.Wait()
		require.Equal(t, 2, b.counter.RoundTrips(), b.counter.Statements())
	}
	require.Len(t, told(b, ring), 3)
}
