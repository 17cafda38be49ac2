// Package pullsvc answers the pull half of a request: it reads commit windows and
// bootstrap pages for a client's subscriptions and writes them as frames.
//
// [Service.Begin] reads in one round trip, whatever the number of subscriptions:
// gate, client record, horizon, the windows of all subscriptions that catch up and
// the first pages of all that bootstrap, as one snapshot. A second round trip
// records the client, when there is something to record. [Pull.Stream] then writes
// SUB_START to SUB_END of each subscription in request order; it goes back to the
// database only for what did not fit in [Config.BufferBytes] and for further pages
// of a bootstrap. No connection is held while frames are being sent.
//
// What a subscription is answered with:
//
//	revoked    a requested scope is not granted, or the resolver failed (§3.3)
//	bootstrap  cursor below 0 or above the newest commit, or a resume token (§4.7)
//	reset      cursor below the horizon (§4.6)
//	window     otherwise (§4.5)
//
// A window that was cut short becomes a reset where a bootstrap is the shorter way
// (§8.4, [Config.CatchUpChanges]).
//
// With a segment store, what a bootstrap reads of a scope that is larger than a page is
// shared with all who ask for the same: segments are built once, stored, and served as
// they are, inline or by descriptor. A client that takes SQLite images gets one instead of
// pages (§5.3).
//
// A window or page also ends early, at a commit or row, once its payloads reach
// Config.BufferBytes; to a client that is a lower limit.
package pullsvc
