package integration_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// process is a server of some schema versions, started, with a listener.
type process struct {
	*syncpg.Server
	url string
}

func startProcess(t *testing.T, db *pgtest.DB, s *syncpg.Schema, older ...*syncpg.Schema) *process {
	t.Helper()
	server, err := syncpg.New(db.Pool, syncpg.Config{
		Schema: s, OlderSchemas: older, PruneInterval: -1,
		Authenticate: func(*http.Request) (syncpg.Identity, error) {
			return syncpg.Identity{Actor: "ada", Partition: "acme"}, nil
		},
		ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team_id": {"*"}}, nil
		},
	})
	require.NoError(t, err)
	require.NoError(t, server.Start(t.Context()))
	listener := httptest.NewServer(server.Handler())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, server.Stop(ctx))
		listener.Close()
		server.Push().Wait()
	})
	return &process{server, listener.URL}
}

// bumpable is a database of the older of two schema versions.
func bumpable(t *testing.T) (db *pgtest.DB, old, next *syncpg.Schema) {
	t.Helper()
	old, err := syncpg.ParseSchema([]byte(oldIR))
	require.NoError(t, err)
	next, err = syncpg.ParseSchema([]byte(newIR))
	require.NoError(t, err)
	return pgtest.New(t, pgtest.Options{MaxConns: 8, TemplateKey: "the older of two schema versions", Setup: func(ctx context.Context, conn *pgx.Conn) error {
		return schemaddl.Install(ctx, conn, old, schemaddl.Options{})
	}}), old, next
}

// rerouted is the transport of a client whose server can be another one.
type rerouted struct {
	http.Transport
	to *process
}

func (m *rerouted) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Host, r.Host = strings.TrimPrefix(m.to.url, "http://"), ""
	return m.Transport.RoundTrip(r)
}

// deviceAt makes a device of the tasks of team a, and what says where its server is.
func deviceAt(t *testing.T, p *process, id string, s *syncpg.Schema, wire ssp2.WireVersion) (*versionedDevice, *rerouted) {
	t.Helper()
	m := &rerouted{to: p}
	t.Cleanup(m.CloseIdleConnections)
	c, err := client.New(client.Config{URL: "http://syncpg.invalid", ClientID: id, Schema: s, Wire: wire, HTTP: &http.Client{Transport: m}})
	require.NoError(t, err)
	require.NoError(t, c.Acquire(t.Context()))
	require.NoError(t, c.Subscribe("tasks", "tasks", ssp2.ScopeMap{"team_id": {"a"}}))
	return &versionedDevice{Client: c, t: t, schema: s, wire: wire, id: id}, m
}

func requireNotReady(t *testing.T, err error) {
	t.Helper()
	var serr *client.ServerError
	require.ErrorAs(t, err, &serr)
	require.Equal(t, ssp2.CodeSchemaNotReady, serr.Code)
	require.Equal(t, http.StatusServiceUnavailable, serr.Status)
	require.True(t, serr.Retryable)
}

