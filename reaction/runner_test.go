package reaction_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/reaction"
)

// secret stands for text of an error, which must not be stored.
var errSecret = errors.New("text that quotes a password")

func TestWhatAHandlerGets(t *testing.T) {
	t.Parallel()
	b := setup(t)
	key := b.queue(t, reaction.Plan{Key: "a", Type: "mail", Version: 2, Payload: json.RawMessage(`{"to": "ada"}`), MaxAttempts: 3})[0]
	var got []reaction.Delivery
	r := b.runner(t, reaction.Handler{Versions: []int32{1, 2}, Handle: func(ctx context.Context, d *reaction.Delivery) error {
		carried, ok := reaction.FromContext(ctx)
		require.True(t, ok)
		require.Same(t, d, carried)
		got = append(got, *d)
		return errSecret
	}})
	for range 3 {
		run(t, r)
		b.clock.Advance(time.Hour)
	}
	var want []reaction.Delivery
	for attempt := 1; attempt <= 3; attempt++ {
		want = append(want, reaction.Delivery{
			Partition: partition, IdempotencyKey: key, Key: "a", Type: "mail", Version: 2, Payload: json.RawMessage(`{"to":"ada"}`),
			ClientID: "client", ClientCommitID: "commit-1", CommitSeq: 1, Attempt: attempt, MaxAttempts: 3,
		})
	}
	require.Empty(t, cmp.Diff(want, got, cmpopts.IgnoreUnexported(reaction.Delivery{})))
	_, ok := reaction.FromContext(t.Context())
	require.False(t, ok)
	require.NoError(t, (&reaction.Delivery{}).ExtendLease(t.Context()), "made by hand, for a test of a handler")
}

// TestWhatAClaimTakes: due pending reactions and expired leases of the registered types.
func TestWhatAClaimTakes(t *testing.T) {
	t.Parallel()
	all := setup(t)
	for _, c := range []struct {
		name, state, kind string
		at                time.Duration // due, or lease expires
		taken             bool
	}{
		{"pending, due now", "pending", "mail", 0, true},
		{"pending, due before", "pending", "mail", -time.Hour, true},
		{"pending, due later", "pending", "mail", time.Millisecond, false},
		{"leased, expires later", "leased", "mail", time.Millisecond, false},
		{"leased, expires now", "leased", "mail", 0, true},
		{"completed", "completed", "mail", -time.Hour, false},
		{"dead letter", "dead-letter", "mail", -time.Hour, false},
		{"of another registered type", "pending", "hook", 0, true},
		{"of a type that is not registered", "pending", "push", 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := all.beside(c.name)
			b.insert(t, b.partition, "a", c.state, b.clock.Now().Add(c.at))
			_, err := b.db.Pool.Exec(t.Context(), `update syncpg.sync_reactions set reaction_type = $1 where partition = $2`, c.kind, b.partition)
			require.NoError(t, err)
			var attempts []int
			h := handle(func(_ context.Context, d *reaction.Delivery) error {
				attempts = append(attempts, d.Attempt)
				return nil
			})
			result := run(t, b.runner(t, h, func(cfg *reaction.Config) { cfg.Handlers["hook"] = h }))
			if c.taken {
				require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, result)
				require.Equal(t, []int{2}, attempts, "the attempt is counted")
			} else {
				require.Equal(t, reaction.Result{}, result)
			}
		})
	}
}

func TestClaimsAreOldestFirstAndBounded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := b.clock.Now()
	// By type: mail 1 to 8, hook 4.5.
	for _, i := range []int{5, 3, 8, 1, 7, 2, 6, 4} {
		b.insert(t, partition, fmt.Sprint("mail", i), "pending", now.Add(-time.Hour+time.Duration(i)*time.Minute))
	}
	b.insert(t, partition, "hook", "pending", now.Add(-time.Hour+270*time.Second))
	_, err := b.db.Pool.Exec(t.Context(), `update syncpg.sync_reactions set reaction_type = 'hook' where reaction_key = 'hook'`)
	require.NoError(t, err)
	var got []string
	h := handle(func(_ context.Context, d *reaction.Delivery) error {
		got = append(got, d.Key)
		return nil
	})
	r := b.runner(t, h, func(cfg *reaction.Config) { cfg.Handlers["hook"], cfg.Batch = h, 3 })
	require.Equal(t, reaction.Result{Claimed: 3, Completed: 3, MayHaveMore: true}, run(t, r))
	require.Equal(t, []string{"mail1", "mail2", "mail3"}, got)
	require.Equal(t, reaction.Result{Claimed: 3, Completed: 3, MayHaveMore: true}, run(t, r))
	require.Equal(t, []string{"mail4", "mail5", "mail6"}, got[3:], "the type with the oldest is first")
	require.Equal(t, reaction.Result{Claimed: 3, Completed: 3, MayHaveMore: true}, run(t, r))
	require.Equal(t, []string{"hook", "mail7", "mail8"}, got[6:], "what is left of the batch goes to the next type")
	require.Equal(t, reaction.Result{}, run(t, r))
}

