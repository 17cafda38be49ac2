package lease

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// maxAge is how old a lease may become before a round refreshes it, if a tenth of the TTL
// is not less. Refreshing it in every round would make every quiet pull write.
const maxAge = time.Minute

// Find is the statement of Round.Args.
var Find = pgtx.NewStatement(db.LeaseFind)

// Round is the lease in a round whose scopes the resolver gave. It is used by one
// goroutine: read it, look whether it is Due, and write it then.
type Round struct {
	store   *Store
	client  Client
	scopes  string // as the record has them
	digest  []byte
	askedAt time.Time

	stored record
	found  bool
	next   *record // to be written
	frame  *ssp2.Lease
}

// Begin is called when the resolver has answered; askedAt is from before it was asked, by
// the clock of the Config.
func (s *Store) Begin(c Client, allowed scope.Allowed, askedAt time.Time) *Round {
	r := &Round{store: s, client: c, scopes: renderScopes(allowed), askedAt: askedAt}
	sum := sha256.Sum256([]byte(r.scopes))
	r.digest = sum[:]
	return r
}

// Now returns the time by the clock of the Config.
func (s *Store) Now() time.Time { return s.clock() }

// Args are the arguments of Find, whose row goes to Read.
func (r *Round) Args() []any { return []any{r.client.Partition, r.client.ID, false} }

// Read reads the row of Find and decides what becomes of the lease.
func (r *Round) Read(ctx context.Context, rows pgx.Rows) error {
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[db.LeaseFindRow])
	if err != nil {
		return fmt.Errorf("reading the auth lease: %w", err)
	}
	r.decide(ctx, row)
	return nil
}

func (r *Round) decide(ctx context.Context, row db.LeaseFindRow) {
	s, now := r.store, r.store.clock()
	r.stored, r.found = recordOf(r.client, row), row.Found
	r.next, r.frame = nil, nil
	id := r.stored.id
	switch outcome := s.judge(r.found, &r.stored, r.client); outcome {
	case events.LeaseTampered, events.LeaseRevoked:
		if outcome == events.LeaseTampered {
			s.consulted(ctx, r.client, id, outcome)
		}
		// A revocation stands also when the key that signed it is no longer configured.
		if r.stored.revokedAt >= 0 && (s.hold || r.stored.revokedAt > r.askedAt.UnixMilli()) {
			return // what the resolver said is from before the revocation
		}
		id = newID()
	case events.LeaseMissing, events.LeaseOtherActor:
		id = newID()
	case events.LeaseValid, events.LeaseExpired:
		age := now.UnixMilli() - r.stored.issuedAt
		if age >= 0 && age < min(maxAge, s.ttl/10).Milliseconds() && bytes.Equal(r.stored.digest, r.digest) &&
			r.stored.expiresAt-r.stored.issuedAt == s.ttl.Milliseconds() {
			r.frame = &ssp2.Lease{LeaseID: id, ExpiresAtMs: r.stored.expiresAt}
			return
		}
	}
	r.next = &record{
		partition: r.client.Partition, client: r.client.ID, id: id, actor: r.client.Actor, digest: r.digest,
		issuedAt: now.UnixMilli(), expiresAt: now.Add(s.ttl).UnixMilli(), revokedAt: -1,
	}
	r.next.signature = s.sign(r.next)
}

// Due says that the lease is to be written.
func (r *Round) Due() bool { return r.next != nil }

// Queue adds the writing of a lease that is due to a batch. relaxed: the transaction does
// not wait for the disk. The client's record must be there, or be written before.
func (r *Round) Queue(b *pgx.Batch, relaxed bool) {
	p := r.params(relaxed)
	b.Queue(db.LeaseIssue, p.Partition, p.ClientID, p.ActorID, p.Previous, p.LeaseID, p.AllowedScopes,
		p.IssuedAt, p.ExpiresAt, p.Signature, p.Relaxed).QueryRow(func(row pgx.Row) error {
		var issued bool
		if err := row.Scan(&issued); err != nil {
			return fmt.Errorf("writing the auth lease: %w", err)
		}
		r.written(issued)
		return nil
	})
}

func (r *Round) params(relaxed bool) db.LeaseIssueParams {
	p := db.LeaseIssueParams{
		Partition: r.client.Partition, ClientID: r.client.ID, ActorID: r.client.Actor,
		LeaseID: r.next.id, AllowedScopes: r.scopes, IssuedAt: r.next.issuedAt, ExpiresAt: r.next.expiresAt,
		Signature: r.next.signature, Relaxed: relaxed,
	}
	if r.found {
		p.Previous = &r.stored.id
	}
	return p
}

// written says what became of the write. When something else happened to the lease
// meanwhile, this round tells nothing of it.
func (r *Round) written(issued bool) {
	r.frame = nil
	if issued {
		r.frame = &ssp2.Lease{LeaseID: r.next.id, ExpiresAtMs: r.next.expiresAt}
	}
}

// Refresh reads the lease, and writes it if it is due, for a round that does not pull: a
// round trip, or two.
func (r *Round) Refresh(ctx context.Context) error {
	q := db.New(r.store.pool)
	row, err := q.LeaseFind(ctx, db.LeaseFindParams{Partition: r.client.Partition, ClientID: r.client.ID})
	if err != nil {
		return fmt.Errorf("reading the auth lease: %w", err)
	}
	if r.decide(ctx, row); !r.Due() {
		return nil
	}
	issued, err := q.LeaseIssue(ctx, r.params(true))
	if err != nil {
		return fmt.Errorf("writing the auth lease: %w", err)
	}
	r.written(issued)
	return nil
}

// Frame returns the LEASE frame of the round (§7.3.2), nil for none.
func (r *Round) Frame() *ssp2.Lease {
	if r == nil {
		return nil
	}
	return r.frame
}
