package pushsvc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// Defaults of Config.
const (
	// DefaultMaxOperations is the operation cap of a request (§6.1).
	DefaultMaxOperations = 500
	// DefaultMaxBatchOperations keeps a transaction within some tens of milliseconds.
	DefaultMaxBatchOperations = 2000
	// DefaultMaxWaiting is more than one partition's clients can make of a stall.
	DefaultMaxWaiting = 1000
	// DefaultMaxWait is how long a client may be expected to stay.
	DefaultMaxWait = 10 * time.Second
)

// Config configures a Service. Only Schema is required.
type Config struct {
	// Schema is the newest schema version served, the installed one.
	Schema *schema.Schema
	// Versions are the schema versions served, of which Schema is the newest. Default:
	// Schema alone.
	Versions *schema.Versions
	// Clock gives the time of commits and outcomes. Default time.Now.
	Clock func() time.Time
	// MaxOperations caps the operations of one request (§6.1). Default 500.
	MaxOperations int
	// MaxBatchOperations is up to how many operations of requests to one partition,
	// of different clients, share a transaction. Default 2000; negative: none do, and
	// each request has a transaction of its own at once.
	MaxBatchOperations int
	// MaxWaiting caps the requests that wait for one partition in this process, and
	// MaxWait the time each does; above, they are refused with sync.rate_limited.
	// Defaults 1000 and 10 s.
	MaxWaiting int
	MaxWait    time.Duration
	// Validators holds the row validator of each table that has one, by name (§6.7).
	Validators map[string]Validator
	// ValidateCommit decides about whole commits (§6.8). nil: nobody is asked.
	ValidateCommit CommitValidator
	// PlanReactions plans the reactions of commits (§6.9). nil: there are none.
	PlanReactions Planner
	// MaxCascade caps the operations that the declared references of the schema append to
	// one commit. Default 1000.
	MaxCascade int
	// Gate is shared with the other services of a server. Default one of its own.
	Gate *gate.Gate
	// Events receives events.PushApplied, PushRejected or PushConflicted for each commit
	// that was answered, duplicates and replays included, and events.ReactionQueued for
	// each reaction that was stored, after its answer; the next
	// push to its partition waits until the sink returns. Default: nobody.
	Events events.Sink
	// Committed is told of each transaction that committed commits, once, with the newest
	// seq of the partition: after its connection is back in the pool and before anybody is
	// answered, so it must not block. A panic changes nothing. It hears of what this
	// process applied; a commit whose acknowledgment the database lost is not told.
	// Default: nobody.
	Committed func(partition string, seq int64)
	// Logger receives what clients are not told. Default: nothing is logged.
	Logger *slog.Logger
}

// Service applies pushes. It is safe for concurrent use.
type Service struct {
	pool          *pgxpool.Pool
	schema        *schema.Schema
	versions      *schema.Versions
	past          sync.Map // schema version to *schema.Schema: of stored outcomes, not served any more; nil: not known
	clock         func() time.Time
	maxOperations int
	gate          *gate.Gate
	events        events.Sink
	committed     func(partition string, seq int64) // nil: nobody
	log           *slog.Logger
	write         []pgtx.Statement // by Table.Index: schemaddl.WriteRowsSQL
	stored        [][]int          // by Table.Index: schemaddl.StoredColumns
	everything    scope.Resolution // of the host's own writes
	validators    []Validator      // by Table.Index; nil when there are none
	references    *references      // nil when there are none
	maxCascade    int

	validateCommit CommitValidator
	planReactions  Planner

	queues             queues
	queueOff           bool
	maxBatchOperations int
	maxWaiting         int
	maxWait            time.Duration
	maxAdmittedBytes   int64
	maxPlannedBytes    int64
	maxCommitBytes     int64
	maxAheadRows       int
	maxAheadBytes      int64
	work               sync.WaitGroup // transactions in flight
}