// TestWhatOthersHoldIsPassedOver: a claim gets on while another one is not committed.
func TestWhatOthersHoldIsPassedOver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, keysOf("a", 5)...)
	tx, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	var n int
	require.NoError(t, tx.QueryRow(t.Context(), `select count(*) from syncpg.sync_claim_reactions('p1', '{mail,mail}', 'o', $1::bigint, $1::bigint + 1000, 3)`,
		b.clock.Now().UnixMilli()).Scan(&n))
	require.Equal(t, 3, n)
	require.Equal(t, reaction.Result{Claimed: 2, Completed: 2}, run(t, b.runner(t, fails(nil), func(cfg *reaction.Config) { cfg.Batch = 3 })))
}

func TestEveryPassHasAFreshOwner(t *testing.T) {
	t.Parallel()
	b := setup(t)
	owners := map[string]bool{}
	r := b.runner(t, handle(func(context.Context, *reaction.Delivery) error {
		for _, l := range b.list(t, reaction.StateLeased) {
			owners[l.LeaseOwner] = true
			require.GreaterOrEqual(t, len(l.LeaseOwner), 20, "not to be guessed")
			require.Equal(t, b.clock.Now().Add(lease), l.LeaseExpiresAt)
		}
		return nil
	}))
	for range 3 {
		b.queue(t, mail("a"), mail("b"))
		run(t, r)
	}
	require.Len(t, owners, 3)
}

