package realtime_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// TestACommitBetweenWatchAndHello: what is committed while a client is being connected is
// told of exactly once, as a hello or as a delta (§8.1, §8.2).
func TestACommitBetweenWatchAndHello(t *testing.T) {
	t.Parallel()
	t.Run("the client does not have it", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		w.record("a", "ada", 0, orgSub("o1"))
		w.store.onRead = func(context.Context) { w.commit(change("d1", "o1", "f")) }
		a, _, err := w.dial("a", "ada") //nolint:bodyclose // the library has read it
		require.NoError(t, err)
		a.expect("hello 0/1 true")
		a.nothing(w)
		w.commit(change("d2", "o1", "f"))
		a.expect("wake catchup-required 2")
		a.ack(2) // it has pulled
		w.commit(change("d3", "o1", "f"))
		a.expect("delta s:3[d3]>3")
		a.nothing(w)
	})
	t.Run("the client has it from elsewhere", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		w.record("a", "ada", 1, orgSub("o1"))
		row := w.store.clients["a"]
		row.MaxCommitSeq = 1
		w.store.clients["a"] = row
		a, _, err := w.dial("a", "ada") //nolint:bodyclose // likewise
		require.NoError(t, err)
		a.expect("hello 1/1 false")
		w.commit(change("d1", "o1", "f")) // reaches this process only now
		a.nothing(w)
		w.commit(change("d2", "o1", "f"))
		a.expect("delta s:2[d2]>2")
		a.nothing(w)
	})
	t.Run("another client is connected already", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		w.record("first", "ada", 0, orgSub("o1"))
		first := w.connect("first", "ada")
		w.record("a", "ada", 0, orgSub("o1"))
		w.store.onRead = func(context.Context) { w.commit(change("d1", "o1", "f")) }
		a, _, err := w.dial("a", "ada") //nolint:bodyclose // likewise
		require.NoError(t, err)
		a.expect("hello 0/1 true")
		first.expect("delta s:1[d1]>1")
		a.nothing(w)
		first.nothing(w)
	})
	t.Run("another client is connected already, and commits are on their way to it", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		first := w.on("first", "o1")
		w.record("a", "ada", 0, orgSub("o1"))
		row := w.store.clients["a"]
		row.MaxCommitSeq = 2
		w.store.clients["a"] = row
		a, _, err := w.dial("a", "ada") //nolint:bodyclose // likewise
		require.NoError(t, err)
		a.expect("hello 0/2 true")
		w.commit(change("d1", "o1", "f"))
		first.expect("delta s:1[d1]>1")
		a.expect("wake catchup-required 2")
		a.ack(2) // it has pulled
		w.commit(change("d2", "o1", "f"))
		first.expect("delta s:2[d2]>2")
		a.nothing(w)
		w.commit(change("d3", "o1", "f"))
		a.expect("delta s:3[d3]>3")
	})
}

// TestAnAcknowledgementOfTheFuture does not keep deltas from a client, nor is it stored.
func TestAnAcknowledgementOfTheFuture(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	w.commit(change("d1", "o1", "f"))
	a.expect("delta s:1[d1]>1")
	a.ack(1<<53 - 1)
	w.commit(change("d2", "o1", "f"))
	a.expect("delta s:2[d2]>2")
	w.settle()
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	for _, write := range w.store.writes {
		require.LessOrEqual(t, write.Cursors[0], int64(2))
	}
	require.NotEmpty(t, w.store.writes)
}

// TestAClientThatReadsNoRefusals is ended before they take much memory.
func TestAClientThatReadsNoRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, w.server.URL+"/realtime?clientId=a", &websocket.DialOptions{ //nolint:bodyclose // likewise
		HTTPHeader: map[string][]string{"X-Actor": {"ada"}},
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = ws.CloseNow() })
	const messages = 700 // fewer than events may wait
	for i := range messages {
		text, err := ssp2.AppendControl(nil, &ssp2.PresencePublish{ScopeKey: fmt.Sprint("org:", i, strings.Repeat("x", 60<<10)), Doc: []byte(`{}`)})
		require.NoError(t, err)
		if err := ws.Write(ctx, websocket.MessageText, text); err != nil {
			require.NoError(t, ctx.Err())
			w.settleAt(0)
			require.Equal(t, 1, w.dropped(events.DropUnread))
			return
		}
	}
	require.Fail(t, "40 MiB of refusals wait for it")
}

