package retention_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/retention"
)

// BenchmarkPrune prunes 100,000 commits of two changes each, with a tombstone and two scope
// entries, which are 600,000 rows, against one statement per table that deletes the same.
func BenchmarkPrune(b *testing.B) {
	const commits = 100_000
	for _, bm := range []struct {
		name  string
		prune func(b *testing.B, w *bundle)
	}{
		{"floor", func(b *testing.B, w *bundle) {
			for _, table := range []string{"sync_changes", "sync_change_scopes", "sync_tombstones", "sync_commits"} {
				w.exec(b, `delete from syncpg.`+table+` where partition = 'p' and commit_seq <= $1`, commits)
			}
			w.exec(b, `update syncpg.sync_partitions set horizon_seq = $1 where partition = 'p'`, commits)
		}},
		{"batches", func(b *testing.B, w *bundle) {
			s := w.service(b, retention.Config{Policy: retention.Policy{KeepCommits: -1}})
			result, err := s.Prune(b.Context(), "p", nil)
			require.NoError(b, err)
			require.Equal(b, int64(commits), result.Commits)
		}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				w := setup(b)
				w.open(b, "p")
				w.append(b, "p", commits, 0)
				w.exec(b, `vacuum analyze`)
				w.exec(b, `checkpoint`)
				b.StartTimer()
				bm.prune(b, w)
				b.StopTimer()
				require.Equal(b, left{Horizon: commits}, w.left(b, "p"))
				b.StartTimer()
			}
			seconds := b.Elapsed().Seconds() / float64(b.N)
			b.ReportMetric(commits/seconds, "commits/s")
			b.ReportMetric(6*commits/seconds, "rows/s")
		})
	}
}
