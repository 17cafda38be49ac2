package pushsvc

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/syncpg/syncpg/ssp2"
)

// Validator decides whether a row may be written as it is (§6.7). It runs for every
// operation on its table, in order, after the payload is decoded, authorized, free of
// conflicts and merged, and immediately before the row is staged; not for the delete of
// an absent row. It holds the partition's lock: no other push to the partition goes on
// until it returns, so it should be quick, and must not push to the same partition.
//
// nil accepts. An error of [Reject] rejects the commit with the host's code. Any other
// error, or a panic, is a mistake: the commit is rejected with
// sync.constraint_violation and a fixed text, and the error is logged. An error after
// ctx has ended rejects nothing: the push fails, no outcome is recorded, and the client
// may try again. ctx ends when the caller of Push goes away.
//
// A validator may run more than once for one operation, when the transaction has to be
// tried again: what counts is what it said last. It must change nothing.
type Validator func(ctx context.Context, v *RowValidation) error

// RowValidation is what a [Validator] is asked.
type RowValidation struct {
	Partition, Actor, ClientID string
	// Op is an upsert or a delete.
	Op    ssp2.Op
	Table string
	RowID string
	// Row is the row as it will be stored, merged and with the stored scope columns;
	// nil for a delete.
	Row *Row
	// Stored is the row as the operations before this one left it; nil for an insert.
	Stored *Row
}

// wholeCommit stands for all operations of a commit.
const wholeCommit = -1

// refusedByHook is all a client learns of a mistake in a hook.
const refusedByHook = "the commit could not be validated"

// hookContext returns the context of the hooks for a commit: of the caller whose commit
// it is, for as long as the transaction runs.
func (t *transaction) hookContext(ctx context.Context, c *commit) (context.Context, context.CancelFunc) {
	hook, cancel := context.WithCancelCause(c.req.ctx)
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	return hook, func() {
		stop()
		cancel(nil)
	}
}

// validateRow asks the validator of the table about an operation, nil for accepted.
func (t *transaction) validateRow(ctx context.Context, o *operation, ch *change) error {
	validate := t.s.validators[o.table.Index]
	if validate == nil {
		return nil
	}
	req := o.commit.req
	v := &RowValidation{
		Partition: t.partition, Actor: req.Actor, ClientID: req.ClientID,
		Op: o.Op, Table: o.Table, RowID: o.RowID,
		Row: view(o.table, ch.row), Stored: view(o.table, o.stored),
	}
	err := contain(func() error { return validate(ctx, v) })
	return t.verdict(ctx, "validating a row", o.commit, o.index, err)
}

// verdict turns what a hook said about a commit into nil, a *refusal, or the error that
// the hook was cut short by. op is the operation it was asked about; wholeCommit lets
// it name one.
func (t *transaction) verdict(ctx context.Context, what string, c *commit, op int, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
	r := rejectionIn(err)
	named := op
	if op == wholeCommit {
		op = 0
		if r != nil {
			named = max(r.op, 0)
		}
	}
	if r != nil && named < len(c.ops) {
		return &refusal{
			result:  ssp2.OpResult{OpIndex: int32(named), Status: ssp2.OpError, Code: r.code, Message: r.message},
			details: r.details,
		}
	}
	t.s.log.ErrorContext(ctx, "a hook failed", "doing", what, "operation", op, "error", err)
	return &refusal{result: opError(op, ssp2.CodeConstraintViolation, refusedByHook)}
}

// contain runs a hook and turns a panic into an error.
func contain(hook func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return hook()
}
