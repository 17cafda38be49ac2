package pullsvc_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/ssp2"
)

// copyLog makes another partition with the same log.
func (b *bundle) copyLog(t testing.TB, from, to string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), b.db.Pool, func(tx pgx.Tx) error {
		for _, sql := range []string{
			`select syncpg.sync_open_partition($2, 'epoch-1', 0) where $1::text <> ''`,
			`update syncpg.sync_partitions as p set max_commit_seq = o.max_commit_seq from syncpg.sync_partitions as o
			 where o.partition = $1 and p.partition = $2`,
			`insert into syncpg.sync_commits select $2, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count
			 from syncpg.sync_commits where partition = $1`,
			`insert into syncpg.sync_changes select $2, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload
			 from syncpg.sync_changes where partition = $1`,
			`insert into syncpg.sync_change_scopes select $2, table_name, scope_key, commit_seq from syncpg.sync_change_scopes where partition = $1`,
		} {
			if _, err := tx.Exec(t.Context(), sql, from, to); err != nil {
				return err
			}
		}
		return nil
	}))
}

// TestCompactionChangesNoReplica: whatever is compacted and pruned, and whenever between
// two pulls, a client that goes on from any cursor at or above the horizon ends with the
// rows it would have ended with (§4.6). Rows move between scopes, and back.
func TestCompactionChangesNoReplica(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 2 }))
	service, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema})
	require.NoError(t, err)
	var histories, compacted atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		full := fmt.Sprint("full-", histories.Add(1))
		b.inPartition(full)
		b.exec(t, `select syncpg.sync_open_partition($1, $2, 0)`, full, epoch)
		for range rapid.IntRange(1, 25).Draw(rt, "commits") {
			if changes := randomChanges(rt, b); len(changes) > 0 {
				b.commit(t, changes...)
			}
		}
		short := fmt.Sprint("short-", histories.Load())
		b.copyLog(t, full, short)

		// The clock stands so that the window of full history begins at some commit; the
		// commits say that they were made seq seconds after 1970.
		now := time.UnixMilli(0)
		keeper := func(p retention.Policy) {
			s, err := retention.New(b.db.Pool, retention.Config{Policy: p, Clock: func() time.Time { return now }})
			require.NoError(rt, err)
			result, err := s.Prune(t.Context(), short, nil)
			require.NoError(rt, err)
			compacted.Add(result.Compacted)
		}
		compact := func() {
			now = time.UnixMilli(1000*rapid.Int64Range(0, b.seq+1).Draw(rt, "full history from") + 500).Add(time.Hour)
			keeper(retention.Policy{CompactAfter: time.Hour, KeepCommits: b.seq + 1})
		}
		compact()
		horizon := rapid.Int64Range(0, b.seq).Draw(rt, "horizon")
		keeper(retention.Policy{KeepCommits: b.seq - horizon, ActiveWindow: -1})
		if horizon == b.seq {
			keeper(retention.Policy{KeepCommits: -1, ActiveWindow: -1})
		}

		for _, r := range []*replica{
			{sub: sub("ab", "items", 0, project("a", "b"))},
			{sub: sub("c", "items", 0, project("c"))},
			{sub: sub("doc", "docs", 0, docScopes([]string{"a", "b"}, []string{"1", "2"}))},
			{sub: sub("org", "docs", 0, docScopes([]string{"a"}, nil))},
			{sub: sub("folder", "docs", 0, docScopes(nil, []string{"2", "3"}))},
		} {
			// What the client has at its cursor, by the full log.
			r.rows = map[string]row{}
			cursor := rapid.Int64Range(horizon, b.seq).Draw(rt, "cursor")
			req := request(r.sub)
			req.Partition = full
			for _, c := range b.pull(t, req)[0].Commits {
				if c.CommitSeq <= cursor {
					r.apply(rt, b, nil, []ssp2.Frame{&c})
				}
			}
			r.sub.Cursor = cursor
			b.partition = short
			for rounds := 0; r.sub.Cursor < b.seq; rounds++ {
				require.Less(rt, rounds, 100)
				pullInto(t, rt, b, &instance{Service: service}, []*replica{r}, ssp2.PullHeader{Accept: 3, LimitCommits: rapid.Int32Range(1, 6).Draw(rt, "limit")}, -1)
				require.GreaterOrEqual(rt, r.sub.Cursor, horizon, "no reset")
				if rapid.IntRange(0, 2).Draw(rt, "compact") == 0 {
					compact()
				}
			}
			if d := cmp.Diff(r.want(b), r.rows, cmp.AllowUnexported(row{})); d != "" {
				rt.Fatalf("subscription %s from %d: %s", r.sub.ID, cursor, d)
			}
		}
		var entries int64
		require.NoError(rt, b.db.Pool.QueryRow(t.Context(), `
			select count(*) from syncpg.sync_change_scopes as s
			 where s.partition = $1 and not exists (
			   select 1 from syncpg.sync_changes as c
			    where c.partition = $1 and c.commit_seq = s.commit_seq and c.table_name = s.table_name and s.scope_key = any (c.scopes))`, short).Scan(&entries))
		require.Zero(rt, entries, "scope entries that lead to nothing")
	})
	require.Positive(t, compacted.Load())
}
