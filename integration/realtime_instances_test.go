package integration_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// startInstance starts a node with its background work.
func startInstance(t *testing.T, dsn string, s *schema.Schema, change ...func(*syncpg.Config)) *node {
	t.Helper()
	cfg := worldConfig(s)
	for _, f := range change {
		f(&cfg)
	}
	n, err := startNode(dsn, 4, cfg)
	require.NoError(t, err)
	require.NoError(t, n.server.Start(t.Context()))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, n.server.Stop(ctx))
		require.NoError(t, n.stop())
	})
	return n
}

// redDevice is a device that subscribes to the items of the team "red".
func redDevice(t *testing.T, s *schema.Schema, n *node, id string) *device {
	t.Helper()
	d, err := newDevice(s, deviceConfig{url: "http://" + n.addr, partition: "p1", actor: "ada", id: id, wire: ssp2.WireV2})
	require.NoError(t, err)
	require.NoError(t, d.Acquire(t.Context()))
	require.NoError(t, d.Subscribe("red", "items", ssp2.ScopeMap{"team": {"red"}}))
	_, err = d.CatchUp(t.Context())
	require.NoError(t, err)
	return d
}

// title pushes a commit that gives an item a title, until it has an answer, and returns
// its seq.
func (d *device) title(ctx context.Context, id, title string) (int64, error) {
	table, _ := d.schema.Table("items")
	row, err := ssp2.AppendRow(nil, table.Wire, []ssp2.Value{
		{Bytes: []byte(id)},
		{Bytes: []byte("red")},
		{Bytes: []byte(title)},
		{Null: true},
		{},
		{},
		{Null: true},
		{Null: true},
		{Null: true},
	})
	if err != nil {
		return 0, err
	}
	c := &sentCommit{commit: ssp2.PushCommit{
		ClientCommitID: fmt.Sprint("c", len(d.sent)),
		Operations:     []ssp2.Operation{{Table: "items", RowID: id, Op: ssp2.OpUpsert, Payload: row}},
	}}
	d.sent = append(d.sent, c)
	err = await(func() error {
		err := d.deliver(ctx, c)
		if err != nil && !tolerable(err) {
			panic(err)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	if c.answer.CommitSeq == nil {
		return 0, fmt.Errorf("commit %s is not applied: %+v", c.commit.ClientCommitID, c.answer)
	}
	return *c.answer.CommitSeq, nil
}

// subscriber is a device with a socket: it takes deltas as they come, acknowledges them,
// and pulls when it is told to.
type subscriber struct {
	t      *testing.T
	device *device
	conn   *websocket.Conn
	cursor int64
	deltas []int64 // seqs of the commits that came as deltas
	pulls  int
	titles map[string]string // of items, as deltas and pulls brought them
}

func subscribe(t *testing.T, n *node, d *device) *subscriber {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, res, err := websocket.Dial(ctx, "ws://"+n.addr+"/realtime?clientId="+url.QueryEscape(d.id), &websocket.DialOptions{
		HTTPHeader: http.Header{headerActor: {"ada"}, headerPartition: {"p1"}},
	})
	require.NoError(t, err)
	if res.Body != nil {
		defer func() { _ = res.Body.Close() }()
	}
	conn.SetReadLimit(-1)
	t.Cleanup(func() { _ = conn.CloseNow() })
	s := &subscriber{t: t, device: d, conn: conn, titles: map[string]string{}}
	s.cursor, _ = d.Cursor("red")
	kind, text, err := conn.Read(ctx)
	require.NoError(t, err)
	require.Equal(t, websocket.MessageText, kind)
	ev, err := ssp2.ParseServerEvent(text)
	require.NoError(t, err)
	require.IsType(t, &ssp2.Hello{}, ev)
	if ev.(*ssp2.Hello).RequiresSync {
		s.pull(ctx)
	}
	return s
}

// reaches takes messages until the device has everything up to seq.
func (s *subscriber) reaches(seq int64) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	for s.cursor < seq {
		kind, message, err := s.conn.Read(ctx)
		require.NoError(s.t, err, "waiting for %d, at %d, deltas %v", seq, s.cursor, s.deltas)
		if kind == websocket.MessageBinary {
			s.delta(ctx, message)
			continue
		}
		ev, err := ssp2.ParseServerEvent(message)
		require.NoError(s.t, err)
		if _, ok := ev.(*ssp2.Wake); ok {
			s.pull(ctx)
		}
	}
}

// delta applies a delta: the commits after the cursor, without a gap and each once.
func (s *subscriber) delta(ctx context.Context, message []byte) {
	s.t.Helper()
	require.Zero(s.t, message[0], "the channel of deltas")
	m, err := ssp2.DecodeMessage(message[1:])
	require.NoError(s.t, err)
	table, _ := s.device.schema.Table("items")
	for _, f := range m.Frames {
		switch f := f.(type) {
		case *ssp2.Commit:
			require.Equal(s.t, s.cursor+1, f.CommitSeq, "every commit of this test matches")
			s.cursor = f.CommitSeq
			s.deltas = append(s.deltas, f.CommitSeq)
			for _, c := range f.Changes {
				values, err := ssp2.DecodeRow(table.Wire, c.Row, nil)
				require.NoError(s.t, err)
				s.titles[c.RowID] = string(values[2].Bytes)
			}
		case *ssp2.SubEnd:
			require.Equal(s.t, s.cursor, f.NextCursor)
		}
	}
	s.ack(ctx)
}

// pull catches up over HTTP, until the server can answer.
func (s *subscriber) pull(ctx context.Context) {
	s.t.Helper()
	s.pulls++
	require.NoError(s.t, await(func() error {
		_, err := s.device.CatchUp(ctx)
		if err != nil && !tolerable(err) {
			panic(err)
		}
		return err
	}))
	cursor, complete := s.device.Cursor("red")
	require.True(s.t, complete)
	s.cursor = max(s.cursor, cursor)
	for id, row := range s.device.Rows("items") {
		s.titles[id] = string(row.Values[2].Bytes)
	}
	s.ack(ctx)
}

func (s *subscriber) ack(ctx context.Context) {
	s.t.Helper()
	text, err := ssp2.AppendControl(nil, &ssp2.Ack{Cursor: s.cursor})
	require.NoError(s.t, err)
	require.NoError(s.t, s.conn.Write(ctx, websocket.MessageText, text))
}

// dropListeners ends the sessions that listen.
func dropListeners(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), `select count(pg_terminate_backend(pid)) from pg_stat_activity
		where datname = current_database() and application_name = $1`, fanout.ApplicationName).Scan(&n))
	require.Positive(t, n)
}

