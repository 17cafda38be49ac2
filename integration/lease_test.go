package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// leased is a server with leases, whose resolver may be out of reach, on a clock of its own.
type leased struct {
	*front
	pool   *pgxpool.Pool
	schema *schema.Schema
	cfg    syncpg.Config
	now    atomic.Int64
	outage atomic.Bool
	// allowed is what the resolver says instead of what the device asks for; nil: that.
	allowed atomic.Pointer[scope.Allowed]
}

const leaseTTL = time.Hour

func newLeased(t *testing.T) *leased {
	t.Helper()
	l := &leased{schema: worldSchema(t)}
	l.now.Store(1_800_000_000_000)
	l.pool = pgtest.New(t, pgtest.Options{Setup: installWorld(l.schema), TemplateKey: "the schema of the world"}).Pool
	l.cfg = worldConfig(l.schema)
	l.cfg.Clock = func() time.Time { return time.UnixMilli(l.now.Load()) }
	l.cfg.Leases = &syncpg.Leases{TTL: leaseTTL, Keys: [][]byte{bytes.Repeat([]byte("l"), 32)}}
	resolve := l.cfg.ResolveScopes
	l.cfg.ResolveScopes = func(ctx context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
		if l.outage.Load() {
			return nil, fmt.Errorf("the directory does not answer: %w", syncpg.ErrOutage)
		}
		if allowed := l.allowed.Load(); allowed != nil {
			return *allowed, nil
		}
		return resolve(ctx, req)
	}
	l.front = newFront(t)
	l.again(t)
	return l
}

// again puts another server in the place of the one that serves.
func (l *leased) again(t *testing.T) {
	t.Helper()
	l.serve(t, l.pool, l.cfg)
}

// device is one that has synced once.
func (l *leased) device(t *testing.T, partition, id string, wire ssp2.WireVersion) *restoredDevice {
	t.Helper()
	d := newRestoredDevice(t, l.schema, l.url, partition, id, wire)
	require.NoError(t, d.deliver(t.Context(), d.written(t, "c0", "of "+id, "before")))
	_, err := d.CatchUp(t.Context())
	require.NoError(t, err)
	return d
}

// refused checks that neither half of a round is served, and that it costs the device nothing.
func (d *restoredDevice) refused(t *testing.T, code ssp2.Code) {
	t.Helper()
	rows, lease := len(d.titles()), d.Lease()
	require.Equal(t, code, serverCode(d.deliver(t.Context(), d.unanswered()...)))
	_, err := d.Pull(t.Context())
	require.Equal(t, code, serverCode(err))
	require.Len(t, d.titles(), rows, "what a device has stays")
	require.NotEmpty(t, d.unanswered(), "and so does what it wants to send")
	require.Equal(t, lease, d.Lease())
	cursor, complete := d.Cursor("items")
	require.True(t, complete)
	require.GreaterOrEqual(t, cursor, int64(0))
}

// everyWire runs a scenario in each wire version, one after the other, since they share a clock
// and a resolver, in a partition of its own.
func everyWire(t *testing.T, scenario func(t *testing.T, partition string, wire ssp2.WireVersion)) {
	t.Helper()
	for wire := ssp2.WireV1; wire <= ssp2.WireV3; wire++ {
		t.Run(fmt.Sprint("wire version ", wire), func(t *testing.T) {
			scenario(t, fmt.Sprint("leased ", wire), wire)
		})
	}
}

// TestLeasesAreIssuedAndRefreshed is Appendix B 15 (a): an authorized round brings a lease,
// and later ones slide the same one, whichever server they come to.
func TestLeasesAreIssuedAndRefreshed(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	everyWire(t, func(t *testing.T, partition string, wire ssp2.WireVersion) {
		began := l.now.Load()
		d := l.device(t, partition, "device", wire)
		first := *d.Lease()
		require.NotEmpty(t, first.LeaseID)
		require.Equal(t, began+leaseTTL.Milliseconds(), first.ExpiresAtMs)
		l.again(t)
		l.now.Add((20 * time.Minute).Milliseconds())
		_, err := d.Pull(t.Context())
		require.NoError(t, err)
		require.Equal(t, ssp2.Lease{LeaseID: first.LeaseID, ExpiresAtMs: first.ExpiresAtMs + (20 * time.Minute).Milliseconds()}, *d.Lease())
		// A round that only pushes is an authorized one as well.
		l.now.Add((20 * time.Minute).Milliseconds())
		require.NoError(t, d.deliver(t.Context(), d.written(t, "c1", "more", "x")))
		require.Equal(t, l.now.Load()+leaseTTL.Milliseconds(), d.Lease().ExpiresAtMs)
		require.Equal(t, first.LeaseID, d.Lease().LeaseID)
		// Of its actor, every device has its own.
		other := l.device(t, partition, "other", wire)
		require.NotEqual(t, first.LeaseID, other.Lease().LeaseID)
	})
}

