package smoke

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Options say what to check and as whom.
type Options struct {
	// URL is the mount of the server: /sync and /readyz are added to it. Required.
	URL string

	// Header goes with every request, such as Authorization.
	Header http.Header

	// Schema is the one that the server serves. Required.
	Schema *schema.Schema

	// Table is the name of the table to write to. "": see [Choose].
	Table string

	// Scopes fixes values of scope variables, for an actor that is not allowed every value. Others are made up.
	Scopes map[string]string

	// Wires are the wire versions to check, one pass each. Nil: 2 and 3.
	Wires []ssp2.WireVersion

	// DeltaWithin is how long a commit may take to a socket. 0: 15 seconds.
	DeltaWithin time.Duration

	// HTTP sends the requests. Nil: http.DefaultClient.
	HTTP *http.Client
}

// Step is the outcome of one step.
type Step struct {
	Wire   ssp2.WireVersion // 0 for steps before the passes
	Name   string           // what was checked
	Detail string           // what was found, "" for nothing worth saying
	Took   time.Duration
	Err    error  // nil when the step passed
	Look   string // after a failure: what to look at, "" when there is nothing to propose
}

// StepError is the failed step that ended a run.
type StepError struct{ Step Step }

func (f *StepError) Error() string {
	name := f.Step.Name
	if f.Step.Wire != 0 {
		name = fmt.Sprintf("wire version %d: %s", f.Step.Wire, name)
	}
	return fmt.Sprintf("%s: %v", name, f.Step.Err)
}

// Unwrap returns the error of the step.
func (f *StepError) Unwrap() error { return f.Step.Err }

// Run checks a server, calls report after every step, and stops at the first that fails with a [StepError]. Other errors
// are about the options; then nothing has been sent.
func Run(ctx context.Context, o Options, report func(Step)) error {
	target, err := Choose(o.Schema, o.Table)
	if err != nil {
		return err
	}
	if o.Wires == nil {
		o.Wires = []ssp2.WireVersion{ssp2.WireV2, ssp2.WireV3}
	}
	if o.HTTP == nil {
		o.HTTP = http.DefaultClient
	}
	o.URL = strings.TrimRight(o.URL, "/")
	var seed [32]byte
	if _, err := crand.Read(seed[:]); err != nil {
		return fmt.Errorf("make a random seed: %w", err)
	}
	random := rand.New(rand.NewChaCha8(seed)) //nolint:gosec // Made-up values have to differ, not to be secret.

	passes := make([]*pass, len(o.Wires))
	for i, wire := range o.Wires {
		if passes[i], err = newPass(o, target, wire, random); err != nil {
			return err
		}
	}
	ready := runner{ctx: ctx, report: report}
	if !ready.step("the server is ready", func() (string, error) { return checkReady(ctx, o) }) {
		return ready.failure
	}
	for _, p := range passes {
		p.runner = runner{ctx: ctx, wire: p.wire, report: report}
		if !p.run() {
			return p.failure
		}
	}
	return nil
}

// runner times and reports steps.
type runner struct {
	ctx     context.Context // of the one Run that all steps share
	wire    ssp2.WireVersion
	report  func(Step)
	failure *StepError
}

// step runs one step and reports whether it passed.
func (r *runner) step(name string, f func() (detail string, err error)) bool {
	start := time.Now()
	detail, err := f()
	s := Step{Wire: r.wire, Name: name, Detail: detail, Took: time.Since(start), Err: err}
	if err != nil {
		s.Look = whatToLookAt(err)
		r.failure = &StepError{s}
	}
	r.report(s)
	return err == nil
}

// pass is the scenario in one wire version.
type pass struct {
	runner
	*plan
	wire   ssp2.WireVersion
	maker  *maker
	writer *client.Client // writes, and follows the log from the start
	reader *client.Client // comes later and bootstraps
	want   expectation
	commit int   // number of the last commit made
	seq    int64 // newest commit seq seen

	deltaWithin time.Duration
}

