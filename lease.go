package syncpg

import (
	"context"
	"errors"

	"github.com/syncpg/syncpg/lease"
)

// ErrLeaseNotFound says that a partition has no such auth lease.
var ErrLeaseNotFound = lease.ErrNotFound

var errNoLeases = errors.New("syncpg: Config.Leases is nil, so there are no auth leases")

// RevokeLease revokes an auth lease by its id (§7.3.4): from when it returns no round is
// authorized by it, on any server, and it is never refreshed. Rounds that ResolveScopes
// answers go on, and rows that clients have are not touched; to take those away, let
// ResolveScopes answer less. Errors: [ErrLeaseNotFound], and those of the database.
func (s *Server) RevokeLease(ctx context.Context, partition, leaseID string) error {
	if s.leases == nil {
		return errNoLeases
	}
	return s.leases.Revoke(ctx, partition, leaseID)
}

// ClearLease lets the client of a revoked lease have another one, which only matters with
// [Leases].HoldRevoked. Errors: [ErrLeaseNotFound], also when the lease is not revoked, and
// those of the database.
func (s *Server) ClearLease(ctx context.Context, partition, leaseID string) error {
	if s.leases == nil {
		return errNoLeases
	}
	return s.leases.Clear(ctx, partition, leaseID)
}
