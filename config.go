package syncpg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
)

// Names of lower packages that a host meets in [Config].
type (
	// Schema is a compiled schema, from [ParseSchema].
	Schema = schema.Schema
	// Identity is who is asking, and in which partition. Both are of the host's
	// making and never on the wire.
	Identity = round.Identity
	// ScopeRequest is what ResolveScopes is asked.
	ScopeRequest = round.ScopeRequest
	// Validator is a rule for the rows of a table; see package pushsvc for how it rejects.
	Validator = pushsvc.Validator
	// CommitValidator is a rule for whole commits.
	CommitValidator = pushsvc.CommitValidator
	// Planner says what work follows a commit.
	Planner = pushsvc.Planner
	// RetentionPolicy says how much of a log is kept.
	RetentionPolicy = retention.Policy
)

// ErrOutage says that an authority is out of reach, which decides nothing.
// ResolveScopes returns it, or an error that wraps it, when it cannot find out
// what an actor may do: the round fails and may be retried, where any other error
// revokes and refuses for good. Authenticate returns it for 503 instead of 401.
var ErrOutage = round.ErrOutage

// ParseSchema compiles a schema from its IR, the JSON document that the app's code
// generator writes. The error lists every rule it breaks, with table and column.
func ParseSchema(ir []byte) (*Schema, error) { return schema.Parse(ir) }

// Config says what a server serves and for whom. Schema, Authenticate and
// ResolveScopes are required; the zero value of every other field is its default.
// [New] copies a Config and never changes it.
type Config struct {
	// Schema is the newest schema version this server serves. It must be the installed one.
	Schema *Schema

	// OlderSchemas are versions before Schema whose clients are served, too: they get and
	// send rows in the codec of their version (§9), where columns are matched by name. New
	// refuses one that cannot be served from Schema: its tables and columns must still be
	// there with the same keys, scopes, types and nullability, and what Schema has more must
	// be tables or nullable columns. An update of such a client leaves the columns it does
	// not know as they are. ResolveScopes, validators and all the rest see Schema only.
	// Clients of any other version are told to upgrade (§1.6). Ready refuses a version from
	// before one that could not have served it, since its clients would miss changes. A socket of an older client
	// gets wake-ups instead of deltas until a round over it tells the version. Default: none.
	OlderSchemas []*Schema

	// Authenticate says who sent a request, from its headers; it must not read the
	// body. It runs on every round. Its errors are answered with 401
	// sync.auth_required and not shown, except ErrOutage (503) and *ssp2.Error,
	// which is answered as it is.
	Authenticate func(r *http.Request) (Identity, error)

	// ResolveScopes says what an actor may read and write: scope variable to
	// values, "*" for any. It runs once per round, after the request is found to be
	// well-formed and before anything is read or written. When it fails for another
	// reason than ErrOutage, or panics, the actor holds nothing in this round:
	// subscriptions are revoked, which makes clients drop their rows, and pushes
	// are refused for good (§3.2, §3.4).
	ResolveScopes func(ctx context.Context, req ScopeRequest) (scope.Allowed, error)

	// Validators holds the rule for the rows of each table that has one, by table name
	// (§6.7). It sees every row that a push would write, as it would be stored, and
	// rejects with pushsvc.Reject; its other errors tell the client nothing. A name that
	// the schema does not have is an error of New. Default: no rules, at no cost.
	Validators map[string]Validator

	// ValidateCommit is the rule for whole commits (§6.8), which may read the rows that
	// the commit would leave. It costs no round trip until it reads. Default: no rule.
	ValidateCommit CommitValidator

	// PlanReactions says what work follows a commit (§6.9). The plans are stored with the
	// commit, for a reaction.Runner of the host to deliver, which Committed can wake. When
	// it fails, so does the push, and the client tries again. Default: no reactions.
	PlanReactions Planner

	// Leases turns auth leases on (§7.3): while ResolveScopes answers ErrOutage, a client
	// is served with what it was allowed when it was last asked. Default: nil, off.
	Leases *Leases

	// AppSchema is the database schema of the app's tables. Default: "public".
	AppSchema string

	// MaxOperations caps the operations of all commits of one request (§6.1).
	// Default: 500.
	MaxOperations int

	// MaxBatchOperations is up to how many operations of requests of different clients
	// to one partition share a transaction. Default: 2000. Negative: requests share none.
	MaxBatchOperations int

	// MaxWaiting caps the pushes that wait for one partition in this process, and
	// MaxWait the time each does; a push beyond is refused with sync.rate_limited.
	// Defaults: 1000 and 10 s.
	MaxWaiting int
	MaxWait    time.Duration

	// MaxCascade caps the operations that the references of the schema append to one
	// commit, which is refused above. Default: 1000.
	MaxCascade int

	// MaxSubscriptions caps the subscriptions of one request. Default: 1000.
	MaxSubscriptions int

	// MaxScopeValues caps the scope values that all subscriptions of one request ask
	// for. Default: 20000.
	MaxScopeValues int

	// CatchUpChanges is how many changes a subscription may be behind and still be sent
	// every one of them, although its scope has no more rows than that; beyond, its client
	// begins anew, which is the shorter way (§8.4). Default: 1000. Negative: any number.
	CatchUpChanges int

	// ImageDir is where SQLite images of the bootstrap are built, each as a temporary file
	// of the size of the rows. Default: os.TempDir.
	ImageDir string

	// MaxBuilds is how many images are built at once; further clients get rows segments. It
	// is also how many builds of a started server go on at once, for up to ten minutes,
	// after their clients have left. Default: 4.
	MaxBuilds int

	// InlineSegmentMaxBytes is the size in bytes up to which a bootstrap page rides
	// in the response although the client takes others too (§5.7). Default: 262144.
	InlineSegmentMaxBytes int

	// Segments keeps the bootstrap pages and images that clients download by themselves,
	// at GET /segments/{id}. Default: tables of the database, which all its servers share;
	// see package segment for others.
	Segments segment.Store

	// SegmentTTL is how long the default store keeps a segment. Default: 24 h. Negative:
	// there is no store, every page rides in the response, and clients that take external
	// ones only cannot bootstrap. It says nothing about a store in Segments.
	SegmentTTL time.Duration

	// SegmentURLs issues URLs for clients that fetch segments without authentication
	// (§5.4): a segment.Signer, whose URLs this server answers, or one of presigned URLs.
	// Default: none are issued.
	SegmentURLs segment.URLSigner

	// MaxRequestBytes bounds a request body in bytes, as sent and as decompressed.
	// Default: 16 MiB. Negative: no bound.
	MaxRequestBytes int64

	// WriteTimeout is how long a client may take for the next 64 KiB of a response
	// before it is given up. Default: 30 s. Negative: no limit.
	WriteTimeout time.Duration

	// MaxCompressed is how many responses are compressed at once, each of which holds about
	// 1 MiB for as long as its client takes; further ones go out as they are. Default: 128.
	// Negative: no bound.
	MaxCompressed int

	// Retention says how much of a partition's log is kept (§4.6), at least what the
	// protocol wants. Default: 1000 commits, what clients that pulled within 14 days have
	// not pulled, as long as it is not over 30 days old, and no compaction.
	Retention RetentionPolicy

	// PruneInterval is how often a started server prunes the logs of all partitions.
	// However many servers share a database, one does at a time. Default: 1 hour.
	// Negative: never; then call Server.Retention().PruneAll, or `syncpg prune`.
	PruneInterval time.Duration

	// Realtime is about GET /realtime, the channel for sync over sockets (§8): origins,
	// limits, intervals. Default: the defaults of realtime.Options. Sockets are served
	// between Server.Start and Server.Stop; meanwhile one connection besides the pool
	// listens for commits of other processes.
	Realtime realtime.Options

	// DisableRealtime leaves GET /realtime out.
	DisableRealtime bool

	// Clock is where all times of commits come from. Default: time.Now.
	Clock func() time.Time

	// Events gets what happens: requests, commits, pulls; see package events. It is
	// called on the goroutines that serve, so it must return at once; a panic of it
	// changes nothing. Default: nobody is told, which costs nothing.
	Events events.Sink

	// Committed is told of each transaction of this process that committed pushes, with
	// the newest seq of the partition, before their answer. It must not block; a panic
	// changes nothing. Default: nobody is told.
	Committed func(partition string, seq int64)

	// Logger gets what clients are not told: failures at warn and error, refused
	// requests at debug. Default: nothing is logged.
	Logger *slog.Logger
}

