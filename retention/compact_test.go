package retention_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
)

// history appends commits that are two days old, each a list of changes "row op scopes":
// op is + or -.
func (b *bundle) history(t *testing.T, partition string, commits ...[]string) {
	t.Helper()
	for _, changes := range commits {
		seq := scan[int64](t, b, `update syncpg.sync_partitions set max_commit_seq = max_commit_seq + 1 where partition = $1 returning max_commit_seq`, partition)
		b.exec(t, `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
			values ($1, $2, 'w', $2::bigint::text, 'ada', $3, $4)`, partition, seq, start.Add(-2*day).UnixMilli(), len(changes))
		for i, c := range changes {
			var row, op, table string
			_, err := fmt.Sscan(c, &row, &op)
			require.NoError(t, err)
			scopes := strings.Fields(c)[2:]
			table, row, found := strings.Cut(row, "/")
			if !found {
				table, row = "items", table
			}
			b.exec(t, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
				values ($1, $2::bigint, $3, $4, $5, case $6 when '+' then 1 else 2 end, case $6 when '+' then $2::bigint end, $7, case $6 when '+' then '\x01'::bytea end)`,
				partition, seq, i, table, row, op, scopes)
			b.exec(t, `insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
				select $1, $2, k, $4 from unnest($3::text[]) as k on conflict do nothing`, partition, table, scopes, seq)
		}
	}
}

// remaining are the changes of a log as "seq row op scopes", and its scope entries as
// "table scope seq".
func (b *bundle) remaining(t *testing.T, partition string) (changes, entries []string) {
	t.Helper()
	list := func(sql string) []string {
		rows, err := b.db.Pool.Query(t.Context(), sql, partition)
		require.NoError(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	changes = list(`select commit_seq || ' ' || case table_name when 'items' then '' else table_name || '/' end || row_id
		|| case op when 1 then ' + ' else ' - ' end || array_to_string(scopes, ' ')
		from syncpg.sync_changes where partition = $1 order by commit_seq, change_index`)
	return changes, list(`select table_name || ' ' || scope_key || ' ' || commit_seq from syncpg.sync_change_scopes where partition = $1 order by commit_seq, table_name, scope_key`)
}

// TestCompaction: which changes go (§4.6).
func TestCompaction(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, tc := range []struct {
		name    string
		history [][]string
		changes []string
		entries []string
	}{
		{"the newest change of a row stays", [][]string{{"r + p=a"}, {"r + p=a"}, {"r + p=a"}}, []string{"3 r + p=a"}, []string{"items p=a 3"}},
		{"a delete supersedes", [][]string{{"r + p=a"}, {"r - p=a"}}, []string{"2 r - p=a"}, []string{"items p=a 2"}},
		{"and is superseded", [][]string{{"r - p=a"}, {"r + p=a"}}, []string{"2 r + p=a"}, []string{"items p=a 2"}},
		{
			"a row that moved stays deleted where it was",
			[][]string{{"r + p=a"}, {"r - p=a", "r + p=b"}, {"r + p=b"}},
			[]string{"2 r - p=a", "3 r + p=b"},
			[]string{"items p=a 2", "items p=b 3"},
		},
		{
			"a row that moved back does not",
			[][]string{{"r + p=a"}, {"r - p=a", "r + p=b"}, {"r - p=b", "r + p=a"}},
			[]string{"3 r - p=b", "3 r + p=a"},
			[]string{"items p=a 3", "items p=b 3"},
		},
		{
			"every variable counts: who sees one of them sees both",
			[][]string{{"r + f=1 p=a"}, {"r - f=1 p=a", "r + f=2 p=a"}, {"r + f=2 p=a"}},
			[]string{"2 r - f=1 p=a", "3 r + f=2 p=a"},
			[]string{"items f=1 2", "items p=a 2", "items f=2 3", "items p=a 3"},
		},
		{
			"other rows and tables supersede nothing",
			[][]string{{"r + p=a", "s + p=a", "other/r + p=a"}, {"r + p=a"}},
			[]string{"1 s + p=a", "1 other/r + p=a", "2 r + p=a"},
			[]string{"items p=a 1", "other p=a 1", "items p=a 2"},
		},
		{
			"within a commit too", [][]string{{"r + p=a", "r - p=a", "r + p=a"}}, []string{"1 r + p=a"}, []string{"items p=a 1"},
		},
		{"changes without scopes", [][]string{{"r +"}, {"r +"}}, []string{"2 r + "}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			partition := fmt.Sprint("p", i)
			b.open(t, partition)
			b.history(t, partition, tc.history...)
			s := b.service(t, retention.Config{Policy: retention.Policy{CompactAfter: day}})
			before, _ := b.remaining(t, partition)
			result, err := s.Prune(t.Context(), partition, nil)
			require.NoError(t, err)
			changes, entries := b.remaining(t, partition)
			require.Equal(t, tc.changes, changes)
			require.ElementsMatch(t, tc.entries, entries)
			require.Equal(t, retention.Result{Compacted: int64(len(before) - len(changes))}, result)
			require.Equal(t, int64(len(tc.history)), b.left(t, partition).Commits, "commits stay")
		})
	}
}

// TestFullHistoryWindow: what is younger than the window stays, and what follows a commit
// that is, however old that says it is.
func TestFullHistoryWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	commit := []string{"r + p=a"}
	b.history(t, "p", commit, commit, commit, commit, commit, commit)
	b.exec(t, `update syncpg.sync_commits set created_at_ms = $1 where partition = 'p' and commit_seq = 4`, start.UnixMilli())
	compact := func(after time.Duration) (seqs []string) {
		_, err := b.service(t, retention.Config{Policy: retention.Policy{CompactAfter: after}}).Prune(t.Context(), "p", nil)
		require.NoError(t, err)
		seqs, _ = b.remaining(t, "p")
		return seqs
	}
	require.Len(t, compact(3*day), 6)
	require.Equal(t, []string{"3 r + p=a", "4 r + p=a", "5 r + p=a", "6 r + p=a"}, compact(day))
	b.exec(t, `update syncpg.sync_commits set created_at_ms = 0 where partition = 'p'`)
	require.Equal(t, []string{"6 r + p=a"}, compact(day))
	require.Len(t, compact(0), 1, "no compaction by default")
}

// TestCompactionInBatches: a batch deletes what is superseded within it, and larger ones
// more of it.
func TestCompactionInBatches(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	var commits [][]string
	for i := range 30 {
		commits = append(commits, []string{fmt.Sprintf("r%d + p=a", i%3), fmt.Sprintf("s%d + p=a", i)})
	}
	b.history(t, "p", commits...)
	s := b.service(t, retention.Config{Policy: retention.Policy{CompactAfter: day}})
	s.SetSizes(8, 1)
	for last := int64(1); last > 0; {
		result, err := s.Prune(t.Context(), "p", nil)
		require.NoError(t, err)
		last = result.Compacted
	}
	changes, entries := b.remaining(t, "p")
	require.Less(t, len(changes), 60)
	require.Greater(t, len(changes), 33, "a change has to be looked at together with what supersedes it")
	require.Contains(t, changes, "30 r2 + p=a")
	require.Len(t, entries, 30, "one per commit, which all have another row")
	_, err := b.service(t, retention.Config{Policy: retention.Policy{CompactAfter: day}}).Prune(t.Context(), "p", nil)
	require.NoError(t, err)
	changes, _ = b.remaining(t, "p")
	require.Len(t, changes, 33)
}

// TestCompactionBlocksNobody: while compaction stands still in the middle of its batch,
// the partition can be locked, as a push does.
func TestCompactionBlocksNobody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.open(t, "p")
	b.history(t, "p", []string{"r + p=a"}, []string{"r + p=a"})
	holder := b.connect(t)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select 1 from syncpg.sync_changes where partition = 'p' for update`)
	require.NoError(t, err)
	s := b.service(t, retention.Config{Policy: retention.Policy{CompactAfter: day}})
	done := make(chan error, 1)
	go func() {
		_, err := s.Prune(t.Context(), "p", nil)
		done <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	b.exec(t, `select 1 from syncpg.sync_partitions where partition = 'p' for update`)
	// A second compaction, and pruning, wait behind it without the partition's lock.
	more := b.service(t, retention.Config{Policy: retention.Policy{KeepCommits: -1}})
	pruned := make(chan error, 1)
	go func() {
		_, err := more.Prune(t.Context(), "p", nil)
		pruned <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
	b.exec(t, `select 1 from syncpg.sync_partitions where partition = 'p' for update`)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-done)
	require.NoError(t, <-pruned)
	require.Equal(t, left{Horizon: 2}, b.left(t, "p"))
}