func newPass(o Options, target *schema.Table, wire ssp2.WireVersion, random *rand.Rand) (*pass, error) {
	p, m, err := newPlan(target, o.Scopes, random)
	if err != nil {
		return nil, err
	}
	ps := &pass{plan: p, wire: wire, maker: m, want: expectation{}, deltaWithin: cmp.Or(o.DeltaWithin, defaultDeltaWithin)}
	cfg := client.Config{URL: o.URL, Header: o.Header, Schema: o.Schema, Wire: wire, HTTP: o.HTTP}
	cfg.ClientID = m.prefix + "-writer"
	if ps.writer, err = client.New(cfg); err != nil {
		return nil, err
	}
	cfg.ClientID = m.prefix + "-reader"
	// One row a page and one page a pull, so that a bootstrap has to be taken up again.
	cfg.LimitSnapshotRows, cfg.MaxSnapshotPages = 1, 1
	if ps.reader, err = client.New(cfg); err != nil {
		return nil, err
	}
	for _, c := range []*client.Client{ps.writer, ps.reader} {
		for _, t := range p.tables {
			if err := c.Subscribe("smoke-"+t.table.Name, t.table.Name, t.scopes); err != nil {
				return nil, err
			}
		}
	}
	return ps, nil
}

// run is the scenario.
func (p *pass) run() bool {
	rows := p.rows
	first, second := p.mutable[0], p.mutable[len(p.mutable)-1]
	inserts := p.newCommit(slices.Concat(p.inserts(p.parents...), p.inserts(rows[:3]...))...)
	var stale ssp2.PushCommit
	var inserted, rejected client.Result

	ok := p.step("acquire the log epoch", func() (string, error) {
		return "", p.writer.Acquire(p.ctx)
	}) && p.step("bootstrap the first client while there is nothing", func() (string, error) {
		return p.catchUp(p.writer)
	}) && p.step("push a commit of inserts", func() (_ string, err error) {
		if inserted, err = p.pushApplied(inserts); err != nil {
			return "", err
		}
		for _, r := range slices.Concat(p.parents, rows[:3]) {
			p.want.insert(r)
		}
		return fmt.Sprintf("%d rows of %s, commit %d", len(inserts.Operations), p.tableNames(), p.seq), nil
	}) && p.step("push an update of the version it was made for", func() (string, error) {
		op := p.update(rows[0], first)
		if _, err := p.pushApplied(p.newCommit(op.Operation)); err != nil {
			return "", err
		}
		p.want.update(rows[0], op)
		return "", nil
	})
	if ok && p.wire >= ssp2.WireV3 && first != second {
		ok = p.step("push an old update of another column, which is no conflict", func() (string, error) {
			op := p.update(rows[0], second)
			if _, err := p.pushApplied(p.newCommit(op.Operation)); err != nil {
				return "", err
			}
			p.want.update(rows[0], op)
			return "", nil
		})
	}
	return ok && p.step("push an update of an old version: a conflict", func() (_ string, err error) {
		op := p.update(rows[0], first)
		stale = p.newCommit(op.Operation)
		rejected, err = p.pushConflict(stale, rows[0], first)
		return "", err
	}) && p.step("push both commits again: the same outcomes", func() (string, error) {
		return "", p.replay(inserts, inserted, stale, rejected)
	}) && p.step("push a delete", func() (string, error) {
		if _, err := p.pushApplied(p.newCommit(deletes(rows[2])...)); err != nil {
			return "", err
		}
		p.want.remove(rows[2])
		return "", nil
	}) && p.step("bootstrap a second client page by page, and compare", func() (string, error) {
		if err := p.reader.Acquire(p.ctx); err != nil {
			return "", err
		}
		return p.compare(p.reader)
	}) && p.step("pull the log with the first client, and compare", func() (string, error) {
		return p.compare(p.writer)
	}) && p.step("push an insert, an update and a delete in one request", func() (string, error) {
		op := p.update(rows[1], first, second)
		err := p.pushAll(p.newCommit(p.inserts(rows[3])...), p.newCommit(op.Operation), p.newCommit(deletes(rows[0])...))
		if err != nil {
			return "", err
		}
		p.want.insert(rows[3])
		p.want.update(rows[1], op)
		p.want.remove(rows[0])
		return "", nil
	}) && p.step("pull the log with both clients, and compare", func() (string, error) {
		if _, err := p.compare(p.writer); err != nil {
			return "", fmt.Errorf("first client: %w", err)
		}
		detail, err := p.compare(p.reader)
		if err != nil {
			return "", fmt.Errorf("second client: %w", err)
		}
		return detail, nil
	}) && p.step("follow an update over a socket, and compare", func() (string, error) {
		return p.follow(rows[3], first)
	}) && p.step("delete what was written, and compare", func() (string, error) {
		slices.Reverse(p.parents)
		left := slices.Concat([]row{rows[1], rows[3]}, p.parents)
		if _, err := p.pushApplied(p.newCommit(deletes(left...)...)); err != nil {
			return "", err
		}
		for _, r := range left {
			p.want.remove(r)
		}
		if _, err := p.compare(p.writer); err != nil {
			return "", fmt.Errorf("first client: %w", err)
		}
		return p.compare(p.reader)
	})
}

