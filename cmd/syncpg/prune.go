package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/ssp2"
)

// retentionFlags say how much of a log is kept.
type retentionFlags struct {
	ActiveWindow time.Duration `name:"active-window" default:"336h" setting:"" group:"retention" help:"For how long after its newest pull a client holds the log. At least 336h (14 days)."`
	ForceAge     time.Duration `name:"force-age" default:"720h" setting:"" group:"retention" help:"Age at which commits are deleted although an active client has not pulled them. At least 720h (30 days); -1s: never."`
	KeepCommits  int64         `name:"keep-commits" default:"1000" setting:"" group:"retention" help:"How many of a partition's newest commits stay in any case. At least 1000."`
	CompactAfter time.Duration `name:"compact-after" default:"0s" setting:"" group:"retention" help:"Age at which changes go that later ones of the same row supersede. 0: none do."`
}

func (f retentionFlags) policy() (retention.Policy, error) {
	p := retention.Policy{ActiveWindow: f.ActiveWindow, ForceAge: f.ForceAge, KeepCommits: f.KeepCommits, CompactAfter: f.CompactAfter}
	for name, zero := range map[string]bool{
		"--active-window": f.ActiveWindow == 0, "--force-age": f.ForceAge == 0, "--keep-commits": f.KeepCommits == 0,
	} {
		if zero {
			return p, usagef("%s is 0, which the protocol does not allow", name)
		}
	}
	if err := p.Check(); err != nil {
		return p, usagef("%w", err)
	}
	return p, nil
}

// whichFlags name partitions.
type whichFlags struct {
	Partition []string `name:"partition" sep:"none" placeholder:"NAME" help:"A partition; may be repeated."`
	All       bool     `name:"all" help:"Every partition."`
}

func (f whichFlags) check() error {
	if f.All == (len(f.Partition) > 0) {
		return usagef("say which partitions: --partition NAME, which may be repeated, or --all")
	}
	return nil
}

type pruneCmd struct {
	databaseFlags
	whichFlags
	retentionFlags
	BatchRows int  `name:"batch-rows" default:"2000" help:"How many rows of commits and changes are deleted at a time; pushes to the partition wait for as many."`
	DryRun    bool `name:"dry-run" help:"Show what would be deleted, and what keeps the rest, and delete nothing."`
	JSON      bool `name:"json" help:"Print JSON."`
}

// Help explains the command.
func (*pruneCmd) Help() string {
	return `Deletes commits that every client has that still pulls, and those that are too old to wait for clients, with all that ` +
		`belongs to them. A client that comes back later begins anew, with nothing lost. Rows of the app and outcomes of pushes ` +
		`stay.

It can be interrupted at any time, and run while servers do: pushes to a partition wait for one batch of it at most. ` +
		`Servers prune by themselves too, see "syncpg serve --prune-interval". Progress goes to stderr.`
}

// prunedPartition is what is printed of a partition as JSON.
type prunedPartition struct {
	Partition       string `json:"partition"`
	PreviousHorizon int64  `json:"previousHorizon"`
	Horizon         int64  `json:"horizon"`
	Commits         int64  `json:"commits"`
	Changes         int64  `json:"changes"`
	Tombstones      int64  `json:"tombstones"`
	Compacted       int64  `json:"compacted"`
}

// plannedPartition is what --dry-run prints of a partition as JSON.
type plannedPartition struct {
	Partition     string `json:"partition"`
	Newest        int64  `json:"newest"`
	Horizon       int64  `json:"horizon"`
	Target        int64  `json:"target"`
	Commits       int64  `json:"commits"`
	ActiveClients int64  `json:"activeClients"`
	LeastCursor   *int64 `json:"leastCursor"`
}

// Run prunes.
func (c *pruneCmd) Run(ctx context.Context, p *program) error {
	if err := c.check(); err != nil {
		return err
	}
	policy, err := c.policy()
	if err != nil {
		return err
	}
	if c.BatchRows < 1 || c.BatchRows > 1_000_000 {
		return usagef("--batch-rows is %d; it must be 1 to 1,000,000", c.BatchRows)
	}
	pool, s, err := c.retention(ctx, p, retention.Config{Policy: policy, BatchRows: c.BatchRows})
	if err != nil {
		return err
	}
	defer pool.Close()
	if c.DryRun {
		return c.plan(ctx, p, s)
	}
	return c.prune(ctx, p, s)
}

// retention opens the database of a command and the service that looks after its logs.
func (f databaseFlags) retention(ctx context.Context, p *program, cfg retention.Config) (*pgxpool.Pool, *retention.Service, error) {
	cfg.Logger = p.log
	pool, err := f.pool(ctx, p)
	if err != nil {
		return nil, nil, err
	}
	if _, err := migrations.Check(ctx, pool); err != nil {
		pool.Close()
		return nil, nil, asState(err)
	}
	s, err := retention.New(pool, cfg)
	if err != nil {
		pool.Close()
		return nil, nil, fmt.Errorf("look after the logs: %w", err)
	}
	return pool, s, nil
}

// each visits the partitions of the command.
func (f whichFlags) each(ctx context.Context, s *retention.Service, visit func(partition string) error) error {
	if f.All {
		return s.Each(ctx, visit)
	}
	for _, partition := range f.Partition {
		if err := visit(partition); err != nil {
			return err
		}
	}
	return nil
}

// nothingToPrune is what is printed when --all finds no partition.
const nothingToPrune = "nothing to do: no partition has more commits than are kept\n"