// TestOutcomes: what a handler returns is what becomes of the reaction.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	all := setup(t)
	details := json.RawMessage(`{"at": [1]}`)
	for _, c := range []struct {
		name        string
		handler     reaction.Handler
		maxAttempts int
		dead        bool
		code        string
		details     string
	}{
		{"an ordinary error", fails(errSecret), 2, false, "reaction.handler_failed", ""},
		{"an ordinary error at the last attempt", fails(errSecret), 1, true, "reaction.handler_failed", ""},
		{"a retryable error", fails(&reaction.RetryableError{Code: "mail.busy", Details: details, Err: errSecret}), 2, false, "mail.busy", `{"at":[1]}`},
		{"a retryable error at the last attempt", fails(&reaction.RetryableError{Code: "mail.busy", Err: errSecret}), 1, true, "mail.busy", ""},
		{"a permanent error", fails(&reaction.PermanentError{Code: "mail.bounced", Details: details, Err: errSecret}), 10, true, "mail.bounced", `{"at":[1]}`},
		{"a wrapped permanent error", fails(fmt.Errorf("%w: %w", errSecret, &reaction.PermanentError{Code: "mail.bounced"})), 10, true, "mail.bounced", ""},
		{
			"a retryable error inside a permanent one",
			fails(&reaction.PermanentError{Code: "a.b", Err: &reaction.RetryableError{Code: "c.d"}}), 10, true, "a.b", "",
		},
		{"a code that is none", fails(&reaction.PermanentError{Code: "text that quotes a password"}), 10, true, "reaction.handler_failed", ""},
		{"a code of 128 bytes", fails(&reaction.PermanentError{Code: strings.Repeat("c", 128)}), 10, true, strings.Repeat("c", 128), ""},
		{"a code of 129 bytes", fails(&reaction.PermanentError{Code: strings.Repeat("c", 129)}), 10, true, "reaction.handler_failed", ""},
		{"details of 8,192 bytes", fails(&reaction.PermanentError{Code: "x", Details: text(8192)}), 10, true, "x", string(text(8192))},
		{"details of 8,193 bytes", fails(&reaction.PermanentError{Code: "x", Details: text(8193)}), 10, true, "x", ""},
		{"details that are not JSON", fails(&reaction.PermanentError{Code: "x", Details: json.RawMessage("quotes a password")}), 10, true, "x", ""},
		{"a panic", handle(func(context.Context, *reaction.Delivery) error { panic(errSecret) }), 2, false, "reaction.handler_panicked", ""},
		{"a panic at the last attempt", handle(func(context.Context, *reaction.Delivery) error { panic("quotes a password") }), 1, true, "reaction.handler_panicked", ""},
		{
			"a panic with a permanent error is a panic",
			handle(func(context.Context, *reaction.Delivery) error { panic(&reaction.PermanentError{Code: "x"}) }), 2, false, "reaction.handler_panicked", "",
		},
		{
			"a version that the handler does not list",
			reaction.Handler{Versions: []int32{2, 3}, Handle: func(context.Context, *reaction.Delivery) error { panic("called") }},
			10, true, "reaction.version_unsupported", "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := all.beside(c.name)
			var log bytes.Buffer
			plan := mail("a")
			plan.MaxAttempts = c.maxAttempts
			key := b.queue(t, plan)[0]
			now := b.clock.Now()
			r := b.runner(t, c.handler, func(cfg *reaction.Config) { cfg.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			want := reaction.Reaction{
				IdempotencyKey: key, Key: "a", Type: "mail", Version: 1, Payload: json.RawMessage("null"),
				ClientID: "client", ClientCommitID: "commit-1", CommitSeq: 1, Attempts: 1, MaxAttempts: c.maxAttempts, CreatedAt: now,
				FailureCode: c.code, FailedAt: now,
			}
			if c.details != "" {
				want.FailureDetails = json.RawMessage(c.details)
			}
			if c.dead {
				require.Equal(t, reaction.Result{Claimed: 1, DeadLettered: 1}, run(t, r))
				want.State, want.FinishedAt = reaction.StateDeadLetter, now
				require.Equal(t, []string{"reaction.started", "reaction.dead_lettered"}, b.happened())
			} else {
				require.Equal(t, reaction.Result{Claimed: 1, Retried: 1}, run(t, r))
				want.State, want.RunAt = reaction.StatePending, now.Add(time.Second)
				require.Equal(t, []string{"reaction.started", "reaction.retried"}, b.happened())
			}
			require.Empty(t, cmp.Diff(want, b.list(t, want.State)["a"]))
			require.Contains(t, log.String(), c.code)
			var row string
			require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select r::text from syncpg.sync_reactions as r where r.partition = $1`, b.partition).Scan(&row))
			require.NotContains(t, row, "quotes a password", "the text of errors stays out of the database")
		})
	}
}

// TestLifeOfAReaction: a failure, a retry that waits for its time, a success.
func TestLifeOfAReaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	key := b.queue(t, mail("a"))[0]
	start := b.clock.Now()
	var outcome error
	r := b.runner(t, handle(func(context.Context, *reaction.Delivery) error {
		b.clock.Advance(250 * time.Millisecond)
		return outcome
	}))
	outcome = &reaction.RetryableError{Code: "mail.busy"}
	require.Equal(t, reaction.Result{Claimed: 1, Retried: 1}, run(t, r))
	b.clock.Advance(time.Second - time.Millisecond)
	require.Equal(t, reaction.Result{}, run(t, r), "not yet")
	b.clock.Advance(time.Millisecond)
	require.Equal(t, reaction.Result{Claimed: 1, Retried: 1}, run(t, r))
	b.clock.Advance(2 * time.Second)
	outcome = nil
	require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, r))
	b.clock.Advance(time.Hour)
	require.Equal(t, reaction.Result{}, run(t, r))

	done := b.list(t, reaction.StateCompleted)["a"]
	require.Equal(t, 3, done.Attempts)
	require.Equal(t, start.Add(3750*time.Millisecond), done.FinishedAt)
	require.Equal(t, "mail.busy", done.FailureCode, "of the newest attempt that failed")

	about := func(attempt int) events.Delivery {
		return events.Delivery{Partition: partition, IdempotencyKey: key, Type: "mail", Version: 1, Attempt: attempt}
	}
	took := 250 * time.Millisecond
	var got []events.Event
	for _, recorded := range b.ring.Query(events.Filter{}) {
		got = append([]events.Event{recorded.Event}, got...)
	}
	require.Empty(t, cmp.Diff([]events.Event{
		events.ReactionStarted{Delivery: about(1)},
		events.ReactionRetried{Delivery: about(1), Duration: took, Code: "mail.busy", NextAt: start.Add(1250 * time.Millisecond)},
		events.ReactionStarted{Delivery: about(2)},
		events.ReactionRetried{Delivery: about(2), Duration: took, Code: "mail.busy", NextAt: start.Add(3500 * time.Millisecond)},
		events.ReactionStarted{Delivery: about(3)},
		events.ReactionCompleted{Delivery: about(3), Duration: took},
	}, got, cmpopts.IgnoreFields(events.Delivery{}, "LeaseOwner")))
}

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, mail("a"))
	r := b.runner(t, fails(nil), func(cfg *reaction.Config) { cfg.Events = (*events.Ring)(nil) })
	require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, r))
}

// TestAStaleRunnerSkipsWhatOthersReclaimed: every handler of a batch starts with a
// renewal, which fails when the row was reclaimed while an earlier one ran.
func TestAStaleRunnerSkipsWhatOthersReclaimed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, mail("a"), mail("b"), mail("c"))
	var calls []string
	other := b.runner(t, handle(func(_ context.Context, d *reaction.Delivery) error {
		calls = append(calls, "other "+d.Key)
		return nil
	}), func(cfg *reaction.Config) { cfg.Batch = 1 })
	first := true
	r := b.runner(t, handle(func(ctx context.Context, d *reaction.Delivery) error {
		calls = append(calls, "first "+d.Key)
		if first {
			first = false
			b.clock.Advance(lease - time.Millisecond)
			require.Equal(t, reaction.Result{}, run(t, other), "while the leases hold")
			require.NoError(t, d.ExtendLease(ctx))
			b.clock.Advance(time.Millisecond)
			require.Equal(t, reaction.Result{Claimed: 1, Completed: 1, MayHaveMore: true}, run(t, other))
		}
		return nil
	}))
	require.Equal(t, reaction.Result{Claimed: 3, Completed: 2, Lost: 1}, run(t, r))
	require.Len(t, calls, 4-1)
	require.Equal(t, map[string]int{"completed": 3}, b.states(t))
	seen := map[string]bool{}
	for _, call := range calls {
		key := call[len(call)-1:]
		require.False(t, seen[key], "twice: %v", calls)
		seen[key] = true
	}
}

func TestARenewalLastsFromTheStartOfTheHandler(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, mail("a"), mail("b"))
	other := b.runner(t, fails(nil))
	r := b.runner(t, handle(func(context.Context, *reaction.Delivery) error {
		b.clock.Advance(lease - time.Millisecond)
		require.Equal(t, reaction.Result{}, run(t, other))
		return nil
	}))
	require.Equal(t, reaction.Result{Claimed: 2, Completed: 2}, run(t, r), "the second begins almost a lease after the claim")
}

func TestExtendLease(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.queue(t, mail("a"))
	other := b.runner(t, fails(nil))
	r := b.runner(t, handle(func(ctx context.Context, d *reaction.Delivery) error {
		for range 3 {
			b.clock.Advance(lease - time.Millisecond)
			require.NoError(t, d.ExtendLease(ctx))
			require.Equal(t, b.clock.Now().Add(lease), b.list(t, reaction.StateLeased)["a"].LeaseExpiresAt)
		}
		b.clock.Advance(2 * lease)
		require.NoError(t, d.ExtendLease(ctx), "expired, but nobody took it")
		b.clock.Advance(-lease)
		require.NoError(t, d.ExtendLease(ctx))
		b.clock.Advance(lease)
		require.Equal(t, reaction.Result{}, run(t, other), "a lease is never shortened")
		b.clock.Advance(lease)
		require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, other))
		require.ErrorIs(t, d.ExtendLease(ctx), reaction.ErrLeaseLost)
		done, cancel := context.WithCancel(ctx)
		cancel()
		err := d.ExtendLease(done)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, reaction.ErrLeaseLost)
		return nil
	}))
	require.Equal(t, reaction.Result{Claimed: 1, Lost: 1}, run(t, r))
}

// TestAStaleOwnerChangesNothing: neither while the new owner works nor afterwards.
func TestAStaleOwnerChangesNothing(t *testing.T) {
	t.Parallel()
	all := setup(t)
	for name, outcome := range map[string]error{
		"complete": nil, "retry": errSecret, "dead-letter": &reaction.PermanentError{Code: "x"}, "give back": context.Canceled,
	} {
		for _, finished := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", new owner finished: ", finished), func(t *testing.T) {
				t.Parallel()
				b := all.beside(t.Name())
				b.queue(t, mail("a"))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				working, proceed := make(chan struct{}), make(chan struct{})
				other := b.runner(t, handle(func(context.Context, *reaction.Delivery) error {
					close(working)
					<-proceed
					return nil
				}))
				var wg sync.WaitGroup
				var before reaction.Reaction
				var theirs reaction.Result
				var theirErr error
				state := reaction.StateLeased
				r := b.runner(t, handle(func(context.Context, *reaction.Delivery) error {
					b.clock.Advance(lease)
					wg.Go(func() { theirs, theirErr = other.RunOnce(t.Context()) })
					<-working
					if finished {
						close(proceed)
						wg.Wait()
						state = reaction.StateCompleted
					}
					before = b.list(t, state)["a"]
					if errors.Is(outcome, context.Canceled) {
						cancel()
					}
					return outcome
				}))
				result, _ := r.RunOnce(ctx)
				require.Equal(t, reaction.Result{Claimed: 1, Lost: 1}, result)
				require.NotEmpty(t, before.Key)
				require.Empty(t, cmp.Diff(before, b.list(t, state)["a"]))
				if !finished {
					close(proceed)
					wg.Wait()
				}
				require.NoError(t, theirErr)
				require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, theirs)
				require.Equal(t, map[string]int{"completed": 1}, b.states(t))
				require.Len(t, b.ring.Query(events.Filter{Name: "reaction.completed"}), 1)
			})
		}
	}
}

// TestARunnerKilledBeforeItRecords: the side effect has happened, nothing is recorded;
// exactly one more delivery follows, with the same key.
func TestARunnerKilledBeforeItRecords(t *testing.T) {
	t.Parallel()
	b := setup(t)
	plan := mail("a")
	plan.MaxAttempts = 1
	key := b.queue(t, plan)[0]
	var effects []string
	dying := b.runner(t, handle(func(_ context.Context, d *reaction.Delivery) error {
		effects = append(effects, d.IdempotencyKey)
		runtime.Goexit()
		return nil
	}))
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		_, _ = dying.RunOnce(t.Context())
	}()
	<-killed
	r := b.runner(t, handle(func(_ context.Context, d *reaction.Delivery) error {
		require.Equal(t, 2, d.Attempt)
		effects = append(effects, d.IdempotencyKey)
		return nil
	}))
	b.clock.Advance(lease - time.Millisecond)
	require.Equal(t, reaction.Result{}, run(t, r), "while the lease holds")
	b.clock.Advance(time.Millisecond)
	require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, r))
	b.clock.Advance(time.Hour)
	require.Equal(t, reaction.Result{}, run(t, r))
	require.Equal(t, []string{key, key}, effects)
}

// TestACancelledPass: what was not handled to the end is due again and not counted;
// what was handled is recorded.
func TestACancelledPass(t *testing.T) {
	t.Parallel()
	all := setup(t)
	for name, c := range map[string]struct {
		outcome error
		want    reaction.Result
		states  map[string]int
	}{
		"the handler stops":               {context.Canceled, reaction.Result{Claimed: 3, GivenBack: 3}, map[string]int{"pending": 3}},
		"the handler succeeds":            {nil, reaction.Result{Claimed: 3, Completed: 1, GivenBack: 2}, map[string]int{"completed": 1, "pending": 2}},
		"the handler fails":               {errSecret, reaction.Result{Claimed: 3, Retried: 1, GivenBack: 2}, map[string]int{"pending": 3}},
		"the handler fails for good":      {&reaction.PermanentError{Code: "x"}, reaction.Result{Claimed: 3, DeadLettered: 1, GivenBack: 2}, map[string]int{"dead-letter": 1, "pending": 2}},
		"the handler had its own context": {context.DeadlineExceeded, reaction.Result{Claimed: 3, Retried: 1, GivenBack: 2}, map[string]int{"pending": 3}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := all.beside(name)
			b.queue(t, keysOf("r", 3)...)
			ctx, cancel := context.WithCancel(t.Context())
			r := b.runner(t, handle(func(ctx context.Context, _ *reaction.Delivery) error {
				cancel()
				<-ctx.Done()
				return c.outcome
			}))
			result, err := r.RunOnce(ctx)
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, c.want, result)
			require.Equal(t, c.states, b.states(t))
			counted := 0
			for _, p := range b.list(t, reaction.StatePending) {
				counted += p.Attempts
			}
			require.Equal(t, result.Retried, counted, "attempts")
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := all.runner(t, fails(nil)).RunOnce(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

// TestTheDatabaseGoesAway: what cannot be recorded is an error, and delivered again.
func TestTheDatabaseGoesAway(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options) { o.MaxConns = 1 })
	b.queue(t, keysOf("r", 3)...)
	admin, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	defer func() { _ = admin.Close(t.Context()) }()
	var calls int
	r := b.runner(t, handle(func(ctx context.Context, _ *reaction.Delivery) error {
		if calls++; calls > 1 {
			return nil
		}
		_, err := admin.Exec(ctx, `alter table syncpg.sync_reactions add constraint broken check (state <> 'completed') not valid`)
		return err
	}))
	result, err := r.RunOnce(t.Context())
	require.ErrorContains(t, err, "recording the outcome of a reaction")
	require.Equal(t, reaction.Result{Claimed: 3, GivenBack: 2}, result)
	_, err = admin.Exec(t.Context(), `alter table syncpg.sync_reactions drop constraint broken`)
	require.NoError(t, err)
	require.Equal(t, reaction.Result{Claimed: 2, Completed: 2}, run(t, r))
	b.clock.Advance(lease)
	require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, r))

	b.queue(t, keysOf("r", 2)...)
	for _, function := range []string{"sync_settle_reaction", "sync_extend_reaction", "sync_claim_reactions", "sync_list_due_partitions"} {
		_, err = admin.Exec(t.Context(), `alter function syncpg.`+function+` rename to gone`)
		require.NoError(t, err)
		_, err = r.RunOnce(t.Context())
		require.Error(t, err, function)
		_, err = admin.Exec(t.Context(), `alter function syncpg.gone rename to `+function)
		require.NoError(t, err)
		b.clock.Advance(lease)
	}
	require.Equal(t, reaction.Result{Claimed: 2, Completed: 2}, run(t, r))
}

// TestAHandlerMayUseThePool: none of its connections is held meanwhile.
func TestAHandlerMayUseThePool(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options) { o.MaxConns = 1 })
	b.queue(t, keysOf("r", 3)...)
	r := b.runner(t, handle(func(ctx context.Context, d *reaction.Delivery) error {
		return errors.Join(pgx.BeginFunc(ctx, b.db.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select 1`)
			return err
		}), d.ExtendLease(ctx))
	}))
	require.Equal(t, reaction.Result{Claimed: 3, Completed: 3}, run(t, r))
}

