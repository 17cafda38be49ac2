package realtime_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// TestRefusedConnections are answered as the HTTP binding does: JSON under the status of
// the catalogue (§1.1).
func TestRefusedConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{Origins: []string{"https://*.example.com", "plain.test"}, MaxConnections: 3, MaxConnectionsPerClient: 2})
	w.record("taken", "bob", 0, orgSub("o1"))
	keep := []*client{w.connect("a", "ada"), w.connect("a", "ada")}
	for _, tc := range []struct {
		name, client, actor string
		header              []string
		status              int
		code                ssp2.Code
	}{
		{"nobody", "x", "", nil, 401, ssp2.CodeAuthRequired},
		{"no client id", "", "ada", nil, 400, ssp2.CodeInvalidClientID},
		{"a reserved client id", "%5B%22remote-command%22,1%5D", "ada", nil, 400, ssp2.CodeInvalidClientID},
		{"a client of another actor", "taken", "ada", nil, 400, ssp2.CodeInvalidClientID},
		{"a third connection of a client", "a", "ada", nil, 429, ssp2.CodeWebSocketConnectionLimit},
		{"a page of another origin", "x", "ada", []string{"Origin", "https://evil.test"}, 403, ssp2.CodeForbidden},
		{"a page of a scheme that is not meant", "x", "ada", []string{"Origin", "http://app.example.com"}, 403, ssp2.CodeForbidden},
		{"a page of nowhere", "x", "ada", []string{"Origin", "null"}, 403, ssp2.CodeForbidden},
	} {
		_, res, err := w.dial(tc.client, tc.actor, tc.header...) //nolint:bodyclose // the library has read it
		require.Error(t, err, tc.name)
		require.NotNil(t, res, tc.name)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Equal(t, tc.status, res.StatusCode, "%s: %s", tc.name, body)
		require.Equal(t, "application/json", res.Header.Get("Content-Type"), tc.name)
		var e struct {
			Code ssp2.Code `json:"code"`
		}
		require.NoError(t, json.Unmarshal(body, &e), tc.name)
		require.Equal(t, tc.code, e.Code, tc.name)
	}
	third, _, err := w.dial("b", "ada", "Origin", "https://app.example.com") //nolint:bodyclose // likewise
	require.NoError(t, err, "an origin that may")
	_, res, err := w.dial("c", "ada") //nolint:bodyclose // likewise
	require.Error(t, err)
	require.Equal(t, 429, res.StatusCode, "the process has all it takes")
	third.close()
	w.settleAt(2)
	_, _, err = w.dial("b", "ada", "Origin", "http://plain.test") //nolint:bodyclose // likewise
	require.NoError(t, err)
	keep[0].close()
	w.settleAt(2)
	_, _, err = w.dial("a", "ada", "Origin", w.server.URL) //nolint:bodyclose // likewise
	require.NoError(t, err, "the server's own pages")
}

// settleAt waits until that many connections are left.
func (w *world) settleAt(connections int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(w.t, w.hub.Settle(ctx, connections, nil))
}

func TestWhatIsNoUpgradeIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	for _, tc := range []struct {
		method string
		change func(http.Header)
		status int
	}{
		{http.MethodGet, func(h http.Header) { clear(h) }, 426},
		{http.MethodGet, func(h http.Header) { h.Set("Sec-WebSocket-Version", "8") }, 426},
		{http.MethodGet, func(h http.Header) { h.Set("Connection", "keep-alive") }, 426},
		{http.MethodPost, func(http.Header) {}, 405},
	} {
		r, err := http.NewRequestWithContext(t.Context(), tc.method, w.server.URL+"/realtime?clientId=a", nil)
		require.NoError(t, err)
		for name, value := range map[string]string{
			"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
			"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "X-Actor": "ada",
		} {
			r.Header.Set(name, value)
		}
		tc.change(r.Header)
		r.Close = true
		res, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		require.Equal(t, tc.status, res.StatusCode)
		require.NoError(t, res.Body.Close())
	}
}

// TestWhatCannotBeAskedIsRefused: nobody is connected on half of what there is to know.
func TestWhatCannotBeAskedIsRefused(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		fail   func(w *world)
		status int
	}{
		"the database":  {func(w *world) { w.store.fail = context.DeadlineExceeded }, 503},
		"the log":       {func(w *world) { w.fan.watchErr = context.DeadlineExceeded }, 503},
		"the authority": {func(w *world) { w.engine.err = ssp2.Errorf(ssp2.CodeAuthLeaseRequired, "out of reach") }, 401},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.record("a", "ada", 0, orgSub("o1"))
			tc.fail(w)
			_, res, err := w.dial("a", "ada") //nolint:bodyclose // the library has read it
			require.Error(t, err)
			require.Equal(t, tc.status, res.StatusCode)
			w.settleAt(0)
		})
	}
}

