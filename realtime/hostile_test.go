package realtime_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/ssp2"
)

// deaf connects a client that reads nothing until it is told to.
func (w *world) deaf(name, actor string) *client {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ws, _, err := websocket.Dial( //nolint:bodyclose // the library has read it
		ctx, w.server.URL+"/realtime?clientId="+name, &websocket.DialOptions{HTTPHeader: http.Header{"X-Actor": {actor}}},
	)
	require.NoError(w.t, err)
	ws.SetReadLimit(-1)
	w.t.Cleanup(func() { _ = ws.CloseNow() })
	w.settle() // its hello is written
	return &client{t: w.t, ws: ws, incoming: make(chan received, 100_000)}
}

// listen makes a deaf client read.
func (c *client) listen() {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.read()
	}()
	c.t.Cleanup(func() {
		_ = c.ws.CloseNow()
		<-ended
	})
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestAReaderThatStopsReading: memory stays flat, others get every delta, and it converges
// by the wake-up that it finds at the end. The commits are those of a minute at 500 a second;
// time plays no part in what happens. It measures the heap of the process, so it runs alone.
func TestAReaderThatStopsReading(t *testing.T) { //nolint:paralleltest // see above
	w := newWorld(t, realtime.Options{})
	const commits = 30_000
	w.record("deaf", "ada", 0, orgSub("o1"))
	w.record("well", "bob", 0, orgSub("o1"))
	deaf, well := w.deaf("deaf", "ada"), w.connect("well", "bob")
	row := change("d", "o1", "f")
	row.Payload = make([]byte, 16<<10)
	run := func(n int) {
		for range n {
			seq := w.commit(row)
			require.Equal(t, fmt.Sprintf("delta s:%d[d]>%d", seq, seq), well.next().String())
			if well.send(&ssp2.Ack{Cursor: seq}); seq%16 == 0 {
				well.ping() // its acknowledgements have arrived
			}
		}
	}
	run(1000) // the buffers of the socket are full behind this
	before := heap()
	run(commits - 1000)
	grown := int64(heap()) - int64(before)
	t.Logf("%d MiB of deltas, heap grown by %d KiB", (commits-1000)*len(row.Payload)>>20, grown>>10)
	require.Less(t, grown, int64(4<<20), "bytes of heap for a client that does not read")
	_, _, _, queued := w.hub.Counts()
	require.LessOrEqual(t, queued, 64+2)

	deaf.listen()
	got := 0
	for last := int64(0); ; {
		r := deaf.next()
		if wake, ok := r.event.(*ssp2.Wake); ok {
			require.Equal(t, ssp2.WakeCatchupRequired, wake.Reason)
			if wake.Cursor == commits {
				break // the newest of those that the socket took
			}
		}
		if r.delta != nil {
			got++
			last++
			require.Equal(t, fmt.Sprintf("delta s:%d[d]>%d", last, last), r.String(), "no gap before the wake-up")
		}
	}
	require.Less(t, got, 1000)
	deaf.ack(commits)
	w.commit(row)
	deaf.expect(fmt.Sprintf("delta s:%d[d]>%d", commits+1, commits+1))
}

// TestAHalfOpenConnectionEnds: a client that answers no ping is gone, and its peers see it
// leave; one that answers stays (§8.5).
func TestAHalfOpenConnectionEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("dead", "ada", 0, orgSub("o1"))
	dead := w.deaf("dead", "ada")
	dead.send(&ssp2.PresencePublish{ScopeKey: "org:o1", Doc: []byte("{}")})
	alive := w.on("alive", "o1")
	alive.expect("join org:o1 ada/dead {}")
	w.settle()
	for range 3 {
		w.hub.BeatAll()
		alive.expect("heartbeat")
		alive.ping() // and so its answer to the server's ping has been read
	}
	w.hub.BeatAll()
	for got := ""; got != "leave org:o1 ada/dead "; {
		// Its heartbeat comes as well, unless something is being written to it just then.
		if got = alive.next().String(); got != "heartbeat" {
			require.Equal(t, "leave org:o1 ada/dead ", got)
		}
	}
	w.settleAt(1)
	require.Equal(t, 1, w.dropped(events.DropSilent))
	alive.ping()
}

