package events

import (
	"encoding/hex"
	"time"

	"github.com/syncpg/syncpg/ssp2"
)

// RequestHandled says that a sync round is over, "request.handled". Requests that no
// round began for, such as unauthenticated ones, are not told.
type RequestHandled struct {
	Partition, Actor, ClientID string
	WireVersion                ssp2.WireVersion
	Commits                    int   // pushed
	Subscriptions              int   // pulled
	BytesReceived              int64 // body of the request, as it was compressed; 0 when the binding does not count
	BytesSent                  int64 // body of the response, as it was compressed; likewise
	Duration                   time.Duration
	Code                       ssp2.Code // what the request failed with; "" when it did not
}

// EventName returns "request.handled".
func (RequestHandled) EventName() string { return "request.handled" }

// Push is what events about the outcome of a pushed commit (§2.3) have in common.
type Push struct {
	Partition, Actor, ClientID, ClientCommitID string
	Operations                                 int
	Replay                                     bool      // the outcome stood already
	RecordedAt                                 time.Time // when it was recorded; zero when it was not
	OutcomeID                                  OutcomeID // of the stored outcome; every replay has the same; zero when none is stored
}

// OutcomeID is the identity of a stored outcome, a random UUID.
type OutcomeID [16]byte

// String returns the id in the form of a UUID.
func (id OutcomeID) String() string {
	h := hex.EncodeToString(id[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// MarshalText returns the id in the form of a UUID.
func (id OutcomeID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// PushApplied says that a commit is applied (§6.1), "push.applied".
type PushApplied struct {
	Push
	CommitSeq int64
}

// EventName returns "push.applied".
func (PushApplied) EventName() string { return "push.applied" }

// PushRejected says that a commit is rejected, other than by a conflict, "push.rejected".
type PushRejected struct {
	Push
	Code    ssp2.Code // of the operation that failed, the host's own codes included (§6.7)
	OpIndex int32
}

// EventName returns "push.rejected".
func (PushRejected) EventName() string { return "push.rejected" }

// PushConflicted says that a commit is rejected by a conflict (§6.2), "push.conflicted".
type PushConflicted struct {
	Push
	Code    ssp2.Code
	OpIndex int32 // of the first conflict
}

// EventName returns "push.conflicted".
func (PushConflicted) EventName() string { return "push.conflicted" }

// PullServed says that a subscription is answered, "pull.served", one event per subscription.
type PullServed struct {
	Partition, Actor, ClientID string
	SubscriptionID, Table      string
	Status                     ssp2.SubStatus
	Bootstrap                  bool // answered with segments (§4.7), else with commits (§4.5)
	Commits                    int
	Changes                    int
	SegmentsInline             int   // in the response
	SegmentsExternal           int   // built for this response, to be downloaded
	SegmentsReused             int   // found in the segment store, to be downloaded
	Rows                       int64 // in all segments
	Bytes                      int64 // of commits and inline segments
	NextCursor                 int64
}

// EventName returns "pull.served".
func (PullServed) EventName() string { return "pull.served" }

// SegmentServed says that the download of a segment (§5.5) is over, or refused,
// "segment.served". Requests for the headers alone are not told.
type SegmentServed struct {
	Partition, Actor string         // empty as far as it is not known who asks; a URL (§5.4) tells no actor
	SegmentID        string         // empty when what was asked for is none
	Table            string         // empty when it was refused
	MediaType        ssp2.MediaType // rows or an image; 0 when it was refused
	Signed           bool           // asked for by URL
	NotModified      bool           // the client has it, and was told so
	Broken           bool           // broken off before its end
	Bytes            int64          // of the segment
	BytesSent        int64          // of it, as it was compressed
	Duration         time.Duration
	Code             ssp2.Code // what it was refused with; "" when it was not
}

// EventName returns "segment.served".
func (SegmentServed) EventName() string { return "segment.served" }

// ReactionQueued says that the commit that planned a reaction is committed (§6.9),
// "reaction.queued".
type ReactionQueued struct {
	Partition, Actor, ClientID, ClientCommitID string
	CommitSeq                                  int64
	IdempotencyKey                             string
	Type                                       string
	Version                                    int32
}

// EventName returns "reaction.queued".
func (ReactionQueued) EventName() string { return "reaction.queued" }

// Delivery is what events about one delivery of a reaction (§6.9) have in common.
type Delivery struct {
	Partition      string
	IdempotencyKey string
	Type           string
	Version        int32
	Attempt        int    // 1 is the first
	LeaseOwner     string // token of the runner's pass
}

// ReactionStarted says that the handler of a reaction is about to be called, "reaction.started".
type ReactionStarted struct {
	Delivery
}

// EventName returns "reaction.started".
func (ReactionStarted) EventName() string { return "reaction.started" }

// ReactionRetried says that a delivery failed and there will be another, "reaction.retried".
type ReactionRetried struct {
	Delivery
	Duration time.Duration // of the handler
	Code     string        // of the failure
	NextAt   time.Time     // not before then
}

// EventName returns "reaction.retried".
func (ReactionRetried) EventName() string { return "reaction.retried" }

// ReactionCompleted says that a delivery is recorded as completed, "reaction.completed".
type ReactionCompleted struct {
	Delivery
	Duration time.Duration // of the handler
}

// EventName returns "reaction.completed".
func (ReactionCompleted) EventName() string { return "reaction.completed" }

// ReactionDeadLettered says that a delivery failed for good, "reaction.dead_lettered".
type ReactionDeadLettered struct {
	Delivery
	Duration time.Duration // of the handler
	Code     string        // of the failure
}

// EventName returns "reaction.dead_lettered".
func (ReactionDeadLettered) EventName() string { return "reaction.dead_lettered" }

// ReactionPruneCompleted says that a retention pass over a partition's reactions is over,
// "reaction.prune_completed".
type ReactionPruneCompleted struct {
	Partition          string
	CompletedBefore    time.Time // cutoff; zero: they are kept
	DeadLetterBefore   time.Time // cutoff; zero: they are kept
	Limit              int
	RemovedCompleted   int
	RemovedDeadLetters int
	MayHaveMore        bool
}

// EventName returns "reaction.prune_completed".
func (ReactionPruneCompleted) EventName() string { return "reaction.prune_completed" }

// Pruned says that a pruning of a partition's log (§4.6) is over, "prune.completed".
type Pruned struct {
	Partition       string
	PreviousHorizon int64 // commit seq
	Horizon         int64 // commit seq; the previous one when nothing was removed
	RemovedCommits  int64
}

// EventName returns "prune.completed".
func (Pruned) EventName() string { return "prune.completed" }

// ResolverFailed says that the host's scope resolver returned an error, panicked, or
// returned scopes that cannot be (§3.2), "scopes.resolve_failed".
type ResolverFailed struct {
	Partition, Actor, ClientID string
	Phase                      string // what needed the scopes, such as "request"
	Outage                     bool   // the host cannot say, which revokes nothing (§7.3)
	Err                        error
}

// EventName returns "scopes.resolve_failed".
func (ResolverFailed) EventName() string { return "scopes.resolve_failed" }

// LeaseOutcome is what an auth lease was found to be.
type LeaseOutcome string

// Outcomes of LeaseConsulted.
const (
	LeaseValid      LeaseOutcome = "valid"
	LeaseMissing    LeaseOutcome = "missing"
	LeaseExpired    LeaseOutcome = "expired"
	LeaseRevoked    LeaseOutcome = "revoked"
	LeaseOtherActor LeaseOutcome = "other_actor"
	LeaseTampered   LeaseOutcome = "tampered" // its signature is wrong
)

// LeaseConsulted says that a round was to be authorized by the auth lease of its client,
// since live authorization was out of reach (§7.3.3), "lease.consulted". It is also told of
// a tampered one that a round with live authorization replaced.
type LeaseConsulted struct {
	Partition, Actor, ClientID string
	LeaseID                    string // empty: there is none
	Outcome                    LeaseOutcome
}

// EventName returns "lease.consulted".
func (LeaseConsulted) EventName() string { return "lease.consulted" }

// Session is what events about a realtime connection (§8) have in common.
type Session struct {
	Partition, Actor, ClientID, SessionID string
}

// RealtimeConnected says that a realtime connection is open (§8.1), "realtime.opened".
type RealtimeConnected struct {
	Session
	Registrations int   // subscriptions that get deltas
	Cursor        int64 // last acknowledged
	LatestSeq     int64
}

// EventName returns "realtime.opened".
func (RealtimeConnected) EventName() string { return "realtime.opened" }

// RealtimeDisconnected says that a realtime connection is closed, "realtime.closed".
type RealtimeDisconnected struct {
	Session
	Duration time.Duration // since it was opened
}

// EventName returns "realtime.closed".
func (RealtimeDisconnected) EventName() string { return "realtime.closed" }

// RealtimeDeltaSent says that a commit went out as a delta (§8.2), "realtime.delta".
type RealtimeDeltaSent struct {
	Session
	CommitSeq int64
	Changes   int
	Bytes     int64
}

// EventName returns "realtime.delta".
func (RealtimeDeltaSent) EventName() string { return "realtime.delta" }

// RealtimeWakeSent says that a client was told to pull (§8.3), "realtime.wake".
type RealtimeWakeSent struct {
	Session
	Reason ssp2.WakeReason
}

// EventName returns "realtime.wake".
func (RealtimeWakeSent) EventName() string { return "realtime.wake" }
