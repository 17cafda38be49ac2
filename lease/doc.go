// Package lease keeps auth leases (§7.3): what a client's actor was allowed when the
// host's resolver was last reached, so that rounds can go on for a while when it is not.
//
// A round whose scopes the resolver gave issues or refreshes the lease of its client: a
// [Round] travels in the round trips that its pull makes anyway. A round whose resolver is
// out of reach asks [Store.Authorize].
//
// Leases are signed at rest. A record whose signature is wrong counts as none. What the
// signature cannot see is that a whole older record was put back, a revocation undone that
// way included.
package lease