// TestLeasesServeAnOutageAndEnd is Appendix B 15 (b): while the resolver is out of reach, a
// round is authorized by the lease, as far as that goes; when it has ended, rounds fail as a
// whole, and what waits to be sent is sent when the resolver is back.
func TestLeasesServeAnOutageAndEnd(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	everyWire(t, func(t *testing.T, partition string, wire ssp2.WireVersion) {
		defer l.outage.Store(false)
		defer l.allowed.Store(nil)
		narrow := scope.Allowed{}
		for variable := range worldScopes {
			narrow[variable] = []string{"*"}
		}
		narrow["team"] = []string{"red"}
		l.allowed.Store(&narrow)
		d := l.device(t, partition, "device", wire)
		newcomer := newRestoredDevice(t, l.schema, l.url, partition, "newcomer", wire)
		lease := *d.Lease()

		l.outage.Store(true)
		l.again(t) // one that never heard of the device
		offline := d.written(t, "offline", "offline", "by lease")
		require.NoError(t, d.deliver(t.Context(), offline))
		require.Equal(t, ssp2.PushApplied, offline.answer.Status)
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		require.Equal(t, "by lease", d.titles()["offline"])
		l.now.Add((30 * time.Minute).Milliseconds())
		_, err = d.Pull(t.Context())
		require.NoError(t, err)
		require.Equal(t, lease, *d.Lease(), "an outage slides nothing")
		// The lease is no bypass: what it does not grant is refused for good (§3.4).
		blue := d.written(t, "blue", "blue", "x")
		blue.commit = d.upserted(t, "blue again", "items", blueItem()).commit
		blue.commit.ClientCommitID = "blue"
		d.sent = d.sent[:len(d.sent)-1]
		require.NoError(t, d.deliver(t.Context(), blue))
		require.Equal(t, string(ssp2.CodeForbidden), blue.answer.Results[0].Code)
		// A device that never had a lease has none now, and another actor has not this one.
		newcomer.written(t, "c0", "of newcomer", "x")
		require.Equal(t, ssp2.CodeAuthLeaseRequired, serverCode(newcomer.deliver(t.Context(), newcomer.unanswered()...)))
		thief, err := newDevice(l.schema, deviceConfig{url: l.url, partition: partition, actor: "somebody else", id: "device", wire: wire, transport: d.scissors})
		require.NoError(t, err)
		require.NoError(t, thief.Acquire(t.Context()))
		_, err = thief.Pull(t.Context())
		require.Equal(t, ssp2.CodeAuthLeaseRequired, serverCode(err))

		l.now.Store(lease.ExpiresAtMs - 1)
		_, err = d.Pull(t.Context())
		require.NoError(t, err)
		l.now.Store(lease.ExpiresAtMs)
		late := d.written(t, "too late", "late", "after the outage")
		d.refused(t, ssp2.CodeAuthLeaseRequired)

		l.outage.Store(false)
		require.NoError(t, d.deliver(t.Context(), d.unanswered()...))
		require.Equal(t, ssp2.PushApplied, late.answer.Status)
		require.Equal(t, lease.LeaseID, d.Lease().LeaseID)
		require.Equal(t, l.now.Load()+leaseTTL.Milliseconds(), d.Lease().ExpiresAtMs)
		require.NoError(t, newcomer.deliver(t.Context(), newcomer.unanswered()...))
		for _, d := range []*restoredDevice{d, newcomer} {
			_, err = d.CatchUp(t.Context())
			if d == newcomer {
				require.NoError(t, err)
			}
			require.Equal(t, map[string]string{
				"of device": "before", "offline": "by lease", "late": "after the outage", "of newcomer": "x",
			}, d.titles())
		}
	})
}