// TestAClientThatReadsItsRefusalsStays, however many there are.
func TestAClientThatReadsItsRefusalsStays(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a := w.on("a", "o1")
	key := "org:" + strings.Repeat("x", 60<<10)
	for range 20 { // more than may wait
		a.present(key, `{}`)
		require.Equal(t, "refused "+key+" presence.forbidden", a.next().String())
	}
	a.nothing(w)
}

// TestStopWhileAClientIsBeingConnected waits no longer than its context says, whatever the
// database does.
func TestStopWhileAClientIsBeingConnected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	entered := make(chan struct{})
	ended := make(chan error, 1)
	w.store.onRead = func(ctx context.Context) {
		close(entered)
		<-ctx.Done()
		ended <- context.Cause(ctx)
	}
	status := make(chan int, 1)
	go func() {
		defer close(status)
		if _, res, _ := w.dial("a", "ada"); res != nil { //nolint:bodyclose // likewise
			status <- res.StatusCode
		}
	}()
	<-entered
	up, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, w.hub.Stop(up), context.Canceled)
	require.ErrorIs(t, <-ended, context.Canceled, "not that of its own time limit")
	require.Equal(t, 503, <-status)
}

// TestAClientThatMovedToAnotherProcess: what it published here is not told of any more,
// or it would be present for ever (§8.6.1).
func TestAClientThatMovedToAnotherProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	w.record("b", "bob", 0, orgSub("o1"))
	a, b := w.connect("a", "ada"), w.connect("b", "bob")
	a.send(&ssp2.PresencePublish{ScopeKey: "org:o1", Doc: []byte(`{"at":"here"}`)})
	b.expect(`join org:o1 ada/a {"at":"here"}`)
	key := fanout.PresenceKey{Partition: "acme", ScopeKey: "org:o1", ActorID: "ada", ClientID: "a"}
	w.hub.Presence(fanout.Presence{PresenceKey: key, Instance: "other", Doc: []byte(`{"at":"there"}`)})
	b.expect(`update org:o1 ada/a {"at":"there"}`)
	a.close()
	w.settleAt(1)
	b.nothing(w)
	w.fan.mu.Lock()
	require.Equal(t, []string{`org:o1 a {"at":"here"}`, "org:o1 a "}, w.fan.published)
	w.fan.mu.Unlock()
	w.hub.Presence(fanout.Presence{PresenceKey: key, Instance: "other"})
	b.expect("leave org:o1 ada/a ")
}

// TestDisconnect: who lost a scope keeps it no longer than the host allows (§3.3, §8.1).
func TestDisconnect(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	for client, actor := range map[string]string{"a1": "ada", "a2": "ada", "b": "bob"} {
		w.record(client, actor, 0, orgSub("o1"))
	}
	a1, a2, b := w.connect("a1", "ada"), w.connect("a2", "ada"), w.connect("b", "bob")
	revoke := func() int {
		w.engine.mu.Lock()
		w.engine.allowed = scope.Allowed{"org": {"o2"}}
		w.engine.mu.Unlock()
		return w.hub.Disconnect("acme", "ada")
	}
	require.Equal(t, 2, revoke())
	w.commit(change("d1", "o1", "f"))
	for _, c := range []*client{a1, a2} {
		require.ErrorIs(t, c.next().err, io.EOF)
	}
	b.expect("delta s:1[d1]>1")
	w.settleAt(1)
	require.Zero(t, w.hub.Disconnect("other", "bob"))
	require.Zero(t, w.hub.Disconnect("acme", "b"))

	again := w.connect("a1", "ada")
	w.commit(change("d2", "o1", "f"))
	b.expect("delta s:2[d2]>2")
	again.nothing(w)
}

// TestDisconnectWhileAClientIsBeingConnected: what was resolved before does not count.
func TestDisconnectWhileAClientIsBeingConnected(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	w.store.onRead = func(context.Context) { w.hub.Disconnect("acme", "ada") }
	a, _, err := w.dial("a", "ada") //nolint:bodyclose // likewise
	require.NoError(t, err)
	require.Equal(t, websocket.StatusGoingAway, a.ended())
}

