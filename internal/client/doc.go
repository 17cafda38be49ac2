// Package client is a small SSP2 client that keeps its replica in memory. It exists to check servers: it is strict where
// a client of an app may be lenient, and it keeps nothing when the process ends.
//
// A [Client] speaks wire version 1, 2 or 3 over HTTP (§1.1). It acquires the log epoch (§2.1), pushes commits (§6), pulls
// its subscriptions, incrementally (§4.5) or by paged bootstrap (§4.7), and applies commits and segments the way §1.4 and
// §5.6 ask of a client. It downloads segments (§5.5) or fetches them by signed URL (§5.4), and imports SQLite images
// (§5.3) when it is given what opens them. [Client.Dial] opens the realtime channel (§8), on which commits arrive as deltas. Besides what
// the codec checks, it refuses an answer that
//
//   - answers other commits or subscriptions than the request has, or in another order;
//   - delivers a row outside the effective scopes, or with stored scopes that differ from the row's own;
//   - delivers a segment whose columns are not those of the schema, or that is not what its descriptor says;
//   - delivers segments of a bootstrap that do not follow each other at one pin.
//
// Such an answer is an error that wraps [ErrProtocol].
package client
