package reaction_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/reaction"
)

var errRollback = errors.New("roll back")

func TestReactionsLiveAndDieWithTheTransactionThatStoresThem(t *testing.T) {
	t.Parallel()
	b := setup(t)
	records, err := reaction.Normalize(partition, "c", "k", keysOf("r", 2))
	require.NoError(t, err)
	records[0].CommitSeq, records[1].CommitSeq = 1, 1
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), b.db.Pool, func(tx pgx.Tx) error {
		require.Equal(t, 2, enqueue(t, tx, b.clock.Now(), partition, records))
		return errRollback
	}), errRollback)
	require.Empty(t, b.states(t))

	require.Equal(t, 2, enqueue(t, b.db.Pool, b.clock.Now(), partition, records))
	require.Equal(t, map[string]int{"pending": 2}, b.states(t))
	require.Equal(t, 0, enqueue(t, b.db.Pool, b.clock.Now(), partition, records), "a second time")
	require.Equal(t, map[string]int{"pending": 2}, b.states(t))
	require.Equal(t, 0, enqueue(t, b.db.Pool, b.clock.Now(), partition, nil))
}

func TestWhatIsStoredIsWhatWasPlanned(t *testing.T) {
	t.Parallel()
	b := setup(t)
	payload := json.RawMessage(`{"z":[1.50,-0,1e300],"a":"\u0000 \ud800 \"<ü>","a":null}`)
	key := b.queue(t, reaction.Plan{Key: `k"ü`, Type: "mail", Version: 7, Payload: payload, MaxAttempts: 100})[0]
	want := reaction.Reaction{
		IdempotencyKey: key, Key: `k"ü`, Type: "mail", Version: 7, Payload: payload,
		ClientID: "client", ClientCommitID: "commit-1", CommitSeq: 1, State: reaction.StatePending,
		MaxAttempts: 100, CreatedAt: b.clock.Now(), RunAt: b.clock.Now(),
	}
	require.Empty(t, cmp.Diff(map[string]reaction.Reaction{`k"ü`: want}, b.list(t, reaction.StatePending)))

	largest := reaction.Plan{Key: strings.Repeat("k", 256), Type: strings.Repeat("t", 128), Version: 1, Payload: text(65536)}
	records, err := reaction.Normalize(strings.Repeat("\x01", 512), strings.Repeat("\x01", 512), strings.Repeat("\x01", 512), []reaction.Plan{largest})
	require.NoError(t, err)
	records[0].CommitSeq = 1
	require.Equal(t, 1, enqueue(t, b.db.Pool, b.clock.Now(), strings.Repeat("\x01", 512), records), "the largest of everything")
}

// The table itself refuses what no code of ours would write.
func TestStatesThatCannotBe(t *testing.T) {
	t.Parallel()
	tx := pgtest.Tx(t)
	const insert = `insert into syncpg.sync_reactions (partition, client_id, client_commit_id, reaction_key, idempotency_key,
		commit_seq, reaction_type, reaction_version, payload, max_attempts, created_at_ms, %s) values ('p', 'c', 'k', 'r', 'i', 1, 't', 1, '{}', 1, 1, %s)`
	for _, c := range []struct {
		name, columns, values string
		ok                    bool
	}{
		{"pending", "state, due_at_ms", "'pending', 1", true},
		{"pending after a failure", "state, due_at_ms, attempts, failure_code, failed_at_ms", "'pending', 1, 1, 'x', 1", true},
		{"pending, never due", "state", "'pending'", false},
		{"pending with an owner", "state, due_at_ms, lease_owner", "'pending', 1, 'o'", false},
		{"leased", "state, due_at_ms, lease_owner, attempts", "'leased', 1, 'o', 1", true},
		{"leased by nobody", "state, due_at_ms, attempts", "'leased', 1, 1", false},
		{"leased for ever", "state, lease_owner, attempts", "'leased', 'o', 1", false},
		{"leased without an attempt", "state, due_at_ms, lease_owner", "'leased', 1, 'o'", false},
		{"completed", "state, attempts, finished_at_ms", "'completed', 1, 1", true},
		{"completed at no time", "state, attempts", "'completed', 1", false},
		{"completed and due", "state, attempts, finished_at_ms, due_at_ms", "'completed', 1, 1, 1", false},
		{"dead-letter", "state, attempts, finished_at_ms, failure_code, failed_at_ms", "'dead-letter', 1, 1, 'x', 1", true},
		{"dead-letter without a failure", "state, attempts, finished_at_ms", "'dead-letter', 1, 1", false},
		{"dead-letter finished at another time", "state, attempts, finished_at_ms, failure_code, failed_at_ms", "'dead-letter', 1, 2, 'x', 1", false},
		{"failed at no time", "state, due_at_ms, failure_code", "'pending', 1, 'x'", false},
		{"details without a code", "state, due_at_ms, failure_details", "'pending', 1, '{}'", false},
		{"details too long", "state, due_at_ms, failure_code, failed_at_ms, failure_details", `'pending', 1, 'x', 1, to_json(repeat('x', 8191))`, false},
		{"another state", "state, due_at_ms", "'dead', 1", false},
	} {
		nested, err := tx.Begin(t.Context())
		require.NoError(t, err)
		_, err = nested.Exec(t.Context(), fmt.Sprintf(insert, c.columns, c.values))
		if c.ok {
			require.NoError(t, err, c.name)
		} else {
			require.Equal(t, "23514", pgtx.SQLState(err), c.name)
		}
		require.NoError(t, nested.Rollback(t.Context()))
	}
}

