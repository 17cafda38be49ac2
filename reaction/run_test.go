package reaction_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/reaction"
)

// sink is a function as a sink.
type sink func(events.Event)

func (s sink) Emit(_ context.Context, e events.Event) { s(e) }

// running is a runner whose Run has looked for due reactions once.
type running struct {
	*reaction.Runner
	ticks chan time.Time
	stop  func()
}

// start runs a runner until the test or stop ends it.
func start(t *testing.T, r *reaction.Runner) *running {
	t.Helper()
	ticks, asked, ended := make(chan time.Time), make(chan time.Duration, 1), make(chan error, 1)
	r.SetTicks(ticks, func(every time.Duration) { asked <- every })
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- r.Run(ctx) }()
	require.Equal(t, reaction.DefaultPollInterval, <-asked)
	stop := sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return &running{r, ticks, stop}
}

// tick makes the runner look for due reactions, and returns when it has begun to.
func (r *running) tick() { r.ticks <- time.Time{} }

// expect waits for handled reactions by name.
func expect(t *testing.T, handled <-chan string, want ...string) {
	t.Helper()
	got := make([]string, len(want))
	for i := range want {
		select {
		case got[i] = <-handled:
		case <-time.After(time.Minute):
			require.FailNow(t, "nothing came", "got %v, want %v", got[:i], want)
		}
	}
	require.ElementsMatch(t, want, got)
}

func TestRunWakesOnNotifyAndOnPoll(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handled := make(chan string)
	h := handle(func(_ context.Context, d *reaction.Delivery) error {
		handled <- d.Partition + " " + d.Key
		return nil
	})
	b.queue(t, mail("before"))
	r := start(t, b.runner(t, h))
	expect(t, handled, "p1 before")
	// The first look is over, and nothing ticks: only the notification can find this.
	b.queue(t, mail("notified"))
	r.Notify(partition)
	expect(t, handled, "p1 notified")
	r.Notify("empty")

	b.queueIn(t, "p2", mail("polled"))
	r.tick()
	expect(t, handled, "p2 polled")
	require.ErrorIs(t, r.Run(t.Context()), reaction.ErrRunning)
	r.stop()

	b.queue(t, mail("while it stood"))
	r.Notify(partition)
	again := start(t, r.Runner)
	expect(t, handled, "p1 while it stood")
	again.stop()
}

func TestRunTakesFullBatchesAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handled := make(chan string, 100)
	h := handle(func(_ context.Context, d *reaction.Delivery) error {
		handled <- d.Key
		return nil
	})
	r := start(t, b.runner(t, h, func(cfg *reaction.Config) { cfg.Batch, cfg.Partitions = 2, []string{partition} }))
	// The first look and the notification are good for two passes.
	b.queue(t, keysOf("r", 7)...)
	b.queueIn(t, "p2", mail("not ours"))
	r.Notify("p2")
	r.Notify(partition)
	expect(t, handled, "r0", "r1", "r2", "r3", "r4", "r5", "r6")
	r.stop()
	require.Empty(t, handled)
	require.Equal(t, map[string]int{"completed": 7, "pending": 1}, b.states(t))
}

// TestASlowHandlerHoldsUpOnlyItsBatch: another worker takes what else is due in the
// same partition and in others.
func TestASlowHandlerHoldsUpOnlyItsBatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handled, proceed := make(chan string, 10), make(chan struct{})
	h := handle(func(_ context.Context, d *reaction.Delivery) error {
		if d.Key == "slow" {
			handled <- "begun"
			<-proceed
		}
		handled <- d.Partition + " " + d.Key
		return nil
	})
	r := start(t, b.runner(t, h, func(cfg *reaction.Config) { cfg.Batch, cfg.Workers = 1, 2 }))
	b.queue(t, mail("slow"))
	r.Notify(partition)
	expect(t, handled, "begun")
	b.queue(t, mail("quick"))
	b.queueIn(t, "p2", mail("quick"))
	r.Notify(partition)
	r.Notify("p2")
	expect(t, handled, "p1 quick", "p2 quick")
	close(proceed)
	expect(t, handled, "p1 slow")
}

