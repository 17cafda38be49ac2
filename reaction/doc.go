// Package reaction is durable work that follows a commit (§6.9): mail, webhooks, jobs.
//
// A host plans reactions while a push is validated ([Plan], [Normalize]); they are
// stored in the commit's own transaction, so there is one exactly when the commit was
// accepted. A [Runner] then delivers them to handlers, at least once each.
//
//	          claim                     completed
//	pending ────────▶ leased ─────────▶ completed ──▶ pruned after 30 days
//	   ▲               │   │
//	   └── retry later ┘   └─ permanent, or the last attempt
//	   ▲                            │
//	   └── RetryDeadLetter ── dead-letter ──────────▶ pruned after 90 days
//
// A runner that dies leaves its lease to expire; then the reaction is claimed again
// and delivered with the same idempotency key. Handlers pass that key to the systems
// they call: nothing else can make a side effect happen once only.
//
// Every step of a lease compares its owner, a token of one pass of one runner, so
// whoever was too slow cannot change what somebody else has taken over. Times are
// those of the runner's clock; the clocks of runners should differ by much less than
// a lease.
package reaction