// TestOriginsThatMayNot: the rule is about the host and the port that a browser names, not
// about what they begin or end with.
func TestOriginsThatMayNot(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{Origins: []string{"https://*.example.com", "plain.test:8080"}})
	for origin, admitted := range map[string]bool{
		"https://app.example.com": true, "HTTPS://App.Example.COM": true, "http://plain.test:8080": true,
		"null": false, "file://": false, "https://example.com": false, "http://app.example.com": false,
		"https://app.example.com.evil.test": false, "https://app.example.com:444": false, "https://evil.test/.example.com": false,
		"https://app.example.com@evil.test": false, "http://plain.test": false, "http://plain.test:80": false, "://": false,
	} {
		_, res, err := w.dial("a", "ada", "Origin", origin) //nolint:bodyclose // likewise
		if admitted {
			require.NoError(t, err, origin)
			continue
		}
		require.Error(t, err, origin)
		require.Equal(t, 403, res.StatusCode, origin)
	}
}

// TestOriginsThatNoBrowserSends: what could never match is refused, rather than every page.
func TestOriginsThatNoBrowserSends(t *testing.T) {
	t.Parallel()
	for origin, want := range map[string]string{
		"https://app.example.com/": "is no origin", "https://app.example.com/app": "is no origin", "app.example.com/": "is no origin",
		"https://": "is no origin", "": "is no origin", "[": "syntax error in pattern",
	} {
		_, err := realtime.NewWith(realtime.Config{
			Options: realtime.Options{Origins: []string{origin}}, Schema: docSchema, Versions: docVersions,
			Rounds: &fakeEngine{}, Gate: &fakeGate{},
			Authenticate: func(*http.Request) (round.Identity, error) { return round.Identity{}, nil },
		}, &fakeStore{}, &fakeFan{})
		require.ErrorContains(t, err, want, origin)
	}
}

// TestDisconnectReachesOtherProcesses: what another process tells ends the connections that
// are older than that, here as there.
func TestDisconnectReachesOtherProcesses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, b := w.on("ada", "o1"), w.on("bob", "o1")
	before := time.Now().Add(-time.Hour)
	w.hub.Notice(fanout.Notice{Partition: "acme", Actor: "ada", At: before})
	w.hub.Notice(fanout.Notice{Partition: "other", Actor: "ada", At: time.Now()})
	w.hub.Notice(fanout.Notice{Partition: "acme", Actor: "cyd", At: time.Now()})
	w.commit(change("d1", "o1", "f"))
	a.expect("delta s:1[d1]>1")
	w.hub.Notice(fanout.Notice{Partition: "acme", Actor: "ada", At: time.Now()})
	require.ErrorIs(t, a.next().err, io.EOF)
	w.settleAt(1)
	b.expect("delta s:1[d1]>1")
	require.Empty(t, w.fan.notices, "what was heard is not told on")

	require.Equal(t, 1, w.hub.Disconnect("acme", "bob"))
	require.Equal(t, []fanout.Notice{{Partition: "acme", Actor: "bob"}}, w.fan.notices)
	c := w.on("cyd", "o1")
	w.hub.Notice(fanout.Notice{At: before})
	c.ping()
	w.hub.Notice(fanout.Notice{At: time.Now()})
	require.ErrorIs(t, c.next().err, io.EOF, "too many to be named")
}

// TestWhatIsHeldBackOfAClientThatMoved is not let through: it is older than what the client
// published in the other process (§8.6.4).
func TestWhatIsHeldBackOfAClientThatMoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{PresenceInterval: time.Second})
	a, b := w.on("a", "o1"), w.on("b", "o1")
	a.present("org:o1", `{"n":1}`)
	a.present("org:o1", `{"n":2}`)
	b.expect(`join org:o1 a/a {"n":1}`)
	key := fanout.PresenceKey{Partition: "acme", ScopeKey: "org:o1", ActorID: "a", ClientID: "a"}
	w.hub.Presence(fanout.Presence{PresenceKey: key, Instance: "other", Doc: []byte(`{"n":3}`)})
	b.expect(`update org:o1 a/a {"n":3}`)
	w.hub.ReleasePresence()
	b.nothing(w)
}