// TestARequestThatStallsEnds: what was read of it is not kept for ever, even of a client
// that answers pings.
func TestARequestThatStallsEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1"))[:20])
	a.ping()
	for range 2 {
		w.hub.BeatAll()
		a.ping()
	}
	w.hub.BeatAll()
	w.settleAt(0)
}

// TestThousandsOfTinyChunks are one request.
func TestThousandsOfTinyChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(0)
	a := w.connect("a", "ada")
	good := pullRequest("a", orgSub("o1"))
	request := append([]byte{}, good[:len(good)-5]...)
	for range 40 {
		var mark ssp2.Mark
		request, mark = ssp2.BeginFrame(request, 0x7F) // unknown, to be skipped
		request = append(request, make([]byte, 100)...)
		var err error
		request, err = ssp2.EndFrame(request, mark)
		require.NoError(t, err)
	}
	for _, b := range ssp2.AppendEnd(request) {
		a.chunk([]byte{b})
	}
	m, _ := a.response()
	require.Empty(t, statusOf(m))
}

// TestAHugeMessage is not taken in, whatever it is.
func TestAHugeMessage(t *testing.T) {
	t.Parallel()
	huge := make([]byte, 64<<20)
	send := func(c *client, kind websocket.MessageType) {
		// The server closes in the middle of it.
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = c.ws.Write(ctx, kind, huge)
	}
	t.Run("binary", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		a := w.connect("a", "ada")
		good := pullRequest("a", orgSub("o1"))
		message := append([]byte{byte(ssp2.TagRound)}, good[:len(good)-5]...)
		message, _ = ssp2.BeginFrame(message, 0x7F)
		copy(message[len(message)-4:], []byte{0, 0, 0, 4})
		message = append(message, huge...)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = a.ws.Write(ctx, websocket.MessageBinary, message)
		m, _ := a.response()
		require.Equal(t, string(ssp2.CodeInvalidRequest), statusOf(m))
		a.ended()
		w.settleAt(0)
	})
	t.Run("text", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, realtime.Options{})
		a := w.connect("a", "ada")
		send(a, websocket.MessageText)
		a.ended()
		w.settleAt(0)
	})
}

// TestPresenceForAReaderThatStops: what waits for it is bounded, and its peers are as before.
func TestPresenceForAReaderThatStops(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	var orgs []string
	for i := range 2000 {
		orgs = append(orgs, fmt.Sprint("o", i))
	}
	w.record("deaf", "ada", 0, orgSub(orgs...))
	w.deaf("deaf", "ada")
	a := w.on("a", orgs...)
	doc := `{"d":"` + strings.Repeat("x", 15<<10) + `"}`
	for range 2000 {
		// What waits of a peer is replaced by what follows.
		a.send(&ssp2.PresencePublish{ScopeKey: "org:o0", Doc: []byte(doc)})
	}
	a.ping()
	require.Zero(t, w.dropped(events.DropUnread))
	for _, org := range orgs {
		a.send(&ssp2.PresencePublish{ScopeKey: "org:" + org, Doc: []byte(doc)})
	}
	a.ping()
	w.settleAt(1)
	require.Equal(t, 1, w.dropped(events.DropUnread), "too many wait")
	select {
	case r := <-a.incoming:
		t.Fatalf("unexpected: %v", r)
	default:
	}
}

// TestBytesThatAreNoWebSocket end the connection and nothing else.
func TestBytesThatAreNoWebSocket(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	for _, garbage := range []string{strings.Repeat("\xff", 32), "\x81\x05hello", strings.Repeat("\x00", 4096), "\x89\x7e\xff\xff"} {
		conn, err := net.Dial("tcp", w.server.Listener.Addr().String())
		require.NoError(t, err)
		_, err = fmt.Fprintf(conn, "GET /realtime?clientId=a HTTP/1.1\r\nHost: x\r\nX-Actor: ada\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
			"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n%s", garbage)
		require.NoError(t, err)
		buf := make([]byte, 4096)
		for err == nil {
			_, err = conn.Read(buf)
		}
		require.NoError(t, conn.Close())
	}
	w.settleAt(0)
	require.NotContains(t, w.logged.String(), "panic")
}

// dropped counts the connections that were ended for a reason.
func (w *world) dropped(reason events.DropReason) int {
	n := 0
	for _, e := range w.ring.Query(events.Filter{Name: "realtime.dropped"}) {
		if d, ok := e.Event.(events.RealtimeDropped); ok && d.Reason == reason {
			n++
		}
	}
	return n
}
