package reaction

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
)

// Defaults of Config.
const (
	DefaultLease          = time.Minute
	DefaultBatch          = 10
	DefaultInitialBackoff = time.Second
	DefaultMaxBackoff     = 5 * time.Minute
	DefaultWorkers        = 4
	DefaultPollInterval   = 5 * time.Second
)

const (
	// recordWithin is how long recording an outcome may take, whether the pass is
	// cancelled or not.
	recordWithin = 10 * time.Second
	// partitionsPerPage bounds what one look for due partitions returns.
	partitionsPerPage = 1000
)

// Handler handles the reactions of one type.
type Handler struct {
	// Versions are the versions that Handle supports, at least one. A reaction of any
	// other is dead-lettered without a call.
	Versions []int32
	// Handle does the work. nil completes the reaction; a [PermanentError] dead-letters
	// it; any other error, and a panic, is retried until the attempts are used up. It
	// is called from several goroutines, and again for a reaction that it handled
	// already, see the package comment. ctx ends with the pass and carries the
	// delivery, see [FromContext].
	Handle func(ctx context.Context, d *Delivery) error
}

// Config configures a Runner. Only Handlers is required.
type Config struct {
	// Handlers are the handlers by type. Reactions of other types are left alone.
	Handlers map[string]Handler
	// Partitions are those to work on. Nil: all.
	Partitions []string
	// Lease is how long a claimed reaction belongs to a pass, from its claim and again
	// from the start of its handler. Default 1 minute.
	Lease time.Duration
	// Batch is how many reactions one claim takes. Default 10.
	Batch int
	// InitialBackoff and MaxBackoff bound the delay of a retry:
	// min(MaxBackoff, InitialBackoff × 2^(attempt - 1)). Default 1 second, 5 minutes.
	InitialBackoff, MaxBackoff time.Duration
	// Workers is how many passes Run makes at a time. Default 4. No connection is held
	// while a handler runs.
	Workers int
	// PollInterval is how often Run looks for reactions that it was not notified of:
	// retries, expired leases, those of other processes. Default 5 seconds.
	PollInterval time.Duration
	// Clock gives the time. Default time.Now.
	Clock func() time.Time
	// Events receives the life cycle of deliveries. Default: nobody.
	Events events.Sink
	// Logger receives what is not stored: the errors of handlers. Default: nothing is
	// logged.
	Logger *slog.Logger
}

// Runner delivers reactions. It is safe for concurrent use.
type Runner struct {
	queries *db.Queries
	cfg     Config
	types   []string
	queue   *queue
	running atomic.Bool
	page    int // partitions per look
	// ticks returns a channel of ticks and what stops them.
	ticks func(every time.Duration) (<-chan time.Time, func())
}

// New returns a runner over the caller's pool, which it never closes. It does no I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Runner, error) {
	if pool == nil {
		return nil, errors.New("reaction: a pool is required")
	}
	if len(cfg.Handlers) == 0 {
		return nil, errors.New("reaction: Config.Handlers is empty")
	}
	for name, h := range cfg.Handlers {
		switch {
		case !codeLike(name, MaxTypeBytes):
			return nil, fmt.Errorf("reaction: Config.Handlers: no reaction has the type %.64q", name)
		case len(h.Versions) == 0 || h.Handle == nil:
			return nil, fmt.Errorf("reaction: Config.Handlers: the handler of %q needs Versions and Handle", name)
		}
	}
	cfg.Handlers = maps.Clone(cfg.Handlers)
	cfg.Partitions = slices.Clone(cfg.Partitions)
	if cfg.Batch < 0 || cfg.Batch > 1000 {
		return nil, fmt.Errorf("reaction: Config.Batch is %d; it must be 1 to 1000, or 0 for the default of %d", cfg.Batch, DefaultBatch)
	}
	if cfg.Workers < 0 {
		return nil, fmt.Errorf("reaction: Config.Workers is %d; it must be positive, or 0 for the default of %d", cfg.Workers, DefaultWorkers)
	}
	for _, d := range []struct {
		field    string
		value    *time.Duration
		standard time.Duration
	}{
		{"Lease", &cfg.Lease, DefaultLease},
		{"InitialBackoff", &cfg.InitialBackoff, DefaultInitialBackoff},
		{"MaxBackoff", &cfg.MaxBackoff, DefaultMaxBackoff},
		{"PollInterval", &cfg.PollInterval, DefaultPollInterval},
	} {
		*d.value = cmp.Or(*d.value, d.standard)
		if *d.value < time.Millisecond {
			return nil, fmt.Errorf("reaction: Config.%s is %v; it must be at least a millisecond, or 0 for the default of %v", d.field, *d.value, d.standard)
		}
	}
	cfg.Batch = cmp.Or(cfg.Batch, DefaultBatch)
	cfg.Workers = cmp.Or(cfg.Workers, DefaultWorkers)
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Events = events.Safe(cfg.Events, cfg.Logger)
	return &Runner{
		queries: db.New(pool), cfg: cfg, types: slices.Sorted(maps.Keys(cfg.Handlers)),
		queue: newQueue(), page: partitionsPerPage, ticks: newTicks,
	}, nil
}