// New returns a service over the caller's pool, which it never closes. It does no
// I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Service, error) {
	switch {
	case pool == nil:
		return nil, errors.New("pushsvc: a pool is required")
	case cfg.Schema == nil:
		return nil, errors.New("pushsvc: Config.Schema is required")
	case cfg.MaxOperations < 0:
		return nil, fmt.Errorf("pushsvc: Config.MaxOperations is %d; it must be positive, or 0 for the default of %d", cfg.MaxOperations, DefaultMaxOperations)
	case cfg.MaxCascade < 0:
		return nil, fmt.Errorf("pushsvc: Config.MaxCascade is %d; it must be positive, or 0 for the default of %d", cfg.MaxCascade, DefaultMaxCascade)
	case cfg.MaxWaiting < 0 || cfg.MaxWait < 0:
		return nil, errors.New("pushsvc: Config.MaxWaiting and Config.MaxWait must be positive, or 0 for their defaults")
	}
	versions, err := schema.VersionsOf(cfg.Versions, cfg.Schema)
	if err != nil {
		return nil, fmt.Errorf("pushsvc: Config.Versions: %w", err)
	}
	s := &Service{
		pool: pool, schema: cfg.Schema, versions: versions, clock: cfg.Clock,
		maxOperations: cmp.Or(cfg.MaxOperations, DefaultMaxOperations), gate: cfg.Gate, log: cfg.Logger, committed: cfg.Committed,
		validateCommit:     cfg.ValidateCommit,
		planReactions:      cfg.PlanReactions,
		references:         newReferences(cfg.Schema),
		maxCascade:         cmp.Or(cfg.MaxCascade, DefaultMaxCascade),
		queues:             queues{byPartition: map[string]*queue{}},
		queueOff:           cfg.MaxBatchOperations < 0,
		maxBatchOperations: cmp.Or(cfg.MaxBatchOperations, DefaultMaxBatchOperations),
		maxWaiting:         cmp.Or(cfg.MaxWaiting, DefaultMaxWaiting),
		maxWait:            cmp.Or(cfg.MaxWait, DefaultMaxWait),
		maxAdmittedBytes:   maxAdmittedBytes,
		maxPlannedBytes:    maxPlannedBytes,
		maxCommitBytes:     maxCommitBytes,
		maxAheadRows:       maxAheadRows,
		maxAheadBytes:      maxAheadBytes,
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.gate == nil {
		s.gate = gate.New(pool, s.clock)
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.events = events.Safe(cfg.Events, s.log)
	for name, v := range cfg.Validators {
		table, ok := cfg.Schema.Table(name)
		switch {
		case !ok:
			return nil, fmt.Errorf("pushsvc: Config.Validators: the schema has no table %q", name)
		case v == nil:
			return nil, fmt.Errorf("pushsvc: Config.Validators: that of table %q is nil", name)
		case s.validators == nil:
			s.validators = make([]Validator, len(cfg.Schema.Tables))
		}
		s.validators[table.Index] = v
	}
	all := scope.Allowed{}
	for _, t := range cfg.Schema.Tables {
		for i := range t.Scopes {
			all[t.Scopes[i].Variable] = []string{scope.Any}
		}
		s.write = append(s.write, pgtx.NewStatement(schemaddl.WriteRowsSQL(t)))
		s.stored = append(s.stored, schemaddl.StoredColumns(t))
	}
	s.everything.Grants = scope.Compile(all)
	return s, nil
}

// Wait returns when no transaction is in flight: those of answered pushes may still
// be being closed, and those whose callers went away go on.
func (s *Service) Wait() { s.work.Wait() }

// Request is the push half of a request (§1.5).
type Request struct {
	Partition   string
	Actor       string
	ClientID    string
	WireVersion ssp2.WireVersion
	// SchemaVersion is that of the payloads, and of the rows in the answer. 0: the newest.
	SchemaVersion int32
	LogEpoch      *string
	// Scopes is what the host's resolver said, once for the whole request (§3.2).
	Scopes  scope.Resolution
	Commits []ssp2.PushCommit
}

// Response answers a Request.
type Response struct {
	// Reset says that the partition's log epoch is not the request's: nothing was
	// done, and LogEpoch is the one to take up (§2.1).
	Reset    bool
	LogEpoch string
	// Results has one result per commit, in request order.
	Results []ssp2.PushResult
	// Details holds the companion frame of each result (§6.3.1), nil for none.
	Details []*ssp2.PushResultDetails
	// LastSeq is the newest seq among the results, 0 for none.
	LastSeq int64
}

// Validate checks what a request must satisfy before anything else is done with
// it (§1.7): the client id, a schema version that is served, no empty commit, the operation
// cap. Errors are *ssp2.Error.
func (s *Service) Validate(req Request) error {
	if err := gate.CheckClientID(req.ClientID); err != nil {
		return err
	}
	if _, ok := s.versions.Schema(cmp.Or(req.SchemaVersion, s.schema.Version)); !ok {
		return ssp2.Errorf(ssp2.CodeClientSchemaUnsupported, "the schema version %d is not served", req.SchemaVersion)
	}
	total := 0
	for i := range req.Commits {
		n := len(req.Commits[i].Operations)
		if n == 0 {
			return ssp2.Errorf(ssp2.CodeEmptyCommit, "commit %d has no operations", i)
		}
		total += n
	}
	if total > s.maxOperations {
		return ssp2.Errorf(ssp2.CodeTooManyOperations, "the request has %d operations and this server takes %d at a time: split it", total, s.maxOperations)
	}
	return nil
}

const (
	maxAttempts = 4
	// maxAdmittedBytes bounds the rows and outcomes one admission reads. Postgres
	// cannot return a gigabyte in an array, and the process has other things to hold.
	maxAdmittedBytes = 256 << 20
	// maxCommitBytes bounds the rows one commit writes: whoever pulls it gets it whole,
	// in one frame, and clients bound those (ssp2.Limits: 32 MiB).
	maxCommitBytes = 24 << 20
	// maxPlannedBytes is what rows and outcomes hold before they are written in a
	// flush of their own.
	maxPlannedBytes = 64 << 20
	// maxBatchBytes bounds the payloads of requests that share a transaction.
	maxBatchBytes = 32 << 20
)

// Push applies the commits of a request in order and returns their outcomes. When
// it returns, every outcome is durable. Requests of other clients to the same
// partition may share its transaction; each has outcomes and failures of its own.
//
// Errors that are *ssp2.Error fail the whole request and name the reason, among them
// sync.rate_limited when the partition is too busy. Any other error means that
// nothing may have been done, and the same request may be sent again; when ctx ends,
// it is that of ctx, and the commits may be applied all the same.
func (s *Service) Push(ctx context.Context, req Request) (*Response, error) {
	if err := gate.CheckIdentity(req.Partition, req.Actor); err != nil {
		return nil, fmt.Errorf("pushing: %w", err)
	}
	if err := s.Validate(req); err != nil {
		return nil, err
	}
	epoch, err := s.gate.Enter(ctx, req.Partition)
	if err != nil {
		return nil, fmt.Errorf("pushing: %w", err)
	}
	reset, err := gate.Decide(req.WireVersion, req.LogEpoch, epoch)
	if err != nil {
		return nil, err
	}
	if reset {
		return &Response{Reset: true, LogEpoch: epoch.LogEpoch}, nil
	}
	return s.submit(ctx, s.newRequest(ctx, req))
}

// retryable says that the transaction met another one and may run again.
func retryable(err error) bool {
	switch pgtx.SQLState(err) {
	case sqlStateLogMoved, sqlStateClientBound:
		return true
	}
	return pgtx.Retryable(err) || errors.Is(err, errPartitionGone) || errors.Is(err, errOutcomeStands)
}

// attempt runs one transaction for requests of one partition and answers them. An
// error leaves those without an answer that were not refused.
func (s *Service) attempt(ctx context.Context, batch []*request) error {
	partition := batch[0].Partition
	if _, err := s.gate.Enter(ctx, partition); err != nil {
		return fmt.Errorf("pushing: %w", err)
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("waiting for a connection: %w", err)
	}
	defer s.tell(batch) //nolint:contextcheck // each request has its own
	giveBack := sync.OnceFunc(func() { pgtx.Finish(ctx, conn) })
	defer giveBack()
	t := newTransaction(s, conn, partition, batch)
	if err := t.admit(ctx); err != nil {
		return err
	}
	t.checkGate()
	if t.admitted.oversized {
		if err := t.refuseOversized(ctx); err != nil {
			return err
		}
	} else if t.admitted.locked {
		if err := t.applySpan(ctx); err != nil {
			return err
		}
	}
	for _, r := range batch {
		if !r.refused() {
			r.resp, r.err = r.response()
		}
	}
	t.note()
	if t.committed {
		giveBack()
		s.announce(ctx, partition, t.committedSeq())
	}
	// Of a replay nothing was written and nothing is locked, so that its answer need
	// not wait for the transaction to be closed.
	answer(batch, nil)
	return nil
}

// committedSeq is the newest seq of a transaction that committed something, else 0: one
// that only recorded rejections did not.
func (t *transaction) committedSeq() int64 {
	if !t.committed || t.lastSeq == t.admitted.lastSeq {
		return 0
	}
	return t.lastSeq
}

// announce tells of a transaction that committed.
func (s *Service) announce(ctx context.Context, partition string, seq int64) {
	if s.committed == nil || seq == 0 {
		return
	}
	err := contain(func() error {
		s.committed(partition, seq)
		return nil
	})
	if err != nil {
		s.log.ErrorContext(ctx, "Config.Committed failed", "error", err)
	}
}
