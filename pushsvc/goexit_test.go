package pushsvc_test

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// exiting is a validator that ends its goroutine over some rows, as a test helper that
// fails does.
func exiting(_ *pgtest.Options, cfg *pushsvc.Config) {
	cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
		if title, _ := v.Row.Text("title"); title == "exit" {
			runtime.Goexit()
		}
		return nil
	}}
}

// TestAHookThatEndsItsGoroutine fails its own push, leaves no outcome, and neither its
// neighbours nor the partition wait for ever.
func TestAHookThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	for _, off := range []bool{false, true} {
		b := setup(t, exiting, func(_ *pgtest.Options, cfg *pushsvc.Config) {
			if off {
				cfg.MaxBatchOperations = -1
			}
		})
		c := b.client(t, ssp2.WireV2)
		k := c.commit(b.upsert(t, "notes", note("n", "exit")))
		for range 2 {
			_, err := b.Push(t.Context(), c.request(k))
			require.Error(t, err)
			require.Empty(t, ssp2.CodeOf(err))
		}
		c.apply(t, b.upsert(t, "notes", note("n", "x")))
		require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where client_commit_id = $1`, k.ClientCommitID))
		b.Wait()
		require.Zero(t, b.db.Pool.Stat().AcquiredConns())
	}
}

func TestNeighboursOfAHookThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	b := setup(t, exiting)
	c := b.client(t, ssp2.WireV2)
	clients := c.fleet(5)
	push := func(i int, title string) func() <-chan answer {
		return func() <-chan answer {
			return clients[i].pushing(t.Context(), b.Service, clients[i].commit(b.upsert(t, "notes", note("n", title))))
		}
	}
	first, rest, release := c.behind(t, b, push(0, "a"), push(1, "exit"), push(2, "b"), push(3, "exit"), push(4, "c"))
	release()
	requireApplied(t, (<-first).resp.Results...)
	for i, seq := range map[int]int64{0: 2, 2: 3, 4: 4} {
		a := <-rest[i]
		require.NoError(t, a.err)
		require.Equal(t, seq, *a.resp.Results[0].CommitSeq, "arrival order")
	}
	require.Error(t, (<-rest[1]).err)
	require.Error(t, (<-rest[3]).err)
	requireSoundLog(t, b)
}

// TestASinkThatEndsItsGoroutine, or a Committed: what was committed is answered, or found
// again, and the partition goes on.
func TestASinkThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	var exits atomic.Int64
	exit := func() {
		if exits.Add(1)%2 == 1 {
			runtime.Goexit()
		}
	}
	b := setup(t, withEvents(emit(func(context.Context, events.Event) { exit() })), func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Committed = func(string, int64) { exit() }
	})
	c := b.client(t, ssp2.WireV2)
	for range 4 {
		k := c.commit(b.upsert(t, "notes", note("n", "x")))
		if _, err := b.Push(t.Context(), c.request(k)); err != nil {
			require.Equal(t, ssp2.PushCached, c.send(t, k)[0].Status)
		}
	}
	b.Wait()
	require.NotZero(t, exits.Load())
	require.EqualValues(t, 4, c.seq(t))
	require.Zero(t, b.db.Pool.Stat().AcquiredConns())
}