// Leases configures auth leases (§7.3). Keys is required.
type Leases struct {
	// TTL is how long a client is served without ResolveScopes after the last round that
	// had its answer, which is also how long a scope that was taken away since can be
	// used on. A lease may be a minute older than that round, a tenth of the TTL if that
	// is less. Default: 15 minutes.
	TTL time.Duration

	// Keys sign the leases in the database, at least 32 random bytes each: the first
	// signs, all verify. Every server of a database has the same ones. To rotate, add the
	// new key behind, everywhere; then put it in front; take the old one away when a TTL
	// has passed.
	Keys [][]byte

	// HoldRevoked keeps a client whose lease was revoked without one until
	// [Server.ClearLease]. Default: false, an answer of ResolveScopes from after the
	// revocation gets it a new one.
	HoldRevoked bool
}

// check says what is wrong with a Config that the services below do not look at.
func (c *Config) check() error {
	switch {
	case c.Schema == nil:
		return errors.New("Config.Schema is nil: compile one with syncpg.ParseSchema")
	case c.Authenticate == nil:
		return errors.New("Config.Authenticate is nil: return the Identity of a request, or an error for 401")
	case c.ResolveScopes == nil:
		return errors.New(`Config.ResolveScopes is nil: return what an actor may read and write, such as scope.Allowed{"team_id": {"t1"}}`)
	}
	if err := schemaddl.CheckAppSchema(c.AppSchema); err != nil {
		return fmt.Errorf("Config.AppSchema: %w", err)
	}
	if err := c.Retention.Check(); err != nil {
		return fmt.Errorf("Config.Retention: %w", err)
	}
	return nil
}
