package fanout_test

import (
	"context"
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
	deaf := make(signal, 1)
	c := b.start(t, func(cfg *fanout.Config) { cfg.Events, cfg.MaxBehind = events.Multi(ring, deaf), 2 })
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
	b.exec(t, `select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = $1`, fanout.ApplicationName)
	deaf.wait(t)
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
	for _, name := range []string{"fanout.listening", "fanout.heard", "fanout.deaf"} {
		require.Positive(t, seen[name], name)
	}
}

// signal is told of the end of a connection that listened.
type signal chan events.FanoutDeaf

func (s signal) Emit(_ context.Context, e events.Event) {
	if e, ok := e.(events.FanoutDeaf); ok {
		select {
		case s <- e:
		default:
		}
	}
}

func (s signal) wait(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case e := <-s:
		require.Equal(t, 1, e.Failures)
		require.Error(t, e.Err)
	case <-ctx.Done():
		require.FailNow(t, "nobody says that the connection is gone")
	}
}
