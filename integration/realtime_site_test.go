package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// harbour is servers over one database, with sockets. Every actor of the one partition
// holds every scope.
type harbour struct {
	t       testing.TB
	db      *pgtest.DB
	schema  *syncpg.Schema
	servers []*syncpg.Server
	urls    []string
	http    *http.Client
	counter *pgtest.Counter // of what the servers send
}

// newHarbour starts that many servers.
func newHarbour(t testing.TB, servers int, change func(*syncpg.Config)) *harbour {
	t.Helper()
	s, err := syncpg.ParseSchema(sample.IR())
	require.NoError(t, err)
	h := &harbour{t: t, schema: s, http: &http.Client{Transport: &http.Transport{}}, counter: new(pgtest.Counter)}
	h.db = pgtest.New(t, pgtest.Options{
		Counter:     h.counter,
		TemplateKey: "the sample schema",
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
		},
	})
	t.Cleanup(h.http.CloseIdleConnections)
	for range servers {
		cfg := syncpg.Config{
			Schema: s, PruneInterval: -1,
			Authenticate: func(r *http.Request) (syncpg.Identity, error) {
				return syncpg.Identity{Actor: r.Header.Get("X-Actor"), Partition: "acme"}, nil
			},
			ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
				return scope.Allowed{"team_id": {"*"}}, nil
			},
		}
		if change != nil {
			change(&cfg)
		}
		server, err := syncpg.New(h.db.Pool, cfg)
		require.NoError(t, err)
		require.NoError(t, server.Start(context.Background()))
		listener := httptest.NewServer(server.Handler())
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			require.NoError(t, server.Stop(ctx))
			h.http.CloseIdleConnections()
			listener.Close()
			server.Push().Wait()
		})
		h.servers = append(h.servers, server)
		h.urls = append(h.urls, listener.URL)
	}
	return h
}

// settle waits until all servers have offered all that is committed, and written it.
func (h *harbour) settle() {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, server := range h.servers {
		require.NoError(h.t, server.Realtime().Settle(ctx, 1<<30, map[string]int64{"acme": h.head()}))
	}
}

// head is the newest commit.
func (h *harbour) head() int64 {
	h.t.Helper()
	var seq int64
	require.NoError(h.t, h.db.Pool.QueryRow(context.Background(),
		`select coalesce(max(max_commit_seq), 0) from syncpg.sync_partitions where partition = 'acme'`).Scan(&seq))
	return seq
}

// boat is a device with a socket.
type boat struct {
	*client.Client
	h     *harbour
	name  string
	hello *ssp2.Hello

	ws     *websocket.Conn
	ended  chan struct{}
	arrive chan arrival
	past   []string // what arrived besides the chunks of rounds, in order
	behind bool     // it was told to pull
}

type arrival struct {
	text, delta, chunk []byte
	err                error
}

// device makes a device of the lists of some teams, which is not connected.
func (h *harbour) device(server int, name string, teams ...string) *boat {
	h.t.Helper()
	b := &boat{h: h, name: name}
	var err error
	b.Client, err = client.New(client.Config{
		URL: h.urls[server], ClientID: name, Schema: h.schema, Wire: ssp2.WireV2, LimitCommits: 10,
		Header: http.Header{"X-Actor": {name}}, HTTP: h.http, Round: b.round,
	})
	require.NoError(h.t, err)
	if len(teams) > 0 {
		require.NoError(h.t, b.Subscribe("lists", "lists", ssp2.ScopeMap{"team_id": teams}))
	}
	return b
}

// connect opens the socket.
func (b *boat) connect(server int) *boat {
	b.h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ws, _, err := websocket.Dial( //nolint:bodyclose // the library has read it
		ctx, b.h.urls[server]+"/realtime?clientId="+url.QueryEscape(b.name),
		&websocket.DialOptions{HTTPHeader: http.Header{"X-Actor": {b.name}}},
	)
	require.NoError(b.h.t, err)
	ws.SetReadLimit(-1)
	b.ws, b.arrive, b.ended = ws, make(chan arrival, 10_000), make(chan struct{})
	go func(ws *websocket.Conn, arrive chan<- arrival, ended chan<- struct{}) {
		defer close(ended)
		for {
			kind, data, err := ws.Read(context.Background())
			switch {
			case err != nil:
				arrive <- arrival{err: err}
				return
			case kind == websocket.MessageText:
				arrive <- arrival{text: data}
			case data[0] == byte(ssp2.TagDelta):
				arrive <- arrival{delta: data[1:]}
			default:
				arrive <- arrival{chunk: data[1:]}
			}
		}
	}(ws, b.arrive, b.ended)
	b.h.t.Cleanup(b.cut)
	a := b.wait()
	ev, err := ssp2.ParseServerEvent(a.text)
	require.NoError(b.h.t, err)
	hello, ok := ev.(*ssp2.Hello)
	require.True(b.h.t, ok)
	b.hello = hello
	b.behind = b.behind || hello.RequiresSync
	return b
}

// cut drops the connection.
func (b *boat) cut() {
	_ = b.ws.CloseNow()
	<-b.ended
}

// leave closes the connection.
func (b *boat) leave() {
	_ = b.ws.Close(websocket.StatusNormalClosure, "")
	<-b.ended
}

func (b *boat) wait() arrival {
	b.h.t.Helper()
	select {
	case a := <-b.arrive:
		require.NoError(b.h.t, a.err)
		return a
	case <-time.After(patience):
		b.h.t.Fatal("nothing arrives")
		return arrival{}
	}
}