// TestHello is §8.1.
func TestHello(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		cursor  int64
		subs    []sub
		want    string
		latest  int64
		revoked bool
	}{
		{"a client that never pulled", -2, nil, "hello -1/5 true", 5, false},
		{"one that never pulled, of a partition without commits", -2, nil, "hello -1/0 true", 0, false},
		{"one that has everything", 5, []sub{orgSub("o1")}, "hello 5/5 false", 5, false},
		{"one that is behind", 4, []sub{orgSub("o1")}, "hello 4/5 true", 5, false},
		{"one from the future", 9, []sub{orgSub("o1")}, "hello 9/5 true", 5, false},
		{"one whose scopes are gone", 5, []sub{orgSub("o1")}, "hello 5/5 true", 5, true},
		{"one that pulled nothing", 5, nil, "hello 5/5 true", 5, false},
		{"one with a table that is gone", 5, []sub{{"s", "gone", ssp2.ScopeMap{"x": {"y"}}}}, "hello 5/5 true", 5, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.fan.seqs["acme"] = tc.latest
			if tc.cursor >= -1 {
				w.record("a", "ada", tc.cursor, tc.subs...)
			}
			if tc.revoked {
				w.engine.allowed = nil
			}
			a := w.connect("a", "ada")
			require.Equal(t, tc.want, received{event: a.hello}.String())
			require.Equal(t, []any{"ada", "a", int64(1), int64(1000)}, []any{a.hello.ActorID, a.hello.ClientID, a.hello.ProtocolVersion, a.hello.TimestampMs})
			require.NotEmpty(t, a.hello.SessionID)
			w.commit(change("d", "o1", "f"))
			switch {
			case tc.revoked || len(tc.subs) == 0 || tc.subs[0].table == "gone":
				a.nothing(w)
			case tc.cursor == 5:
				a.expect("delta s:6[d]>6")
			default:
				a.expect("wake catchup-required 6")
			}
		})
	}
}

// TestAcknowledgementsAreWrittenTogether: one statement for all that changed.
func TestAcknowledgementsAreWrittenTogether(t *testing.T) {
	t.Parallel()
	ticks := make(chan time.Time)
	w := newWorldWith(t, realtime.Options{AckInterval: time.Minute}, func(every time.Duration) <-chan time.Time {
		if every == time.Minute {
			return ticks
		}
		return nil
	})
	w.fan.seqs["acme"] = 10
	var clients []*client
	for i := range 5 {
		name := fmt.Sprintf("c%d", i)
		w.record(name, "ada", 5, orgSub("o1"))
		clients = append(clients, w.connect(name, "ada"))
	}
	for i, c := range clients[:4] {
		for cursor := int64(5); cursor <= int64(6+i); cursor++ {
			c.ack(cursor)
		}
	}
	clients[0].ack(3) // an older one is not news
	ticks <- time.Time{}
	ticks <- time.Time{} // nothing is left
	w.store.mu.Lock()
	require.Equal(t, []db.RealtimeRecordAcksParams{{
		Partitions: []string{"acme", "acme", "acme", "acme"}, ClientIds: []string{"c0", "c1", "c2", "c3"},
		ActorIds: []string{"ada", "ada", "ada", "ada"}, Cursors: []int64{6, 7, 8, 9}, AtMs: []int64{1000, 1000, 1000, 1000},
	}}, w.store.writes)
	w.store.writes, w.store.fail = nil, errors.New("away")
	w.store.mu.Unlock()

	clients[4].ack(7)
	clients[4].close()
	ticks <- time.Time{}
	ticks <- time.Time{}
	w.store.mu.Lock()
	require.Empty(t, w.store.writes)
	w.store.fail = nil
	w.store.mu.Unlock()
	again := w.connect("c4", "ada")
	require.EqualValues(t, 7, again.hello.Cursor, "what is not written yet is known")
	again.ack(8)
	ticks <- time.Time{}
	ticks <- time.Time{}
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	require.Len(t, w.store.writes, 1)
	require.Equal(t, []int64{8}, w.store.writes[0].Cursors, "what could not be written is tried again, the newest of it")
}

// TestAnAcknowledgementIsNotWrittenOverAPull: what came before a pull is forgotten with it.
func TestAnAcknowledgementIsNotWrittenOverAPull(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.fan.seqs["acme"] = 9
	w.record("a", "ada", 3, orgSub("o1"))
	w.engine.run = pulls(5)
	a := w.connect("a", "ada")
	a.ack(8)
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	w.settle() // writes
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	require.Empty(t, w.store.writes)
}

