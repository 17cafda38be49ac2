package realtime_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/ssp2"
)

// present publishes a document, or leaves.
func (c *client) present(key, doc string) {
	c.t.Helper()
	ev := &ssp2.PresencePublish{ScopeKey: key}
	if doc != "" {
		ev.Doc = []byte(doc)
	}
	c.send(ev)
	c.ping()
}

// on connects a client that is registered on the orgs.
func (w *world) on(name string, orgs ...string) *client {
	w.t.Helper()
	w.record(name, name, 0, orgSub(orgs...))
	return w.connect(name, name)
}

// TestPresenceLifecycle is §8.6.2.
func TestPresenceLifecycle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, b := w.on("a", "o1"), w.on("b", "o1", "o2")
	a.present("org:o1", `{"x": 1}`)
	b.expect(`join org:o1 a/a {"x": 1}`)
	a.present("org:o1", `{"x":2}`)
	b.expect(`update org:o1 a/a {"x":2}`)
	a.present("org:o1", "")
	b.expect(`leave org:o1 a/a `)
	a.present("org:o1", "") // is not there
	a.present("org:o1", `{}`)
	b.expect(`join org:o1 a/a {}`)
	b.present("org:o2", `{}`) // nobody else is on it
	b.present("org:o1", `{"y":1}`)
	a.expect(`join org:o1 b/b {"y":1}`)
	c := w.on("c", "o1", "o2")
	snapshot := []string{c.next().String(), c.next().String(), c.next().String()}
	slices.Sort(snapshot)
	require.Equal(t, []string{`join org:o1 a/a {}`, `join org:o1 b/b {"y":1}`, `join org:o2 b/b {}`}, snapshot)
	a.close()
	b.expect(`leave org:o1 a/a `)
	c.expect(`leave org:o1 a/a `)
	b.nothing(w)
	c.nothing(w)
	w.fan.mu.Lock()
	defer w.fan.mu.Unlock()
	require.Equal(t, []string{
		`org:o1 a {"x": 1}`, `org:o1 a {"x":2}`, `org:o1 a `, `org:o1 a {}`, `org:o2 b {}`, `org:o1 b {"y":1}`, `org:o1 a `,
	}, w.fan.published, "what other processes are told")
}

// TestPresenceNeedsTheKey: to publish and to receive (§8.6.3).
func TestPresenceNeedsTheKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, d := w.on("a", "o1"), w.on("d", "o2")
	a.present("org:o1", `{}`)
	d.present("org:o2", `{}`)
	d.present("org:o1", `{"evil":true}`)
	d.expect("refused org:o1 presence.forbidden")
	d.present("folder:o2", `{}`)
	d.expect("refused folder:o2 presence.forbidden")
	d.present("o2", `{}`)
	d.expect("refused o2 presence.forbidden")
	d.present("org:o1", "")
	d.expect("refused org:o1 presence.forbidden")
	a.nothing(w)
	d.nothing(w)
	other, _, err := w.dial("a", "a", "X-Partition", "another") //nolint:bodyclose // the library has read it
	require.NoError(t, err)
	other.next() // hello
	a.present("org:o1", `{"n":1}`)
	other.nothing(w)
}

// TestPresenceSize: a document that is too large changes nothing (§8.6.2).
func TestPresenceSize(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, b := w.on("a", "o1"), w.on("b", "o1")
	fits := `{"d":"` + strings.Repeat("x", 16<<10-8) + `"}`
	a.present("org:o1", fits)
	require.Equal(t, "join org:o1 a/a "+fits, b.next().String())
	a.present("org:o1", fits[:len(fits)-2]+`x"}`)
	a.expect("refused org:o1 presence.too_large")
	b.nothing(w)
	c := w.on("c", "o1")
	require.Equal(t, "join org:o1 a/a "+fits, c.next().String(), "the one before stays")
}

// TestPresenceFollowsRegistrations: a round that changes them takes presence along (§8.6.3).
func TestPresenceFollowsRegistrations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(0)
	a, b, c := w.on("a", "o1", "o2"), w.on("b", "o1", "o2"), w.on("c", "o3")
	a.present("org:o1", `{"n":1}`)
	a.present("org:o2", `{"n":2}`)
	b.expect(`join org:o1 a/a {"n":1}`, `join org:o2 a/a {"n":2}`)
	c.present("org:o3", `{"c":1}`)
	b.present("org:o1", `{"b":1}`)
	a.expect(`join org:o1 b/b {"b":1}`)

	a.chunk(pullRequest("a", orgSub("o1", "o2")))
	a.response()
	a.nothing(w) // the same grant
	b.nothing(w)

	a.chunk(pullRequest("a", orgSub("o2", "o3"), sub{"n", "notes", ssp2.ScopeMap{"org": {"o3"}}}))
	a.response()
	a.expect(`join org:o3 c/c {"c":1}`)
	b.expect(`leave org:o1 a/a `)
	b.present("org:o1", `{"b":2}`)
	b.present("org:o2", `{"b":3}`)
	a.expect(`join org:o2 b/b {"b":3}`)
	a.nothing(w)

	a.chunk(pullRequest("a"))
	a.response()
	b.expect(`leave org:o2 a/a `)
	a.present("org:o2", `{}`)
	a.expect("refused org:o2 presence.forbidden")
}

