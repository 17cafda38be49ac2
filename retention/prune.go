package retention

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

// errBusy says that another process prunes.
var errBusy = errors.New("another process prunes")

// Plan is up to where a partition's log could be pruned, and why not further.
type Plan struct {
	LogEpoch string
	Newest   int64 // commit seq of the newest commit
	Horizon  int64 // commit seq; what is at or below it is deleted
	Target   int64 // the horizon that pruning would reach now
	// ActiveClients are those with a cursor that pulled within the active window, and
	// LeastCursor is the least of their cursors, -1 when there is none.
	ActiveClients int64
	LeastCursor   int64
}

// Commits is how many commits pruning would delete.
func (p Plan) Commits() int64 { return p.Target - p.Horizon }

// Result is what a pruning did.
type Result struct {
	PreviousHorizon int64 // commit seq
	Horizon         int64 // commit seq
	Commits         int64 // deleted
	Changes         int64 // deleted with them
	Tombstones      int64 // deleted with them
	Compacted       int64 // superseded changes deleted above the horizon
}

func (r *Result) add(more Result) {
	r.Commits += more.Commits
	r.Changes += more.Changes
	r.Tombstones += more.Tombstones
	r.Compacted += more.Compacted
}

// Progress is how far a pruning has come.
type Progress struct {
	Partition string
	Target    int64 // the horizon that it is to reach, as of its beginning
	Result          // so far
}

// Plan looks up to where a partition's log could be pruned now, and changes nothing. The
// error is sync.storage.partition_unregistered (an *ssp2.Error) when there is no such
// partition, or one of the database.
func (s *Service) Plan(ctx context.Context, partition string) (Plan, error) {
	return s.plan(ctx, partition, s.cfg.Policy.at(s.cfg.Clock()))
}

func (s *Service) plan(ctx context.Context, partition string, b bounds) (Plan, error) {
	row, err := db.New(s.pool).RetentionPlanPrune(ctx, db.RetentionPlanPruneParams{
		Partition: partition, ActiveSince: b.activeSince, OlderThan: b.olderThan, Keep: b.keep,
	})
	if err != nil {
		return Plan{}, fmt.Errorf("planning to prune: %w", err)
	}
	if row.LogEpoch == "" {
		return Plan{}, unregistered(partition)
	}
	return Plan{
		LogEpoch: row.LogEpoch, Newest: row.MaxCommitSeq, Horizon: row.HorizonSeq, Target: row.TargetSeq,
		ActiveClients: row.ActiveClients, LeastCursor: row.LeastCursor,
	}, nil
}

func unregistered(partition string) error {
	return ssp2.Errorf(ssp2.CodeStoragePartitionUnregistered, "there is no partition %.64q", partition)
}

// Prune prunes the log of a partition (§4.6), then compacts what is left when the policy
// says so. progress, unless nil, is told when it is known what is to be done and after
// every batch. The errors are sync.storage.partition_unregistered when there is no such
// partition, sync.storage.prune_epoch_mismatch (both *ssp2.Error) when its log was replaced
// meanwhile, of which nothing is deleted, or one of the database; the result says what was
// done by then.
func (s *Service) Prune(ctx context.Context, partition string, progress func(Progress)) (Result, error) {
	return s.prune(ctx, partition, false, progress)
}

// prune prunes a partition; alone: only while no other process prunes with alone.
func (s *Service) prune(ctx context.Context, partition string, alone bool, progress func(Progress)) (result Result, err error) {
	b := s.cfg.Policy.at(s.cfg.Clock())
	plan, err := s.plan(ctx, partition, b)
	if err != nil {
		return Result{}, err
	}
	p := pass{
		Service: s, partition: partition, plan: plan, bounds: b, alone: alone, progress: progress,
		result: Result{PreviousHorizon: plan.Horizon, Horizon: plan.Horizon},
	}
	p.tell()
	err = p.prune(ctx)
	if !errors.Is(err, errBusy) {
		events.Emit(ctx, s.cfg.Events, events.Pruned{
			Partition: partition, PreviousHorizon: p.result.PreviousHorizon, Horizon: p.result.Horizon, RemovedCommits: p.result.Commits,
		})
	}
	if err == nil && b.compact != nil {
		err = p.compact(ctx)
	}
	return p.result, err
}

// pass is one pruning of a partition.
type pass struct {
	*Service
	partition string
	plan      Plan
	bounds    bounds
	alone     bool
	progress  func(Progress)
	result    Result
}

func (p *pass) tell() {
	if p.progress != nil {
		p.progress(Progress{Partition: p.partition, Target: p.plan.Target, Result: p.result})
	}
}