func TestRetryOfADeadLetter(t *testing.T) {
	t.Parallel()
	b := setup(t)
	key := b.dead(t, mail("a"))
	require.NotEmpty(t, b.list(t, reaction.StateDeadLetter)["a"].FailureCode)
	b.clock.Advance(time.Hour)

	retry := func(q reaction.Querier, partition, key string) error {
		return reaction.RetryDeadLetter(t.Context(), q, partition, key, b.clock.Now())
	}
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), b.db.Pool, func(tx pgx.Tx) error {
		require.NoError(t, retry(tx, partition, key))
		return errRollback
	}), errRollback)
	require.Equal(t, map[string]int{"dead-letter": 1}, b.states(t), "rolled back with the caller's transaction")
	for _, wrong := range []string{"", "x", `["p1"]`, strings.Replace(key, "client", "other", 1), key + " "} {
		require.ErrorIs(t, retry(b.db.Pool, partition, wrong), reaction.ErrNotDeadLetter, wrong)
	}
	require.ErrorIs(t, retry(b.db.Pool, "p2", key), reaction.ErrNotDeadLetter)

	require.NoError(t, retry(b.db.Pool, partition, key))
	require.Empty(t, cmp.Diff(reaction.Reaction{
		IdempotencyKey: key, Key: "a", Type: "mail", Version: 1, Payload: json.RawMessage("null"),
		ClientID: "client", ClientCommitID: "commit-1", CommitSeq: 1, State: reaction.StatePending, MaxAttempts: 10,
		CreatedAt: b.clock.Now().Add(-time.Hour), RunAt: b.clock.Now(),
	}, b.list(t, reaction.StatePending)["a"]), "no failure, no attempts, due at once")
	require.ErrorIs(t, retry(b.db.Pool, partition, key), reaction.ErrNotDeadLetter, "pending")

	require.Equal(t, reaction.Result{Claimed: 1, Completed: 1}, run(t, b.runner(t, fails(nil))))
	require.ErrorIs(t, retry(b.db.Pool, partition, key), reaction.ErrNotDeadLetter, "completed")
}

// TestRetentionDeletesWhatIsOld: strictly older than its cutoff, and finished.
func TestRetentionDeletesWhatIsOld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := b.clock.Now()
	day := 24 * time.Hour
	for _, c := range []struct {
		key, state string
		age        time.Duration
	}{
		{"completed, 30 days", "completed", 30 * day},
		{"completed, 30 days and a millisecond", "completed", 30*day + time.Millisecond},
		{"dead, 30 days and a millisecond", "dead-letter", 30*day + time.Millisecond},
		{"dead, 90 days", "dead-letter", 90 * day},
		{"dead, 90 days and a millisecond", "dead-letter", 90*day + time.Millisecond},
		{"pending", "pending", 1000 * day},
		{"expired lease", "leased", 1000 * day},
	} {
		b.insert(t, partition, c.key, c.state, now.Add(-c.age))
		b.insert(t, "p2", c.key, c.state, now.Add(-c.age))
	}
	_, err := b.db.Pool.Exec(t.Context(), `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count) values ('p1', 1, 'c', 'k', 'a', 1, 0)`)
	require.NoError(t, err)

	result, err := reaction.Prune(t.Context(), b.db.Pool, partition, now, reaction.PruneOptions{Events: b.ring})
	require.NoError(t, err)
	require.Equal(t, reaction.PruneResult{Completed: 1, DeadLetters: 1}, result)
	var left []string
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select array_agg(reaction_key order by reaction_key) from syncpg.sync_reactions where partition = 'p1'`).Scan(&left))
	require.Equal(t, []string{"completed, 30 days", "dead, 30 days and a millisecond", "dead, 90 days", "expired lease", "pending"}, left)
	var others, commits int
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select (select count(*) from syncpg.sync_reactions where partition = 'p2'), (select count(*) from syncpg.sync_commits)`).Scan(&others, &commits))
	require.Equal(t, 7, others, "another partition")
	require.Equal(t, 1, commits, "the log")
	require.Equal(t, events.ReactionPruneCompleted{
		Partition: partition, CompletedBefore: now.Add(-30 * day), DeadLetterBefore: now.Add(-90 * day),
		Limit: 1000, RemovedCompleted: 1, RemovedDeadLetters: 1,
	}, b.ring.Query(events.Filter{})[0].Event)
}