// TestThePresenceOfAClientIsOne: the last publish wins, whichever of its connections it
// came on, and only the end of that one is a leave (§8.6.1).
func TestThePresenceOfAClientIsOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	b := w.on("b", "o1")
	first := w.on("a", "o1")
	first.present("org:o1", `{"n":1}`)
	b.expect(`join org:o1 a/a {"n":1}`)
	second := w.on("a", "o1")
	second.nothing(w) // it is no peer of itself
	second.present("org:o1", `{"n":2}`)
	b.expect(`update org:o1 a/a {"n":2}`)
	first.close()
	b.nothing(w)
	_ = second.ws.CloseNow() // clean or not
	b.expect(`leave org:o1 a/a `)
}

// TestWhatIsHeldBackOfAClientThatCameBack on another connection is older than what it
// published there (§8.6.1, §8.6.4).
func TestWhatIsHeldBackOfAClientThatCameBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{PresenceInterval: time.Second})
	b := w.on("b", "o1")
	first, second := w.on("a", "o1"), w.on("a", "o1")
	first.present("org:o1", `{"n":1}`)
	b.expect(`join org:o1 a/a {"n":1}`)
	first.present("org:o1", `{"n":2}`)
	second.present("org:o1", `{"n":3}`)
	b.expect(`update org:o1 a/a {"n":3}`)
	w.hub.ReleasePresence()
	b.nothing(w)
}

// TestWhatIsHeldBackForAKeyThatIsLost does not survive the loss (§8.6.3), though the key
// comes back before the interval ends.
func TestWhatIsHeldBackForAKeyThatIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{PresenceInterval: time.Second})
	w.engine.run = pulls(0)
	a, b := w.on("a", "o1"), w.on("b", "o1")
	a.present("org:o1", `{"n":1}`)
	b.expect(`join org:o1 a/a {"n":1}`)
	a.present("org:o1", `{"n":2}`)
	for _, org := range []string{"o2", "o1"} {
		a.chunk(pullRequest("a", orgSub(org)))
		a.response()
	}
	b.expect(`leave org:o1 a/a `)
	w.hub.ReleasePresence()
	b.nothing(w)
}

// TestPresenceOfOtherProcesses.
func TestPresenceOfOtherProcesses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	there := func(instance, doc string) fanout.Presence {
		msg := fanout.Presence{PresenceKey: fanout.PresenceKey{Partition: "acme", ScopeKey: "org:o1", ActorID: "far", ClientID: "x"}, Instance: instance}
		if doc != "" {
			msg.Doc = []byte(doc)
		}
		return msg
	}
	w.hub.Presence(there("i1", `{"n":1}`)) // before anybody is here
	a := w.on("a", "o1")
	a.expect(`join org:o1 far/x {"n":1}`)
	w.hub.Presence(there("i1", `{"n":2}`))
	a.expect(`update org:o1 far/x {"n":2}`)
	w.hub.Presence(there("i2", `{"n":3}`)) // it moved
	a.expect(`update org:o1 far/x {"n":3}`)
	w.hub.Presence(there("i1", ""))
	a.nothing(w)
	w.hub.Presence(there("i2", ""))
	a.expect(`leave org:o1 far/x `)
	w.hub.Presence(there("i2", ""))
	a.nothing(w)

	// The partition is kept for the presence in it, and what is committed meanwhile is not heard.
	w.hub.Presence(there("i2", `{"n":4}`))
	a.expect(`join org:o1 far/x {"n":4}`)
	a.close()
	w.settleAt(0)
	w.fan.seqs["acme"] = 5
	w.record("b", "b", 5, orgSub("o1"))
	b := w.connect("b", "b")
	b.expect(`join org:o1 far/x {"n":4}`)
	w.commit(change("d", "o1", "f"))
	b.expect("delta s:6[d]>6")
	w.hub.Presence(there("i2", ""))
	b.close()
	w.settleAt(0)
	_, partitions, _, _ := w.hub.Counts()
	require.Zero(t, partitions, "nothing is kept of who left")
}

// TestThePresenceRateCap: peers see the newest document, at a bounded rate (§8.6.4).
func TestThePresenceRateCap(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{PresenceInterval: 1e8}) // 100 ms
	a, b := w.on("a", "o1", "o2"), w.on("b", "o1", "o2")
	for i := range 5 {
		a.present("org:o1", fmt.Sprintf(`{"n":%d}`, i))
	}
	a.present("org:o2", `{}`)
	b.expect(`join org:o1 a/a {"n":0}`, `join org:o2 a/a {}`)
	b.nothing(w)
	w.hub.ReleasePresence()
	b.expect(`update org:o1 a/a {"n":4}`)
	a.present("org:o1", `{"n":5}`)
	b.nothing(w)
	a.present("org:o1", "")
	b.expect(`leave org:o1 a/a `)
	w.hub.ReleasePresence()
	b.nothing(w) // what it took back does not come again
	w.advance(100)
	a.present("org:o1", `{"n":6}`)
	b.expect(`join org:o1 a/a {"n":6}`)
	w.advance(100)
	a.present("org:o1", `{"n":7}`)
	b.expect(`update org:o1 a/a {"n":7}`)
}
