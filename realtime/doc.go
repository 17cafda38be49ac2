// Package realtime serves the realtime channel (§8): a WebSocket per device that carries
// sync rounds, deltas, wake-ups and presence.
//
//	handler.go   GET /realtime: authentication, limits, the client's record, hello (§8.1)
//	conn.go      one connection: what is read from it and written to it
//	netconn.go   bounded writes, and writes that must not wait
//	round.go     rounds over the socket (§8.7), run by the same engine as POST /sync
//	hub.go       the connections of a process and what they share per partition
//	index.go     which registrations a change belongs to
//	delta.go     a commit on its way to them (§8.2), wake-ups (§8.3), acknowledgements
//	presence.go  who is there (§8.6)
//	acks.go      cursors on their way to the database
//	pulse.go     heartbeats (§8.5) and connections that are dead
//
// A connection has one goroutine that reads. It has others only while there is something
// to do: one while something is to be written, one while a round runs. What is to be
// written waits in a bounded queue; when a delta does not fit, the client gets a wake-up
// instead, and no more deltas before it has caught up. Nobody waits for a slow client but
// its own round.
//
// Commits come from package fanout, which reads them from the log, whoever wrote them.
package realtime
