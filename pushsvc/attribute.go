package pushsvc

import (
	"context"

	"github.com/syncpg/syncpg/internal/pgtx"
)

// attribute finds the operation of a refused commit that the database refuses by
// itself: the first in client order.
func (t *transaction) attribute(ctx context.Context, c *appliedCommit) (int, error) {
	culprit := -1
	var err error
	if len(c.changes) == 0 {
		return 0, nil // a host's trigger on the log
	}
	if len(c.changes) > 1 {
		culprit, err = t.searchStatements(ctx, c)
		if err == nil && culprit < 0 && t.admitted.single != nil {
			culprit, err = t.searchChecks(ctx, c)
		}
	}
	// A commit of which nobody is to blame begins with its first change.
	return c.changes[max(culprit, 0)].opIndex, err
}

// searchStatements runs the changes of a commit one by one, each with its own entry
// of the log, and returns the first that fails, -1 for none.
func (t *transaction) searchStatements(ctx context.Context, c *appliedCommit) (int, error) {
	f := t.newFlush()
	if err := t.takeBack(ctx, f, pgtx.RollbackTo); err != nil {
		return -1, err
	}
	for i := range c.changes {
		f.about(i, func() {
			t.queueRun(f, []*change{&c.changes[i]})
			f.queue("probing", pgtx.ProbeSavepoint)
			t.queueAppend(f, []appliedCommit{{c.commit, c.changes[i : i+1]}})
			f.queue("probing", pgtx.ProbeRollbackTo)
			f.queue("probing", pgtx.ProbeRelease)
		})
	}
	return t.runSearch(ctx, f)
}

// searchChecks finds the change after which the deferred checks fail for good:
// between two changes that swap a unique value they fail as well.
func (t *transaction) searchChecks(ctx context.Context, c *appliedCommit) (int, error) {
	culprit := -1
	from := pgtx.RollbackTo
	for next := 0; next < len(c.changes); {
		f := t.newFlush()
		if err := t.takeBack(ctx, f, from); err != nil {
			return -1, err
		}
		for i := next; i < len(c.changes); i++ {
			f.about(i, func() {
				t.queueRun(f, []*change{&c.changes[i]})
				f.queueChecks()
			})
		}
		failed, err := t.runSearch(ctx, f)
		if err != nil || failed < 0 {
			return -1, err
		}
		if failed > next || culprit < 0 {
			culprit = failed
		}
		next, from = failed+1, pgtx.ProbeRollbackTo
	}
	return culprit, nil
}

// about marks the statements that queue adds as being about a change.
func (f *flush) about(change int, queue func()) {
	from := len(f.statements)
	queue()
	for i := from; i < len(f.statements); i++ {
		f.statements[i].change = change
	}
}

// runSearch runs a search and returns the change that fails, -1 for none.
func (t *transaction) runSearch(ctx context.Context, f *flush) (int, error) {
	failed, err := t.run(ctx, f)
	switch {
	case err == nil:
		return -1, nil
	case failed != nil && failed.row && impossibleRow(err):
		return failed.change, nil
	}
	return -1, err
}
