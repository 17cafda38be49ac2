package pushsvc

import (
	"context"
	"errors"
	"fmt"

	"github.com/syncpg/syncpg/ssp2"
)

// planned is a set of consecutive commits as they will be applied together.
type planned struct {
	applied  []appliedCommit
	rejected []*commit // with their outcome set
}

type appliedCommit struct {
	*commit
	changes []change
}

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
	c.outcome = rejection(opError(0, ssp2.CodeConstraintViolation, "the rows of this commit are too large to be written together"))
	_, err := t.flush(ctx, &planned{rejected: []*commit{c}}, true)
	return requestError(err)
}

// applyRange applies consecutive commits in one flush. When the database refuses
// one of them, the range is taken back and applied in halves; a single commit is
// rejected. last says that nothing follows, so that the flush also commits.
func (t *transaction) applyRange(ctx context.Context, commits []*commit, last bool) error {
	mark := t.state.mark()
	plan := t.plan(commits)
	failed, err := t.flush(ctx, plan, last)
	if err == nil || failed == nil || !failed.row {
		return err
	}
	if !impossibleRow(err) {
		return fmt.Errorf("%w: %w", errRowFailed, err)
	}
	t.s.log.DebugContext(ctx, "the database refused a push", "commits", len(commits), "error", err)
	t.state.rollback(mark)
	for _, c := range commits {
		c.outcome = nil
	}
	if len(commits) > 1 {
		half := len(commits) / 2
		if err := t.applyRange(ctx, commits[:half], false); err != nil {
			return err
		}
		return t.applyRange(ctx, commits[half:], last)
	}
	op, err := t.attribute(ctx, &plan.applied[0])
	if err != nil {
		return fmt.Errorf("looking for the refused operation: %w", err)
	}
	commits[0].outcome = rejection(opError(op, ssp2.CodeConstraintViolation, refusedByDatabase))
	t.rejected = append(t.rejected, commits[0])
	return nil
}

// plan runs the commits over the candidate state and sets their outcomes.
func (t *transaction) plan(commits []*commit) *planned {
	p := &planned{}
	seq := t.lastSeq
	for _, c := range commits {
		if c.req.refused() {
			continue
		}
		changes, err := t.stage(c)
		if r := (*refusal)(nil); errors.As(err, &r) {
			c.outcome = rejection(r.result)
			p.rejected = append(p.rejected, c)
			continue
		}
		if err != nil {
			// Not the fault of those that share the transaction.
			c.req.err = fmt.Errorf("applying a commit: %w", err)
			continue
		}
		seq++
		c.outcome = appliedOutcome(seq, len(c.ops))
		p.applied = append(p.applied, appliedCommit{c, changes})
	}
	return p
}
