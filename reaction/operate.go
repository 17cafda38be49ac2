package reaction

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
)

// Defaults of PruneOptions.
const (
	DefaultKeepCompleted   = 30 * 24 * time.Hour
	DefaultKeepDeadLetters = 90 * 24 * time.Hour
	DefaultPruneLimit      = 1000
)

// MaxListLimit is the most that one page of List holds.
const MaxListLimit = 1000

const defaultListLimit = 100

// Querier is a pool, a connection or a transaction of pgx. In a transaction what is
// done takes effect when the caller commits.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// RetryDeadLetter makes a dead-lettered reaction due at now, with all its attempts and
// without its failure. The error is [ErrNotDeadLetter] when it is in another state or
// gone, or one of the database. A runner learns of it by [Runner.Notify] or its poll.
func RetryDeadLetter(ctx context.Context, q Querier, partition, idempotencyKey string, now time.Time) error {
	id, ok := parseKey(partition, idempotencyKey)
	if !ok {
		return ErrNotDeadLetter
	}
	reset, err := db.New(q).ReactionRetry(ctx, db.ReactionRetryParams{
		Partition: partition, ClientID: id.clientID, CommitID: id.clientCommitID, Key: id.key, Now: now.UnixMilli(),
	})
	if err != nil {
		return fmt.Errorf("retrying a dead letter: %w", err)
	}
	if !reset {
		return ErrNotDeadLetter
	}
	return nil
}

// PruneOptions says what a retention pass deletes. The zero value has the defaults.
type PruneOptions struct {
	// KeepCompleted is how long completed reactions are kept after they were completed.
	// Default 30 days. -1: for ever.
	KeepCompleted time.Duration
	// KeepDeadLetters is how long dead letters are kept after they failed. Default 90
	// days. -1: for ever.
	KeepDeadLetters time.Duration
	// Limit is how many are deleted at most. Default 1000.
	Limit int
	// Events learns of the pass. Default: nobody. In a transaction of the caller's it is
	// told before the commit.
	Events events.Sink
}

// PruneResult is what a retention pass did.
type PruneResult struct {
	Completed   int // deleted
	DeadLetters int // deleted
	// MayHaveMore says that the limit was reached: run another pass.
	MayHaveMore bool
}

// Prune makes one retention pass over a partition (§6.9): it deletes reactions that
// were completed or dead-lettered longer ago than they are kept, oldest first.
// Unfinished ones stay, whatever their age. The log is not touched, nor does pruning it
// touch reactions.
func Prune(ctx context.Context, q Querier, partition string, now time.Time, opts PruneOptions) (PruneResult, error) {
	if opts.Limit < 0 || opts.Limit > 1_000_000 {
		return PruneResult{}, fmt.Errorf("reaction: PruneOptions.Limit is %d; it must be 1 to 1,000,000, or 0 for the default of %d", opts.Limit, DefaultPruneLimit)
	}
	limit := cmp.Or(opts.Limit, DefaultPruneLimit)
	done := events.ReactionPruneCompleted{Partition: partition, Limit: limit}
	params := db.ReactionPruneParams{Partition: partition, Batch: int32(limit)}
	done.CompletedBefore, params.CompletedBefore = cutoff(now, cmp.Or(opts.KeepCompleted, DefaultKeepCompleted))
	done.DeadLetterBefore, params.DeadLetterBefore = cutoff(now, cmp.Or(opts.KeepDeadLetters, DefaultKeepDeadLetters))
	removed, err := db.New(q).ReactionPrune(ctx, params)
	if err != nil {
		return PruneResult{}, fmt.Errorf("pruning reactions: %w", err)
	}
	result := PruneResult{Completed: int(removed.Completed), DeadLetters: int(removed.DeadLetters)}
	result.MayHaveMore = result.Completed+result.DeadLetters >= limit
	done.RemovedCompleted, done.RemovedDeadLetters, done.MayHaveMore = result.Completed, result.DeadLetters, result.MayHaveMore
	events.Emit(ctx, events.Safe(opts.Events, nil), done)
	return result, nil
}

// cutoff returns the time before which things that are kept so long are deleted, and
// that in milliseconds; nothing when they are kept for ever.
func cutoff(now time.Time, keep time.Duration) (time.Time, *int64) {
	if keep < 0 {
		return time.Time{}, nil
	}
	at := now.Add(-keep)
	return at, new(at.UnixMilli())
}

// State is the state of a reaction (§6.9).
type State string

// The states of §6.9.
const (
	StatePending    State = "pending"
	StateLeased     State = "leased"
	StateCompleted  State = "completed"
	StateDeadLetter State = "dead-letter"
)