func TestEveryPartitionOrThoseConfigured(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"p3", "p1", "p2"} {
		b.queueIn(t, p, keysOf("r", 2)...)
	}
	b.insert(t, "p0", "later", "pending", b.clock.Now().Add(time.Hour))
	b.insert(t, "p1a", "done", "completed", b.clock.Now())
	var got []string
	h := handle(func(_ context.Context, d *reaction.Delivery) error {
		got = append(got, d.Partition)
		return nil
	})
	require.Equal(t, reaction.Result{Claimed: 2, Completed: 2}, run(t, b.runner(t, h, func(cfg *reaction.Config) { cfg.Partitions = []string{"p2", "p9"} })))
	require.Equal(t, []string{"p2", "p2"}, got)
	require.Equal(t, reaction.Result{Claimed: 4, Completed: 4}, run(t, b.runner(t, h)))
	require.Equal(t, []string{"p1", "p1", "p3", "p3"}, got[2:])
}

func TestMoreDuePartitionsThanAPageHolds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 20 {
		b.insert(t, fmt.Sprint("p", i), "a", "pending", b.clock.Now())
	}
	// Every tenth and fifth of ten has nothing for us.
	_, err := b.db.Pool.Exec(t.Context(), `update syncpg.sync_reactions set reaction_type = 'push' where partition ~ '[05]$'`)
	require.NoError(t, err)
	r := b.runner(t, fails(nil))
	r.SetPage(4)
	require.Equal(t, reaction.Result{Claimed: 16, Completed: 16}, run(t, r))
	require.Equal(t, map[string]int{"completed": 16, "pending": 4}, b.states(t))
}

