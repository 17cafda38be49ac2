package lease

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
)

// State is what a lease is worth, as far as its times say.
type State string

// The states of a lease. Whether its record is genuine is for [Store.Genuine] to say.
const (
	StateValid   State = "valid"
	StateExpired State = "expired"
	StateRevoked State = "revoked"
)

// Info is an auth lease, without what it allows.
type Info struct {
	Client
	LeaseID             string
	IssuedAt, ExpiresAt time.Time
	RevokedAt           time.Time // zero: it is not revoked

	record record
}

// State returns what the lease is worth at a time.
func (i *Info) State(now time.Time) State {
	switch {
	case !i.RevokedAt.IsZero():
		return StateRevoked
	case !now.Before(i.ExpiresAt):
		return StateExpired
	}
	return StateValid
}

// Filter says which leases are meant. What is empty stands for any.
type Filter struct {
	Partition, ClientID, LeaseID, Actor string
}

// lastName comes after every name of a partition or a client, which have 512 bytes at most.
var lastName = strings.Repeat("\U0010FFFF", 129)

// listPage is how many leases are read at a time.
const listPage = 500

// List calls visit for every lease that a filter means, by partition and client, until it
// returns an error. It needs no key, verifies nothing and locks nothing: leases that are
// issued meanwhile may be left out. With a partition it reads those of the partition.
func List(ctx context.Context, pool *pgxpool.Pool, f Filter, visit func(Info) error) error {
	params := db.LeaseListParams{
		AfterPartition: f.Partition, UpToPartition: cmp.Or(f.Partition, lastName), UpToClient: lastName,
		ClientID: optional(f.ClientID), LeaseID: optional(f.LeaseID), ActorID: optional(f.Actor),
		Batch: listPage,
	}
	for {
		page, err := db.New(pool).LeaseList(ctx, params)
		if err != nil {
			return fmt.Errorf("listing auth leases: %w", err)
		}
		for i := range page {
			if err := visit(infoOf(&page[i])); err != nil {
				return err
			}
		}
		if len(page) < listPage {
			return nil
		}
		last := &page[len(page)-1]
		params.AfterPartition, params.AfterClient = last.Partition, last.ClientID
	}
}

func optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

func infoOf(row *db.LeaseListRow) Info {
	i := Info{
		Client:  Client{Partition: row.Partition, ID: row.ClientID, Actor: row.ActorID},
		LeaseID: row.LeaseID, IssuedAt: time.UnixMilli(row.IssuedAtMs), ExpiresAt: time.UnixMilli(row.ExpiresAtMs),
		record: record{
			partition: row.Partition, client: row.ClientID, id: row.LeaseID, actor: row.ActorID, digest: row.AllowedDigest,
			issuedAt: row.IssuedAtMs, expiresAt: row.ExpiresAtMs, revokedAt: row.RevokedAtMs, signature: row.Signature,
		},
	}
	if row.RevokedAtMs >= 0 {
		i.RevokedAt = time.UnixMilli(row.RevokedAtMs)
	}
	return i
}

// Genuine says whether the record of a lease was signed with one of the keys.
func (s *Store) Genuine(i Info) bool { return s.verify(&i.record) }
