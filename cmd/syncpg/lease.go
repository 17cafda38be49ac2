package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/migrations"
)

type leaseCmd struct {
	List   leaseListCmd   `cmd:"" help:"Show auth leases."`
	Revoke leaseRevokeCmd `cmd:"" help:"Take auth leases away."`
}

// checked opens the pool of a command on a database that has the migrations.
func (f databaseFlags) checked(ctx context.Context, p *program) (*pgxpool.Pool, error) {
	pool, err := f.pool(ctx, p)
	if err != nil {
		return nil, err
	}
	if _, err := migrations.Check(ctx, pool); err != nil {
		pool.Close()
		return nil, asState(err)
	}
	return pool, nil
}

// shownLease is what is printed of a lease as JSON.
type shownLease struct {
	Partition string  `json:"partition"`
	Actor     string  `json:"actor"`
	Client    string  `json:"client"`
	LeaseID   string  `json:"leaseId"`
	State     string  `json:"state"`
	IssuedAt  string  `json:"issuedAt"`
	ExpiresAt string  `json:"expiresAt"`
	RevokedAt *string `json:"revokedAt"`
}

func show(i lease.Info, now time.Time) shownLease {
	text := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	s := shownLease{
		Partition: i.Partition, Actor: i.Actor, Client: i.ID, LeaseID: i.LeaseID, State: string(i.State(now)),
		IssuedAt: text(i.IssuedAt), ExpiresAt: text(i.ExpiresAt),
	}
	if !i.RevokedAt.IsZero() {
		s.RevokedAt = new(text(i.RevokedAt))
	}
	return s
}

type leaseListCmd struct {
	databaseFlags
	Partition string `name:"partition" placeholder:"NAME" help:"Only those of a partition. Default: all."`
	Actor     string `name:"actor" placeholder:"ID" help:"Only those of an actor."`
	Client    string `name:"client" placeholder:"ID" help:"Only the one of a client."`
	JSON      bool   `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*leaseListCmd) Help() string {
	return "A lease is what a client was allowed when it was last asked, for when that cannot be found out; see \"syncpg serve " +
		"--lease-key\". Without the key it is not seen whether a lease was tampered with."
}

// Run lists leases.
func (c *leaseListCmd) Run(ctx context.Context, p *program) error {
	pool, err := c.checked(ctx, p)
	if err != nil {
		return err
	}
	defer pool.Close()
	now, leases := time.Now(), []shownLease{}
	err = lease.List(ctx, pool, lease.Filter{Partition: c.Partition, Actor: c.Actor, ClientID: c.Client}, func(i lease.Info) error {
		leases = append(leases, show(i, now))
		return nil
	})
	switch {
	case err != nil:
		return err
	case c.JSON:
		return p.printJSON(leases)
	case len(leases) == 0:
		p.printf("no leases\n")
		return nil
	}
	rows := [][]string{{"PARTITION", "ACTOR", "CLIENT", "LEASE", "STATE", "EXPIRES"}}
	for _, l := range leases {
		rows = append(rows, []string{
			strconv.Quote(l.Partition), strconv.Quote(l.Actor), strconv.Quote(l.Client), l.LeaseID, l.State, l.ExpiresAt,
		})
	}
	return table(p.stdout, "", rows)
}

type leaseRevokeCmd struct {
	databaseFlags
	Partition        string `name:"partition" required:"" placeholder:"NAME" help:"The partition."`
	LeaseID          string `name:"lease-id" xor:"which" placeholder:"ID" help:"The lease with this id."`
	Actor            string `name:"actor" xor:"which" placeholder:"ID" help:"The leases of all clients of an actor."`
	Client           string `name:"client" xor:"which" placeholder:"ID" help:"The lease of a client."`
	LeaseKey         string `name:"lease-key" required:"" placeholder:"BASE64" setting:"" help:"The key of the servers, which signs the revocation. Better in the environment or the file than here."`
	LeasePreviousKey string `name:"lease-previous-key" placeholder:"BASE64" setting:"" help:"Their previous key."`
	JSON             bool   `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*leaseRevokeCmd) Help() string {
	return "From then on no round is authorized by the lease, on any server, and it is never refreshed. That concerns outages only: " +
		"while scopes can be found out the client goes on, and then gets another lease. To take rows away from a device, allow it less."
}

// Run revokes leases.
func (c *leaseRevokeCmd) Run(ctx context.Context, p *program) error {
	if c.LeaseID == "" && c.Actor == "" && c.Client == "" {
		return usagef("say which leases: --lease-id, --actor or --client")
	}
	key, err := decodeKey("--lease-key", c.LeaseKey)
	if err != nil {
		return err
	}
	keys := [][]byte{key}
	previous, err := decodeKey("--lease-previous-key", c.LeasePreviousKey)
	if err != nil {
		return err
	}
	if previous != nil {
		keys = append(keys, previous)
	}
	pool, err := c.checked(ctx, p)
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := lease.New(pool, lease.Config{Keys: keys, Logger: p.log})
	if err != nil {
		return fmt.Errorf("keep leases: %w", err)
	}
	which := lease.Filter{Partition: c.Partition, LeaseID: c.LeaseID, Actor: c.Actor, ClientID: c.Client}
	var found []lease.Info
	if err := lease.List(ctx, pool, which, func(i lease.Info) error {
		if !store.Genuine(i) {
			return fmt.Errorf("the lease %s is not signed with this key: is it the one of the servers? Nothing was revoked", i.LeaseID)
		}
		found = append(found, i)
		return nil
	}); err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("partition %q has no such lease: `syncpg lease list` shows those that are there", c.Partition)
	}
	revoked := []shownLease{}
	for _, i := range found {
		// One that is not there any more authorizes nothing.
		if err := store.Revoke(ctx, i.Partition, i.LeaseID); err != nil && !errors.Is(err, lease.ErrNotFound) {
			return err
		}
	}
	now := time.Now()
	if err := lease.List(ctx, pool, which, func(i lease.Info) error {
		if !i.RevokedAt.IsZero() {
			revoked = append(revoked, show(i, now))
		}
		return nil
	}); err != nil {
		return err
	}
	if c.JSON {
		return p.printJSON(revoked)
	}
	for _, l := range revoked {
		p.printf("revoked %s of client %q, actor %q\n", l.LeaseID, l.Client, l.Actor)
	}
	return nil
}
