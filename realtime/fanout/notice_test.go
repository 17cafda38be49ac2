package fanout_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime/fanout"
)

// noticed waits for as many notices, and returns them without their time.
func (r *recorder) noticed(t testing.TB, n int) []fanout.Notice {
	t.Helper()
	r.until(t, "notices", func() bool { return len(r.notices) >= n })
	all := soFar(r, &r.notices)
	for i := range all {
		all[i].At = time.Time{}
	}
	return all
}

func TestNoticesReachOtherProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	began := time.Now()
	long := strings.Repeat("日本", 5000) // more than a notification holds
	ada, tablet := fanout.Notice{Partition: "acme", Actor: long}, fanout.Notice{Partition: "acme", Client: "tablet", SchemaVersion: 2}
	for _, n := range []fanout.Notice{ada, tablet} {
		n.At = began
		a.Notify(n)
	}
	got := c.sink.noticed(t, 2)
	require.Equal(t, []fanout.Notice{ada, tablet}, got[:2])
	for _, n := range soFar(c.sink, &c.sink.notices) {
		require.False(t, n.At.Before(began), "never early")
		require.False(t, n.At.After(time.Now()))
	}
	c.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	a.sink.sees(t, map[string]string{"team:red/phone": `{}`})
	require.Empty(t, soFar(a.sink, &a.sink.notices), "nobody hears of itself")
}

// TestANoticeThatIsMissedIsAskedFor: an actor who lost a scope keeps it in no process whose
// listener was being replaced just then.
func TestANoticeThatIsMissedIsAskedFor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t)
	c, mayConnect, connected := b.startGated(t)
	b.listening(t, 2)
	ada, eve, bob := fanout.Notice{Partition: "acme", Actor: "ada"}, fanout.Notice{Partition: "acme", Actor: "eve"}, fanout.Notice{Partition: "acme", Actor: "bob"}
	a.Notify(ada)
	c.sink.until(t, "the first", func() bool { return slices.ContainsFunc(c.sink.notices, isOf("ada")) })
	b.exec(t, `select pg_terminate_backend($1)`, <-connected)
	b.listening(t, 1)
	a.Notify(eve)
	mayConnect <- struct{}{}
	c.sink.until(t, "what was missed", func() bool { return slices.ContainsFunc(c.sink.notices, isOf("eve")) })
	a.Notify(bob)
	c.sink.until(t, "the next", func() bool { return slices.ContainsFunc(c.sink.notices, isOf("bob")) })
}

func isOf(actor string) func(fanout.Notice) bool {
	return func(n fanout.Notice) bool { return n.Partition == "acme" && n.Actor == actor }
}
