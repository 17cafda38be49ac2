package realtime

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// TestWhatIsRememberedOfCommitsIsBounded, in commits and in changes; what is not remembered
// may have been missed.
func TestWhatIsRememberedOfCommitsIsBounded(t *testing.T) {
	t.Parallel()
	s, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":1,"tables":[{"name":"docs","primaryKey":"id","columns":[
		{"name":"id","type":"string","nullable":false},{"name":"org","type":"string","nullable":false}],
		"scopes":[{"pattern":"org:{org}"}]}]}`))
	require.NoError(t, err)
	table, _ := s.Table("docs")
	index := newIndex()
	g, err := index.groupOf(table, ssp2.ScopeMap{"org": {"o1"}})
	require.NoError(t, err)
	for _, test := range []struct{ changes, kept int64 }{{0, recentCommits}, {1, recentCommits}, {1000, recentChanges / 1000}, {recentChanges, 1}} {
		var r recent
		const head = 2*recentCommits + 10
		for seq := int64(1); seq <= head; seq++ {
			c := &fanout.Commit{Seq: seq, Changes: make([]fanout.Change, test.changes)}
			for i := range c.Changes {
				c.Changes[i] = fanout.Change{Table: "docs", Scopes: []string{"org=o2"}}
			}
			r.add(c)
		}
		budget := 1 << 30
		require.Len(t, r.touched, int(test.kept))
		require.LessOrEqual(t, cap(r.touched), 4*recentCommits)
		require.Equal(t, head-test.kept, r.after)
		require.Zero(t, r.missed(g, head-test.kept, head, &budget))
		require.EqualValues(t, head, r.missed(g, head-test.kept-1, head, &budget), "who knows")
		r.add(&fanout.Commit{Seq: head + 1, Changes: []fanout.Change{{Table: "docs", Scopes: []string{"org=o1"}}}})
		r.add(&fanout.Commit{Seq: head + 2})
		require.EqualValues(t, head+1, r.missed(g, head, head+2, &budget))
		require.Zero(t, r.missed(g, head+1, head+2, &budget))
		r.add(&fanout.Commit{Seq: head + 3, Changes: make([]fanout.Change, recentChanges+1)})
		require.EqualValues(t, head+3, r.missed(g, head+2, head+3, &budget), "too large to be compared")
	}
}

// TestAWakeUpThatWaitsTellsTheWorst: wake-ups coalesce, and one of them says that the log is
// another one (§8.3).
func TestAWakeUpThatWaitsTellsTheWorst(t *testing.T) {
	t.Parallel()
	c := &conn{hub: &Hub{cfg: Config{Clock: time.Now}}, p: &partition{}, writing: true}
	c.suppress(7, ssp2.WakeCatchupRequired)
	c.restart(3, 1)
	c.suppress(4, ssp2.WakeDeltaTooLarge)
	require.Len(t, c.queue, 1)
	it, _ := c.unqueue()
	require.Equal(t, ssp2.WakeResetRequired, it.wake.Reason)
	require.EqualValues(t, 4, it.wake.Cursor)
}

// TestWhatIsTakenBackTakesNoRoom: a client that learns of another version gets deltas again as
// long as those that wait for it are within their bound.
func TestWhatIsTakenBackTakesNoRoom(t *testing.T) {
	t.Parallel()
	c := &conn{hub: &Hub{}, writing: true, version: 1, deltaBytes: 300, queue: []item{
		{delta: &delta{seq: 1, size: 100}}, {text: []byte("{}")}, {delta: &delta{seq: 2, size: 200}},
	}}
	c.unlearn(2)
	require.Zero(t, c.deltaBytes)
	require.Len(t, c.queue, 2)
	require.NotNil(t, c.queue[0].text)
	require.NotNil(t, c.queue[1].wake)
	require.EqualValues(t, 2, c.observed)
}
