package pushsvc

import (
	"context"

	"github.com/syncpg/syncpg/ssp2"
)

// CommitValidator decides whether a commit may be applied as a whole (§6.8): once, after
// the last of its operations is staged and before anything of it is logged. What a
// [Validator] may and may not do holds for it too. nil accepts. [RejectOperation]
// rejects the commit and blames an operation, [Reject] the first one; an index that the
// commit does not have is a mistake, as is any other error.
type CommitValidator func(ctx context.Context, c *Candidate) error

// Candidate is a commit about to be applied, and a view of the partition as it would
// leave it: with the writes and deletes of all its operations, and those of the commits
// before it. It serves until the hook returns, also to several goroutines.
//
// The reads look at the partition as a whole, whatever the actor may see: ask for what
// the rule needs, and let none of it into a rejection.
//
// A row that the push names is known already. Any other read is a round trip to the
// database on the connection of the push, and the first of a commit writes the commit's
// rows, behind a savepoint: a hook that never reads costs none. A read waits for its
// answer even when its context ends, which would cost the connection, and with it the
// pushes that share it; no read begins after that.
type Candidate struct {
	Partition, Actor, ClientID, ClientCommitID string
	// Operations has one entry per operation of the commit, in order, and then one per
	// operation that its references led to.
	Operations []Evidence

	read *reader
}

// Evidence is what one operation of a commit does (§6.8).
type Evidence struct {
	OpIndex int // in the commit, from 0
	// Appended says that a declared reference led to it: the client's operation OpIndex
	// deleted a row that this one referred to.
	Appended bool
	Op       ssp2.Op
	Table    string
	RowID    string
	// Row is the row as the operation leaves it, merged and with the stored scope
	// columns; nil for a delete.
	Row *Row
	// Stored is the row as the operations before this one left it, and StoredVersion
	// its server version; nil and 0 when there was none.
	Stored        *Row
	StoredVersion int64
	// NextVersion is the server version of Row; 0 for a delete.
	NextVersion int64
}

// evidence returns what an operation does; ch is nil when it changes nothing.
func (o *operation) evidence(ch *change) Evidence {
	e := Evidence{
		OpIndex: o.index, Appended: o.appended, Op: o.Op, Table: o.Table, RowID: o.RowID,
		Stored: view(o.table, o.stored), StoredVersion: o.stored.version,
	}
	if ch != nil && ch.row != nil {
		e.Row, e.NextVersion = view(o.table, ch.row), ch.row.version
	}
	return e
}

// judgesCommits says whether a hook looks at whole commits.
func (s *Service) judgesCommits() bool { return s.validateCommit != nil || s.planReactions != nil }

// judge asks the hooks for whole commits, nil for accepted. What the database said while
// they read comes before what they say.
func (t *transaction) judge(ctx context.Context, read *reader, evidence []Evidence) error {
	c := read.commit.commit
	candidate := &Candidate{
		Partition: t.partition, Actor: c.req.Actor, ClientID: c.req.ClientID, ClientCommitID: c.id,
		Operations: evidence, read: read,
	}
	var err error
	if t.s.validateCommit != nil {
		err = contain(func() error { return t.s.validateCommit(ctx, candidate) })
		err = t.verdict(ctx, "validating a commit", c, wholeCommit, err)
	}
	if err == nil && t.s.planReactions != nil && read.failed() == nil {
		err = t.planReactions(ctx, c, candidate)
	}
	if failed := read.close(); failed != nil {
		return failed
	}
	return err
}