// insert stores a reaction in any state, as of a time.
func (b *bundle) insert(t testing.TB, partition, key, state string, at time.Time) {
	t.Helper()
	_, err := b.db.Pool.Exec(t.Context(), `
		insert into syncpg.sync_reactions (partition, client_id, client_commit_id, reaction_key, idempotency_key, commit_seq,
			reaction_type, reaction_version, payload, max_attempts, created_at_ms, state, attempts,
			due_at_ms, lease_owner, finished_at_ms, failure_code, failed_at_ms)
		select $1, 'c', 'k', $2, '["' || $1 || '","c","k","' || $2 || '"]', 1, 'mail', 1, 'null', 10, $4, $3, 1,
			case when $3 in ('pending', 'leased') then $4::bigint end, case when $3 = 'leased' then 'dead runner' end,
			case when $3 in ('completed', 'dead-letter') then $4 end, case when $3 = 'dead-letter' then 'x' end,
			case when $3 = 'dead-letter' then $4 end`, partition, key, state, at.UnixMilli())
	require.NoError(t, err)
}

func TestRetentionIsBoundedPerPass(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := b.clock.Now().Add(-1000 * time.Hour)
	for i := range 5 {
		b.insert(t, partition, fmt.Sprint("c", i), "completed", old.Add(time.Duration(i)*time.Second))
		b.insert(t, partition, fmt.Sprint("d", i), "dead-letter", old)
	}
	prune := func(opts reaction.PruneOptions) reaction.PruneResult {
		result, err := reaction.Prune(t.Context(), b.db.Pool, partition, b.clock.Now(), opts)
		require.NoError(t, err)
		return result
	}
	all := reaction.PruneOptions{KeepCompleted: time.Hour, KeepDeadLetters: time.Hour, Limit: 4}
	require.Equal(t, reaction.PruneResult{}, prune(reaction.PruneOptions{KeepCompleted: -1, KeepDeadLetters: -1}), "kept for ever")
	require.Equal(t, reaction.PruneResult{Completed: 4, MayHaveMore: true}, prune(all))
	require.Contains(t, b.list(t, reaction.StateCompleted), "c4", "the newest is left")
	require.Equal(t, reaction.PruneResult{Completed: 1, DeadLetters: 3, MayHaveMore: true}, prune(all))
	require.Equal(t, reaction.PruneResult{DeadLetters: 2}, prune(all))
	require.Equal(t, reaction.PruneResult{}, prune(all))
	for _, limit := range []int{-1, 1_000_001} {
		_, err := reaction.Prune(t.Context(), b.db.Pool, partition, b.clock.Now(), reaction.PruneOptions{Limit: limit})
		require.Error(t, err)
	}
	panicking := reaction.PruneOptions{Events: (*events.Ring)(nil)}
	require.NotPanics(t, func() { prune(panicking) })
}

