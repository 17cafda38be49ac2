package pushsvc

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/ssp2"
)

// phase is the part of a flush that a statement belongs to.
type phase uint8

const (
	ofPlan   phase = iota // what is decided
	ofCommit              // the rows of the commit that is being decided
	ofRead                // what its hook wants to read
)

// statement is one statement of a flush.
type statement struct {
	what     string
	phase    phase
	row      bool                 // it fails because of what the commits write
	change   int                  // in a search: the change it is about
	outcomes bool                 // it records outcomes
	rows     func(pgx.Rows) error // takes over what it returns, nil for nothing
}

// Statements of the push path besides transaction control and row writes.
var (
	pushAdmit          = pgtx.NewStatement(db.PushAdmit)
	pushAppend         = pgtx.NewStatement(db.PushAppend)
	pushRecordOutcomes = pgtx.NewStatement(db.PushRecordOutcomes)
)

// statements are those a connection must have ready before a push begins.
var statements = []pgtx.Statement{
	pgtx.Begin, pushAdmit, pgtx.Savepoint, pushAppend, pushRecordOutcomes, pgtx.Commit,
	pgtx.RollbackTo, pgtx.Release,
	pgtx.ProbeSavepoint, pgtx.CheckConstraints, pgtx.ProbeRollbackTo, pgtx.ProbeRelease,
}

// flush is one round trip: a batch of statements and what each is for.
type flush struct {
	session    pgtx.Session
	batch      pgx.Batch
	statements []statement
	phase      phase // of the statements to come
}

func (t *transaction) newFlush() *flush { return &flush{session: t.session} }

