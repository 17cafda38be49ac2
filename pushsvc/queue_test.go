package pushsvc_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// fleet returns n clients of one partition, each an actor of its own.
func (c *client) fleet(n int) []*client {
	clients := make([]*client, n)
	for i := range clients {
		clients[i] = c.with(func(r *pushsvc.Request) {
			r.ClientID, r.Actor = fmt.Sprintf("client-%03d", i), fmt.Sprintf("actor-%03d", i)
		})
	}
	return clients
}

// behind holds the partition, has one push wait for it in the database, and then
// lets the others queue up behind that one, in order.
func (c *client) behind(t testing.TB, b *bundle, pushes ...func() <-chan answer) (first <-chan answer, rest []<-chan answer, release func(...string)) {
	t.Helper()
	release = c.hold(t)
	head := c.with(func(r *pushsvc.Request) { r.ClientID = "head" })
	first = head.pushing(t.Context(), b.Service, head.commit(b.upsert(t, "notes", note("head", "x"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	for i, push := range pushes {
		rest = append(rest, push())
		b.WaitQueued(t.Context(), c.req.Partition, i+1)
	}
	return first, rest, release
}

func TestQueuedPushesShareATransactionInOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	clients := c.fleet(40)
	pushes := make([]func() <-chan answer, len(clients))
	for i, cl := range clients {
		pushes[i] = func() <-chan answer {
			return cl.pushing(t.Context(), b.Service, cl.commit(b.upsert(t, "notes", note(fmt.Sprint("n", i), "x"))))
		}
	}
	first, rest, release := c.behind(t, b, pushes...)
	b.counter.Reset()
	release()
	requireApplied(t, (<-first).resp.Results...)
	for i, done := range rest {
		a := <-done
		require.NoError(t, a.err)
		requireApplied(t, a.resp.Results...)
		require.EqualValues(t, i+2, *a.resp.Results[0].CommitSeq, "arrival order")
	}
	b.Wait()
	require.Equal(t, 2, b.counter.Commits(), "the head's, and one for the forty behind it")
	requireSoundLog(t, b)
}

// TestNeighboursInATransaction: a request that fails, conflicts or goes away does so
// alone.
func TestNeighboursInATransaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "slugs", map[string]any{"id": "1", "project_id": "pr1", "slug": "taken"}))
	owned := c.with(func(r *pushsvc.Request) { r.ClientID, r.Actor = "owned", "carol" })
	owned.apply(t, b.upsert(t, "notes", note("owned", "x")))

	gone, cancel := context.WithCancel(t.Context())
	defer cancel()
	clients := c.fleet(8)
	push := func(ctx context.Context, i int, ops ...ssp2.Operation) func() <-chan answer {
		return func() <-chan answer { return clients[i].pushing(ctx, b.Service, clients[i].commit(ops...)) }
	}
	thief := owned.with(func(r *pushsvc.Request) { r.Actor = "mallory" })
	stale := clients[7].with(func(r *pushsvc.Request) { other := "another"; r.LogEpoch = &other })
	denied := clients[6].with(func(r *pushsvc.Request) { r.Scopes.Err = context.DeadlineExceeded })
	first, rest, release := c.behind(t, b,
		push(t.Context(), 0, b.upsert(t, "notes", note("a", "x"))),
		push(t.Context(), 1, base(b.upsert(t, "notes", note("a", "y")), 9)),
		push(t.Context(), 2, b.upsert(t, "slugs", map[string]any{"id": "2", "project_id": "pr1", "slug": "taken"})),
		push(gone, 3, b.upsert(t, "notes", note("gone", "x"))),
		func() <-chan answer {
			return thief.pushing(t.Context(), b.Service, thief.commit(b.upsert(t, "notes", note("stolen", "x"))))
		},
		func() <-chan answer {
			return denied.pushing(t.Context(), b.Service, denied.commit(b.upsert(t, "notes", note("denied", "x"))))
		},
		push(t.Context(), 4, b.upsert(t, "notes", note("z", "x"))),
	)
	requireReset(t, stale, b)
	cancel()
	require.ErrorIs(t, (<-rest[3]).err, context.Canceled)
	release()
	requireApplied(t, (<-first).resp.Results...)
	requireApplied(t, (<-rest[0]).resp.Results...)
	requireRejected(t, (<-rest[1]).resp.Results[0], 0, ssp2.CodeVersionConflict)
	requireRejected(t, (<-rest[2]).resp.Results[0], 0, ssp2.CodeConstraintViolation)
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf((<-rest[4]).err))
	requireRejected(t, (<-rest[5]).resp.Results[0], 0, ssp2.CodeForbidden)
	requireApplied(t, (<-rest[6]).resp.Results...)
	require.Nil(t, c.stored(t, "notes", "gone"))
	require.Nil(t, c.stored(t, "notes", "stolen"))
	requireSoundLog(t, b)
}

// requireReset: a wrong epoch is answered at once, however long the line is.
func requireReset(t testing.TB, c *client, b *bundle) {
	t.Helper()
	a := <-c.pushing(t.Context(), b.Service, c.commit(b.upsert(t, "notes", note("stale", "x"))))
	require.NoError(t, a.err)
	require.True(t, a.resp.Reset)
}