// Result is what a pass did.
type Result struct {
	Claimed      int
	Completed    int
	Retried      int
	DeadLettered int
	// Lost reactions were claimed by somebody else since: before the handler was called,
	// or before its outcome could be recorded.
	Lost int
	// GivenBack reactions were not handled to the end, since the pass was cancelled.
	GivenBack int
	// MayHaveMore says that a claim was full.
	MayHaveMore bool
}

func (r *Result) add(other Result) {
	r.Claimed += other.Claimed
	r.Completed += other.Completed
	r.Retried += other.Retried
	r.DeadLettered += other.DeadLettered
	r.Lost += other.Lost
	r.GivenBack += other.GivenBack
	r.MayHaveMore = r.MayHaveMore || other.MayHaveMore
}

// RunOnce makes one claim in every partition that has something to claim and delivers
// what it gets, one after the other. For a host with a scheduler of its own. An error is
// one of the database, or that ctx ended; what was claimed by then and not handled is
// given back, or its lease expires.
func (r *Runner) RunOnce(ctx context.Context) (Result, error) {
	var total Result
	owner := rand.Text()
	err := r.eachDue(ctx, func(partition string) error {
		claimed, err := r.claim(ctx, partition, owner)
		if err != nil {
			return err
		}
		result, err := r.deliverAll(ctx, partition, owner, claimed)
		total.add(result)
		return err
	})
	return total, err
}

// eachDue calls visit for the partitions that have something to claim.
func (r *Runner) eachDue(ctx context.Context, visit func(partition string) error) error {
	page := r.cfg.Partitions
	for after := ""; ; {
		if r.cfg.Partitions == nil {
			var err error
			page, err = r.queries.ReactionListDuePartitions(ctx, db.ReactionListDuePartitionsParams{
				Types: r.types, Now: r.cfg.Clock().UnixMilli(), After: after, Batch: int32(r.page),
			})
			if err != nil {
				return fmt.Errorf("looking for due reactions: %w", err)
			}
		}
		for _, partition := range page {
			if err := visit(partition); err != nil {
				return err
			}
			after = partition
		}
		if r.cfg.Partitions != nil || len(page) < r.page {
			return nil
		}
	}
}

func (r *Runner) claim(ctx context.Context, partition, owner string) ([]db.ReactionClaimRow, error) {
	now := r.cfg.Clock()
	claimed, err := r.queries.ReactionClaim(ctx, db.ReactionClaimParams{
		Partition: partition, Types: r.types, Owner: owner,
		Now: now.UnixMilli(), LeaseUntil: now.Add(r.cfg.Lease).UnixMilli(), Batch: int32(r.cfg.Batch),
	})
	if err != nil {
		return nil, fmt.Errorf("claiming reactions: %w", err)
	}
	return claimed, nil
}

func (r *Runner) deliverAll(ctx context.Context, partition, owner string, claimed []db.ReactionClaimRow) (Result, error) {
	result := Result{Claimed: len(claimed), MayHaveMore: len(claimed) == r.cfg.Batch}
	for i, row := range claimed {
		l := r.lease(partition, owner, row)
		held, err := l.extend(ctx)
		if err != nil {
			r.giveBack(ctx, partition, owner, claimed[i:], &result)
			return result, err
		}
		if !held {
			result.Lost++
			continue
		}
		if err := r.deliver(ctx, l, &result); err != nil {
			r.giveBack(ctx, partition, owner, claimed[i+1:], &result)
			return result, err
		}
	}
	return result, nil
}