func TestEveryModeOfTheDriver(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(o *pgtest.Options) {
				o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
			})
			payload := json.RawMessage(`{"a":["\\ ' \" ü"]}`)
			b.queue(t, reaction.Plan{Key: `{,"`, Type: "mail", Version: 1, Payload: payload}, mail("dead"))
			r := b.runner(t, handle(func(ctx context.Context, d *reaction.Delivery) error {
				if d.Key == "dead" {
					return &reaction.PermanentError{Code: "x", Details: payload}
				}
				require.Equal(t, payload, d.Payload)
				return d.ExtendLease(ctx)
			}))
			require.Equal(t, reaction.Result{Claimed: 2, Completed: 1, DeadLettered: 1}, run(t, r))
			dead := b.list(t, reaction.StateDeadLetter)["dead"]
			require.Equal(t, payload, dead.FailureDetails)
			require.NoError(t, reaction.RetryDeadLetter(t.Context(), b.db.Pool, partition, dead.IdempotencyKey, b.clock.Now()))
			result, err := reaction.Prune(t.Context(), b.db.Pool, partition, b.clock.Now().Add(1000*time.Hour), reaction.PruneOptions{})
			require.NoError(t, err)
			require.Equal(t, reaction.PruneResult{Completed: 1}, result)
		})
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	defer pool.Close()
	valid := func() reaction.Config {
		return reaction.Config{Handlers: map[string]reaction.Handler{"mail": fails(nil)}}
	}
	_, err = reaction.New(pool, valid())
	require.NoError(t, err)
	_, err = reaction.New(nil, valid())
	require.Error(t, err)
	for name, change := range map[string]func(*reaction.Config){
		"no handlers":        func(c *reaction.Config) { c.Handlers = nil },
		"handler of no type": func(c *reaction.Config) { c.Handlers[""] = fails(nil) },
		"handler of a long type": func(c *reaction.Config) {
			c.Handlers[strings.Repeat("a", 129)] = fails(nil)
		},
		"handler of no version": func(c *reaction.Config) {
			c.Handlers["x"] = reaction.Handler{Handle: func(context.Context, *reaction.Delivery) error { return nil }}
		},
		"handler that is nil":   func(c *reaction.Config) { c.Handlers["x"] = reaction.Handler{Versions: []int32{1}} },
		"lease negative":        func(c *reaction.Config) { c.Lease = -1 },
		"lease below a ms":      func(c *reaction.Config) { c.Lease = time.Microsecond },
		"batch negative":        func(c *reaction.Config) { c.Batch = -1 },
		"batch too large":       func(c *reaction.Config) { c.Batch = 1001 },
		"initial backoff":       func(c *reaction.Config) { c.InitialBackoff = -1 },
		"greatest backoff":      func(c *reaction.Config) { c.MaxBackoff = -1 },
		"workers negative":      func(c *reaction.Config) { c.Workers = -1 },
		"poll interval too low": func(c *reaction.Config) { c.PollInterval = 1 },
	} {
		cfg := valid()
		change(&cfg)
		_, err := reaction.New(pool, cfg)
		require.ErrorContains(t, err, "Config.", name)
	}
}

func TestErrorsSayWhatHappened(t *testing.T) {
	t.Parallel()
	require.EqualError(t, &reaction.PermanentError{Code: "mail.bounced", Err: errSecret}, "permanent failure mail.bounced: text that quotes a password")
	require.EqualError(t, &reaction.RetryableError{Code: "mail.busy"}, "retryable failure mail.busy")
	require.ErrorIs(t, &reaction.RetryableError{Err: errSecret}, errSecret)
	require.ErrorIs(t, &reaction.PermanentError{Err: errSecret}, errSecret)
}