// TestOneClientsRequestsKeepTheirOrder, and never share a transaction.
func TestOneClientsRequestsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	one := c.fleet(1)[0]
	var pushes []func() <-chan answer
	for i := range 5 {
		pushes = append(pushes, func() <-chan answer {
			return one.pushing(t.Context(), b.Service, one.commit(b.upsert(t, "notes", note("n", strconv.Itoa(i)))))
		})
	}
	twice := one.commit(b.upsert(t, "notes", note("n", "twice")))
	for range 2 {
		pushes = append(pushes, func() <-chan answer { return one.pushing(t.Context(), b.Service, twice) })
	}
	first, rest, release := c.behind(t, b, pushes...)
	release()
	requireApplied(t, (<-first).resp.Results...)
	for i, done := range rest[:5] {
		require.EqualValues(t, i+2, *(<-done).resp.Results[0].CommitSeq)
	}
	requireApplied(t, (<-rest[5]).resp.Results...)
	require.Equal(t, ssp2.PushCached, (<-rest[6]).resp.Results[0].Status)
	require.EqualValues(t, 6, c.stored(t, "notes", "n").Version)
}

func TestABusyPartitionRefusesRatherThanGrows(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.MaxWaiting = 2 })
	c := b.client(t, ssp2.WireV2)
	clients := c.fleet(3)
	push := func(i int) func() <-chan answer {
		return func() <-chan answer {
			return clients[i].pushing(t.Context(), b.Service, clients[i].commit(b.upsert(t, "notes", note(strconv.Itoa(i), "x"))))
		}
	}
	first, rest, release := c.behind(t, b, push(0), push(1))
	refused := <-push(2)()
	require.Equal(t, ssp2.CodeRateLimited, ssp2.CodeOf(refused.err))
	release()
	requireApplied(t, (<-first).resp.Results...)
	for _, done := range rest {
		requireApplied(t, (<-done).resp.Results...)
	}
	// There is room again.
	requireApplied(t, (<-push(2)()).resp.Results...)
}

func TestPatienceWithABusyPartitionEnds(t *testing.T) {
	t.Parallel()
	b := setup(t, func(_ *pgtest.Options, cfg *pushsvc.Config) { cfg.MaxWait = time.Millisecond })
	c := b.client(t, ssp2.WireV2)
	release := c.hold(t)
	first := c.pushing(t.Context(), b.Service, c.commit(b.upsert(t, "notes", note("n", "x"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	other := c.fleet(1)[0]
	late := <-other.pushing(t.Context(), b.Service, other.commit(b.upsert(t, "notes", note("m", "x"))))
	require.Equal(t, ssp2.CodeRateLimited, ssp2.CodeOf(late.err))
	release()
	requireApplied(t, (<-first).resp.Results...)
	require.Nil(t, c.stored(t, "notes", "m"))
}

// TestTheTransactionEndsWithTheLastCaller: it goes on for one that is still there.
func TestTheTransactionEndsWithTheLastCaller(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	release := c.hold(t)
	ctx, cancel := context.WithCancel(t.Context())
	waiting := c.pushing(ctx, b.Service, c.commit(b.upsert(t, "notes", note("n", "x"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	cancel()
	require.ErrorIs(t, (<-waiting).err, context.Canceled)
	b.Wait() // its transaction ended although nobody let go of the partition
	release()
	require.Nil(t, c.stored(t, "notes", "n"))
	c.apply(t, b.upsert(t, "notes", note("n", "y")))
}

// TestNeighboursOfAFailure: a request over which the database fails, for a reason that
// is no rejection, fails alone.
func TestNeighboursOfAFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `create function public.fail() returns trigger language plpgsql as $$ begin raise exception 'not today'; end $$`,
		`create trigger fail before insert on public.notes for each row when (new.title = 'boom') execute function public.fail()`)
	c := b.client(t, ssp2.WireV2)
	clients := c.fleet(3)
	push := func(i int, title string) func() <-chan answer {
		return func() <-chan answer {
			return clients[i].pushing(t.Context(), b.Service, clients[i].commit(b.upsert(t, "notes", note(title, title))))
		}
	}
	first, rest, release := c.behind(t, b, push(0, "before"), push(1, "boom"), push(2, "after"))
	release()
	requireApplied(t, (<-first).resp.Results...)
	requireApplied(t, (<-rest[0]).resp.Results...)
	require.Equal(t, "P0001", pgtx.SQLState((<-rest[1]).err))
	a := <-rest[2]
	require.NoError(t, a.err)
	require.EqualValues(t, 3, *a.resp.Results[0].CommitSeq, "arrival order")
	requireSoundLog(t, b)
}

// TestClientIsBoundMeanwhile: a pull may bind a client while a push of it is under
// way; it is refused, and nobody else.
func TestClientIsBoundMeanwhile(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.Tracer = hooks })
	monitor := b.session(t)
	c := b.client(t, ssp2.WireV2)
	clients := c.fleet(2)
	first, rest, release := c.behind(t, b,
		func() <-chan answer {
			return clients[0].pushing(t.Context(), b.Service, clients[0].commit(b.upsert(t, "notes", note("mine", "x"))))
		},
		func() <-chan answer {
			return clients[1].pushing(t.Context(), b.Service, clients[1].commit(b.upsert(t, "notes", note("other", "x"))))
		})
	// The first batch to end is the head's admission, the third that of the two.
	bind := func(*pgx.Conn, error) {
		_, err := monitor.Exec(context.WithoutCancel(t.Context()), `insert into syncpg.sync_clients (partition, client_id, actor_id, created_at_ms, updated_at_ms)
			values ($1, $2, 'bob', 1, 1)`, c.req.Partition, clients[0].req.ClientID)
		require.NoError(t, err)
	}
	hooks.onBatchEnd(func(*pgx.Conn, error) { hooks.onBatchEnd(func(*pgx.Conn, error) { hooks.onBatchEnd(bind) }) })
	release()
	requireApplied(t, (<-first).resp.Results...)
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf((<-rest[0]).err))
	a := <-rest[1]
	require.NoError(t, a.err)
	requireApplied(t, a.resp.Results...)
	require.Nil(t, c.stored(t, "notes", "mine"))
	requireSoundLog(t, b)
}