// listening waits until both instances listen.
func listening(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, pgtest.WaitFor(t.Context(), pool, `select count(*) = 2 from pg_stat_activity
		where datname = current_database() and application_name = $1 and state = 'idle' and query <> ''`, fanout.ApplicationName))
}

func TestADeltaCrossesInstances(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "world"})
	a, b := startInstance(t, db.DSN, s), startInstance(t, db.DSN, s)
	listening(t, db.Pool)
	writer := redDevice(t, s, a, "writer")
	reader := subscribe(t, b, redDevice(t, s, b, "reader"))
	start := reader.cursor
	push := func(title string) int64 {
		seq, err := writer.title(t.Context(), "i", title)
		require.NoError(t, err)
		return seq
	}
	reader.reaches(push("one"))
	reader.reaches(push("two"))
	require.Equal(t, "two", reader.titles["i"])

	// The listeners are killed in between; what nobody hears of is found after connecting.
	dropListeners(t, db.Pool)
	push("three")
	newest := push("four")
	reader.reaches(newest)
	listening(t, db.Pool)
	reader.reaches(push("five"))
	require.Equal(t, "five", reader.titles["i"])
	require.Zero(t, reader.pulls, "all of it came as deltas")
	require.Len(t, reader.deltas, int(reader.cursor-start), "each once")
}

// TestARotationReachesRunningInstances: an epoch that is rotated past the servers, as
// `syncpg epoch rotate` does, is known to all of them at once (§2.1): their sockets are told
// to reset, although nobody polls and the clock in which epochs are remembered stands still.
func TestARotationReachesRunningInstances(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "world"})
	still := func(c *syncpg.Config) {
		c.Clock = func() time.Time { return time.UnixMilli(1_790_000_000_000) }
		c.Realtime.PollInterval = time.Hour
	}
	a, b := startInstance(t, db.DSN, s, still), startInstance(t, db.DSN, s, still)
	listening(t, db.Pool)
	readers := []*subscriber{subscribe(t, a, redDevice(t, s, a, "one")), subscribe(t, b, redDevice(t, s, b, "two"))}
	_, err := readers[0].device.title(t.Context(), "i", "one")
	require.NoError(t, err)
	for _, r := range readers {
		r.reaches(1)
	}
	operator, err := retention.New(db.Pool, retention.Config{})
	require.NoError(t, err)
	rotations := map[string]func() error{
		"one": func() error { _, err := operator.RotateEpoch(t.Context(), "p1"); return err },
		"all": func() error { _, err := operator.RotateEpochs(t.Context()); return err },
	}
	for name, rotate := range rotations {
		before := readers[0].device.Epoch()
		require.NoError(t, rotate())
		for _, r := range readers {
			r.told(ssp2.WakeResetRequired)
			_, err := r.device.Pull(t.Context())
			require.ErrorIs(t, err, client.ErrReset, name)
			require.NotEqual(t, before, r.device.Epoch(), name)
			_, err = r.device.CatchUp(t.Context())
			require.NoError(t, err)
			require.Len(t, r.device.Rows("items"), 1)
		}
	}
}