// startFlush returns a flush that first takes back what has to be taken back.
func (t *transaction) startFlush(ctx context.Context) (*flush, error) {
	f := t.newFlush()
	if t.dirty {
		if err := t.takeBack(ctx, f, pgtx.RollbackTo); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *flush) queue(what string, s pgtx.Statement, args ...any) {
	f.add(statement{what: what}, s, args...)
}

// queueRow queues a statement that may fail because of what the commits write.
func (f *flush) queueRow(what string, s pgtx.Statement, args ...any) {
	f.add(statement{what: what, row: true}, s, args...)
}

func (f *flush) add(st statement, s pgtx.Statement, args ...any) {
	st.phase = f.phase
	f.session.Queue(&f.batch, s, args...)
	f.statements = append(f.statements, st)
}

// takeBack rolls back to a savepoint, in front of what f holds. Without statements of our own pgx describes those of a batch before it
// sends them, which an aborted transaction refuses: then it takes a round trip.
func (t *transaction) takeBack(ctx context.Context, f *flush, to pgtx.Statement) error {
	if f.session.Named {
		f.queue("taking back a refused commit", to)
		return nil
	}
	if _, err := t.conn.Exec(ctx, to.SQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("taking back a refused commit: %w", err)
	}
	return nil
}

// queueChecks queues every deferred check, leaving the constraints deferred.
func (f *flush) queueChecks() {
	f.queue("probing", pgtx.ProbeSavepoint)
	f.queueRow("checking constraints", pgtx.CheckConstraints)
	f.queue("probing", pgtx.ProbeRollbackTo)
	f.queue("probing", pgtx.ProbeRelease)
}

// flush writes a plan together with the rejections not recorded yet. On an error
// it returns the statement that failed; the transaction can then go on from its
// savepoint, if it has one.
func (t *transaction) flush(ctx context.Context, p *planned, last bool) (*statement, error) {
	if len(p.applied) == 0 && !last && !p.full {
		t.rejected = append(t.rejected, p.rejected...) // recorded with the next flush
		return nil, nil
	}
	f, err := t.startFlush(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.queuePlan(f, p); err != nil {
		return nil, err
	}
	if last {
		f.queue("committing", t.end())
	} else if t.saved || len(p.applied) > 0 {
		f.queue("releasing the savepoint", pgtx.Release)
	}
	if failed, err := t.run(ctx, f); err != nil {
		t.saved, t.dirty = true, true
		return failed, err
	}
	t.settle(p)
	t.saved, t.dirty = false, false
	t.committed = last
	return nil, nil
}

// queuePlan queues what a plan writes, behind the savepoint if it writes rows, and the
// rejections not recorded yet.
func (t *transaction) queuePlan(f *flush, p *planned) error {
	if len(p.applied) > 0 {
		if !t.saved {
			f.queue("setting the savepoint", pgtx.Savepoint)
		}
		rows := p.applied
		if p.written {
			rows = rows[1:]
		}
		t.queueWrites(f, rows)
		t.queueAppend(f, p.applied)
		t.queueReactions(f, p.applied)
	}
	if outcomes := t.outcomesOf(p); len(outcomes) > 0 {
		return t.queueOutcomes(f, outcomes)
	}
	return nil
}

// outcomesOf returns the commits whose outcomes are recorded with a plan.
func (t *transaction) outcomesOf(p *planned) []*commit {
	outcomes := slices.Concat(t.rejected, p.rejected)
	for i := range p.applied {
		outcomes = append(outcomes, p.applied[i].commit)
	}
	return outcomes
}

// settle notes that the database has what queuePlan queued for it.
func (t *transaction) settle(p *planned) {
	for _, c := range t.outcomesOf(p) {
		c.req.actor = c.req.Actor
	}
	t.rejected = nil
	t.lastSeq += int64(len(p.applied))
	t.state.bury(p.applied)
}

// run sends a flush and reads its answers. failed is the statement the database
// refused, nil when the error is not one statement's.
func (t *transaction) run(ctx context.Context, f *flush) (failed *statement, err error) {
	results := t.conn.SendBatch(ctx, &f.batch)
	defer func() { _ = results.Close() }()
	for i := range f.statements {
		st := &f.statements[i]
		if err := st.take(results); err != nil {
			state := pgtx.SQLState(err)
			if st.outcomes && state == sqlStateUnique {
				err = fmt.Errorf("%w: %w", errOutcomeStands, err)
			}
			if state == "" {
				st = nil
			}
			return st, fmt.Errorf("%s: %w", f.statements[i].what, err)
		}
	}
	if err := results.Close(); err != nil {
		return nil, fmt.Errorf("finishing the push: %w", err)
	}
	return nil, nil
}

// take reads the answer to the statement.
func (st *statement) take(results pgx.BatchResults) error {
	if st.rows == nil {
		_, err := results.Exec()
		return err //nolint:wrapcheck // run says what it was doing
	}
	rows, err := results.Query()
	if err != nil {
		return err //nolint:wrapcheck // run says what it was doing
	}
	return st.rows(rows)
}

func (f *flush) queueAdmit(p *db.PushAdmitParams, read func(pgx.Rows) error) {
	f.add(statement{what: "admitting the push", rows: read}, pushAdmit, p.Partition, p.Now, p.ClientIds, p.CommitClients, p.CommitIds, p.Tables, p.RowIds, p.MaxBytes,
		p.ParentTables, p.ParentRows, p.ReachedTables)
}

// queueOutcomes records outcomes, and the clients of which these are the first.
func (t *transaction) queueOutcomes(f *flush, commits []*commit) error {
	n := len(commits)
	p := db.PushRecordOutcomesParams{
		Partition: t.partition, Now: t.now, SchemaVersion: t.s.schema.Version,
		ClientIds: make([]string, n), CommitIds: make([]string, n), Statuses: make([]int16, n), CommitSeqs: make([]int64, n),
		Results: make([][]byte, n), Details: make([]string, n), OutcomeIds: make([]pgtype.UUID, n),
		NewClients: []string{}, NewActors: []string{},
	}
	for i, c := range commits {
		var err error
		p.ClientIds[i], p.CommitIds[i] = c.req.ClientID, c.id
		p.Statuses[i], p.CommitSeqs[i] = int16(c.outcome.status), c.outcome.seq
		if p.Results[i], p.Details[i], err = c.outcome.encode(); err != nil {
			return err
		}
		p.OutcomeIds[i] = c.outcome.identify(t.now)
		if c.req.actor == "" && !slices.Contains(p.NewClients, c.req.ClientID) {
			p.NewClients, p.NewActors = append(p.NewClients, c.req.ClientID), append(p.NewActors, c.req.Actor)
		}
	}
	f.add(statement{what: "recording outcomes", outcomes: true}, pushRecordOutcomes, p.Partition, p.Now, p.SchemaVersion, p.ClientIds, p.CommitIds, p.Statuses,
		p.CommitSeqs, pgtype.FlatArray[[]byte](p.Results), p.Details, pgtype.FlatArray[pgtype.UUID](p.OutcomeIds), p.NewClients, p.NewActors)
	return nil
}

// queueAppend appends the commits to the log.
func (t *transaction) queueAppend(f *flush, commits []appliedCommit) {
	n, total := len(commits), 0
	for i := range commits {
		total += len(commits[i].changes)
	}
	p := db.PushAppendParams{
		Partition: t.partition, BaseSeq: t.lastSeq, Now: t.now, WriterVersion: t.s.schema.Version,
		ClientIds: make([]string, n), CommitIds: make([]string, n), ActorIds: make([]string, n), ChangeCounts: make([]int32, n),
		ChangeCommits: make([]int32, total), ChangeIndexes: make([]int32, total), ChangeTables: make([]string, total),
		ChangeRows: make([]string, total), ChangeOps: make([]int16, total), ChangeVersions: make([]int64, total),
		ChangePayloads: make([][]byte, total), ChangeScopeSets: make([]int32, total), ScopeSets: []string{},
		TombstoneCommits: []int32{}, TombstoneTables: []string{}, TombstoneRows: []string{},
		ClearedTables: []string{}, ClearedRows: []string{},
	}
	sets := map[string]int32{}
	var literal []byte
	type grave struct {
		commit int32
		table  string
	}
	graves := map[rowKey]grave{} // commit 0: cleared
	var order []rowKey
	k := 0
	for i := range commits {
		c := &commits[i]
		p.ClientIds[i], p.CommitIds[i], p.ActorIds[i], p.ChangeCounts[i] = c.req.ClientID, c.id, c.req.Actor, int32(len(c.changes))
		for j := range c.changes {
			ch := &c.changes[j]
			p.ChangeCommits[k], p.ChangeIndexes[k] = int32(i+1), int32(j)
			p.ChangeTables[k], p.ChangeRows[k], p.ChangeOps[k] = ch.table.Name, ch.key.id, int16(ch.op)
			if _, ok := graves[ch.key]; !ok {
				order = append(order, ch.key)
			}
			if ch.op == ssp2.OpUpsert {
				p.ChangeVersions[k], p.ChangePayloads[k] = ch.row.version, ch.row.payload
				graves[ch.key] = grave{0, ch.table.Name}
			} else {
				graves[ch.key] = grave{int32(i + 1), ch.table.Name}
			}
			literal = appendArrayLiteral(literal[:0], ch.scopes)
			set, ok := sets[string(literal)]
			if !ok {
				p.ScopeSets = append(p.ScopeSets, string(literal))
				set = int32(len(p.ScopeSets))
				sets[string(literal)] = set
			}
			p.ChangeScopeSets[k] = set
			k++
		}
	}
	for _, key := range order {
		g := graves[key]
		switch {
		case g.commit > 0:
			p.TombstoneCommits = append(p.TombstoneCommits, g.commit)
			p.TombstoneTables = append(p.TombstoneTables, g.table)
			p.TombstoneRows = append(p.TombstoneRows, key.id)
		case t.state.buried(key):
			p.ClearedTables = append(p.ClearedTables, g.table)
			p.ClearedRows = append(p.ClearedRows, key.id)
		}
	}
	f.queueRow("appending to the log", pushAppend, p.Partition, p.BaseSeq, p.Now, p.WriterVersion,
		p.ClientIds, p.CommitIds, p.ActorIds, p.ChangeCounts,
		p.ChangeCommits, p.ChangeIndexes, p.ChangeTables, p.ChangeRows, p.ChangeOps, p.ChangeVersions,
		pgtype.FlatArray[[]byte](p.ChangePayloads), p.ChangeScopeSets, p.ScopeSets,
		p.TombstoneCommits, p.TombstoneTables, p.TombstoneRows, p.ClearedTables, p.ClearedRows)
}

// appendArrayLiteral writes a text[] literal.
func appendArrayLiteral(dst []byte, elements []string) []byte {
	dst = append(dst, '{')
	for i, e := range elements {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		for j := range len(e) {
			if e[j] == '"' || e[j] == '\\' {
				dst = append(dst, '\\')
			}
			dst = append(dst, e[j])
		}
		dst = append(dst, '"')
	}
	return append(dst, '}')
}