// noPartition explains that a partition named on the command line is not there. Other errors stay as they are.
func noPartition(partition string, err error) error {
	if ssp2.CodeOf(err) != ssp2.CodeStoragePartitionUnregistered {
		return err
	}
	return &described{
		fmt.Sprintf("there is no partition %q: the table syncpg.sync_partition_registry has those that are there", partition), err,
	}
}

func (c *pruneCmd) prune(ctx context.Context, p *program, s *retention.Service) error {
	done := []prunedPartition{}
	report := &pruneReport{to: p.stderr, now: time.Now, quiet: c.JSON}
	err := c.each(ctx, s, func(partition string) error {
		r, err := s.Prune(ctx, partition, report.progress)
		if ssp2.CodeOf(err) == ssp2.CodeStoragePartitionUnregistered {
			return noPartition(partition, err)
		}
		done = append(done, prunedPartition{
			partition, r.PreviousHorizon, r.Horizon, r.Commits, r.Changes, r.Tombstones, r.Compacted,
		})
		return err
	})
	// What is done is done, and shown whatever came then.
	if c.JSON {
		if printErr := p.printJSON(done); printErr != nil && err == nil {
			err = printErr
		}
		return err
	}
	rows := [][]string{{"PARTITION", "HORIZON", "COMMITS", "CHANGES", "TOMBSTONES", "COMPACTED"}}
	var commits, compacted int64
	for _, d := range done {
		commits, compacted = commits+d.Commits, compacted+d.Compacted
		rows = append(rows, []string{
			strconv.Quote(d.Partition), fmt.Sprintf("%d (was %d)", d.Horizon, d.PreviousHorizon), strconv.FormatInt(d.Commits, 10),
			strconv.FormatInt(d.Changes, 10), strconv.FormatInt(d.Tombstones, 10), strconv.FormatInt(d.Compacted, 10),
		})
	}
	if len(done) == 0 {
		if err == nil {
			p.printf(nothingToPrune)
		}
		return err
	}
	if tableErr := table(p.stdout, "", rows); tableErr != nil && err == nil {
		err = tableErr
	}
	what := plural(int(commits), "commit")
	if c.CompactAfter > 0 {
		what += " and " + plural(int(compacted), "superseded change")
	}
	p.printf("deleted %s in %s\n", what, plural(len(done), "partition"))
	return err
}

func (c *pruneCmd) plan(ctx context.Context, p *program, s *retention.Service) error {
	plans := []plannedPartition{}
	err := c.each(ctx, s, func(partition string) error {
		plan, err := s.Plan(ctx, partition)
		if err != nil {
			return noPartition(partition, err)
		}
		one := plannedPartition{
			Partition: partition, Newest: plan.Newest, Horizon: plan.Horizon, Target: plan.Target, Commits: plan.Commits(),
			ActiveClients: plan.ActiveClients,
		}
		if plan.ActiveClients > 0 {
			one.LeastCursor = &plan.LeastCursor
		}
		plans = append(plans, one)
		return nil
	})
	if err != nil {
		return err
	}
	switch {
	case c.JSON:
		return p.printJSON(plans)
	case len(plans) == 0:
		p.printf(nothingToPrune)
		return nil
	}
	rows := [][]string{{"PARTITION", "NEWEST", "HORIZON", "WOULD BE", "COMMITS", "ACTIVE CLIENTS", "LEAST CURSOR"}}
	var commits int64
	for _, one := range plans {
		commits += one.Commits
		cursor := "-"
		if one.LeastCursor != nil {
			cursor = strconv.FormatInt(*one.LeastCursor, 10)
		}
		rows = append(rows, []string{
			strconv.Quote(one.Partition), strconv.FormatInt(one.Newest, 10), strconv.FormatInt(one.Horizon, 10),
			strconv.FormatInt(one.Target, 10), strconv.FormatInt(one.Commits, 10), strconv.FormatInt(one.ActiveClients, 10), cursor,
		})
	}
	if err := table(p.stdout, "", rows); err != nil {
		return err
	}
	p.printf("would delete %s in %s\n", plural(int(commits), "commit"), plural(len(plans), "partition"))
	if c.CompactAfter > 0 {
		p.printf("which changes would be compacted is only known when it is done\n")
	}
	return nil
}

// reportEvery is how often progress is reported.
const reportEvery = 2 * time.Second

// pruneReport tells how a pruning goes on, with rate and time left.
type pruneReport struct {
	to    io.Writer
	now   func() time.Time
	quiet bool

	partition string
	began     time.Time
	told      time.Time
}

func (r *pruneReport) progress(g retention.Progress) {
	now := r.now()
	if g.Partition != r.partition || r.began.IsZero() {
		r.partition, r.began, r.told = g.Partition, now, now
		return
	}
	if r.quiet || now.Sub(r.told) < reportEvery {
		return
	}
	r.told = now
	total, took := g.Target-g.PreviousHorizon, now.Sub(r.began)
	rate := float64(g.Commits) / took.Seconds()
	line := fmt.Sprintf("%q: %d of %d commits, %.0f/s", g.Partition, g.Commits, total, rate)
	switch left := total - g.Commits; {
	case g.Compacted > 0:
		line += fmt.Sprintf(", %d changes compacted", g.Compacted)
	case left > 0 && rate > 0:
		line += ", " + duration(time.Duration(float64(left)/rate*float64(time.Second))) + " left"
	}
	_, _ = fmt.Fprintln(r.to, line)
}
