package integration_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// front is an address behind which servers change, as behind a proxy.
type front struct {
	url    string
	server *syncpg.Server
	now    atomic.Pointer[http.Handler]
}

func newFront(t *testing.T) *front {
	t.Helper()
	f := &front{}
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*f.now.Load()).ServeHTTP(w, r) }))
	t.Cleanup(proxy.Close)
	f.url = proxy.URL
	return f
}

// serve puts a new server over a pool behind the front.
func (f *front) serve(t *testing.T, pool *pgxpool.Pool, cfg syncpg.Config) {
	t.Helper()
	server, err := syncpg.New(pool, cfg)
	require.NoError(t, err)
	require.NoError(t, server.Ready(t.Context()))
	t.Cleanup(server.Push().Wait)
	f.server = server
	h := withAllowed(server.Handler())
	f.now.Store(&h)
}

// written is a commit that writes one item of the team red, whatever is there.
func (d *device) written(t *testing.T, id, item, title string) *sentCommit {
	t.Helper()
	null := ssp2.Value{Null: true}
	return d.upserted(t, id, "items", []ssp2.Value{
		textValue(item), textValue("red"), textValue(title), null, {Float: 1}, {Int: 1}, null, null, null,
	})
}

func textValue(s string) ssp2.Value { return ssp2.Value{Bytes: []byte(s)} }

// upserted is a commit that writes a whole row, whatever is there.
func (d *device) upserted(t *testing.T, id, tableName string, values []ssp2.Value) *sentCommit {
	t.Helper()
	table, _ := d.schema.Table(tableName)
	rowID, _ := table.RowID(values)
	op := ssp2.Operation{Table: table.Name, RowID: rowID, Op: ssp2.OpUpsert}
	var err error
	if d.wire < ssp2.WireV3 {
		op.Payload, err = ssp2.AppendRow(nil, table.Wire, values)
	} else {
		present := ssp2.NewBitmap(len(values))
		for i := range values {
			present.Set(i)
		}
		op.Payload, err = ssp2.AppendSparseRow(nil, table.Wire, table.PrimaryKey, present, values)
	}
	require.NoError(t, err)
	c := &sentCommit{commit: ssp2.PushCommit{ClientCommitID: id, Operations: []ssp2.Operation{op}}}
	d.sent = append(d.sent, c)
	return c
}

// restoredDevice is a device with a transport that may lose responses.
type restoredDevice struct {
	*device
	scissors *scissors
}

// lost delivers commits whose answer is lost on the way.
func (d *restoredDevice) lost(ctx context.Context, commits ...*sentCommit) error {
	d.scissors.after = 0
	defer func() { d.scissors.after = -1 }()
	switch err := d.deliver(ctx, commits...); {
	case err == nil:
		return errors.New("an answer came although it was cut")
	case !tolerable(err):
		return err
	}
	return nil
}

// newRestoredDevice subscribes to the tables, or to all.
func newRestoredDevice(t *testing.T, s *schema.Schema, url, partition, id string, wire ssp2.WireVersion, tables ...string) *restoredDevice {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	cut := &scissors{RoundTripper: transport, after: -1}
	d, err := newDevice(s, deviceConfig{url: url, partition: partition, actor: "actor of " + id, id: id, wire: wire, transport: cut})
	require.NoError(t, err)
	if tables == nil {
		require.NoError(t, d.subscribeAll())
	}
	for _, name := range tables {
		table, _ := s.Table(name)
		scopes := ssp2.ScopeMap{}
		for _, sc := range table.Scopes {
			scopes[sc.Variable] = worldScopes[sc.Variable]
		}
		require.NoError(t, d.Subscribe(name, name, scopes))
	}
	require.NoError(t, d.Acquire(t.Context()))
	return &restoredDevice{d, cut}
}

// titles are the items of a replica by id.
func (d *device) titles() map[string]string {
	titles := map[string]string{}
	for id, row := range d.Rows("items") {
		titles[id] = string(row.Values[2].Bytes)
	}
	return titles
}

