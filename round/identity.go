package round

import "errors"

// Identity is who is asking, and in which partition, as the host's
// authentication found it (§1.1). Neither is ever taken from a message.
type Identity struct {
	Actor     string // who, non-empty UTF-8 without U+0000
	Partition string // which log, UTF-8 of 1 to 512 bytes without U+0000; a part of every key
}

// ScopeRequest is what a host's resolver is asked.
type ScopeRequest struct {
	Identity
	ClientID string // the device, as the request names it; not authenticated
}

// ErrOutage says that an authority is out of reach, which decides nothing. A
// resolver that returns it, or an error that wraps it, is not a failing resolver:
// nothing is revoked and no write is refused for good (§7.3.3). Without auth
// leases the request fails with sync.auth_lease_required and may be retried.
var ErrOutage = errors.New("the authority is out of reach")
