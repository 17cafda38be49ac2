package pushsvc

import (
	"context"
	"fmt"
	"time"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/reaction"
)

// Planner says what is to happen once a commit is committed (§6.9): it runs after every
// validator has accepted, and its plans are stored in the transaction of the commit, so
// that they exist if and only if the commit does. A [reaction.Runner] delivers them.
//
// It must have no effect but its answer, since the transaction may still fail, and is
// bound by what holds for a [Validator]. An error, a panic, and plans that break a limit
// of [reaction.Normalize] fail the push: no outcome of the commit is recorded, and a
// later delivery plans again.
type Planner func(ctx context.Context, c *Candidate) ([]reaction.Plan, error)

var pushEnqueue = pgtx.NewStatement(db.ReactionEnqueue)

// planReactions asks the planner about a commit.
func (t *transaction) planReactions(ctx context.Context, c *commit, candidate *Candidate) error {
	var plans []reaction.Plan
	err := contain(func() (err error) {
		plans, err = t.s.planReactions(ctx, candidate)
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("planning reactions: %w", context.Cause(ctx))
	case err != nil:
		return internal("planning reactions", err)
	}
	if c.reactions, err = reaction.Normalize(t.partition, c.req.ClientID, c.id, plans); err != nil {
		return internal("planning reactions", err)
	}
	return nil
}

// queueReactions stores the reactions of commits.
func (t *transaction) queueReactions(f *flush, commits []appliedCommit) {
	var records []reaction.Record
	for _, c := range commits {
		for i := range c.reactions {
			c.reactions[i].CommitSeq = c.outcome.seq
		}
		records = append(records, c.reactions...)
	}
	if len(records) > 0 {
		f.queue("storing reactions", pushEnqueue, reaction.InsertParams(t.partition, time.UnixMilli(t.now), records)...)
	}
}

// noteReactions appends the events of the reactions of a commit.
func (c *commit) noteReactions(noted []events.Event) []events.Event {
	for _, r := range c.reactions {
		noted = append(noted, events.ReactionQueued{
			Partition: c.req.Partition, Actor: c.req.Actor, ClientID: c.req.ClientID, ClientCommitID: c.id,
			CommitSeq: c.outcome.seq, IdempotencyKey: r.IdempotencyKey, Type: r.Type, Version: r.Version,
		})
	}
	return noted
}
