package lease_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func TestIssuanceAndRefresh(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.live(t, ada, allowed)
	require.NotEmpty(t, first.LeaseID)
	require.Equal(t, w.now.Add(ttl).UnixMilli(), first.ExpiresAtMs, "expiresAtMs = issuedAtMs + ttlMs")

	w.now = w.now.Add(time.Minute - time.Millisecond)
	require.Equal(t, first, w.live(t, ada, allowed), "a young lease is left alone")
	w.now = w.now.Add(time.Millisecond)
	second := w.live(t, ada, allowed)
	require.Equal(t, first.LeaseID, second.LeaseID, "a refresh slides the same lease")
	require.Equal(t, w.now.Add(ttl).UnixMilli(), second.ExpiresAtMs)

	w.now = w.now.Add(time.Second)
	narrow := scope.Allowed{"project": {"p1"}}
	third := w.live(t, ada, narrow)
	require.Equal(t, first.LeaseID, third.LeaseID)
	require.Greater(t, third.ExpiresAtMs, second.ExpiresAtMs, "other scopes are captured at once")
	w.granted(t, ada, narrow)

	w.now = w.now.Add(-time.Hour)
	require.Equal(t, w.now.Add(ttl).UnixMilli(), w.live(t, ada, narrow).ExpiresAtMs, "a lease from the future is no reason to wait")
	w.now = w.now.Add(100 * ttl)
	require.Equal(t, first.LeaseID, w.live(t, ada, narrow).LeaseID, "an expired lease slides too")

	bob := w.live(t, lease.Client{Partition: partition, ID: "other device", Actor: "bob"}, allowed)
	require.NotEqual(t, first.LeaseID, bob.LeaseID)
}

func TestATenthOfAShortTTL(t *testing.T) {
	t.Parallel()
	w := setup(t, func(c *lease.Config) { c.TTL = 10 * time.Second })
	first := w.live(t, ada, allowed)
	w.now = w.now.Add(999 * time.Millisecond)
	require.Equal(t, first, w.live(t, ada, allowed))
	w.now = w.now.Add(time.Millisecond)
	require.Equal(t, first.ExpiresAtMs+1000, w.live(t, ada, allowed).ExpiresAtMs)

	longer := w.store(t)
	require.Equal(t, w.now.Add(ttl).UnixMilli(), refresh(t, longer.Begin(ada, allowed, w.now)).ExpiresAtMs, "another TTL applies at once")
}

func TestOutage(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		prepare func(t *testing.T, w *world)
		client  lease.Client
		code    ssp2.Code // empty: served
		outcome events.LeaseOutcome
	}{
		"a valid lease authorizes": {
			prepare: func(*testing.T, *world) {}, client: ada, outcome: events.LeaseValid,
		},
		"until the instant it expires": {
			prepare: func(_ *testing.T, w *world) { w.now = w.now.Add(ttl - time.Millisecond) },
			client:  ada, outcome: events.LeaseValid,
		},
		"at which it does not any more": {
			prepare: func(_ *testing.T, w *world) { w.now = w.now.Add(ttl) },
			client:  ada, code: ssp2.CodeAuthLeaseRequired, outcome: events.LeaseExpired,
		},
		"no lease": {
			prepare: func(*testing.T, *world) {}, client: lease.Client{Partition: partition, ID: "new", Actor: "ada"},
			code: ssp2.CodeAuthLeaseRequired, outcome: events.LeaseMissing,
		},
		"a lease of another partition": {
			prepare: func(*testing.T, *world) {}, client: lease.Client{Partition: "other", ID: ada.ID, Actor: "ada"},
			code: ssp2.CodeAuthLeaseRequired, outcome: events.LeaseMissing,
		},
		"a lease of another actor": {
			prepare: func(*testing.T, *world) {}, client: lease.Client{Partition: partition, ID: ada.ID, Actor: "eve"},
			code: ssp2.CodeAuthLeaseRequired, outcome: events.LeaseOtherActor,
		},
		"a revoked lease": {
			prepare: func(t *testing.T, w *world) {
				t.Helper()
				require.NoError(t, w.Revoke(t.Context(), partition, w.live(t, ada, allowed).LeaseID))
			},
			client: ada, code: ssp2.CodeAuthLeaseRevoked, outcome: events.LeaseRevoked,
		},
		"a lease whose partition got another log epoch": {
			prepare: func(t *testing.T, w *world) {
				t.Helper()
				w.exec(t, `select from syncpg.sync_rotate_epoch($1)`, partition)
			},
			client: ada, code: ssp2.CodeAuthLeaseRequired, outcome: events.LeaseMissing,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			issued := w.live(t, ada, allowed)
			tc.prepare(t, w)
			if tc.code == "" {
				w.granted(t, tc.client, allowed)
			} else {
				w.refused(t, tc.client, tc.code)
			}
			require.Equal(t, []events.LeaseOutcome{tc.outcome}, w.outcomes)
			if tc.outcome == events.LeaseValid {
				w.now = time.UnixMilli(issued.ExpiresAtMs)
				w.refused(t, tc.client, ssp2.CodeAuthLeaseRequired) // being used did not refresh it
			}
		})
	}
}