// round is client.Config.Round over the socket.
func (b *boat) round(ctx context.Context, request []byte) (io.ReadCloser, error) {
	b.behind = false
	for rest := request; len(rest) > 0; {
		n := min(len(rest), 100)
		if err := b.ws.Write(ctx, websocket.MessageBinary, append([]byte{byte(ssp2.TagRound)}, rest[:n]...)); err != nil {
			return nil, err
		}
		rest = rest[n:]
	}
	var response []byte
	for {
		select {
		case a := <-b.arrive:
			switch {
			case a.err != nil:
				return nil, a.err
			case a.delta != nil && response != nil:
				return nil, errors.New("a delta among the chunks of a response (§8.7)")
			case a.chunk == nil:
				if err := b.take(a); err != nil {
					return nil, err
				}
				continue
			}
			response = append(response, a.chunk...)
			if _, err := ssp2.DecodeMessage(response); err == nil {
				return io.NopCloser(bytes.NewReader(response)), nil
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take handles what arrived besides rounds: a delta is applied and acknowledged.
func (b *boat) take(a arrival) error {
	if a.err != nil {
		return a.err
	}
	if a.delta != nil {
		cursor, applied, err := b.Delta(context.Background(), a.delta)
		if err != nil {
			return err
		}
		b.past = append(b.past, fmt.Sprintf("delta %d", cursor))
		if applied {
			return b.send(&ssp2.Ack{Cursor: cursor})
		}
		return nil
	}
	ev, err := ssp2.ParseServerEvent(a.text)
	if err != nil {
		return err
	}
	switch ev := ev.(type) {
	case *ssp2.Wake:
		b.behind = true
		b.past = append(b.past, "wake "+string(ev.Reason))
	case *ssp2.Presence:
		b.past = append(b.past, fmt.Sprintf("%s %s %s %s", ev.Kind, ev.ScopeKey, ev.ClientID, ev.Doc))
	case *ssp2.PresenceError:
		b.past = append(b.past, fmt.Sprintf("%s %s", ev.Code, ev.ScopeKey))
	}
	return nil
}

func (b *boat) send(ev ssp2.ControlEvent) error {
	text, err := ssp2.AppendControl(nil, ev)
	if err != nil {
		return err
	}
	return b.ws.Write(context.Background(), websocket.MessageText, text)
}

// until handles what arrives until that many things have.
func (b *boat) until(things int) []string {
	b.h.t.Helper()
	for len(b.past) < things {
		require.NoError(b.h.t, b.take(b.wait()))
	}
	return b.past
}

// calm handles all there is: whatever the servers had to say has arrived.
func (b *boat) calm() []string {
	b.h.t.Helper()
	b.h.settle()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(b.h.t, b.ws.Ping(ctx))
	for {
		select {
		case a := <-b.arrive:
			require.NoError(b.h.t, b.take(a))
			continue
		default:
			return b.past
		}
	}
}

// sync pulls until it is caught up, over the socket, and acknowledges.
func (b *boat) sync() {
	b.h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if b.Epoch() == "" {
		require.NoError(b.h.t, b.Acquire(ctx))
	}
	_, err := b.CatchUp(ctx)
	require.NoError(b.h.t, err)
	if cursor, ok := b.Floor(); ok {
		require.NoError(b.h.t, b.send(&ssp2.Ack{Cursor: cursor}))
		require.NoError(b.h.t, b.ws.Ping(ctx))
	}
}

// idle pulls as often as it is told to.
func (b *boat) idle() {
	b.h.t.Helper()
	for b.calm(); b.behind; b.calm() {
		b.sync()
	}
}

// push pushes lists, one per commit, over the socket.
func (b *boat) push(ids ...string) {
	b.h.t.Helper()
	b.pushTo("red", ids...)
}

func (b *boat) pushTo(team string, ids ...string) {
	b.h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if b.Epoch() == "" {
		require.NoError(b.h.t, b.Acquire(ctx))
	}
	for _, id := range ids {
		results, err := b.Push(ctx, newListCommit(b.h.t, b.h.schema, id, team))
		require.NoError(b.h.t, err)
		require.Equal(b.h.t, ssp2.PushApplied, results[0].Status)
	}
}

func newListCommit(t testing.TB, s *syncpg.Schema, id, team string) ssp2.PushCommit {
	t.Helper()
	table, ok := s.Table("lists")
	require.True(t, ok)
	text := func(s string) ssp2.Value { return ssp2.Value{Bytes: []byte(s)} }
	row, err := ssp2.AppendRow(nil, table.Wire, []ssp2.Value{text(id), text(team), text("title of " + id), {Null: true}, {Float: 1}, {Int: 0}})
	require.NoError(t, err)
	return ssp2.PushCommit{
		ClientCommitID: "insert " + id,
		Operations:     []ssp2.Operation{{Table: "lists", RowID: id, Op: ssp2.OpUpsert, Payload: row}},
	}
}

// presence publishes a document, or leaves.
func (b *boat) presence(key, doc string) {
	b.h.t.Helper()
	ev := &ssp2.PresencePublish{ScopeKey: key}
	if doc != "" {
		ev.Doc = []byte(doc)
	}
	require.NoError(b.h.t, b.send(ev))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(b.h.t, b.ws.Ping(ctx))
}

// control is a device that syncs over HTTP.
func (h *harbour) control(name string, teams ...string) *client.Client {
	h.t.Helper()
	c, err := client.New(client.Config{
		URL: h.urls[0], ClientID: name, Schema: h.schema, Wire: ssp2.WireV2, Header: http.Header{"X-Actor": {name}}, HTTP: h.http,
	})
	require.NoError(h.t, err)
	require.NoError(h.t, c.Acquire(context.Background()))
	require.NoError(h.t, c.Subscribe("lists", "lists", ssp2.ScopeMap{"team_id": teams}))
	return c
}
