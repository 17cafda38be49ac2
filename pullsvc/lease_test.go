package pullsvc_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// TestLeasesCostNoRoundTrip: a lease is read with the first statements of a pull and
// written with the record of the client; alone, once a minute at most.
func TestLeasesCostNoRoundTrip(t *testing.T) {
	t.Parallel()
	b := setup(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 1 }))
	leases, err := lease.New(b.db.Pool, lease.Config{
		Keys: [][]byte{make([]byte, 32)}, Clock: func() time.Time { return b.now },
	})
	require.NoError(t, err)
	allowed := scope.Allowed{"project": {"*"}}
	pull := func(client string, cursor int64) *ssp2.Lease {
		t.Helper()
		req := request(sub("s", "items", cursor, project("x")))
		req.ClientID = client
		req.Lease = leases.Begin(lease.Client{Partition: partition, ID: client, Actor: req.Actor}, allowed, b.now)
		b.pull(t, req)
		return req.Lease.Frame()
	}
	seq := b.commit(t, item("i", "x", ""))
	pull("c0", seq)   // prepares every statement
	pull("c0", seq-1) // those of a window as well
	var first *ssp2.Lease
	measure := func(name string, cursor int64, trips, writes int) *ssp2.Lease {
		t.Helper()
		b.counter.Reset()
		got := pull("c1", cursor)
		require.Zero(t, b.counter.PrepareRoundTrips(), name)
		require.Equal(t, trips, b.counter.RoundTrips(), "%s: %v", name, b.counter.Statements())
		require.Equal(t, writes, b.counter.Autocommits(), name)
		require.Equal(t, 1, b.counter.Commits(), "%s: of the snapshot", name)
		return got
	}
	first = measure("the first pull", seq, 2, 1)
	require.Equal(t, b.now.Add(lease.DefaultTTL).UnixMilli(), first.ExpiresAtMs)
	require.Equal(t, first, measure("a quiet pull", seq, 1, 0))
	b.now = b.now.Add(30 * time.Second)
	seq = b.commit(t, item("i", "x", "new"))
	require.Equal(t, first, measure("a pull of something, half a minute later", seq-1, 2, 1))
	b.now = b.now.Add(30 * time.Second)
	refreshed := measure("a quiet pull, a minute later", seq, 2, 1)
	require.Equal(t, first.LeaseID, refreshed.LeaseID)
	require.Equal(t, first.ExpiresAtMs+60_000, refreshed.ExpiresAtMs)
	require.Equal(t, refreshed, measure("a quiet pull again", seq, 1, 0))
	allowed = scope.Allowed{"project": {"x"}}
	require.Equal(t, first.LeaseID, measure("a quiet pull with other scopes", seq, 2, 1).LeaseID)
}

// TestLeaseOfSomebodyElsesClient: the pull fails and leaves the lease alone.
func TestLeaseOfSomebodyElsesClient(t *testing.T) {
	t.Parallel()
	b := setup(t)
	leases, err := lease.New(b.db.Pool, lease.Config{Keys: [][]byte{make([]byte, 32)}, Clock: func() time.Time { return b.now }})
	require.NoError(t, err)
	begin := func(actor string) (*pullsvc.Pull, error) {
		req := request(sub("s", "items", 0, project("x")))
		req.Actor = actor
		req.Lease = leases.Begin(lease.Client{Partition: partition, ID: req.ClientID, Actor: actor}, scope.Allowed{"project": {actor}}, b.now)
		return b.Begin(t.Context(), req)
	}
	p, err := begin("alice")
	require.NoError(t, err)
	p.Close()
	_, err = begin("eve")
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(err))
	got, err := leases.Authorize(t.Context(), lease.Client{Partition: partition, ID: "c1", Actor: "alice"})
	require.NoError(t, err)
	require.Equal(t, scope.Allowed{"project": {"alice"}}, got)
}
