package realtime_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

var docSchema = func() *schema.Schema {
	s, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":3,"tables":[
		{"name":"docs","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},
			{"name":"org","type":"string","nullable":false},
			{"name":"folder","type":"string","nullable":false},
			{"name":"body","type":"string","nullable":true}],
		 "scopes":[{"pattern":"org:{org}"},{"pattern":"folder:{folder}"}]},
		{"name":"notes","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},
			{"name":"org","type":"string","nullable":false}],
		 "scopes":[{"pattern":"org:{org}"}]}]}`))
	if err != nil {
		panic(err)
	}
	return s
}()

// docVersions has an older version in which docs have no body, and there are no notes.
var docVersions = func() *schema.Versions {
	older, err := schema.Parse([]byte(`{"irVersion":1,"schemaVersion":2,"tables":[
		{"name":"docs","primaryKey":"id","columns":[
			{"name":"id","type":"string","nullable":false},
			{"name":"org","type":"string","nullable":false},
			{"name":"folder","type":"string","nullable":false}],
		 "scopes":[{"pattern":"org:{org}"},{"pattern":"folder:{folder}"}]}]}`))
	if err != nil {
		panic(err)
	}
	v, err := schema.NewVersions(docSchema, older)
	if err != nil {
		panic(err)
	}
	return v
}()

// world is a hub between stand-ins, served over HTTP.
type world struct {
	t      testing.TB
	hub    *realtime.Hub
	server *httptest.Server
	gate   *fakeGate
	fan    *fakeFan
	store  *fakeStore
	engine *fakeEngine
	ring   *events.Ring
	logged *lockedBuffer
	http   *http.Client // of clients; nil: any

	mu    sync.Mutex
	nowMs int64
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// fakeFan stands in for a fanout: tests call the hub's Sink methods themselves.
type fakeFan struct {
	mu        sync.Mutex
	seqs      map[string]int64
	watched   map[string]int
	published []string
	notices   []fanout.Notice
	watchErr  error
	stopErr   error
	running   bool
}

func (f *fakeFan) Start(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running {
		return fanout.ErrStarted
	}
	f.running = true
	return nil
}

func (f *fakeFan) Stop(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := errors.Join(ctx.Err(), f.stopErr)
	f.running = f.running && err != nil
	return err
}

func (*fakeFan) Committed(string, int64) {}
func (*fakeFan) Look()                   {}

func (f *fakeFan) Watch(_ context.Context, partition string) (int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.watchErr != nil {
		return 0, f.watchErr
	}
	f.watched[partition]++
	return f.seqs[partition], nil
}

func (f *fakeFan) Notify(n fanout.Notice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n.At = time.Time{}
	f.notices = append(f.notices, n)
}

func (f *fakeFan) Unwatch(partition string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watched[partition]--
}

func (f *fakeFan) PublishPresence(key fanout.PresenceKey, doc []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.published = append(f.published, fmt.Sprintf("%s %s %s", key.ScopeKey, key.ClientID, doc))
}

// fakeStore stands in for the database.
type fakeStore struct {
	mu      sync.Mutex
	clients map[string]db.RealtimeReadClientRow
	writes  []db.RealtimeRecordAcksParams
	fail    error
	onRead  func(context.Context) // after a client's record was read
}

func (s *fakeStore) RealtimeReadClient(ctx context.Context, arg db.RealtimeReadClientParams) (db.RealtimeReadClientRow, error) {
	s.mu.Lock()
	row, ok := s.clients[arg.ClientID]
	if !ok {
		row.Cursor = -1
	}
	fail, onRead := s.fail, s.onRead
	s.mu.Unlock()
	if onRead != nil {
		onRead(ctx)
	}
	return row, errors.Join(fail, ctx.Err())
}

func (s *fakeStore) RealtimeRecordAcks(_ context.Context, arg db.RealtimeRecordAcksParams) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	s.writes = append(s.writes, arg)
	return nil
}

// fakeEngine stands in for round.Engine.
type fakeEngine struct {
	mu      sync.Mutex
	allowed scope.Allowed
	err     error
	run     func(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error
	asked   []round.ScopeRequest
}

func (e *fakeEngine) Run(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error {
	e.mu.Lock()
	run := e.run
	e.mu.Unlock()
	if run == nil {
		return errors.New("no round is expected")
	}
	return run(ctx, id, req, w)
}

func (e *fakeEngine) Resolve(_ context.Context, req round.ScopeRequest) (scope.Resolution, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked = append(e.asked, req)
	if e.err != nil {
		return scope.Resolution{}, e.err
	}
	return scope.Resolution{Grants: scope.Compile(e.allowed)}, nil
}

type fakeGate struct {
	mu        sync.Mutex
	forgotten []string
}

func (*fakeGate) Enter(context.Context, string) (gate.Epoch, error) {
	return gate.Epoch{LogEpoch: "epoch-1"}, nil
}

func (g *fakeGate) Forget(partition string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgotten = append(g.forgotten, partition)
}

func (g *fakeGate) ForgetAll() { g.Forget("(all)") }

// newWorld starts a hub, whose clock stands still and whose tickers never tick. Requests
// name their actor in the header X-Actor.
func newWorld(t testing.TB, options realtime.Options) *world {
	t.Helper()
	return newWorldWith(t, options, func(time.Duration) <-chan time.Time { return nil })
}

func newWorldWith(t testing.TB, options realtime.Options, tick func(every time.Duration) <-chan time.Time) *world {
	t.Helper()
	w := &world{
		t: t, nowMs: 1000, ring: events.NewRing(1000), logged: &lockedBuffer{},
		gate:   &fakeGate{},
		fan:    &fakeFan{seqs: map[string]int64{}, watched: map[string]int{}},
		store:  &fakeStore{clients: map[string]db.RealtimeReadClientRow{}},
		engine: &fakeEngine{allowed: scope.Allowed{"org": {"*"}, "folder": {"*"}}},
	}
	hub, err := realtime.NewWith(realtime.Config{
		Options: options, Schema: docSchema, Versions: docVersions, Rounds: w.engine, Gate: w.gate,
		Authenticate: func(r *http.Request) (round.Identity, error) {
			actor := r.Header.Get("X-Actor")
			if actor == "" {
				return round.Identity{}, errors.New("nobody")
			}
			partition := r.Header.Get("X-Partition")
			if partition == "" {
				partition = "acme"
			}
			return round.Identity{Actor: actor, Partition: partition}, nil
		},
		MaxRequestBytes: 1 << 20, Events: w.ring, Clock: w.now,
		Logger: slog.New(slog.NewTextHandler(w.logged, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}, w.store, w.fan)
	require.NoError(t, err)
	hub.Ticks(tick)
	w.hub = hub
	require.NoError(t, hub.Start(t.Context()))
	mux := http.NewServeMux()
	mux.Handle("/realtime", hub)
	w.server = httptest.NewServer(mux)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, hub.Stop(ctx))
		w.server.Close()
		connections, partitions, groups, queued := hub.Counts()
		require.Equal(t, []int{0, 0, 0, 0}, []int{connections, partitions, groups, queued}, "nothing is left of anybody")
		w.fan.mu.Lock()
		defer w.fan.mu.Unlock()
		for partition, n := range w.fan.watched {
			require.Zero(t, n, partition)
		}
	})
	return w
}

func (w *world) now() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return time.UnixMilli(w.nowMs)
}

func (w *world) advance(ms int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nowMs += ms
}

// settle waits until nothing is under way.
func (w *world) settle() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(w.t, w.hub.Settle(ctx, 1<<30, nil))
}

// sub is a subscription of a client's record.
type sub struct {
	id, table string
	scopes    ssp2.ScopeMap
}

func orgSub(orgs ...string) sub { return sub{"s", "docs", ssp2.ScopeMap{"org": orgs}} }

// record stores what a client's last pull left.
func (w *world) record(client, actor string, cursor int64, subs ...sub) {
	type stored struct {
		ID     string        `json:"id"`
		Table  string        `json:"table"`
		Scopes ssp2.ScopeMap `json:"scopes"`

		SchemaVersion int32 `json:"schemaVersion"`
	}
	list := []stored{}
	for _, s := range subs {
		list = append(list, stored{s.id, s.table, s.scopes, docSchema.Version})
	}
	text, err := json.Marshal(list)
	require.NoError(w.t, err)
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	w.store.clients[client] = db.RealtimeReadClientRow{
		ActorID: actor, WireVersion: 2, Cursor: cursor, Subscriptions: string(text), MaxCommitSeq: w.head(),
	}
}

func (w *world) head() int64 {
	w.fan.mu.Lock()
	defer w.fan.mu.Unlock()
	return w.fan.seqs["acme"]
}

// change is a row of docs.
func change(id, org, folder string) fanout.Change {
	return fanout.Change{
		Table: "docs", RowID: id, Op: ssp2.OpUpsert, RowVersion: 1,
		Scopes: []string{"folder=" + folder, "org=" + org}, Payload: []byte("row of " + id),
	}
}

// commit appends a commit to the log and tells the hub. It returns its seq.
func (w *world) commit(changes ...fanout.Change) int64 {
	w.fan.mu.Lock()
	w.fan.seqs["acme"]++
	seq := w.fan.seqs["acme"]
	w.fan.mu.Unlock()
	w.hub.Commits("acme", seq-1, []fanout.Commit{{Seq: seq, CreatedAtMs: 77, ActorID: "writer", Changes: changes}})
	return seq
}

// client is a device with a socket.
type client struct {
	t        testing.TB
	ws       *websocket.Conn
	incoming chan received
	hello    *ssp2.Hello
}

// received is one message, or how the connection ended.
type received struct {
	event ssp2.ControlEvent
	delta []byte // without its tag
	chunk []byte
	err   error
}

func (r received) String() string {
	switch {
	case r.err != nil:
		return "end: " + r.err.Error()
	case r.delta != nil:
		m, err := ssp2.DecodeMessage(r.delta)
		if err != nil {
			return "bad delta: " + err.Error()
		}
		var b strings.Builder
		b.WriteString("delta")
		for _, f := range m.Frames {
			switch f := f.(type) {
			case *ssp2.SubStart:
				fmt.Fprintf(&b, " %s", f.ID)
			case *ssp2.Commit:
				fmt.Fprintf(&b, ":%d[", f.CommitSeq)
				for i, ch := range f.Changes {
					if i > 0 {
						b.WriteByte(' ')
					}
					b.WriteString(ch.RowID)
				}
				b.WriteByte(']')
			case *ssp2.SubEnd:
				fmt.Fprintf(&b, ">%d", f.NextCursor)
			}
		}
		return b.String()
	case r.chunk != nil:
		return fmt.Sprintf("chunk of %d bytes", len(r.chunk))
	}
	switch ev := r.event.(type) {
	case *ssp2.Wake:
		return fmt.Sprintf("wake %s %d", ev.Reason, ev.Cursor)
	case *ssp2.Hello:
		return fmt.Sprintf("hello %d/%d %v", ev.Cursor, ev.LatestCursor, ev.RequiresSync)
	case *ssp2.Heartbeat:
		return "heartbeat"
	case *ssp2.Presence:
		return fmt.Sprintf("%s %s %s/%s %s", ev.Kind, ev.ScopeKey, ev.ActorID, ev.ClientID, ev.Doc)
	case *ssp2.PresenceError:
		return fmt.Sprintf("refused %s %s", ev.ScopeKey, ev.Code)
	}
	return fmt.Sprintf("%T", r.event)
}

// dial connects, without reading the hello.
func (w *world) dial(name, actor string, header ...string) (*client, *http.Response, error) {
	w.t.Helper()
	h := http.Header{}
	if actor != "" {
		h.Set("X-Actor", actor)
	}
	for i := 0; i+1 < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ws, res, err := websocket.Dial(
		ctx, w.server.URL+"/realtime?clientId="+name, &websocket.DialOptions{HTTPHeader: h, HTTPClient: w.http},
	)
	if err != nil {
		return nil, res, err
	}
	ws.SetReadLimit(-1)
	c := &client{t: w.t, ws: ws, incoming: make(chan received, 10000)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.read()
	}()
	w.t.Cleanup(func() {
		_ = ws.CloseNow()
		<-ended
	})
	return c, res, nil
}

// connect connects and takes the hello.
func (w *world) connect(name, actor string) *client {
	w.t.Helper()
	c, _, err := w.dial(name, actor) //nolint:bodyclose // the library has read it
	require.NoError(w.t, err)
	hello, ok := c.next().event.(*ssp2.Hello)
	require.True(w.t, ok, "hello comes first")
	c.hello = hello
	return c
}

func (c *client) read() {
	defer close(c.incoming)
	for {
		kind, data, err := c.ws.Read(context.Background())
		if err != nil {
			c.incoming <- received{err: err}
			return
		}
		r := received{}
		switch {
		case kind == websocket.MessageText:
			r.event, r.err = ssp2.ParseServerEvent(data)
		case len(data) > 0 && data[0] == byte(ssp2.TagDelta):
			r.delta = data[1:]
		case len(data) > 0 && data[0] == byte(ssp2.TagRound):
			r.chunk = data[1:]
		default:
			r.err = fmt.Errorf("a binary message %x", data)
		}
		c.incoming <- r
	}
}

// next returns the next message.
func (c *client) next() received {
	c.t.Helper()
	select {
	case r, open := <-c.incoming:
		if !open {
			c.t.Fatal("the connection has ended")
		}
		return r
	case <-time.After(patience):
		c.t.Fatal("nothing arrives")
		return received{}
	}
}

// expect takes the next messages.
func (c *client) expect(want ...string) {
	c.t.Helper()
	for _, s := range want {
		require.Equal(c.t, s, c.next().String())
	}
}

// nothing says that nothing has arrived: whatever was under way is over, and a ping, which
// is answered behind it, has been.
func (c *client) nothing(w *world) {
	c.t.Helper()
	w.settle()
	c.ping()
	select {
	case r := <-c.incoming:
		c.t.Fatalf("unexpected: %v", r)
	default:
	}
}

// ping returns when the server has read what was sent before, and what it had written
// before has arrived.
func (c *client) ping() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(c.t, c.ws.Ping(ctx))
}

// ended returns the close code of a connection that the server ended.
func (c *client) ended() websocket.StatusCode {
	c.t.Helper()
	for {
		if r := c.next(); r.err != nil {
			return websocket.CloseStatus(r.err)
		}
	}
}

func (c *client) send(ev ssp2.ControlEvent) {
	c.t.Helper()
	text, err := ssp2.AppendControl(nil, ev)
	require.NoError(c.t, err)
	c.text(string(text))
}

func (c *client) text(s string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(c.t, c.ws.Write(ctx, websocket.MessageText, []byte(s)))
}

// ack acknowledges, and returns when the server knows.
func (c *client) ack(cursor int64) {
	c.t.Helper()
	c.send(&ssp2.Ack{Cursor: cursor})
	c.ping()
}

func (c *client) binary(b ...byte) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(c.t, c.ws.Write(ctx, websocket.MessageBinary, b))
}

func (c *client) chunk(b []byte) {
	c.t.Helper()
	c.binary(append([]byte{byte(ssp2.TagRound)}, b...)...)
}

// close disconnects.
func (c *client) close() {
	c.t.Helper()
	_ = c.ws.Close(websocket.StatusNormalClosure, "")
}

// response takes a whole response and whatever came among its chunks.
func (c *client) response() (m *ssp2.Message, others []string) {
	c.t.Helper()
	var b []byte
	for {
		r := c.next()
		require.NoError(c.t, r.err)
		if r.chunk == nil {
			others = append(others, r.String())
			continue
		}
		b = append(b, r.chunk...)
		if m, err := ssp2.DecodeMessage(b); err == nil {
			return m, others
		}
	}
}

// pullRequest is the request of a round that pulls.
func pullRequest(client string, subs ...sub) []byte {
	epoch := "epoch-1"
	req := &ssp2.Request{
		WireVersion: ssp2.WireV2, Header: ssp2.RequestHeader{ClientID: client, SchemaVersion: 3, LogEpoch: &epoch},
		Pull: &ssp2.PullHeader{Accept: 3},
	}
	for _, s := range subs {
		req.Subscriptions = append(req.Subscriptions, ssp2.Subscription{ID: s.id, Table: s.table, Scopes: s.scopes, Cursor: -1})
	}
	b, err := ssp2.AppendMessage(nil, req.Message())
	if err != nil {
		panic(err)
	}
	return b
}

// answer writes a response that has these frames.
func answer(w round.Writer, wire ssp2.WireVersion, frames ...ssp2.Frame) error {
	version := int32(3)
	header := &ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: "epoch-1"}
	b, err := ssp2.AppendMessage(nil, &ssp2.Message{WireVersion: wire, Kind: ssp2.KindResponse, Frames: append([]ssp2.Frame{header}, frames...)})
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// pulled answers a pull: every subscription is active, with the scopes it asked for.
func pulled(req *ssp2.Request, next int64) []ssp2.Frame {
	var frames []ssp2.Frame
	for _, s := range req.Subscriptions {
		frames = append(
			frames, &ssp2.SubStart{ID: s.ID, Status: ssp2.SubActive, EffectiveScopes: s.Scopes},
			&ssp2.SubEnd{NextCursor: next},
		)
	}
	return frames
}

var _ io.Writer = (*lockedBuffer)(nil)
