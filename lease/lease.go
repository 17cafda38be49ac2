package lease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// DefaultTTL is the default of Config.TTL.
const DefaultTTL = 15 * time.Minute

// minKeyBytes is what HMAC-SHA256 cannot be weakened below by guessing keys.
const minKeyBytes = 32

// ErrNotFound says that there is no such lease, or none that is revoked where that is
// what was asked for.
var ErrNotFound = errors.New("no such lease")

// Config configures a Store. Keys is required.
type Config struct {
	// TTL is how long a lease is valid after the last round that refreshed it. It is
	// how long a scope that is taken away can be used on, if the resolver goes out of
	// reach right then. Default 15 minutes; at least a second.
	TTL time.Duration
	// Keys sign the leases at rest, at least 32 random bytes each: the first signs, all
	// verify. All servers of a database have the same ones. To rotate, add the new key
	// behind, everywhere; then put it in front; take the old one away when a TTL has passed.
	Keys [][]byte
	// HoldRevoked keeps a client whose lease was revoked without one until Store.Clear.
	// Default: a resolver that is asked after the revocation and still grants scopes
	// clears it, and the client gets a lease under another id (§7.3.4).
	HoldRevoked bool
	// Clock is where issue, expiry and revocation come from. Default time.Now.
	Clock func() time.Time
	// Events gets events.LeaseConsulted. nil: nobody.
	Events events.Sink
	// Logger gets what clients are not told. nil: nothing is logged.
	Logger *slog.Logger
}

// Store issues leases and finds them again. It is safe for concurrent use.
type Store struct {
	pool   *pgxpool.Pool
	ttl    time.Duration
	keys   [][]byte
	hold   bool
	clock  func() time.Time
	events events.Sink
	log    *slog.Logger
}

// New returns a store over the caller's pool, which it never closes. It does no I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Store, error) {
	s := &Store{pool: pool, ttl: cfg.TTL, hold: cfg.HoldRevoked, clock: cfg.Clock, log: cfg.Logger}
	if s.ttl == 0 {
		s.ttl = DefaultTTL
	}
	switch {
	case pool == nil:
		return nil, errors.New("lease: a pool is required")
	case s.ttl < time.Second:
		return nil, fmt.Errorf("lease: Config.TTL is %v; it must be at least a second, or 0 for the default of %v", cfg.TTL, DefaultTTL)
	case len(cfg.Keys) == 0:
		return nil, errors.New("lease: Config.Keys is empty: leases are signed")
	}
	for i, key := range cfg.Keys {
		if len(key) < minKeyBytes {
			return nil, fmt.Errorf("lease: Config.Keys[%d] has %d bytes; it must have at least %d", i, len(key), minKeyBytes)
		}
		s.keys = append(s.keys, append([]byte(nil), key...))
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.events = events.Safe(cfg.Events, s.log)
	return s, nil
}

// Client is whose lease it is. None of it is authenticated by this package.
type Client struct {
	Partition, ID, Actor string
}

// Authorize returns what a client's lease grants while the resolver is out of reach
// (§7.3.3). It changes nothing. Without a valid lease the error is an *ssp2.Error,
// sync.auth_lease_required or sync.auth_lease_revoked; other errors are the database's.
func (s *Store) Authorize(ctx context.Context, c Client) (scope.Allowed, error) {
	row, err := db.New(s.pool).LeaseFind(ctx, db.LeaseFindParams{Partition: c.Partition, ClientID: c.ID, WithScopes: true})
	if err != nil {
		return nil, fmt.Errorf("reading the auth lease: %w", err)
	}
	r := recordOf(c, row)
	outcome := s.judge(row.Found, &r, c)
	var allowed scope.Allowed
	if outcome == events.LeaseValid {
		if allowed, err = parseScopes(row.AllowedScopes); err != nil {
			return nil, fmt.Errorf("reading the auth lease: %w", err)
		}
	}
	s.consulted(ctx, c, r.id, outcome)
	if outcome == events.LeaseValid {
		return allowed, nil
	}
	if outcome == events.LeaseRevoked {
		return nil, ssp2.Errorf(ssp2.CodeAuthLeaseRevoked, "the auth lease was revoked, and live authorization is unavailable")
	}
	return nil, ssp2.Errorf(ssp2.CodeAuthLeaseRequired, "live authorization is unavailable and there is no valid auth lease to stand in for it")
}

// judge says what a record is worth now.
func (s *Store) judge(found bool, r *record, c Client) events.LeaseOutcome {
	switch {
	case !found:
		return events.LeaseMissing
	case !s.verify(r):
		return events.LeaseTampered
	case r.actor != c.Actor:
		return events.LeaseOtherActor
	case r.revokedAt >= 0:
		return events.LeaseRevoked
	case s.clock().UnixMilli() >= r.expiresAt:
		return events.LeaseExpired
	}
	return events.LeaseValid
}

func (s *Store) consulted(ctx context.Context, c Client, leaseID string, outcome events.LeaseOutcome) {
	if outcome == events.LeaseTampered {
		s.log.ErrorContext(ctx, "the signature of an auth lease is wrong: the record was changed, or its key is not configured",
			"partition", c.Partition, "client", c.ID)
	}
	events.Emit(ctx, s.events, events.LeaseConsulted{
		Partition: c.Partition, Actor: c.Actor, ClientID: c.ID, LeaseID: leaseID, Outcome: outcome,
	})
}

// Revoke marks a lease as revoked, for good: no round is authorized by it any more, and it
// is never refreshed. What the resolver grants, and the rows of the client, are not
// touched (§7.3.4). It returns once that is durable. The error is ErrNotFound when the
// partition has no such lease; revoking one again changes nothing.
func (s *Store) Revoke(ctx context.Context, partition, leaseID string) error {
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		q := db.New(tx)
		row, err := q.LeaseLock(ctx, db.LeaseLockParams{Partition: partition, LeaseID: leaseID})
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrNotFound
		}
		if err != nil {
			return err
		}
		r := record{
			partition: partition, client: row.ClientID, id: leaseID, actor: row.ActorID, digest: row.AllowedDigest,
			issuedAt: row.IssuedAtMs, expiresAt: row.ExpiresAtMs, revokedAt: row.RevokedAtMs, signature: row.Signature,
		}
		if r.revokedAt >= 0 && s.verify(&r) {
			return nil
		}
		// One that is not genuine is signed as well: it grants nothing either way, and
		// unsigned it would be taken for none, and replaced by a round from before.
		r.revokedAt = s.clock().UnixMilli()
		r.signature = s.sign(&r)
		return q.LeaseRevoke(ctx, db.LeaseRevokeParams{
			RevokedAt: r.revokedAt, Signature: r.signature, Partition: partition, LeaseID: leaseID,
		})
	})
	if err != nil {
		return fmt.Errorf("revoking an auth lease: %w", err)
	}
	return nil
}

// Clear forgets a revoked lease: the next round that resolves scopes issues one under
// another id, and until then the client has none. The error is ErrNotFound when the
// partition has no such lease, or it is not revoked.
func (s *Store) Clear(ctx context.Context, partition, leaseID string) error {
	n, err := db.New(s.pool).LeaseClear(ctx, db.LeaseClearParams{Partition: partition, LeaseID: leaseID})
	if err == nil && n == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("clearing an auth lease: %w", err)
	}
	return nil
}
