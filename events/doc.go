// Package events tells a host what the server did: requests, commits, pulls, reactions,
// retention, realtime connections. Events are for watching. They are fire and forget
// (§6.9): nothing depends on one being seen, and none is stored; work that must follow
// a commit is a durable reaction (package reaction).
//
// A host implements [Sink], or uses [Slog], a [Ring], or the metrics of package
// events/prometheus, several of them joined by [Multi]. Sinks are called on the
// goroutine that did the work, between two steps of it: they must be safe for
// concurrent use and return at once. One that panics is contained by [Safe], which
// every service puts around the sink it is given.
//
// Events hold ids and numbers, no row data. Partitions, actors and client ids are
// among them; whoever forwards events decides whether those may leave.
package events