func (p *pass) tableNames() string {
	names := make([]string, len(p.tables))
	for i, t := range p.tables {
		names[i] = t.table.Name
	}
	return strings.Join(names, " and ")
}

func (p *pass) newCommit(ops ...ssp2.Operation) ssp2.PushCommit {
	p.commit++
	return ssp2.PushCommit{ClientCommitID: fmt.Sprintf("%s-%d", p.maker.prefix, p.commit), Operations: ops}
}

// inserts inserts rows that must not exist: never touch a row of somebody else.
func (p *pass) inserts(rows ...row) []ssp2.Operation {
	ops := make([]ssp2.Operation, len(rows))
	for i, r := range rows {
		all := ssp2.NewBitmap(len(r.values))
		for c := range r.values {
			all.Set(c)
		}
		zero := int64(0)
		ops[i] = ssp2.Operation{
			Table: r.table.Name, RowID: r.id, Op: ssp2.OpUpsert, BaseVersion: &zero, Payload: p.payload(r, all, r.values),
		}
	}
	return ops
}

// update is an operation with the values the row has when it is applied.
type update struct {
	ssp2.Operation
	values []ssp2.Value
}

// update changes columns of a row that was read when it was new.
func (p *pass) update(r row, columns ...int) update {
	present := ssp2.NewBitmap(len(r.values))
	present.Set(r.table.PrimaryKey)
	base := int64(1)
	stored := p.want.row(r).Values
	values := slices.Clone(stored)
	for _, c := range columns {
		present.Set(c)
		values[c] = p.maker.other(&r.table.Columns[c], stored[c])
	}
	return update{ssp2.Operation{
		Table: r.table.Name, RowID: r.id, Op: ssp2.OpUpsert, BaseVersion: &base, Payload: p.payload(r, present, values),
	}, values}
}

// payload encodes a row as the wire version has it: whole, or with the present columns (v3).
func (p *pass) payload(r row, present ssp2.Bitmap, values []ssp2.Value) []byte {
	var b []byte
	var err error
	if p.wire >= ssp2.WireV3 {
		b, err = ssp2.AppendSparseRow(nil, r.table.Wire, r.table.PrimaryKey, present, values)
	} else {
		b, err = ssp2.AppendRow(nil, r.table.Wire, values)
	}
	if err != nil {
		panic(fmt.Sprintf("smoke: a made-up row of table %q cannot be encoded: %v", r.table.Name, err))
	}
	return b
}

func deletes(rows ...row) []ssp2.Operation {
	ops := make([]ssp2.Operation, len(rows))
	for i, r := range rows {
		ops[i] = ssp2.Operation{Table: r.table.Name, RowID: r.id, Op: ssp2.OpDelete}
	}
	return ops
}

func (p *pass) pushApplied(commit ssp2.PushCommit) (client.Result, error) {
	results, err := p.writer.Push(p.ctx, commit)
	if err != nil {
		return client.Result{}, err
	}
	return results[0], p.checkApplied(results[0])
}

func (p *pass) pushAll(commits ...ssp2.PushCommit) error {
	results, err := p.writer.Push(p.ctx, commits...)
	if err != nil {
		return err
	}
	for i, r := range results {
		if err := p.checkApplied(r); err != nil {
			return fmt.Errorf("commit %d of the request: %w", i+1, err)
		}
	}
	return nil
}

