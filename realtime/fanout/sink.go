package fanout

import "github.com/syncpg/syncpg/ssp2"

// Commit is one commit of the log, with all its changes. It is shared by everybody who
// is given it, and so read only, as is everything below it.
type Commit struct {
	Seq         int64
	CreatedAtMs int64 // epoch milliseconds
	ActorID     string
	Changes     []Change // in the order of the commit
	// Oversize says that the payloads, of Bytes bytes, were not read, since they are
	// more than Config.MaxCommitBytes: every Payload is nil.
	Oversize bool
	Bytes    int64 // of all payloads
}

// Change is one change of a row (§2.2).
type Change struct {
	Table, RowID string
	Op           ssp2.Op
	RowVersion   int64    // 0 for a delete
	Scopes       []string // stored scopes (§3.1), one variable=value per variable, ascending by variable
	Payload      []byte   // the row as wire bytes (§2.4); nil for a delete
}

// Sink receives what happened. Its methods must not block: they run on the goroutines
// that read. Calls about one partition are in order and never overlap; calls about
// different partitions may. Presence is a sequence of its own. A method may call methods
// of the Fanout except Start and Stop. A call that had begun may still be running when
// Unwatch returns.
type Sink interface {
	// Commits gives commits of a watched partition: ascending, without gaps, each once,
	// the first one being from + 1. The first call after Watch has a from that is not
	// above the seq which Watch returned.
	Commits(partition string, from int64, commits []Commit)
	// Lost says that commits up to seq will not be given, since they are too many or were
	// pruned (§4.6): receivers must pull. It goes on with seq + 1.
	Lost(partition string, seq int64)
	// Reset says that the log is another one than before: its epoch was rotated (§2.1), it
	// went back, or another schema version was installed; or that it has commits in another
	// version than Config.SchemaVersion. Receivers must pull, and what they hold will not
	// do. It goes on with seq + 1.
	Reset(partition string, seq int64)
	// Rotated says that the epoch of a partition's log, or with "" of every one, may be
	// another than before (§2.1), watched or not: what is remembered of it counts no more.
	// It may come without a reason, while other calls run and before the Reset of a
	// watched partition.
	Rotated(partition string)
	// Presence tells of a client that is connected to another process.
	Presence(msg Presence)
	// Notice gives what another process told with Fanout.Notify. One about an actor may
	// come late, or a second time when its process was not heard of for long.
	Notice(n Notice)
}

// PresenceKey is whose document it is, and on which scope key (§8.6.1).
type PresenceKey struct {
	Partition, ScopeKey string
	ActorID, ClientID   string
}

// Presence is the newest presence document of a client on a scope key, or that it left.
//
// Each is given once, whatever was lost on the way, for all partitions, watched or not.
// When a process is gone, its clients leave. A client that went to another process is on
// both for a moment, so a receiver has to remember the Instance of the document it
// shows: the one that came last counts, and a leave counts only if it is of the same
// Instance.
type Presence struct {
	PresenceKey
	Instance string // the process that the client is connected to, a random id
	Doc      []byte // a JSON object, read only; nil: it left
}
