package fanout

import (
	"context"
	"fmt"
	"time"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

// maxReadPartitions is how many partitions share a read.
const maxReadPartitions = 1000

// read reads the partitions that have news, and gives the sink what it finds, until ctx
// ends.
func (f *Fanout) read(ctx context.Context) {
	failures := 0
	for {
		batch := f.watched.take(ctx, maxReadPartitions)
		if batch == nil {
			return
		}
		err := f.readBatch(ctx, batch)
		if err == nil {
			failures = 0
			continue
		}
		if ctx.Err() != nil {
			return
		}
		failures++
		f.log.WarnContext(ctx, "cannot read new commits, and will try again", "partitions", len(batch), "failures", failures, "error", err)
		if !f.timing.wait(ctx, backoff(failures)) {
			return
		}
	}
}

// news is what a read found of one partition.
type news struct {
	commits []Commit
	seen    bool // the partition was looked at
	newest  int64
	horizon int64
	epoch   string
	schema  int32
}

// readBatch reads what is new in partitions that the caller holds, and gives them back.
func (f *Fanout) readBatch(ctx context.Context, batch []*partition) error {
	params := db.RealtimeReadNewsParams{
		Partitions: make([]string, len(batch)), Seqs: make([]int64, len(batch)),
		MaxBehind: f.cfg.MaxBehind, MaxCommits: maxReadCommits,
		CommitBytes: f.cfg.MaxCommitBytes, MaxBytes: maxReadBytes,
	}
	for i, p := range batch {
		params.Partitions[i], params.Seqs[i] = p.name, p.at
	}
	began := time.Now()
	found, err := f.readNews(ctx, params)
	commits := 0
	for i := range found {
		commits += len(found[i].commits)
	}
	events.Emit(ctx, f.cfg.Events, events.FanoutRead{
		Partitions: len(batch), Commits: commits, Duration: time.Since(began), Err: err,
	})
	// What was not looked at comes first next time.
	for i, p := range batch {
		if err != nil || !found[i].seen {
			f.watched.release(p, true)
		}
	}
	if err != nil {
		return err
	}
	for i, p := range batch {
		if found[i].seen {
			f.watched.release(p, f.deliver(ctx, p, &found[i]))
		}
	}
	return nil
}

func (f *Fanout) readNews(ctx context.Context, params db.RealtimeReadNewsParams) ([]news, error) {
	ctx, cancel := context.WithTimeout(ctx, queryWithin)
	defer cancel()
	rows, err := f.queries.RealtimeReadNews(ctx, params)
	if err != nil {
		return nil, fmt.Errorf("reading new commits: %w", err)
	}
	found := make([]news, len(params.Partitions))
	for i := range rows {
		row := &rows[i]
		n := &found[row.Ord-1]
		switch {
		case row.CommitSeq == 0:
			n.seen, n.newest, n.horizon, n.epoch, n.schema = true, row.MaxCommitSeq, row.HorizonSeq, row.LogEpoch, row.SchemaVersion
		case row.Op == 0:
			n.commits = append(n.commits, Commit{
				Seq: row.CommitSeq, CreatedAtMs: row.CreatedAtMs, ActorID: row.ActorID,
				Bytes: row.Bytes, Oversize: row.Bytes > params.CommitBytes,
			})
		default:
			c := &n.commits[len(n.commits)-1]
			c.Changes = append(c.Changes, Change{
				Table: row.TableName, RowID: row.RowID, Op: ssp2.Op(row.Op), RowVersion: row.RowVersion,
				Scopes: row.Scopes, Payload: row.Payload,
			})
		}
	}
	return found, nil
}

// deliver gives the sink what is new in a partition that the caller holds, and says
// whether there is more.
func (f *Fanout) deliver(ctx context.Context, p *partition, n *news) (more bool) {
	if !f.watched.wanted(p) {
		return true // for who begins to watch it before it is given back
	}
	epoch, schema := p.epoch, p.schema
	f.watched.identify(p, n.epoch, n.schema)
	switch {
	case epoch != "" && n.epoch != epoch, schema != 0 && n.schema != schema, n.newest < p.at:
		f.watched.moved(p, n.newest)
		events.Emit(ctx, f.cfg.Events, events.FanoutLost{Partition: p.name, Seq: n.newest, Reset: true})
		f.cfg.Sink.Reset(p.name, n.newest)
		return false
	case n.newest == p.at:
		return false
	case f.cfg.SchemaVersion != 0 && n.schema != 0 && n.schema != f.cfg.SchemaVersion:
		// Rows of another layout, which a newer process writes.
		f.watched.moved(p, n.newest)
		f.cfg.Sink.Reset(p.name, n.newest)
		return false
	case n.horizon > p.at, n.newest-p.at > f.cfg.MaxBehind:
		f.lost(ctx, p, n.newest)
		return false
	}
	// Seqs are given out under the lock of the partition, so what is visible has no gaps.
	// If it has one nevertheless, nobody may go on as if there were none.
	from, good := p.at, len(n.commits)
	for i := range n.commits {
		if n.commits[i].Seq != from+int64(i)+1 {
			good = i
			break
		}
	}
	if good > 0 {
		commits := n.commits[:good:good]
		f.watched.moved(p, commits[good-1].Seq)
		f.cfg.Sink.Commits(p.name, from, commits)
	}
	if good == 0 || good < len(n.commits) {
		f.log.ErrorContext(ctx, "the log of a partition has a gap", "partition", p.name, "after", p.at, "newest", n.newest)
		f.lost(ctx, p, n.newest)
		return false
	}
	return p.at < n.newest
}

// lost says that the sink is not given the commits of a partition up to seq.
func (f *Fanout) lost(ctx context.Context, p *partition, seq int64) {
	events.Emit(ctx, f.cfg.Events, events.FanoutLost{Partition: p.name, Seq: seq})
	f.watched.moved(p, seq)
	f.cfg.Sink.Lost(p.name, seq)
}

// poll looks for news that nobody told of, with every tick and when it is asked to.
func (f *Fanout) poll(ctx context.Context) {
	ticks, stop := f.timing.ticks(f.cfg.PollInterval)
	defer stop()
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks:
		case <-f.looks:
		}
		for {
			err := f.look(ctx)
			if err == nil {
				failures = 0
				break
			}
			if ctx.Err() != nil {
				return
			}
			failures++
			f.log.WarnContext(ctx, "cannot look for new commits, and will try again", "failures", failures, "error", err)
			if !f.timing.wait(ctx, backoff(failures)) {
				return
			}
		}
	}
}

// look finds the watched partitions that have news.
func (f *Fanout) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, queryWithin)
	defer cancel()
	total := 0
	defer func() { events.Emit(ctx, f.cfg.Events, events.FanoutPolled{Found: total}) }()
	for _, params := range f.watched.positions() {
		found, err := f.queries.RealtimeFindNews(ctx, *params)
		if err != nil {
			return fmt.Errorf("looking for new commits: %w", err)
		}
		total += len(found)
		names := make([]string, len(found))
		for i, ord := range found {
			names[i] = params.Partitions[ord-1]
		}
		f.watched.stale(names)
	}
	return nil
}
