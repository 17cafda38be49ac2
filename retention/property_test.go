package retention_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/retention"
)

// model is a log and who reads it, and says of single commits what §4.6 says.
type model struct {
	policy  retention.Policy
	ages    []time.Duration // of the commits, the first of which is 1
	changes []int
	clients map[string]reader
	horizon int64
}

type reader struct {
	cursor *int64
	age    time.Duration // of its newest pull
}

// mayGo says that a commit may be deleted when all before it have been.
func (m *model) mayGo(seq int64) bool {
	if seq > int64(len(m.ages))-max(m.policy.KeepCommits, 0) {
		return false
	}
	if m.policy.ForceAge >= 0 && m.ages[seq-1] > m.policy.ForceAge {
		return true
	}
	for _, c := range m.clients {
		if c.cursor != nil && *c.cursor < seq && m.policy.ActiveWindow >= 0 && c.age <= m.policy.ActiveWindow {
			return false
		}
	}
	return true
}

// prune returns the horizon that pruning reaches.
func (m *model) prune() int64 {
	h := m.horizon
	for h < int64(len(m.ages)) && m.mayGo(h+1) {
		h++
	}
	return h
}

func drawReader(rt *rapid.T, from, to int64) reader {
	r := reader{age: rapid.SampledFrom([]time.Duration{0, 13 * day, 14 * day, 14*day + time.Millisecond, 40 * day}).Draw(rt, "pulled")}
	if rapid.IntRange(0, 4).Draw(rt, "never") > 0 {
		r.cursor = new(rapid.Int64Range(from, to+2).Draw(rt, "cursor"))
	}
	return r
}

// write appends commits of a model to the log, the changes of each under scopes that others
// have too, with a tombstone for each.
func (m *model) write(t *testing.T, b *bundle, partition string, from int) {
	t.Helper()
	batch := &pgx.Batch{}
	for i := from; i < len(m.ages); i++ {
		seq := i + 1
		batch.Queue(`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
			values ($1, $2, 'w', $2::bigint::text, 'ada', $3, $4)`, partition, seq, start.Add(-m.ages[i]).UnixMilli(), m.changes[i])
		batch.Queue(`insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, scopes)
			select $1, $2, c, 'items', c::text, 2, array['project=p' || c % 2, 'team=t'] from generate_series(0, $3::int - 1) as c`, partition, seq, m.changes[i])
		batch.Queue(`insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
			select distinct $1, 'items', k, $2::bigint from generate_series(0, $3::int - 1) as c, unnest(array['project=p' || c % 2, 'team=t']) as k`, partition, seq, m.changes[i])
		batch.Queue(`insert into syncpg.sync_tombstones (partition, table_name, row_id, commit_seq)
			select $1, 'items', c::text, $2 from generate_series(0, $3::int - 1) as c
			on conflict (partition, table_name, row_id) do update set commit_seq = excluded.commit_seq`, partition, seq, m.changes[i])
	}
	batch.Queue(`update syncpg.sync_partitions set max_commit_seq = $2 where partition = $1`, partition, len(m.ages))
	require.NoError(t, b.db.Pool.SendBatch(t.Context(), batch).Close())
}

// wants is what is left of the log.
func (m *model) wants() (l left) {
	l.Horizon, l.Commits = m.horizon, int64(len(m.ages))-m.horizon
	tombstones := map[int]int{}
	for i, n := range m.changes {
		for c := range n {
			tombstones[c] = i + 1
		}
		if int64(i) < m.horizon {
			continue
		}
		l.Changes += int64(n)
		l.Scopes += int64(min(n, 2))
		if n > 0 {
			l.Scopes++ // the team
		}
	}
	for _, seq := range tombstones {
		if int64(seq) > m.horizon {
			l.Tombstones++
		}
	}
	if l.Commits > 0 {
		l.First = m.horizon + 1
	}
	return l
}

// TestPruningIsThatOfTheModel: whatever the log, its readers and the policy are, pruning comes
// as far as going from commit to commit does, and no further; who comes back between two
// batches holds what is still there, and wherever it is interrupted horizon and log agree.
func TestPruningIsThatOfTheModel(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var logs, pruned, interrupted, held atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		partition := fmt.Sprint("p", logs.Add(1))
		b.open(t, partition)
		m := &model{clients: map[string]reader{}}
		for range rapid.IntRange(1, 3).Draw(rt, "rounds") {
			from := len(m.ages)
			for range rapid.IntRange(0, 12).Draw(rt, "commits") {
				m.ages = append(m.ages, rapid.SampledFrom([]time.Duration{0, 29 * day, 30 * day, 30*day + time.Millisecond, 50 * day}).Draw(rt, "age"))
				m.changes = append(m.changes, rapid.IntRange(0, 4).Draw(rt, "changes"))
			}
			m.write(t, b, partition, from)
			newest := int64(len(m.ages))
			comes := func(name string, from int64) {
				r := drawReader(rt, from, newest)
				m.clients[name] = r
				b.client(t, partition, name, r.cursor, r.age)
			}
			for i := range rapid.IntRange(0, 3).Draw(rt, "clients") {
				comes(fmt.Sprint("c", i), 0)
			}
			m.policy = retention.Policy{
				KeepCommits:  rapid.SampledFrom([]int64{-1, 1, 3, 10}).Draw(rt, "keep"),
				ForceAge:     rapid.SampledFrom([]time.Duration{-1, 30 * day, 45 * day}).Draw(rt, "force age"),
				ActiveWindow: rapid.SampledFrom([]time.Duration{-1, 14 * day, 14 * day}).Draw(rt, "active window"),
			}
			s := b.service(t, retention.Config{Policy: m.policy, BatchRows: rapid.IntRange(1, 20).Draw(rt, "batch")})
			plan, err := s.Plan(t.Context(), partition)
			require.NoError(rt, err)
			require.Equal(rt, m.prune(), plan.Target)

			ctx, cancel := context.WithCancel(t.Context())
			stopsAt, comesAt := rapid.IntRange(-1, 4).Draw(rt, "stops at"), rapid.IntRange(-1, 3).Draw(rt, "comes at")
			batches, before := 0, m.horizon
			result, err := s.Prune(ctx, partition, func(p retention.Progress) {
				m.horizon = p.Horizon
				require.Equal(rt, m.wants(), b.left(t, partition))
				if batches == comesAt && m.prune() > m.horizon {
					comes("back", m.horizon)
					held.Add(1)
				}
				if batches == stopsAt {
					cancel()
				}
				batches++
			})
			cancel()
			require.Equal(rt, before, result.PreviousHorizon)
			if err == nil {
				m.horizon = m.prune()
			} else {
				require.ErrorIs(rt, err, context.Canceled)
				interrupted.Add(1)
			}
			require.Equal(rt, m.horizon, result.Horizon)
			require.Equal(rt, m.wants(), b.left(t, partition))
			pruned.Add(m.horizon - before)
		}
	})
	require.Positive(t, pruned.Load())
	require.Positive(t, interrupted.Load())
	require.Positive(t, held.Load())
}