// giveBack makes reactions due again as if they had not been claimed. It works when ctx
// is done; where it fails the lease expires.
func (r *Runner) giveBack(ctx context.Context, partition, owner string, claimed []db.ReactionClaimRow, result *Result) {
	ctx, cancel := lasting(ctx)
	defer cancel()
	for _, row := range claimed {
		if err := r.lease(partition, owner, row).giveBack(ctx, result); err != nil {
			r.cfg.Logger.ErrorContext(ctx, "cannot give claimed reactions back; their leases will expire", "partition", partition, "error", err)
			return
		}
	}
}

// lasting returns a context for what is to be recorded even when ctx is done.
func lasting(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), recordWithin)
}

// deliver calls the handler of a reaction whose lease has just been renewed and records
// the outcome.
func (r *Runner) deliver(ctx context.Context, l *lease, result *Result) error {
	d := l.delivery
	about := events.Delivery{
		Partition: d.Partition, IdempotencyKey: d.IdempotencyKey, Type: d.Type, Version: d.Version,
		Attempt: d.Attempt, LeaseOwner: l.owner,
	}
	events.Emit(ctx, r.cfg.Events, events.ReactionStarted{Delivery: about})
	started := r.cfg.Clock()
	err := r.handle(ctx, d)
	now := r.cfg.Clock()
	took := now.Sub(started)

	// What the handler did has happened, whether the pass is cancelled or not.
	recording, cancel := lasting(ctx)
	defer cancel()
	if err == nil {
		held, err := l.settle(recording, now, settlement{state: StateCompleted})
		if held {
			result.Completed++
			events.Emit(ctx, r.cfg.Events, events.ReactionCompleted{Delivery: about, Duration: took})
		}
		return r.unsettled(ctx, d, held, err, result)
	}
	if errors.Is(ctx.Err(), context.Canceled) && errors.Is(err, context.Canceled) {
		return l.giveBack(recording, result)
	}
	f := failureOf(err)
	r.cfg.Logger.WarnContext(ctx, "a reaction failed", "partition", d.Partition, "idempotency_key", d.IdempotencyKey,
		"type", d.Type, "attempt", d.Attempt, "code", f.code, "error", err)
	if f.permanent || d.Attempt >= d.MaxAttempts {
		held, err := l.settle(recording, now, settlement{state: StateDeadLetter, failure: f})
		if held {
			result.DeadLettered++
			events.Emit(ctx, r.cfg.Events, events.ReactionDeadLettered{Delivery: about, Duration: took, Code: f.code})
		}
		return r.unsettled(ctx, d, held, err, result)
	}
	next := now.Add(backoff(r.cfg.InitialBackoff, r.cfg.MaxBackoff, d.Attempt))
	held, err := l.settle(recording, now, settlement{state: StatePending, due: next, failure: f})
	if held {
		result.Retried++
		events.Emit(ctx, r.cfg.Events, events.ReactionRetried{Delivery: about, Duration: took, Code: f.code, NextAt: next})
	}
	return r.unsettled(ctx, d, held, err, result)
}

// unsettled counts an outcome that could not be recorded since the lease was lost.
func (r *Runner) unsettled(ctx context.Context, d *Delivery, held bool, err error, result *Result) error {
	if err == nil && !held {
		result.Lost++
		r.cfg.Logger.WarnContext(ctx, "a reaction outlived its lease; its outcome is not recorded", "partition", d.Partition,
			"idempotency_key", d.IdempotencyKey, "type", d.Type, "attempt", d.Attempt)
	}
	return err
}

// handle calls the handler, if it knows the version.
func (r *Runner) handle(ctx context.Context, d *Delivery) (err error) {
	h := r.cfg.Handlers[d.Type]
	if !slices.Contains(h.Versions, d.Version) {
		return &PermanentError{Code: CodeVersionUnsupported}
	}
	defer func() {
		if cause := recover(); cause != nil {
			err = &panicError{cause}
			r.cfg.Logger.ErrorContext(ctx, "the handler of a reaction panicked", "type", d.Type, "panic", cause, "stack", string(debug.Stack()))
		}
	}()
	return h.Handle(context.WithValue(ctx, contextKey{}, d), d)
}

