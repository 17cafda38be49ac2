// Package fanout carries commits and presence between the processes that serve one
// database (§8.2, §8.6).
//
// Commits come from the log and from nowhere else. A process that has connections in a
// partition watches it; whatever tells that a partition has news (a push of this process,
// a notification of another, a look at the partitions every few seconds) leads to the
// same read, of the commits after the newest one that the sink was given:
//
//	pushsvc ── Committed ──┬──────────────▶ news of a partition ──▶ read the log ──▶ Sink.Commits
//	                       └─ pg_notify        ▲          ▲
//	                             └─ LISTEN ────┘   poll ──┘
//
// So it does not matter who appended a commit, whether a notification was lost, or how
// often one arrives: every commit of a watched partition reaches the sink once, in order,
// or the sink is told that it does not ([Sink.Lost], [Sink.Reset]).
//
// Presence is not in the log nor in any table. It travels in notifications, numbered per
// process, so that a process that missed some asks for all of them again; see presence.go.
package fanout