// TestTamperedRecords: each field of a record is signed; a changed one makes it worth
// nothing, and the next live round replaces it under another id.
func TestTamperedRecords(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"scopes":       `update syncpg.sync_leases set allowed_scopes = '{"project":["*"]}'`,
		"actor":        `update syncpg.sync_leases set actor_id = 'eve'`,
		"id":           `update syncpg.sync_leases set lease_id = 'x'`,
		"issued":       `update syncpg.sync_leases set issued_at_ms = issued_at_ms + 1`,
		"expiry":       `update syncpg.sync_leases set expires_at_ms = expires_at_ms + 1`,
		"revocation":   `update syncpg.sync_leases set revoked_at_ms = 1`,
		"signature":    `update syncpg.sync_leases set signature = set_byte(signature, 31, 255 - get_byte(signature, 31))`,
		"no signature": `update syncpg.sync_leases set signature = ''`,
		"other client": `update syncpg.sync_leases set client_id = 'other device', actor_id = 'bob'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			issued := w.live(t, ada, allowed)
			w.exec(t, sql)
			victim := ada
			switch name {
			case "actor":
				victim.Actor = "eve"
			case "other client":
				victim = lease.Client{Partition: partition, ID: "other device", Actor: "bob"}
			}
			w.refused(t, victim, ssp2.CodeAuthLeaseRequired)
			require.Equal(t, []events.LeaseOutcome{events.LeaseTampered}, w.outcomes)
			require.Contains(t, w.log.String(), "signature")
			if victim.Actor == "eve" {
				return // whose device it is not
			}
			fresh := w.live(t, victim, allowed)
			require.NotEqual(t, issued.LeaseID, fresh.LeaseID)
			w.granted(t, victim, allowed)
		})
	}
}

// TestARevocationThatIsTakenBackInTheDatabase is one more change of a record.
func TestARevocationThatIsTakenBackInTheDatabase(t *testing.T) {
	t.Parallel()
	w := setup(t)
	require.NoError(t, w.Revoke(t.Context(), partition, w.live(t, ada, allowed).LeaseID))
	w.exec(t, `update syncpg.sync_leases set revoked_at_ms = null`)
	w.refused(t, ada, ssp2.CodeAuthLeaseRequired)
}

func TestRevocation(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.live(t, ada, allowed)
	asked := w.now
	running := w.Begin(ada, allowed, asked) // its resolver answered before the revocation
	w.now = w.now.Add(2 * time.Minute)
	require.NoError(t, w.Revoke(t.Context(), partition, first.LeaseID))
	require.NoError(t, w.Revoke(t.Context(), partition, first.LeaseID), "again")
	require.ErrorIs(t, w.Revoke(t.Context(), partition, "another"), lease.ErrNotFound)
	require.ErrorIs(t, w.Revoke(t.Context(), "elsewhere", first.LeaseID), lease.ErrNotFound)

	require.Nil(t, refresh(t, running), "a round from before does not undo it")
	w.refused(t, ada, ssp2.CodeAuthLeaseRevoked)
	w.now = w.now.Add(ttl)
	w.refused(t, ada, ssp2.CodeAuthLeaseRevoked) // expired as well

	second := w.live(t, ada, allowed)
	require.NotEqual(t, first.LeaseID, second.LeaseID, "the handle stays dead")
	w.granted(t, ada, allowed)
	require.ErrorIs(t, w.Clear(t.Context(), partition, second.LeaseID), lease.ErrNotFound, "it is not revoked")
}

// TestRevocationOfWhatNoKeyVerifies: a lease whose key is not configured is revoked as
// any other one is, also for rounds that are under way.
func TestRevocationOfWhatNoKeyVerifies(t *testing.T) {
	t.Parallel()
	w := setup(t, func(c *lease.Config) { c.HoldRevoked = true })
	first := w.live(t, ada, allowed)
	other := w.store(t, func(c *lease.Config) { c.Keys, c.HoldRevoked = [][]byte{key2}, true })
	running := other.Begin(ada, allowed, w.now)
	w.now = w.now.Add(time.Minute)
	require.NoError(t, other.Revoke(t.Context(), partition, first.LeaseID))
	require.Nil(t, refresh(t, running))
	_, err := other.Authorize(t.Context(), ada)
	require.Equal(t, ssp2.CodeAuthLeaseRevoked, ssp2.CodeOf(err), "%v", err)
}

// TestARevocationOutlivesItsKey: keys are rotated, revocations stand until they are cleared.
// What no key verifies any more, and says that it is revoked, is not replaced where a revoked
// lease would not be.
func TestARevocationOutlivesItsKey(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]bool{"held": true, "not held": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)
			first := w.live(t, ada, allowed)
			rotated := w.store(t, func(c *lease.Config) { c.Keys, c.HoldRevoked = [][]byte{key2}, hold })
			running := rotated.Begin(ada, allowed, w.now) // its resolver answered before the revocation
			w.now = w.now.Add(time.Minute)
			require.NoError(t, w.Revoke(t.Context(), partition, first.LeaseID))
			w.now = w.now.Add(2 * ttl)
			require.Nil(t, refresh(t, running))
			after := refresh(t, rotated.Begin(ada, allowed, w.now))
			if hold {
				require.Nil(t, after)
			} else {
				require.NotEqual(t, first.LeaseID, after.LeaseID)
			}
		})
	}
}

// TestRevocationBetweenReadAndWrite: what a round has decided does not stand when the lease
// is revoked before it is written.
func TestRevocationBetweenReadAndWrite(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.live(t, ada, allowed)
	w.now = w.now.Add(5 * time.Minute)
	r := w.Begin(ada, allowed, w.now)
	rows, err := w.db.Pool.Query(t.Context(), lease.Find.SQL, r.Args()...)
	require.NoError(t, err)
	require.NoError(t, r.Read(t.Context(), rows))
	require.True(t, r.Due())
	require.NoError(t, w.Revoke(t.Context(), partition, first.LeaseID))
	batch := &pgx.Batch{}
	r.Queue(batch, true)
	require.NoError(t, w.db.Pool.SendBatch(t.Context(), batch).Close())
	require.Nil(t, r.Frame())
	w.refused(t, ada, ssp2.CodeAuthLeaseRevoked)
}

func TestHoldRevoked(t *testing.T) {
	t.Parallel()
	w := setup(t, func(c *lease.Config) { c.HoldRevoked = true })
	first := w.live(t, ada, allowed)
	require.NoError(t, w.Revoke(t.Context(), partition, first.LeaseID))
	w.now = w.now.Add(time.Hour)
	require.Nil(t, w.live(t, ada, allowed), "no lease until the host clears the revocation")
	w.refused(t, ada, ssp2.CodeAuthLeaseRevoked)
	require.NoError(t, w.Clear(t.Context(), partition, first.LeaseID))
	require.ErrorIs(t, w.Clear(t.Context(), partition, first.LeaseID), lease.ErrNotFound)
	w.refused(t, ada, ssp2.CodeAuthLeaseRequired)
	second := w.live(t, ada, allowed)
	require.NotEqual(t, first.LeaseID, second.LeaseID)
	w.granted(t, ada, allowed)
}

func TestKeyRotation(t *testing.T) {
	t.Parallel()
	w := setup(t)
	first := w.live(t, ada, allowed)
	both := w.store(t, func(c *lease.Config) { c.Keys = [][]byte{key2, key1} })
	got, err := both.Authorize(t.Context(), ada)
	require.NoError(t, err)
	require.Equal(t, allowed, got)
	w.now = w.now.Add(time.Minute)
	require.Equal(t, first.LeaseID, refresh(t, both.Begin(ada, allowed, w.now)).LeaseID)
	w.refused(t, ada, ssp2.CodeAuthLeaseRequired) // this one knows the old key only
	rotated := w.store(t, func(c *lease.Config) { c.Keys = [][]byte{key2} })
	_, err = rotated.Authorize(t.Context(), ada)
	require.NoError(t, err)
}

// TestALeaseIsOfTheActorsOwnClient: a client id that belongs to somebody else gets none
// and takes none away.
func TestALeaseIsOfTheActorsOwnClient(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.live(t, ada, allowed)
	require.Nil(t, w.live(t, lease.Client{Partition: partition, ID: ada.ID, Actor: "eve"}, scope.Allowed{"project": {"secret"}}))
	require.Nil(t, w.live(t, lease.Client{Partition: partition, ID: "unknown", Actor: "eve"}, allowed))
	w.granted(t, ada, allowed)
}

func TestScopesThatNoTextCanHold(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.live(t, ada, scope.Allowed{"project": {"a\x00b", "bad \xff", "ü\u2028"}, "bad \xff": {"x"}, "empty": nil})
	w.granted(t, ada, scope.Allowed{"project": {"a\x00b", "ü\u2028"}, "empty": {}})
	w.now = w.now.Add(time.Minute)
	w.live(t, ada, scope.Allowed{})
	w.granted(t, ada, scope.Allowed{})
}

func TestConfig(t *testing.T) {
	t.Parallel()
	w := setup(t)
	for name, cfg := range map[string]lease.Config{
		"no key":      {},
		"a short key": {Keys: [][]byte{key1, key1[:31]}},
		"a short TTL": {Keys: [][]byte{key1}, TTL: time.Millisecond},
		"a negative":  {Keys: [][]byte{key1}, TTL: -time.Hour},
	} {
		_, err := lease.New(w.db.Pool, cfg)
		require.Error(t, err, name)
	}
	_, err := lease.New(nil, lease.Config{Keys: [][]byte{key1}})
	require.Error(t, err)
	s, err := lease.New(w.db.Pool, lease.Config{Keys: [][]byte{key1}})
	require.NoError(t, err)
	require.Equal(t, s.Now().Add(lease.DefaultTTL).UnixMilli()/1000, refresh(t, s.Begin(ada, allowed, s.Now())).ExpiresAtMs/1000)
}