// told takes messages until there is a wake-up, which must have that reason.
func (s *subscriber) told(reason ssp2.WakeReason) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	for {
		kind, message, err := s.conn.Read(ctx)
		require.NoError(s.t, err, "waiting for a wake-up")
		if kind == websocket.MessageBinary {
			continue
		}
		ev, err := ssp2.ParseServerEvent(message)
		require.NoError(s.t, err)
		if wake, ok := ev.(*ssp2.Wake); ok {
			require.Equal(s.t, reason, wake.Reason)
			return
		}
	}
}

func TestInstancesSurviveARestartOfTheDatabase(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	c := newCluster(t, s)
	a, b := startInstance(t, c.dsn, s), startInstance(t, c.dsn, s)
	listening(t, b.pool)
	writer := redDevice(t, s, a, "writer")
	near, far := subscribe(t, a, redDevice(t, s, a, "near")), subscribe(t, b, redDevice(t, s, b, "far"))
	seq, err := writer.title(t.Context(), "i", "before")
	require.NoError(t, err)
	near.reaches(seq)
	far.reaches(seq)

	// Pushes go on while the server is away.
	pushed := make(chan error, 1)
	go func() {
		var err error
		for i := range 20 {
			if seq, err = writer.title(t.Context(), "i", strconv.Itoa(i)); err != nil {
				break
			}
		}
		pushed <- err
	}()
	require.NoError(t, c.crash(t.Context()))
	require.NoError(t, <-pushed)
	near.reaches(seq)
	far.reaches(seq)

	// And it goes on.
	listening(t, b.pool)
	seq, err = writer.title(t.Context(), "i", "after")
	require.NoError(t, err)
	for _, r := range []*subscriber{near, far} {
		r.reaches(seq)
		require.Equal(t, "after", r.titles["i"])
	}
}

// publish publishes a presence document; nil leaves.
func (s *subscriber) publish(doc string) {
	s.t.Helper()
	ev := &ssp2.PresencePublish{ScopeKey: "team:red"}
	if doc != "" {
		ev.Doc = []byte(doc)
	}
	text, err := ssp2.AppendControl(nil, ev)
	require.NoError(s.t, err)
	require.NoError(s.t, s.conn.Write(s.t.Context(), websocket.MessageText, text))
}

// presence waits for the next presence event and returns its kind, client and document.
func (s *subscriber) presence() string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	for {
		kind, message, err := s.conn.Read(ctx)
		require.NoError(s.t, err)
		if kind != websocket.MessageText {
			continue
		}
		ev, err := ssp2.ParseServerEvent(message)
		require.NoError(s.t, err)
		if p, ok := ev.(*ssp2.Presence); ok {
			return fmt.Sprint(p.Kind, " ", p.ClientID, " ", string(p.Doc))
		}
	}
}

func TestPresenceCrossesInstances(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "world"})
	a, b := startInstance(t, db.DSN, s), startInstance(t, db.DSN, s)
	listening(t, db.Pool)
	ada, eve := subscribe(t, a, redDevice(t, s, a, "ada")), subscribe(t, b, redDevice(t, s, b, "eve"))
	ada.publish(`{"x":1}`)
	require.Equal(t, `join ada {"x":1}`, eve.presence())
	ada.publish(`{"x":2}`)
	require.Equal(t, `update ada {"x":2}`, eve.presence())
	eve.publish(`{"y":1}`)
	require.Equal(t, `join eve {"y":1}`, ada.presence())
	late := subscribe(t, b, redDevice(t, s, b, "late"))
	burst := []string{late.presence(), late.presence()}
	require.ElementsMatch(t, []string{`join ada {"x":2}`, `join eve {"y":1}`}, burst)
	ada.publish("")
	require.Equal(t, "leave ada ", eve.presence())
	require.Equal(t, "leave ada ", late.presence())
	ada.publish(`{"x":3}`)
	require.Equal(t, `join ada {"x":3}`, eve.presence())

	// The whole instance goes, and its clients with it.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, a.server.Stop(ctx))
	require.Equal(t, "leave ada ", eve.presence())
}
