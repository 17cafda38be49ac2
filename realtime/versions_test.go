package realtime_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// TestDeltasAreInTheSchemaVersionOfTheRound: rows of a delta are in the codec of the
// client's schema version (§2.4), which a round of the connection tells. Before one, only
// who pulled in the newest version gets deltas; a commit is encoded once per version.
func TestDeltasAreInTheSchemaVersionOfTheRound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = func(_ context.Context, _ round.Identity, req *ssp2.Request, out round.Writer) error {
		return answer(out, req.WireVersion, pulled(req, w.head())...)
	}
	w.record("new", "ada", 0, orgSub("o1"))
	for name, version := range map[string]string{"old1": "2", "old2": "2", "gone": "1"} {
		w.record(name, "ada", 0, orgSub("o1"))
		row := w.store.clients[name]
		row.Subscriptions = strings.Replace(row.Subscriptions, `"schemaVersion":3`, `"schemaVersion":`+version, 1)
		w.store.clients[name] = row
	}
	fresh, old1, old2, gone := w.connect("new", "ada"), w.connect("old1", "ada"), w.connect("old2", "ada"), w.connect("gone", "ada")
	require.True(t, gone.hello.RequiresSync, "its version is not served any more")

	text := func(s string) ssp2.Value { return ssp2.Value{Bytes: []byte(s)} }
	values := []ssp2.Value{text("d1"), text("o1"), text("f1"), text("the body")}
	docs, _ := docSchema.Table("docs")
	payload, err := ssp2.AppendRow(nil, docs.Wire, values)
	require.NoError(t, err)
	older, err := ssp2.AppendRow(nil, docs.Wire[:3], values[:3])
	require.NoError(t, err)
	written := change("d1", "o1", "f1")
	written.Payload = payload

	w.commit(written)
	fresh.expect("delta s:1[d1]>1")
	old1.expect("wake catchup-required 1")
	old2.expect("wake catchup-required 1")
	gone.nothing(w)
	require.EqualValues(t, 1, w.hub.Encodes())

	m, err := ssp2.DecodeMessage(pullRequest("old1", orgSub("o1")))
	require.NoError(t, err)
	for _, c := range map[string]*client{"old1": old1, "old2": old2} {
		header, _ := m.Frames[0].(*ssp2.RequestHeader)
		header.SchemaVersion, header.ClientID = 2, map[*client]string{old1: "old1", old2: "old2"}[c]
		request, err := ssp2.AppendMessage(nil, m)
		require.NoError(t, err)
		c.chunk(request)
		c.response()
		c.ack(1)
	}
	w.commit(written)
	for c, want := range map[*client][]byte{fresh: payload, old1: older, old2: older} {
		delta, err := ssp2.DecodeMessage(c.next().delta)
		require.NoError(t, err)
		commit, ok := delta.Frames[2].(*ssp2.Commit)
		require.True(t, ok)
		require.Equal(t, want, commit.Changes[0].Row)
	}
	require.EqualValues(t, 3, w.hub.Encodes(), "once per version")
}

// TestADeviceThatPullsInAnotherVersionElsewhere: its socket does not go on in the version
// that it had before, whichever process and binding the pull took (§2.4).
func TestADeviceThatPullsInAnotherVersionElsewhere(t *testing.T) {
	t.Parallel()
	for name, pull := range map[string]func(w *world, client string, version int32){
		"in this process": func(w *world, client string, version int32) { w.hub.Listed("acme", client, version) },
		"in another one": func(w *world, client string, version int32) {
			w.hub.Notice(fanout.Notice{Partition: "acme", Client: client, SchemaVersion: version})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			a, b := w.on("a", "o1"), w.on("b", "o1")
			pull(w, "a", 3)
			pull(w, "nobody", 2)
			w.commit(change("d", "o1", "f"))
			a.expect("delta s:1[d]>1")
			b.expect("delta s:1[d]>1")
			pull(w, "a", 2)
			w.commit(change("d", "o1", "f"))
			a.expect("wake catchup-required 2")
			b.expect("delta s:2[d]>2")
			a.ack(2)
			w.commit(change("d", "o1", "f"))
			a.expect("wake catchup-required 3")

			// While it connects, with what was recorded before.
			w.store.onRead = func(context.Context) { pull(w, "b", 2) }
			w.record("b", "b", 3, orgSub("o1"))
			again := w.connect("b", "b")
			w.commit(change("d", "o1", "f"))
			again.expect("wake catchup-required 4")
		})
	}
}

// TestAQueuedDeltaIsTakenBack: one that was made in the version of before, and waits.
func TestAQueuedDeltaIsTakenBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxBufferedBytes: 64 << 20, MaxUnacked: 1 << 20})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.deaf("a", "ada")
	row := change("d", "o1", "f")
	row.Payload = make([]byte, 1<<19)
	for range 30 {
		w.commit(row) // until the socket takes no more
	}
	w.hub.Listed("acme", "a", 2)
	a.listen()
	got := 0
	for {
		r := a.next()
		if r.delta != nil {
			got++
			continue
		}
		if wake, ok := r.event.(*ssp2.Wake); ok {
			require.EqualValues(t, 30, wake.Cursor)
			break
		}
	}
	require.Less(t, got, 30)
	require.Equal(t, []fanout.Notice{{Partition: "acme", Client: "a", SchemaVersion: 2}}, w.fan.notices)
}