// TestRetryAndRetentionSerialize: whichever of the two is first wins, and the other one
// sees it.
func TestRetryAndRetentionSerialize(t *testing.T) {
	t.Parallel()
	all := setup(t, func(o *pgtest.Options) { o.MaxConns = 8 })
	prune := func(t *testing.T, b *bundle, q reaction.Querier) reaction.PruneResult {
		result, err := reaction.Prune(t.Context(), q, b.partition, b.clock.Now().Add(1000*time.Hour), reaction.PruneOptions{KeepDeadLetters: time.Hour})
		require.NoError(t, err)
		return result
	}
	for _, end := range []string{"commit", "rollback"} {
		t.Run("retry first, "+end, func(t *testing.T) {
			t.Parallel()
			b := all.beside(t.Name())
			key := b.dead(t, mail("a"))
			tx, err := b.db.Pool.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, reaction.RetryDeadLetter(t.Context(), tx, b.partition, key, b.clock.Now()))
			require.Equal(t, reaction.PruneResult{}, prune(t, b, b.db.Pool), "passed over")
			_, err = tx.Exec(t.Context(), end)
			require.NoError(t, err)
			_ = tx.Rollback(t.Context())
			if end == "commit" {
				require.Equal(t, reaction.PruneResult{}, prune(t, b, b.db.Pool))
				require.Equal(t, map[string]int{"pending": 1}, b.states(t))
			} else {
				require.Equal(t, reaction.PruneResult{DeadLetters: 1}, prune(t, b, b.db.Pool))
			}
		})
		t.Run("retention first, "+end, func(t *testing.T) {
			t.Parallel()
			b := all.beside(t.Name())
			key := b.dead(t, mail("a"))
			tx, err := b.db.Pool.Begin(t.Context())
			require.NoError(t, err)
			require.Equal(t, reaction.PruneResult{DeadLetters: 1}, prune(t, b, tx))
			other, err := pgx.Connect(t.Context(), b.db.DSN)
			require.NoError(t, err)
			defer func() { _ = other.Close(t.Context()) }()
			retried := make(chan error, 1)
			go func() { retried <- reaction.RetryDeadLetter(t.Context(), other, b.partition, key, b.clock.Now()) }()
			require.NoError(t, pgtest.WaitBlocked(t.Context(), b.db.Pool, other.PgConn().PID()))
			_, err = tx.Exec(t.Context(), end)
			require.NoError(t, err)
			_ = tx.Rollback(t.Context())
			if end == "commit" {
				require.ErrorIs(t, <-retried, reaction.ErrNotDeadLetter)
				require.Empty(t, b.states(t))
			} else {
				require.NoError(t, <-retried)
				require.Equal(t, map[string]int{"pending": 1}, b.states(t))
			}
		})
	}
}

func TestListPagesThroughAState(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := b.clock.Now()
	for i := range 7 {
		// Several of one time, so that the position within it counts.
		for _, state := range []string{"pending", "leased", "completed", "dead-letter"} {
			b.insert(t, partition, fmt.Sprint(state, i), state, at.Add(time.Duration(i/3)*time.Second))
		}
	}
	b.insert(t, "p2", "other", "pending", at)
	for state, want := range map[reaction.State][]int{
		reaction.StatePending:    {0, 1, 2, 3, 4, 5, 6},
		reaction.StateLeased:     {0, 1, 2, 3, 4, 5, 6},
		reaction.StateCompleted:  {6, 5, 4, 3, 2, 1, 0},
		reaction.StateDeadLetter: {6, 5, 4, 3, 2, 1, 0},
	} {
		for _, limit := range []int{1, 3, 7, 100} {
			var got []string
			opts := reaction.ListOptions{State: state, Limit: limit}
			for {
				page, err := reaction.List(t.Context(), b.db.Pool, partition, opts)
				require.NoError(t, err)
				require.LessOrEqual(t, len(page.Reactions), limit)
				for _, r := range page.Reactions {
					got = append(got, r.Key)
					require.Equal(t, state, r.State)
					require.Equal(t, state == reaction.StateLeased, r.LeaseOwner != "")
					require.Equal(t, state == reaction.StateDeadLetter, r.FailureCode != "")
				}
				if opts.After = page.Next; opts.After == "" {
					break
				}
			}
			var keys []string
			for _, i := range want {
				keys = append(keys, fmt.Sprint(state, i))
			}
			require.Equal(t, keys, got, "%s by %d", state, limit)
		}
	}
	page, err := reaction.List(t.Context(), b.db.Pool, partition, reaction.ListOptions{State: reaction.StateLeased, Limit: 1})
	require.NoError(t, err)
	require.Equal(t, at, page.Reactions[0].LeaseExpiresAt)
	page, err = reaction.List(t.Context(), b.db.Pool, partition, reaction.ListOptions{State: reaction.StateCompleted})
	require.NoError(t, err)
	require.Equal(t, at.Add(2*time.Second), page.Reactions[0].FinishedAt)

	for name, opts := range map[string]reaction.ListOptions{
		"no state": {}, "another state": {State: "dead"}, "limit below": {State: reaction.StatePending, Limit: -1},
		"limit above": {State: reaction.StatePending, Limit: 1001}, "a position of no page": {State: reaction.StatePending, After: "x"},
		"a position of another partition": {State: reaction.StatePending, After: `1 ["p2","c","k","other"]`},
	} {
		_, err := reaction.List(t.Context(), b.db.Pool, partition, opts)
		require.Error(t, err, name)
	}
}