// Delivery is a reaction as its handler gets it, read only.
type Delivery struct {
	Partition string
	// IdempotencyKey is the same for every delivery of the reaction, and of no other
	// reaction. Pass it to the systems that are called.
	IdempotencyKey string
	Key            string
	Type           string
	Version        int32
	Payload        json.RawMessage
	// ClientID, ClientCommitID and CommitSeq are those of the commit that planned it.
	ClientID, ClientCommitID string
	CommitSeq                int64
	// Attempt is 1 for the first delivery. It grows past MaxAttempts where a runner died
	// before it recorded an outcome: only failures count as the end.
	Attempt, MaxAttempts int

	lease *lease // nil: made by hand
}

// ExtendLease makes the lease last for another Config.Lease from now on. A handler
// that takes long calls it before the lease expires. The error is [ErrLeaseLost], or one
// of the database.
func (d *Delivery) ExtendLease(ctx context.Context) error {
	if d.lease == nil {
		return nil
	}
	held, err := d.lease.extend(ctx)
	if err != nil {
		return err
	}
	if !held {
		return ErrLeaseLost
	}
	return nil
}

type contextKey struct{}

// FromContext returns the delivery that a handler's context carries.
func FromContext(ctx context.Context) (*Delivery, bool) {
	d, ok := ctx.Value(contextKey{}).(*Delivery)
	return d, ok
}

// lease is the hold that a pass has on a reaction.
type lease struct {
	runner   *Runner
	owner    string
	delivery *Delivery
}

func (r *Runner) lease(partition, owner string, row db.ReactionClaimRow) *lease {
	l := &lease{runner: r, owner: owner}
	l.delivery = &Delivery{
		Partition: partition, IdempotencyKey: row.IdempotencyKey, Key: row.ReactionKey,
		Type: row.ReactionType, Version: row.ReactionVersion, Payload: json.RawMessage(row.Payload),
		ClientID: row.ClientID, ClientCommitID: row.ClientCommitID, CommitSeq: row.CommitSeq,
		Attempt: int(row.Attempts), MaxAttempts: int(row.MaxAttempts),
		lease: l,
	}
	return l
}

func (l *lease) extend(ctx context.Context) (held bool, err error) {
	d, cfg := l.delivery, l.runner.cfg
	held, err = l.runner.queries.ReactionExtend(ctx, db.ReactionExtendParams{
		Partition: d.Partition, ClientID: d.ClientID, CommitID: d.ClientCommitID, Key: d.Key,
		Owner: l.owner, LeaseUntil: cfg.Clock().Add(cfg.Lease).UnixMilli(),
	})
	if err != nil {
		return false, fmt.Errorf("extending the lease of a reaction: %w", err)
	}
	return held, nil
}

// settlement is how a lease ends.
type settlement struct {
	state   State
	due     time.Time
	failure failure // of no code: none
}

func (l *lease) giveBack(ctx context.Context, result *Result) error {
	now := l.runner.cfg.Clock()
	held, err := l.settle(ctx, now, settlement{state: StatePending, due: now})
	switch {
	case held:
		result.GivenBack++
	case err == nil:
		result.Lost++
	}
	return err
}

// settle ends the lease.
func (l *lease) settle(ctx context.Context, now time.Time, s settlement) (held bool, err error) {
	d := l.delivery
	params := db.ReactionSettleParams{
		Partition: d.Partition, ClientID: d.ClientID, CommitID: d.ClientCommitID, Key: d.Key,
		Owner: l.owner, Now: now.UnixMilli(), State: string(s.state), DueAt: s.due.UnixMilli(),
		FailureDetails: s.failure.details,
	}
	if s.failure.code != "" {
		params.FailureCode = &s.failure.code
	}
	held, err = l.runner.queries.ReactionSettle(ctx, params)
	if err != nil {
		return false, fmt.Errorf("recording the outcome of a reaction: %w", err)
	}
	return held, nil
}