// Reaction is a stored reaction as an operator sees it.
type Reaction struct {
	IdempotencyKey, Key      string
	Type                     string
	Version                  int32
	Payload                  json.RawMessage
	ClientID, ClientCommitID string
	CommitSeq                int64
	State                    State
	Attempts, MaxAttempts    int
	CreatedAt                time.Time
	RunAt                    time.Time // pending: not before then; else zero
	LeaseExpiresAt           time.Time // leased; else zero
	LeaseOwner               string    // leased; else ""
	FinishedAt               time.Time // completed or dead-lettered; else zero
	FailureCode              string    // of the newest failed attempt; "": none failed
	FailureDetails           json.RawMessage
	FailedAt                 time.Time
}

// ListOptions says which reactions are wanted.
type ListOptions struct {
	State State  // required
	After string // Page.Next of the page before; "": from the beginning
	Limit int    // 1 to 1000; 0: 100
}

// Page is a page of reactions.
type Page struct {
	Reactions []Reaction
	Next      string // where the next page begins; "": this is the last one
}

// List returns the reactions of a partition in one state: pending and leased ones by
// the time they are due, finished ones newest first. Listing unfinished ones looks at
// all unfinished ones of the partition.
func List(ctx context.Context, q Querier, partition string, opts ListOptions) (Page, error) {
	switch opts.State {
	case StatePending, StateLeased, StateCompleted, StateDeadLetter:
	default:
		return Page{}, fmt.Errorf("reaction: there is no state %.64q", opts.State)
	}
	if opts.Limit < 0 || opts.Limit > MaxListLimit {
		return Page{}, fmt.Errorf("reaction: ListOptions.Limit is %d; it must be 1 to %d, or 0 for the default of %d", opts.Limit, MaxListLimit, defaultListLimit)
	}
	limit := cmp.Or(opts.Limit, defaultListLimit)
	params := db.ReactionListParams{Partition: partition, State: string(opts.State), Batch: int32(limit) + 1}
	if opts.After != "" {
		at, id, ok := parsePosition(partition, opts.After)
		if !ok {
			return Page{}, fmt.Errorf("reaction: ListOptions.After is %.64q, which no page of this partition gave", opts.After)
		}
		params.AfterMs, params.AfterClient, params.AfterCommit, params.AfterKey = &at, id.clientID, id.clientCommitID, id.key
	}
	rows, err := db.New(q).ReactionList(ctx, params)
	if err != nil {
		return Page{}, fmt.Errorf("listing reactions: %w", err)
	}
	var page Page
	if len(rows) > limit {
		rows = rows[:limit]
		last := rows[limit-1]
		page.Next = fmt.Sprintf("%d %s", last.DueAtMs+last.FinishedAtMs, last.IdempotencyKey)
	}
	page.Reactions = make([]Reaction, len(rows))
	for i, row := range rows {
		page.Reactions[i] = reactionOf(row)
	}
	return page, nil
}

// parsePosition reads Page.Next: a time in milliseconds and an idempotency key.
func parsePosition(partition, position string) (at int64, id identity, ok bool) {
	text, key, _ := strings.Cut(position, " ")
	at, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, identity{}, false
	}
	id, ok = parseKey(partition, key)
	return at, id, ok
}

func reactionOf(row db.ReactionListRow) Reaction {
	r := Reaction{
		IdempotencyKey: row.IdempotencyKey, Key: row.ReactionKey, Type: row.ReactionType, Version: row.ReactionVersion,
		Payload: json.RawMessage(row.Payload), ClientID: row.ClientID, ClientCommitID: row.ClientCommitID, CommitSeq: row.CommitSeq,
		State: State(row.State), Attempts: int(row.Attempts), MaxAttempts: int(row.MaxAttempts),
		CreatedAt: time.UnixMilli(row.CreatedAtMs), LeaseOwner: row.LeaseOwner, FailureCode: row.FailureCode,
	}
	switch r.State {
	case StatePending:
		r.RunAt = time.UnixMilli(row.DueAtMs)
	case StateLeased:
		r.LeaseExpiresAt = time.UnixMilli(row.DueAtMs)
	case StateCompleted, StateDeadLetter:
		r.FinishedAt = time.UnixMilli(row.FinishedAtMs)
	}
	if row.FailureCode != "" {
		r.FailedAt = time.UnixMilli(row.FailedAtMs)
	}
	if row.FailureDetails != "" {
		r.FailureDetails = json.RawMessage(row.FailureDetails)
	}
	return r
}