func (p *pass) checkApplied(r client.Result) error {
	if r.Status != ssp2.PushApplied {
		return outcomeError("applied", r)
	}
	if *r.CommitSeq <= p.seq {
		return fmt.Errorf("the commit got seq %d after seq %d (§2.1)", *r.CommitSeq, p.seq)
	}
	p.seq = *r.CommitSeq
	return nil
}

// pushConflict pushes an update of a column that has changed since.
func (p *pass) pushConflict(commit ssp2.PushCommit, r row, column int) (client.Result, error) {
	results, err := p.writer.Push(p.ctx, commit)
	if err != nil {
		return client.Result{}, err
	}
	result, want := results[0], p.want.row(r)
	if result.Status != ssp2.PushRejected || result.Results[0].Status != ssp2.OpConflict {
		return result, outcomeError("rejected for a conflict", result)
	}
	conflict := result.Results[0]
	if conflict.Code != string(ssp2.CodeVersionConflict) {
		return result, fmt.Errorf("the conflict has the code %s, not %s", conflict.Code, ssp2.CodeVersionConflict)
	}
	got, err := ssp2.DecodeRow(r.table.Wire, conflict.ServerRow, nil)
	if err != nil {
		return result, fmt.Errorf("the serverRow of the conflict cannot be read: %w", err)
	}
	if diff := diffRow(r.table, want, client.Row{Version: conflict.ServerVersion, Values: got}); diff != "" {
		return result, fmt.Errorf("the conflict shows another row than there should be: %s", diff)
	}
	if p.wire >= ssp2.WireV3 {
		marked := ssp2.NewBitmap(len(r.table.Columns))
		marked.Set(column)
		if !slices.Equal(conflict.ConflictColumns, marked) {
			return result, fmt.Errorf("the conflict marks the columns %v, not %s alone",
				columnNames(r.table, conflict.ConflictColumns), r.table.Columns[column].Name)
		}
	}
	return result, nil
}

// replay pushes an applied and a rejected commit again.
func (p *pass) replay(applied ssp2.PushCommit, first client.Result, rejected ssp2.PushCommit, second client.Result) error {
	results, err := p.writer.Push(p.ctx, applied, rejected)
	if err != nil {
		return err
	}
	first.Status = ssp2.PushCached
	for i, want := range []client.Result{first, second} {
		if !sameOutcome(want, results[i]) {
			return fmt.Errorf("the replay of a commit that was answered %s is answered %s", outcome(want), outcome(results[i]))
		}
	}
	return nil
}

func (p *pass) catchUp(c *client.Client) (string, error) {
	progress, err := c.CatchUp(p.ctx)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s: %s, %s", count(progress.Rounds, "pull"), count(progress.SegmentRows, "row"), count(progress.Commits, "commit")), nil
}

// defaultDeltaWithin leaves time to servers that do not listen: they look every 5 seconds.
const defaultDeltaWithin = 15 * time.Second

// follow opens a socket for the second client, updates a row with the first and compares what the second has been sent.
func (p *pass) follow(r row, column int) (string, error) {
	socket, err := p.reader.Dial(p.ctx)
	if errors.Is(err, client.ErrNoRealtime) {
		return "not asked: " + err.Error(), nil
	}
	if err != nil {
		return "", err
	}
	defer socket.Close()
	op := p.update(r, column)
	if _, err := p.pushApplied(p.newCommit(op.Operation)); err != nil {
		return "", err
	}
	p.want.update(r, op)
	ctx, cancel := context.WithTimeout(p.ctx, p.deltaWithin)
	defer cancel()
	progress, pulled, err := socket.Follow(ctx, p.seq, "smoke-"+r.table.Name)
	if err != nil {
		if p.ctx.Err() == nil && ctx.Err() != nil {
			err = fmt.Errorf("%w within %v: %w", errNoDelta, p.deltaWithin, err)
		}
		return "", err
	}
	detail := count(progress.Commits, "commit") + " by delta"
	if pulled {
		detail = "woken up to pull"
	}
	return detail, p.want.compare(p.tables, p.reader)
}

// compare brings a client up to date and compares its replica with what was written.
func (p *pass) compare(c *client.Client) (string, error) {
	detail, err := p.catchUp(c)
	if err != nil {
		return "", err
	}
	return detail, p.want.compare(p.tables, c)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
