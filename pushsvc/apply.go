package pushsvc

import (
	"context"
	"errors"
	"fmt"

	"github.com/syncpg/syncpg/ssp2"
)

// planned is what was decided about consecutive commits and is not written yet.
type planned struct {
	mark     int       // the candidate state before them
	commits  []*commit // all of them
	applied  []appliedCommit
	rejected []*commit // with their outcome set
	// written says that the rows of the first applied one are in the database already,
	// behind the savepoint, because a hook of it had to read them.
	written bool
	// bytes is what its rows and outcomes hold; full says that they are enough for a
	// flush.
	bytes int64
	full  bool
}

type appliedCommit struct {
	*commit
	changes []change
}

// errPlanRefused says that the database refused what was planned before the commit
// that is being decided.
var errPlanRefused = errors.New("the database refused a commit before this one")

// apply decides and writes every commit that has no outcome yet, and commits the
// transaction.
func (t *transaction) apply(ctx context.Context) error {
	var pending []*commit
	for _, c := range t.commits {
		if c.outcome == nil && !c.req.refused() {
			pending = append(pending, c)
		}
	}
	if len(pending) == 0 {
		return nil // another delivery recorded them while this one waited
	}
	if err := t.applyRange(ctx, pending, true); err != nil {
		return requestError(err)
	}
	if t.committed {
		return nil
	}
	// The last commit was refused by the database: record what is left.
	_, err := t.flush(ctx, &planned{}, true)
	return requestError(err)
}

// refuseOversized rejects the one commit of a transaction that names more data than
// an admission reads; it would otherwise be pushed for ever. Of several, each gets a
// transaction of its own.
func (t *transaction) refuseOversized(ctx context.Context) error {
	if len(t.commits) != 1 || !t.admitted.locked {
		return errOversized
	}
	c := t.commits[0]
	if c.req.refused() {
		return nil
	}
	c.outcome = rejection(opError(0, ssp2.CodeConstraintViolation, tooLarge))
	_, err := t.flush(ctx, &planned{rejected: []*commit{c}}, true)
	return requestError(err)
}

// applyRange decides consecutive commits and applies them in one flush. A hook that
// has to read splits it: what is planned so far is written first. last says that
// nothing follows, so that the last flush also commits.
func (t *transaction) applyRange(ctx context.Context, commits []*commit, last bool) error {
	p := &planned{mark: t.state.mark()}
	for i := 0; i < len(commits); i++ {
		if commits[i].req.refused() {
			continue
		}
		err := t.decideCommit(ctx, p, commits[i])
		if errors.Is(err, errPlanRefused) {
			if err = t.applyAgain(ctx, p, false); err == nil {
				*p = planned{mark: t.state.mark()}
				i-- // is decided again, over what is left of those before it
			}
		}
		if err != nil {
			return err
		}
		if p.full = p.bytes > t.s.maxPlannedBytes; p.full && i+1 < len(commits) {
			if err := t.applyPlan(ctx, p, false); err != nil {
				return err
			}
			*p = planned{mark: t.state.mark()}
		}
	}
	return t.applyPlan(ctx, p, last)
}

// applyPlan writes a plan, or takes it back and applies its commits again when the
// database refuses one of them.
func (t *transaction) applyPlan(ctx context.Context, p *planned, last bool) error {
	failed, err := t.flush(ctx, p, last)
	if err != nil && refused(failed, err) {
		t.s.log.DebugContext(ctx, "the database refused a push", "commits", len(p.commits), "error", err)
		return t.applyAgain(ctx, p, last)
	}
	return rowError(failed, err)
}

// refused says that the database failed at a statement because of a row that it would
// refuse on every retry.
func refused(failed *statement, err error) bool {
	return failed != nil && failed.row && impossibleRow(err)
}

// rowError marks an error over what one of the requests writes.
func rowError(failed *statement, err error) error {
	if err != nil && failed != nil && failed.row {
		return fmt.Errorf("%w: %w", errRowFailed, err)
	}
	return err
}

// applyAgain takes back a plan that the database refused and applies its commits in
// halves; a single commit is rejected.
func (t *transaction) applyAgain(ctx context.Context, p *planned, last bool) error {
	t.state.rollback(p.mark)
	for _, c := range p.commits {
		c.outcome, c.reactions = nil, nil
	}
	if half := len(p.commits) / 2; half > 0 {
		if err := t.applyRange(ctx, p.commits[:half], false); err != nil {
			return err
		}
		return t.applyRange(ctx, p.commits[half:], last)
	}
	refusal, err := t.blame(ctx, &p.applied[0])
	if err != nil {
		return err
	}
	c := p.commits[0]
	c.outcome = refusal.outcome()
	t.rejected = append(t.rejected, c)
	return nil
}

// blame finds the operation that made the database refuse a commit.
func (t *transaction) blame(ctx context.Context, c *appliedCommit) (*refusal, error) {
	op, err := t.attribute(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("looking for the refused operation: %w", err)
	}
	return &refusal{result: opError(op, ssp2.CodeConstraintViolation, refusedByDatabase)}, nil
}

// decideCommit runs a commit over the candidate state, asks the hooks, and adds it to
// the plan with its outcome set. An error, errPlanRefused for one, leaves it undecided.
func (t *transaction) decideCommit(ctx context.Context, p *planned, c *commit) error {
	mark := t.state.mark()
	changes, read, err := t.examine(ctx, p, c)
	if err != nil {
		t.state.rollback(mark)
		c.reactions = nil
	}
	if errors.Is(err, errTransaction) {
		return err
	}
	if read != nil {
		if read.err != nil {
			return read.err
		}
		t.dirty = t.dirty || read.ready && err != nil
		p.written = p.written || read.ready && err == nil
	}
	switch r := (*refusal)(nil); {
	case err == nil:
		c.outcome = appliedOutcome(t.lastSeq+int64(len(p.applied))+1, len(c.ops))
		p.applied = append(p.applied, appliedCommit{c, changes})
		for i := range changes {
			if row := changes[i].row; row != nil {
				p.bytes += int64(len(row.payload))
			}
		}
	case errors.As(err, &r):
		c.outcome = r.outcome()
		p.rejected = append(p.rejected, c)
		p.bytes += int64(len(r.result.ServerRow))
	default:
		// Not the fault of those that share the transaction.
		c.req.err = fmt.Errorf("applying a commit: %w", err)
	}
	p.commits = append(p.commits, c)
	return nil
}

// examine is the pipeline of a commit up to what decides it: its operations, the
// references, then the hooks for whole commits, whose reads come back with the changes.
// An error is a *refusal, internal, or errTransaction.
func (t *transaction) examine(ctx context.Context, p *planned, c *commit) ([]change, *reader, error) {
	hooks := ctx
	if t.s.validators != nil || t.s.judgesCommits() {
		var done context.CancelFunc
		hooks, done = t.hookContext(ctx, c)
		defer done()
	}
	mark := t.state.mark()
	st, err := t.stage(hooks, c)
	if err == nil {
		err = t.refer(ctx, hooks, st)
	}
	if err != nil {
		return nil, nil, err
	}
	if !t.s.judgesCommits() {
		return st.changes, nil, nil
	}
	read := &reader{t: t, ctx: ctx, plan: p, commit: appliedCommit{c, st.changes}, mark: mark}
	return st.changes, read, t.judge(hooks, read, st.evidence)
}
