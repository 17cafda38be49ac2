package pushsvc

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schemaddl"
)

// ErrTransaction says that a transaction of the host cannot take a push in.
var ErrTransaction = errors.New("pushsvc: the transaction cannot take a push in")

// joinStatements are those of a push within a transaction of the host.
var joinStatements = []pgtx.Statement{pgtx.Join, pgtx.Characteristics, pgtx.Leave}

// Notification is what is to be told once a transaction of the host has committed.
type Notification struct {
	Partition string
	// Seq is the commit's, 0 when nothing was applied.
	Seq int64

	noted []events.Event
}

// Notify tells of what [Service.ApplyTx] did: Config.Committed, and then Config.Events.
// Call it after the transaction has committed, and not when it was rolled back. Without
// it, clients that are connected get the commit only when somebody looks at the log next.
func (s *Service) Notify(ctx context.Context, n Notification) {
	ctx = context.WithoutCancel(ctx) // what was committed is to be told
	s.announce(ctx, n.Partition, n.Seq)
	for _, e := range n.noted {
		events.Emit(ctx, s.events, e)
	}
}

// ApplyTx is [Service.Apply] within a transaction of the caller: its own rows and the
// commit become visible together or not at all. It never commits. When tx has committed,
// hand the Notification to [Service.Notify], also after a rejection.
//
// After an error tx goes on as if ApplyTx had not been called, except that a rejection
// ([*RejectedError]) is recorded in tx, and stands once tx has committed. An error of the
// database that ends transactions (a deadlock, a lost connection) is the caller's to deal
// with: run its transaction again. [ErrTransaction]: tx is not of isolation level read
// committed, in which alone what is read under the partition's lock is what the lock
// protects; or it is read only; or it has deferred constraints that do not hold yet,
// which would have to be blamed on the commit.
//
// ApplyTx takes the lock of the partition, and tx holds it until it ends: every push to
// the partition, from any client, waits that long. So call it late, do nothing slow after
// it, and end tx soon. Who holds the lock must not wait for [Service.Push] or
// [Service.Apply] to the same partition, which wait for the lock in turn without the
// database knowing. Transactions that write several partitions must take them in one
// order, that of their names for example. So must those that lock rows of the host which
// triggers or hooks of a push lock too: a push has the partition's lock by then, so let
// ApplyTx come before them. The database ends transactions that meet in another order
// with a deadlock error, and nothing of them is done.
//
// Several ApplyTx in one tx are several commits, and see each other.
func (s *Service) ApplyTx(ctx context.Context, tx pgx.Tx, req ApplyRequest) (Applied, Notification, error) {
	if tx == nil {
		return Applied{}, Notification{}, fmt.Errorf("%w: it is nil", ErrTransaction)
	}
	r, err := s.trust(ctx, req)
	if err != nil {
		return Applied{}, Notification{}, err
	}
	for attempt := 1; ; attempt++ {
		t, err := s.join(ctx, tx, r)
		if err == nil {
			t.note()
			n := Notification{Partition: req.Partition, Seq: t.committedSeq(), noted: r.noted}
			applied, err := s.decided(r)
			return applied, n, err
		}
		switch state := pgtx.SQLState(err); {
		case attempt == maxAttempts:
		case errors.Is(err, errPartitionGone):
			if err = s.createPartition(ctx, tx, req.Partition); err == nil {
				continue
			}
		case state == sqlStateLogMoved || state == sqlStateClientBound || errors.Is(err, errOutcomeStands):
			continue // what stands now is found by the next
		}
		return Applied{}, Notification{}, fmt.Errorf("applying in a transaction: %w", err)
	}
}

// createPartition creates a partition in a transaction of the host.
func (s *Service) createPartition(ctx context.Context, tx pgx.Tx, partition string) error {
	// What the attempt before this held went with its savepoint.
	held, err := db.New(tx).PartitionHold(ctx)
	if err != nil {
		return fmt.Errorf("creating the partition: %w", err)
	}
	if !held {
		return gate.Moving()
	}
	err = db.New(tx).PartitionCreate(ctx, db.PartitionCreateParams{
		Partition: partition, LogEpoch: gate.NewLogEpoch(), Now: s.clock().UnixMilli(),
	})
	if err != nil {
		return fmt.Errorf("creating the partition: %w", err)
	}
	return nil
}