// blueItem is an item of a team that the narrow leases do not have.
func blueItem() []ssp2.Value {
	null := ssp2.Value{Null: true}
	return []ssp2.Value{textValue("blue"), textValue("blue"), textValue("x"), null, {Float: 1}, {Int: 1}, null, null, null}
}

// TestARevokedLeaseEndsSyncAndNoData is Appendix B 15 (c): a revoked lease authorizes nothing
// on any server, takes nothing away from the device, and never comes back; the resolver gets
// the device another one, and what waited is sent.
func TestARevokedLeaseEndsSyncAndNoData(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	everyWire(t, func(t *testing.T, partition string, wire ssp2.WireVersion) {
		defer l.outage.Store(false)
		d := l.device(t, partition, "device", wire)
		lease := *d.Lease()
		require.NoError(t, l.server.RevokeLease(t.Context(), partition, lease.LeaseID))
		l.again(t)
		l.outage.Store(true)
		blocked := d.written(t, "blocked", "blocked", "waits")
		d.refused(t, ssp2.CodeAuthLeaseRevoked)
		a, err := auditPartition(t.Context(), l.pool, l.schema, partition)
		require.NoError(t, err)
		require.Equal(t, int64(1), a.maxSeq, "the write never got there")

		l.now.Add(time.Second.Milliseconds())
		l.outage.Store(false)
		require.NoError(t, d.deliver(t.Context(), d.unanswered()...))
		require.Equal(t, ssp2.PushApplied, blocked.answer.Status)
		_, err = d.CatchUp(t.Context())
		require.NoError(t, err)
		fresh := *d.Lease()
		require.NotEqual(t, lease.LeaseID, fresh.LeaseID)
		require.Equal(t, l.now.Load()+leaseTTL.Milliseconds(), fresh.ExpiresAtMs)
		require.Equal(t, map[string]string{"of device": "before", "blocked": "waits"}, d.titles())
		// The new one serves the next outage; the old one is not there any more to be revoked.
		l.outage.Store(true)
		require.NoError(t, d.deliver(t.Context(), d.written(t, "by the new one", "new", "x")))
		require.ErrorIs(t, l.server.RevokeLease(t.Context(), partition, lease.LeaseID), syncpg.ErrLeaseNotFound)
	})
}

// TestAHeldLeaseIsClearedFirst: with HoldRevoked a device goes on by the resolver, without a
// lease, until the host clears the revocation (§7.3.4).
func TestAHeldLeaseIsClearedFirst(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	leases := *l.cfg.Leases
	leases.HoldRevoked = true
	l.cfg.Leases = &leases
	l.again(t)
	d := l.device(t, "held", "device", ssp2.WireV3)
	lease := *d.Lease()
	require.NoError(t, l.server.RevokeLease(t.Context(), "held", lease.LeaseID))
	l.now.Add(time.Minute.Milliseconds() * 30)
	require.NoError(t, d.deliver(t.Context(), d.written(t, "c1", "more", "by the resolver")))
	_, err := d.CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, lease, *d.Lease(), "no frame came")
	l.outage.Store(true)
	d.written(t, "c2", "still more", "x")
	d.refused(t, ssp2.CodeAuthLeaseRevoked)
	require.NoError(t, l.server.ClearLease(t.Context(), "held", lease.LeaseID))
	d.refused(t, ssp2.CodeAuthLeaseRequired) // the revoked one does not resurrect
	l.outage.Store(false)
	require.NoError(t, d.deliver(t.Context(), d.unanswered()...))
	require.NotEqual(t, lease.LeaseID, d.Lease().LeaseID)
}

// TestWithoutLeasesNothingIsIssued is Appendix B 15 (d).
func TestWithoutLeasesNothingIsIssued(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	l.cfg.Leases = nil
	l.again(t)
	everyWire(t, func(t *testing.T, partition string, wire ssp2.WireVersion) {
		defer l.outage.Store(false)
		d := l.device(t, partition, "device", wire)
		require.Nil(t, d.Lease())
		l.outage.Store(true)
		d.written(t, "c1", "more", "x")
		d.refused(t, ssp2.CodeAuthLeaseRequired)
		l.outage.Store(false)
		require.NoError(t, d.deliver(t.Context(), d.unanswered()...))
		require.Nil(t, d.Lease())
	})
}
