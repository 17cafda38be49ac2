package fanout_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/realtime/fanout"
)

// TestEvents: what a host can see of the way of a commit between processes.
func TestEvents(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ring := events.NewRing(1000)
	a := b.start(t)
	c := b.start(t, func(cfg *fanout.Config) { cfg.Events, cfg.MaxBehind = ring, 2 })
	b.listening(t, 2)
	c.watch(t, "acme")
	a.Committed("acme", b.commit(t, "acme", one("1")))
	c.sink.reaches(t, "acme", 1)
	a.Committed("acme", b.commit(t, "acme", one("2"), one("3"), one("4"), one("5")))
	c.sink.reaches(t, "acme", 5)
	b.commit(t, "acme", one("6"))
	tick(t, c.poll)
	c.sink.reaches(t, "acme", 6)
	c.Committed("other", 1)
	b.exec(t, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and query = 'listen syncpg'`)
	c.stop(t)

	seen := map[string]int{}
	commits, found := 0, 0
	for _, e := range ring.Query(events.Filter{}) {
		seen[e.Event.EventName()]++
		switch e := e.Event.(type) {
		case events.FanoutRead:
			commits += e.Commits
		case events.FanoutPolled:
			found += e.Found
		case events.FanoutLost:
			require.Equal(t, events.FanoutLost{Partition: "acme", Seq: 5}, e)
		}
	}
	require.Equal(t, 2, commits, "the first and the last")
	require.Equal(t, 1, found)
	require.Equal(t, 1, seen["fanout.lost"])
	for _, name := range []string{"fanout.listening", "fanout.heard"} {
		require.Positive(t, seen[name], name)
	}
}