// TestProcessesDuringABump is a rollout: a process of the earlier version goes on running
// while the schema is moved, and one of the later version waits for that. From then on the
// first writes nothing and says so, the second takes over, and a device of the earlier
// version goes on there from its cursor, with its outbox.
func TestProcessesDuringABump(t *testing.T) {
	t.Parallel()
	db, old, next := bumpable(t)
	before := startProcess(t, db, old)
	require.NoError(t, before.Ready(t.Context()))
	after := startProcess(t, db, next, old)
	var verr *schemaddl.VersionError
	require.ErrorAs(t, after.Ready(t.Context()), &verr)

	phone, where := deviceAt(t, before, "phone", old, ssp2.WireV3)
	reader, _ := deviceAt(t, before, "reader", old, ssp2.WireV2)
	phone.requireApplied(nil, cells{"id": "1", "team_id": "a", "title": "one", "points": 7})
	want := map[string]cells{"1": {"id": "1", "team_id": "a", "title": "one", "points": 7}}
	require.Equal(t, want, phone.rows())
	require.Equal(t, want, reader.rows())
	// In the log, and pulled by nobody before.
	phone.requireApplied(nil, cells{"id": "2", "team_id": "a", "title": "two", "points": 8})
	want["2"] = cells{"id": "2", "team_id": "a", "title": "two", "points": 8}
	socket, err := phone.Dial(t.Context())
	require.NoError(t, err)
	defer socket.Close()

	base := int64(1)
	waiting := phone.commit(&base, cells{"id": "1", "points": 9})
	head := func() (seq int64) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), `select max_commit_seq from syncpg.sync_partitions`).Scan(&seq))
		return seq
	}
	stages := map[string]bool{}
	_, err = schemaddl.Apply(t.Context(), db.Pool, next, schemaddl.BumpOptions{Progress: func(p schemaddl.Progress) {
		if stages[p.Stage] || p.Stage == schemaddl.StageWaiting || p.Stage == schemaddl.StageLocking {
			return
		}
		stages[p.Stage] = true
		for _, process := range []*process{before, after} {
			where.to = process
			_, err := phone.Push(t.Context(), waiting)
			requireNotReady(t, err)
		}
		where.to = before
		if p.Stage == schemaddl.StageRows || p.Stage == schemaddl.StageChanges {
			require.Equal(t, want, reader.rows(), "who reads does not wait for rows to be rewritten")
		}
	}})
	require.NoError(t, err)
	require.Len(t, stages, 4)
	require.EqualValues(t, 2, head())

	// The earlier process is told, and tells its devices.
	_, _, err = socket.Follow(t.Context(), 1000, "tasks")
	requireNotReady(t, err) // a wake-up made it pull
	_, err = phone.Push(t.Context(), waiting)
	requireNotReady(t, err)
	_, err = reader.Pull(t.Context())
	requireNotReady(t, err)
	require.ErrorAs(t, before.Ready(t.Context()), &verr)
	require.EqualValues(t, 2, head())

	require.NoError(t, after.Ready(t.Context()))
	where.to = after
	p, err := phone.CatchUp(t.Context())
	require.NoError(t, err)
	require.Zero(t, p.Segments)
	require.Equal(t, want, phone.rows())
	require.Equal(t, ssp2.PushApplied, phone.push(waiting).Status)
	upgraded, _ := deviceAt(t, after, "upgraded", next, ssp2.WireV3)
	upgraded.requireApplied(nil, cells{"id": "3", "team_id": "a", "title": "three", "points": nil, "due": 1.5, "color": "red"})
	require.Equal(t, map[string]cells{
		"1": {"id": "1", "team_id": "a", "title": "one", "points": 9}, "2": want["2"], "3": {"id": "3", "team_id": "a", "title": "three"},
	}, phone.rows())
	require.Equal(t, map[string]cells{
		"1": {"id": "1", "team_id": "a", "title": "one", "points": 9}, "2": want["2"], "3": {"id": "3", "team_id": "a", "title": "three", "due": 1.5, "color": "red"},
	}, upgraded.rows())
}

// TestConflictsOfEarlierVersionsCanBeRead: the row in a stored outcome is answered in the
// version of the device, also when the one that it was stored in is not served any more.
func TestConflictsOfEarlierVersionsCanBeRead(t *testing.T) {
	t.Parallel()
	for _, served := range []bool{true, false} {
		db, old, next := bumpable(t)
		before := startProcess(t, db, old)
		device, where := deviceAt(t, before, "phone", old, ssp2.WireV2)
		device.requireApplied(nil, cells{"id": "1", "team_id": "a", "title": "one", "points": 7})
		none := int64(0)
		lost := device.commit(&none, cells{"id": "1", "team_id": "a", "title": "mine", "points": 1})
		conflict := device.push(lost)
		require.Equal(t, ssp2.OpConflict, conflict.Results[0].Status)

		_, err := schemaddl.Apply(t.Context(), db.Pool, next, schemaddl.BumpOptions{})
		require.NoError(t, err)
		var older []*syncpg.Schema
		if served {
			older = append(older, old)
		}
		after := startProcess(t, db, next, older...)
		upgraded, _ := deviceAt(t, after, "phone", next, ssp2.WireV2)
		upgraded.n = device.n // it goes on with the ids of its commits
		upgraded.requireApplied(nil, cells{"id": "1", "team_id": "a", "title": "since", "points": 8})
		lost.Operations[0].Payload = upgraded.commit(&none, cells{"id": "1", "team_id": "a", "title": "mine", "points": 1}).Operations[0].Payload
		replay := upgraded.push(lost)
		require.Equal(t, ssp2.PushRejected, replay.Status)
		require.Equal(t, ssp2.OpConflict, replay.Results[0].Status, "%+v", replay.Results[0])
		table, _ := next.Table("tasks")
		values, err := ssp2.DecodeRow(table.Wire, replay.Results[0].ServerRow, nil)
		require.NoError(t, err)
		require.Equal(t, cells{"id": "1", "team_id": "a", "title": "one", "points": 7}, upgraded.cells(values))
		if served {
			where.to = after
			require.Equal(t, conflict.Results, device.push(device.again(lost, cells{"id": "1", "team_id": "a", "title": "mine", "points": 1})).Results)
		}
	}
}

// again encodes the row of a commit in the version of the device, under the same id.
func (d *versionedDevice) again(c ssp2.PushCommit, row cells) ssp2.PushCommit {
	d.t.Helper()
	encoded := d.commit(c.Operations[0].BaseVersion, row)
	encoded.ClientCommitID = c.ClientCommitID
	return encoded
}