// prune makes batches until one deletes nothing. The plan says whether there is one at
// all; each batch decides for itself how far it goes.
func (p *pass) prune(ctx context.Context) error {
	if p.plan.Target <= p.plan.Horizon {
		return nil
	}
	for {
		began := time.Now()
		row, err := call[db.RetentionPruneLogRow](ctx, p.pool, pruneLog, p.partition, p.plan.LogEpoch,
			p.bounds.activeSince, p.bounds.olderThan, p.bounds.keep, p.cfg.BatchRows, p.alone)
		if err != nil {
			return fmt.Errorf("pruning: %w", err)
		}
		if err := p.check(row.Busy, row.LogEpoch); err != nil {
			return err
		}
		if row.Commits == 0 {
			return nil
		}
		p.result.Horizon = row.HorizonSeq
		p.result.add(Result{Commits: row.Commits, Changes: row.Changes, Tombstones: row.Tombstones})
		p.tell()
		if row.WaitedFor {
			// Whoever waits needs a moment to take the lock, which is free until then.
			p.rest(ctx, time.Since(began))
		}
	}
}

func (p *pass) compact(ctx context.Context) error {
	for after := int64(0); ; {
		row, err := call[db.RetentionCompactLogRow](ctx, p.pool, compactLog, p.partition, p.plan.LogEpoch,
			after, *p.bounds.compact, p.compactRows, p.alone)
		if err != nil {
			return fmt.Errorf("compacting: %w", err)
		}
		if err := p.check(row.Busy, row.LogEpoch); err != nil {
			return err
		}
		p.result.add(Result{Compacted: row.Changes})
		p.tell()
		if row.Finished {
			return nil
		}
		after = row.CompactedSeq
	}
}

// check looks at the state that a batch found.
func (p *pass) check(busy bool, logEpoch string) error {
	switch {
	case busy:
		return errBusy
	case logEpoch == "":
		return unregistered(p.partition)
	case logEpoch != p.plan.LogEpoch:
		return ssp2.Errorf(ssp2.CodeStoragePruneEpochMismatch, "the log of partition %.64q was replaced while it was being pruned", p.partition)
	}
	return nil
}

// Total is what was done in several partitions.
type Total struct {
	Partitions int // whose log was looked at
	Failed     int // of these, those that could not be pruned to the end
	Commits    int64
	Changes    int64
	Tombstones int64
	Compacted  int64
}

// maxFailures bounds the errors that PruneAll joins.
const maxFailures = 10

// PruneAll prunes every partition, one after the other, as [Service.Prune] does. One that
// cannot be pruned, because its log is replaced meanwhile, or it goes away, or the database
// refuses, does not end it: the first of these errors are joined. A database that is out of
// reach does.
func (s *Service) PruneAll(ctx context.Context, progress func(Progress)) (Total, error) {
	return s.pruneAll(ctx, false, progress)
}

func (s *Service) pruneAll(ctx context.Context, alone bool, progress func(Progress)) (Total, error) {
	var total Total
	var failures []error
	err := s.Each(ctx, func(partition string) error {
		r, err := s.prune(ctx, partition, alone, progress)
		total.Partitions++
		total.Commits += r.Commits
		total.Changes += r.Changes
		total.Tombstones += r.Tombstones
		total.Compacted += r.Compacted
		if err == nil {
			return nil
		}
		total.Failed++
		if ctx.Err() != nil || !ofOnePartition(err) {
			return err
		}
		if len(failures) < maxFailures {
			failures = append(failures, fmt.Errorf("partition %.64q: %w", partition, err))
		}
		return nil
	})
	return total, errors.Join(append(failures, err)...)
}

// ofOnePartition says that other partitions may be pruned although one was not: the database
// is there and has an answer.
func ofOnePartition(err error) bool {
	if _, ours := errors.AsType[*ssp2.Error](err); ours {
		return true
	}
	state := pgtx.SQLState(err)
	for _, down := range []string{"08", "53", "57P", "58"} { // connection, resources, shutdown, system
		if strings.HasPrefix(state, down) {
			return false
		}
	}
	return state != ""
}

// Each calls visit for every partition whose log could be pruned, given enough time, in
// byte order, until one returns an error. With compaction these are all that have a log.
func (s *Service) Each(ctx context.Context, visit func(partition string) error) error {
	b := s.cfg.Policy.at(s.cfg.Clock())
	if b.compact != nil {
		b.keep = 0
	}
	for after := ""; ; {
		page, err := db.New(s.pool).RetentionListPartitions(ctx, db.RetentionListPartitionsParams{
			After: after, MoreThan: b.keep, Batch: int32(s.page),
		})
		if err != nil {
			return fmt.Errorf("looking for partitions to prune: %w", err)
		}
		for _, partition := range page {
			if err := visit(partition); err != nil {
				return err
			}
			after = partition
		}
		if len(page) < s.page {
			return nil
		}
	}
}

// rest waits for d, or until ctx ends.
func rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