// TestABackupIsRestoredUnderRunningClients: the database of before, under clients that know
// better (§2.1). Wire version 1 is refused. The others are reset and withhold their outbox
// for one round; then what the backup knows is answered as known, what it does not know is
// applied, and nothing twice. A partition that is younger than the backup is no exception.
func TestABackupIsRestoredUnderRunningClients(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	f := newFront(t)
	f.serve(t, db.Pool, worldConfig(s))
	const partition, young = "restored", "younger than the backup"

	v1 := newRestoredDevice(t, s, f.url, partition, "v1", ssp2.WireV1)
	modern := []*restoredDevice{
		newRestoredDevice(t, s, f.url, partition, "v2", ssp2.WireV2),
		newRestoredDevice(t, s, f.url, partition, "v3", ssp2.WireV3),
	}
	all := append([]*restoredDevice{v1}, modern...)
	for _, d := range all {
		require.NoError(t, d.deliver(t.Context(), d.written(t, "answered", d.id+" answered", "before")))
		require.NoError(t, d.lost(t.Context(), d.written(t, "ack lost before", d.id+" ack lost before", "before")))
	}
	epochs := map[string]string{}
	for _, d := range all {
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		epochs[d.id] = d.Epoch()
	}
	f.server.Push().Wait()
	backup := pgtest.Copy(t, db, pgtest.Options{})

	// After the backup: acknowledged work, which is lost with it; work whose
	// acknowledgement was lost; and work that was never sent.
	for _, d := range all {
		require.NoError(t, d.deliver(t.Context(), d.written(t, "after", d.id+" answered", "after the backup")))
		require.NoError(t, d.lost(t.Context(), d.written(t, "ack lost after", d.id+" ack lost after", "after")))
	}
	late := []*restoredDevice{
		newRestoredDevice(t, s, f.url, young, "late v1", ssp2.WireV1),
		newRestoredDevice(t, s, f.url, young, "late v2", ssp2.WireV2),
	}
	for _, d := range late {
		require.NoError(t, d.deliver(t.Context(), d.written(t, "answered", d.id, "answered")))
	}
	for _, d := range append(all, late...) {
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		d.written(t, "offline", d.id+" offline", "never sent")
	}
	require.Equal(t, "after the backup", v1.titles()["v2 answered"])

	// The runbook: the servers end, the backup takes the place of the database, the epochs
	// rotate, servers start.
	f.server.Push().Wait()
	f.serve(t, backup.Pool, worldConfig(s))
	before, err := auditPartition(t.Context(), backup.Pool, s, partition)
	require.NoError(t, err)
	require.Equal(t, int64(6), before.maxSeq)
	rotated, err := f.server.Retention().RotateEpochs(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), rotated.Partitions)
	require.Equal(t, int64(3), rotated.Clients)
	f.serve(t, backup.Pool, worldConfig(s))

	// Wire version 1 is refused whatever it does, and nothing is done for it.
	for _, d := range []*restoredDevice{v1, late[0]} {
		_, err := d.Pull(t.Context())
		require.Equal(t, ssp2.CodeClientWireUnsupported, serverCode(err), d.id)
		require.Equal(t, ssp2.CodeClientWireUnsupported, serverCode(d.deliver(t.Context(), d.unanswered()...)), d.id)
	}
	// The others: a reset, for which nothing is done either. Their outbox stays.
	for _, d := range append(modern, late[1]) {
		require.ErrorIs(t, d.deliver(t.Context(), d.unanswered()...), client.ErrReset)
		require.NotEqual(t, epochs[d.id], d.Epoch())
		require.Empty(t, d.titles())
		cursor, _ := d.Cursor("items")
		require.Equal(t, int64(-1), cursor)
	}
	a, err := auditPartition(t.Context(), backup.Pool, s, partition)
	require.NoError(t, err)
	require.Equal(t, before.maxSeq, a.maxSeq)
	require.Equal(t, before.rows, a.rows)

	// Now the outbox is replayed, and once more.
	for range 2 {
		for _, d := range append(modern, late[1]) {
			open := d.unanswered()
			if len(open) == 0 {
				open = d.sent[1:]
			}
			if d == late[1] {
				open = d.sent[len(d.sent)-1:]
			}
			require.NoError(t, d.deliver(t.Context(), without(open, "after")...))
		}
	}
	for _, d := range modern {
		require.Equal(t, ssp2.PushCached, d.answerTo("ack lost before").Status, "the backup has it")
		require.LessOrEqual(t, *d.answerTo("ack lost before").CommitSeq, before.maxSeq)
		for _, id := range []string{"ack lost after", "offline"} {
			require.Equal(t, ssp2.PushApplied, d.answerTo(id).Status, id)
			require.Greater(t, *d.answerTo(id).CommitSeq, before.maxSeq)
		}
	}

	a, err = auditPartition(t.Context(), backup.Pool, s, partition)
	require.NoError(t, err)
	require.Equal(t, before.maxSeq+4, a.maxSeq, "two commits of two devices")
	for _, d := range modern {
		p, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		require.Positive(t, p.Segments, "from the beginning")
		require.Equal(t, map[string]string{
			"v1 answered": "before", "v1 ack lost before": "before",
			"v2 answered": "before", "v2 ack lost before": "before", "v2 ack lost after": "after", "v2 offline": "never sent",
			"v3 answered": "before", "v3 ack lost before": "before", "v3 ack lost after": "after", "v3 offline": "never sent",
		}, d.titles())
		for _, table := range s.Tables {
			require.NoError(t, a.replica(d.device, table.Name, nil))
		}
		d.sent = without(d.sent, "after") // acknowledged, and lost with the old database
		require.NoError(t, a.device(d.device))
	}
	// The young partition begins anew: only what was in the outbox is there.
	_, err = late[1].CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"late v2 offline": "never sent"}, late[1].titles())
	require.Equal(t, int64(1), *late[1].answerTo("offline").CommitSeq)
}