// join runs a request in a transaction of the host, which has nothing of it after an
// error.
func (s *Service) join(ctx context.Context, tx pgx.Tx, r *request) (t *transaction, err error) {
	t = newTransaction(s, tx, r.Partition, []*request{r})
	t.joined = true
	defer func() {
		if p := recover(); p != nil {
			s.log.ErrorContext(ctx, "a push panicked", "panic", p, "stack", string(debug.Stack()))
			err = errPanicked
		}
		if err != nil && t.entered && !t.committed {
			err = errors.Join(err, pgtx.TakeBack(ctx, tx))
		}
	}()
	if err := t.admit(ctx); err != nil {
		return t, err
	}
	t.checkGate()
	switch {
	case r.err != nil || !t.admitted.locked:
	case t.admitted.oversized:
		err = t.refuseOversized(ctx)
	default:
		if err = t.checkDeferred(ctx); err == nil {
			err = t.applySpan(ctx)
		}
	}
	if err == nil {
		err = r.err
	}
	if err == nil && !t.committed {
		err = t.leave(ctx) // the outcome was known
	}
	if err == nil {
		r.resp, err = r.response()
	}
	return t, err
}

// queueJoin queues what a push does first in a transaction of the host.
func (t *transaction) queueJoin(f *flush) {
	f.queue("joining the transaction", pgtx.Join)
	f.add(statement{what: "joining the transaction", rows: func(rows pgx.Rows) error {
		t.entered = true
		var isolation, readOnly string
		if _, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, row.Scan(&isolation, &readOnly)
		}); err != nil {
			return err //nolint:wrapcheck // run says what it was doing
		}
		switch {
		case isolation != "read committed" && isolation != "read uncommitted": // the same to Postgres
			return fmt.Errorf("%w: its isolation level is %s, in which it would decide over rows as they were before it had the partition's lock; begin it with pgx.ReadCommitted", ErrTransaction, isolation)
		case readOnly != "off":
			return fmt.Errorf("%w: it is read only", ErrTransaction)
		}
		return nil
	}}, pgtx.Characteristics)
}

// checkDeferred refuses to go on behind deferred constraints of the host that do not hold
// yet, if the push is going to check those of its own.
func (t *transaction) checkDeferred(ctx context.Context) error {
	if t.admitted.single == nil {
		return nil
	}
	f := t.newFlush()
	f.queueChecks()
	if failed, err := t.run(ctx, f); failed != nil && impossibleRow(err) {
		return fmt.Errorf("%w: it has deferred constraints that do not hold yet; apply before or after what they are about: %w", ErrTransaction, err)
	} else if err != nil {
		return err
	}
	return nil
}

// end is what ends the work of a transaction.
func (t *transaction) end() pgtx.Statement {
	if t.joined {
		return pgtx.Leave
	}
	return pgtx.Commit
}

// leave ends the work in a transaction of the host in which nothing was written.
func (t *transaction) leave(ctx context.Context) error {
	f := t.newFlush()
	f.queue("leaving the transaction", pgtx.Leave)
	if _, err := t.run(ctx, f); err != nil {
		return err
	}
	t.entered = false
	return nil
}

// ScanRowsByIndexTx returns the rows of a partition whose indexed columns have exactly
// these values, ascending by row id as bytes, as tx sees them: with what
// [Service.ApplyTx] wrote in it. Nobody is asked who may see them. Errors: the
// [*ssp2.Error] of [Candidate.ScanRowsByIndex], and those of the database.
func (s *Service) ScanRowsByIndexTx(ctx context.Context, tx pgx.Tx, partition string, scan IndexScan) ([]CandidateRow, error) {
	t, args, err := s.indexScan(scan)
	if err != nil || args == nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, schemaddl.ScanByIndexSQL, append([]any{partition}, args...)...)
	if err != nil {
		return nil, fmt.Errorf("scanning rows by index: %w", err)
	}
	found, err := pgx.CollectRows(rows, candidateOf(t))
	if err != nil {
		return nil, fmt.Errorf("scanning rows by index: %w", err)
	}
	return found, nil
}