// TestStopDrains: the round in flight finishes, clients are woken and closed with 1001.
func TestStopDrains(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("idle", "ada", 0, orgSub("o1"))
	held, run := hold(pulls(0))
	w.engine.run = run
	idle, busy := w.connect("idle", "ada"), w.connect("busy", "ada")
	idle.ack(0)
	w.commit(change("d", "o1", "f"))
	idle.expect("delta s:1[d]>1")
	idle.ack(1)
	busy.chunk(pullRequest("busy", orgSub("o1")))
	<-held.began

	stopped := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		stopped <- w.hub.Stop(ctx)
	}()
	idle.expect("wake catchup-required 1")
	require.Equal(t, websocket.StatusGoingAway, idle.ended())
	_, res, err := w.dial("new", "ada") //nolint:bodyclose // likewise
	require.Error(t, err)
	require.Equal(t, 503, res.StatusCode)
	close(held.goOn)
	m, _ := busy.response()
	require.Empty(t, statusOf(m))
	busy.expect("wake catchup-required 1")
	require.Equal(t, websocket.StatusGoingAway, busy.ended())
	require.NoError(t, <-stopped)
	w.store.mu.Lock()
	require.Len(t, w.store.writes, 1, "what was acknowledged is written")
	require.Equal(t, []int64{1}, w.store.writes[0].Cursors)
	w.store.mu.Unlock()

	require.NoError(t, w.hub.Stop(t.Context()), "it is stopped")
	require.NoError(t, w.hub.Start(t.Context()))
	require.ErrorIs(t, w.hub.Start(t.Context()), realtime.ErrStarted)
	w.connect("again", "ada")
}

// TestStopHasADeadline: what does not end is cut off.
func TestStopHasADeadline(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	held, run := hold(pulls(0))
	w.engine.run = run
	busy := w.connect("busy", "ada")
	busy.chunk(pullRequest("busy", orgSub("o1")))
	<-held.began
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, w.hub.Stop(ctx), context.Canceled)
	require.NotEqual(t, websocket.StatusNormalClosure, busy.ended())
	require.False(t, w.fan.running, "there is time to tell other processes that nobody is left")
	require.NoError(t, w.hub.Start(t.Context()))
}

// TestStopIsTriedAgain: a transport that did not stop would never start again.
func TestStopIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.fan.stopErr = errors.New("away")
	require.ErrorIs(t, w.hub.Stop(t.Context()), w.fan.stopErr)
	w.fan.stopErr = nil
	require.NoError(t, w.hub.Stop(t.Context()))
	require.NoError(t, w.hub.Start(t.Context()))
}

// TestAClientThatIsGoneEndsItsRound: its context ends, and nothing is left of it.
func TestAClientThatIsGoneEndsItsRound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	ended := make(chan error, 1)
	began := make(chan struct{})
	w.engine.run = func(ctx context.Context, _ round.Identity, _ *ssp2.Request, _ round.Writer) error {
		close(began)
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	<-began
	_ = a.ws.CloseNow()
	require.ErrorIs(t, <-ended, context.Canceled)
	w.settleAt(0)
}

func TestHeartbeats(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, b := w.connect("a", "ada"), w.connect("b", "bob")
	w.settle()
	w.hub.BeatAll()
	a.expect("heartbeat")
	b.expect("heartbeat")
	w.advance(30_000)
	w.settle()
	w.hub.BeatAll()
	beat, ok := a.next().event.(*ssp2.Heartbeat)
	require.True(t, ok)
	require.EqualValues(t, 31_000, beat.TimestampMs)
}

// TestEventsOfConnections.
func TestEventsOfConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	w.commit(change("d1", "o1", "f"), change("d2", "o1", "f"))
	delta := a.next()
	w.hub.Lost("acme", 7)
	a.next()
	a.close()
	w.settleAt(0)
	session := events.Session{Partition: "acme", Actor: "ada", ClientID: "a", SessionID: a.hello.SessionID}
	var got []events.Event
	for _, r := range w.ring.Query(events.Filter{}) {
		if e, ok := r.Event.(events.RealtimeDisconnected); ok {
			require.Positive(t, e.Duration)
			e.Duration = 0
			r.Event = e
		}
		got = append([]events.Event{r.Event}, got...)
	}
	require.Equal(t, []events.Event{
		events.RealtimeConnected{Session: session, Registrations: 1, Cursor: 0, LatestSeq: 0},
		events.RealtimeDeltaSent{Session: session, CommitSeq: 1, Changes: 2, Bytes: int64(len(delta.delta) + 1)},
		events.RealtimeWakeSent{Session: session, Reason: ssp2.WakeCatchupRequired},
		events.RealtimeDisconnected{Session: session},
	}, got)
}
