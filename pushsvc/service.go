package pushsvc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// DefaultMaxOperations is the operation cap of a request (§6.1).
const DefaultMaxOperations = 500

// Config configures a Service. Only Schema is required.
type Config struct {
	// Schema is the schema version served.
	Schema *schema.Schema
	// AppSchema is the database schema of the app's tables. Default "public".
	AppSchema string
	// Clock gives the time of commits and outcomes. Default time.Now.
	Clock func() time.Time
	// MaxOperations caps the operations of one request (§6.1). Default 500.
	MaxOperations int
	// Gate is shared with the other services of a server. Default one of its own.
	Gate *gate.Gate
	// Logger receives what clients are not told. Default: nothing is logged.
	Logger *slog.Logger
}

// Service applies pushes. It is safe for concurrent use.
type Service struct {
	pool          *pgxpool.Pool
	schema        *schema.Schema
	clock         func() time.Time
	maxOperations int
	gate          *gate.Gate
	log           *slog.Logger
	write         []pgtx.Statement // by Table.Index: schemaddl.WriteRowsSQL
	stored        [][]int          // by Table.Index: schemaddl.StoredColumns

	finishing sync.WaitGroup
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
	}
	s := &Service{
		pool: pool, schema: cfg.Schema, clock: cfg.Clock,
		maxOperations: cfg.MaxOperations, gate: cfg.Gate, log: cfg.Logger,
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.maxOperations == 0 {
		s.maxOperations = DefaultMaxOperations
	}
	if s.gate == nil {
		s.gate = gate.New(pool, s.clock)
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	for _, t := range cfg.Schema.Tables {
		s.write = append(s.write, pgtx.NewStatement(schemaddl.WriteRowsSQL(t)))
		s.stored = append(s.stored, schemaddl.StoredColumns(t))
	}
	return s, nil
}

// Wait returns when no transaction of an answered push is still being closed.
func (s *Service) Wait() { s.finishing.Wait() }

// Request is the push half of a request (§1.5).
type Request struct {
	Partition   string
	Actor       string
	ClientID    string
	WireVersion ssp2.WireVersion
	LogEpoch    *string
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
// it (§1.7): the client id, no empty commit, the operation cap. Errors are *ssp2.Error.
func (s *Service) Validate(req Request) error {
	if err := gate.CheckClientID(req.ClientID); err != nil {
		return err
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

const maxAttempts = 4

// Push applies the commits of a request in order and returns their outcomes. When
// it returns, every outcome is durable. Errors that are *ssp2.Error fail the whole
// request and name the reason; any other error means that nothing may have been
// done, and the same request may be sent again.
func (s *Service) Push(ctx context.Context, req Request) (*Response, error) {
	if err := s.Validate(req); err != nil {
		return nil, err
	}
	for attempt := 1; ; attempt++ {
		resp, err := s.attempt(ctx, &req)
		if err == nil || attempt == maxAttempts || !retryable(err) {
			return resp, err
		}
		s.log.DebugContext(ctx, "push is tried again", "attempt", attempt, "error", err)
	}
}

// retryable says that the transaction met another one and may run again.
func retryable(err error) bool {
	return pgtx.Retryable(err) || pgtx.SQLState(err) == sqlStateLogMoved ||
		errors.Is(err, errPartitionGone) || errors.Is(err, errOutcomeStands)
}

// attempt enters the partition and runs one transaction.
func (s *Service) attempt(ctx context.Context, req *Request) (*Response, error) {
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
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("waiting for a connection: %w", err)
	}
	t := newTransaction(s, conn, req)
	done := false
	defer func() {
		if !done {
			pgtx.Finish(ctx, conn)
		}
	}()
	if err := t.admit(ctx); err != nil {
		return nil, err
	}
	reset, err = t.checkGate()
	if err != nil {
		return nil, err
	}
	if reset {
		return &Response{Reset: true, LogEpoch: t.admitted.epoch.LogEpoch}, nil
	}
	if t.admitted.locked {
		if err := t.apply(ctx); err != nil {
			return nil, err
		}
		return t.response()
	}
	// Nothing was written and nothing is locked, so the answer need not wait for
	// the transaction to be closed.
	done = true
	s.finishing.Add(1)
	go func() {
		defer s.finishing.Done()
		pgtx.Finish(ctx, conn)
	}()
	return t.response()
}
