package realtime_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
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