// without leaves out the commit of an id.
func without(commits []*sentCommit, id string) (rest []*sentCommit) {
	for _, c := range commits {
		if c.commit.ClientCommitID != id {
			rest = append(rest, c)
		}
	}
	return rest
}

// answerTo is the first answer to a commit.
func (d *device) answerTo(id string) ssp2.PushResult {
	for _, c := range d.sent {
		if c.commit.ClientCommitID == id {
			return *c.answer
		}
	}
	return ssp2.PushResult{}
}

// TestAnInstanceThatMissedTheRotation: a server that goes on over a database whose epoch
// was rotated elsewhere decides by the database, not by what it remembers (§2.1).
func TestAnInstanceThatMissedTheRotation(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	f := newFront(t)
	f.serve(t, db.Pool, worldConfig(s))
	other := newFront(t)
	other.serve(t, db.Pool, worldConfig(s))
	const partition = "rotated elsewhere"
	v1 := newRestoredDevice(t, s, f.url, partition, "v1", ssp2.WireV1)
	v2 := newRestoredDevice(t, s, f.url, partition, "v2", ssp2.WireV2)
	for _, d := range []*restoredDevice{v1, v2} {
		require.NoError(t, d.deliver(t.Context(), d.written(t, "c1", d.id, "before")))
	}
	_, err := other.server.Retention().RotateEpoch(t.Context(), partition)
	require.NoError(t, err)

	require.Equal(t, ssp2.CodeClientWireUnsupported, serverCode(v1.deliver(t.Context(), v1.written(t, "c2", "v1", "after"))))
	old := v2.Epoch()
	require.ErrorIs(t, v2.deliver(t.Context(), v2.written(t, "c2", "v2", "after")), client.ErrReset)
	require.NotEqual(t, old, v2.Epoch())
	a, err := auditPartition(t.Context(), db.Pool, s, partition)
	require.NoError(t, err)
	require.Equal(t, int64(2), a.maxSeq)
	require.NoError(t, v2.deliver(t.Context(), v2.unanswered()...))
	_, err = v2.CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"v1": "before", "v2": "after"}, v2.titles())
}

// TestAClientWithoutAnEpochOnlyGetsOne: acquisition does nothing else (§2.1), whatever the
// request carries.
func TestAClientWithoutAnEpochOnlyGetsOne(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	f := newFront(t)
	resolved := atomic.Int64{}
	cfg := worldConfig(s)
	resolve := cfg.ResolveScopes
	cfg.ResolveScopes = func(ctx context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
		resolved.Add(1)
		return resolve(ctx, req)
	}
	f.serve(t, db.Pool, cfg)
	d := newRestoredDevice(t, s, f.url, "fresh", "d", ssp2.WireV2)
	require.NotEmpty(t, d.Epoch())
	require.Zero(t, resolved.Load())
	var clients, registered int64
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select (select count(*) from syncpg.sync_clients),
		(select count(*) from syncpg.sync_partition_registry where partition = 'fresh' and log_epoch = $1 and not epoch_required)`, d.Epoch()).Scan(&clients, &registered))
	require.Zero(t, clients)
	require.Equal(t, int64(1), registered)
}