func TestRunEndsItsHandlers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, keysOf("r", 3)...)
	begun := make(chan struct{})
	r := start(t, b.runner(t, handle(func(ctx context.Context, _ *reaction.Delivery) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	})))
	<-begun
	r.stop()
	require.Equal(t, map[string]int{"pending": 3}, b.states(t))
	for _, p := range b.list(t, reaction.StatePending) {
		require.Zero(t, p.Attempts)
	}
}

// TestRunOutlivesFailuresOfTheDatabase: they are logged, and it tries again.
func TestRunOutlivesFailuresOfTheDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	logged := make(chan string, 10)
	log := slog.New(slog.NewTextHandler(writer(func(line []byte) {
		for _, text := range []string{"cannot look for due reactions", "cannot run reactions"} {
			if bytes.Contains(line, []byte(text)) {
				logged <- text
			}
		}
	}), nil))
	handled := make(chan string, 10)
	r := start(t, b.runner(t, handle(func(_ context.Context, d *reaction.Delivery) error {
		handled <- d.Key
		return nil
	}), func(cfg *reaction.Config) { cfg.Logger = log }))
	rename := func(from, to string) {
		_, err := b.db.Pool.Exec(t.Context(), `alter function syncpg.`+from+` rename to `+to)
		require.NoError(t, err)
	}
	// A look that was under way when a function went may have logged as well.
	await := func(text string) {
		for got := ""; got != text; {
			select {
			case got = <-logged:
			case <-time.After(time.Minute):
				require.FailNow(t, "not logged", text)
			}
		}
	}
	rename("sync_list_due_partitions", "gone")
	r.tick()
	await("cannot look for due reactions")
	rename("gone", "sync_list_due_partitions")
	rename("sync_claim_reactions", "gone")
	b.queue(t, mail("a"))
	r.tick()
	await("cannot run reactions")
	rename("gone", "sync_claim_reactions")
	r.tick()
	expect(t, handled, "a")
}

type writer func(line []byte)

func (w writer) Write(line []byte) (int, error) {
	w(line)
	return len(line), nil
}

// TestTwoRunnersNeverRunOneTwice over 1,000 reactions, while leases hold.
func TestTwoRunnersNeverRunOneTwice(t *testing.T) {
	t.Parallel()
	const n = 1000
	b := setup(t, func(o *pgtest.Options) { o.MaxConns = 8 })
	for i := range n / 100 {
		b.queueIn(t, fmt.Sprint("p", i%3), keysOf(fmt.Sprint("c", i, "-"), 100)...)
	}
	var mu sync.Mutex
	calls := map[string]int{}
	byRunner := [2]int{}
	done := make(chan struct{}, n)
	runners := [2]*running{}
	began := time.Now()
	for i := range runners {
		h := handle(func(_ context.Context, d *reaction.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			calls[d.IdempotencyKey]++
			byRunner[i]++
			return nil
		})
		runners[i] = start(t, b.runner(t, h, func(cfg *reaction.Config) {
			cfg.Workers = 3
			cfg.Events = sink(func(e events.Event) {
				if _, ok := e.(events.ReactionCompleted); ok {
					done <- struct{}{}
				}
			})
		}))
	}
	for i := range n {
		select {
		case <-done:
		case <-time.After(time.Minute):
			require.FailNow(t, "a reaction is missing", "%d of %d are done", i, n)
		}
	}
	t.Logf("%d reactions in %v, %v by the two runners", n, time.Since(began), byRunner)
	for _, r := range runners {
		r.stop()
	}
	require.Len(t, calls, n)
	for key, times := range calls {
		require.Equal(t, 1, times, key)
	}
	require.Empty(t, done)
	require.Equal(t, map[string]int{"completed": n}, b.states(t))
}
