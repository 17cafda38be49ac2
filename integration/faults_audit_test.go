package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// hostClient is the client of commits that the host writes by itself, without an
// outcome.
const hostClient = "the host"

// rowRef names a row, logRow is what the log or a table says of it.
type (
	rowRef struct{ table, id string }
	logRow struct {
		version int64
		payload []byte
		scopes  []string
	}
	commitRef struct{ client, id string }
)

// audit checks that all that a database says about a partition agrees. It remembers the log
// that it has read, so that one whose log is read before it is pruned knows all of it.
type audit struct {
	schema    *schema.Schema
	partition string
	problems  []error

	since    int64 // the newest commit that was read before
	maxSeq   int64
	horizon  int64
	commits  map[commitRef]int64
	outcomes map[commitRef]int64 // 0: rejected
	rows     map[rowRef]logRow   // of the tables
	folded   map[rowRef]logRow   // of the log
	graves   map[rowRef]int64
}

func (a *audit) problem(format string, args ...any) {
	a.problems = append(a.problems, fmt.Errorf("partition %s: "+format, append([]any{a.partition}, args...)...))
}

func newAudit(s *schema.Schema, partition string) *audit {
	return &audit{
		schema: s, partition: partition, commits: map[commitRef]int64{}, outcomes: map[commitRef]int64{},
		rows: map[rowRef]logRow{}, folded: map[rowRef]logRow{}, graves: map[rowRef]int64{},
	}
}

// auditPartition reads a partition whole, in one snapshot, and checks it. The error
// lists every contradiction.
func auditPartition(ctx context.Context, db beginner, s *schema.Schema, partition string) (*audit, error) {
	a := newAudit(s, partition)
	return a, a.read(ctx, db)
}

type beginner interface {
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
}

// read reads what the log has more than before, and all the rest anew, in one snapshot.
func (a *audit) read(ctx context.Context, db beginner) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	clear(a.rows)
	for _, check := range []func(context.Context, pgx.Tx) error{a.log, a.results, a.fold, a.tables, a.index, a.tombstones} {
		if err := check(ctx, tx); err != nil {
			return err
		}
	}
	a.since = a.maxSeq
	return errors.Join(a.problems...)
}

// log: the commits are numbered from 1 without gaps, and each once. Only those up to the
// horizon may be gone.
func (a *audit) log(ctx context.Context, tx pgx.Tx) error {
	var left int64
	if err := tx.QueryRow(ctx, `
		select coalesce(max(p.max_commit_seq), 0), coalesce(max(p.horizon_seq), 0),
		       (select count(*) from syncpg.sync_commits as c where c.partition = $1)
		  from syncpg.sync_partitions as p where p.partition = $1`, a.partition).Scan(&a.maxSeq, &a.horizon, &left); err != nil {
		return err
	}
	if left != a.maxSeq-a.horizon {
		a.problem("the log has %d commits between its horizon %d and its end %d", left, a.horizon, a.maxSeq)
	}
	rows, err := tx.Query(ctx, `
		select c.commit_seq, c.client_id, c.client_commit_id, c.change_count,
		       (select array_agg(x.change_index order by x.change_index) from syncpg.sync_changes as x
		         where x.partition = c.partition and x.commit_seq = c.commit_seq)
		  from syncpg.sync_commits as c where c.partition = $1 and c.commit_seq > $2 order by c.commit_seq`, a.partition, a.since)
	if err != nil {
		return err
	}
	seq, next := a.since, a.since
	var ref commitRef
	var count int
	var indexes []int
	_, err = pgx.ForEachRow(rows, []any{&seq, &ref.client, &ref.id, &count, &indexes}, func() error {
		if next++; seq != next {
			a.problem("commit %d follows commit %d", seq, next-1)
			next = seq
		}
		if _, twice := a.commits[ref]; twice {
			a.problem("commit %v is in the log twice", ref)
		}
		a.commits[ref] = seq
		for i, index := range indexes {
			if i != index {
				a.problem("commit %d has changes %v", seq, indexes)
				break
			}
		}
		if len(indexes) != count {
			a.problem("commit %d has %d changes, and says %d", seq, len(indexes), count)
		}
		return nil
	})
	if next != a.maxSeq {
		a.problem("the log ends at %d, and the partition says %d", next, a.maxSeq)
	}
	return err
}

// results: a commit of a client is in the log if and only if its outcome says so.
func (a *audit) results(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `select client_id, client_commit_id, coalesce(commit_seq, 0) from syncpg.sync_push_results where partition = $1`, a.partition)
	if err != nil {
		return err
	}
	var ref commitRef
	var seq int64
	_, err = pgx.ForEachRow(rows, []any{&ref.client, &ref.id, &seq}, func() error {
		a.outcomes[ref] = seq
		if a.commits[ref] != seq {
			a.problem("commit %v has outcome %d, and stands in the log as %d", ref, seq, a.commits[ref])
		}
		return nil
	})
	for ref, seq := range a.commits {
		if _, ok := a.outcomes[ref]; !ok && ref.client != hostClient {
			a.problem("commit %d, %v, has no outcome", seq, ref)
		}
	}
	return err
}

// fold: every change continues what the changes before it made of its row, and its
// scopes are those of the row.
func (a *audit) fold(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		select commit_seq, table_name, row_id, op, coalesce(row_version, 0), scopes, payload
		  from syncpg.sync_changes where partition = $1 and commit_seq > $2 order by commit_seq, change_index`, a.partition, a.since)
	if err != nil {
		return err
	}
	var seq, version int64
	var ref rowRef
	var op ssp2.Op
	var scopes []string
	var payload []byte
	moved := map[rowRef]int64{} // rows that the open commit has deleted, with their version
	last := int64(0)
	_, err = pgx.ForEachRow(rows, []any{&seq, &ref.table, &ref.id, &op, &version, &scopes, &payload}, func() error {
		if seq != last {
			clear(moved)
			last = seq
		}
		old, exists := a.folded[ref]
		if op == ssp2.OpDelete {
			if !exists || !slices.Equal(scopes, old.scopes) {
				a.problem("commit %d deletes %v with scopes %q; it had %q", seq, ref, scopes, old.scopes)
			}
			delete(a.folded, ref)
			moved[ref] = old.version
			a.graves[ref] = seq
			return nil
		}
		if version != old.version+1 && version != moved[ref]+1 {
			a.problem("commit %d puts %v at version %d after %d", seq, ref, version, old.version)
		}
		if want := a.scopesOf(ref.table, payload); !slices.Equal(scopes, want) {
			a.problem("commit %d writes %v with scopes %q; the row has %q", seq, ref, scopes, want)
		}
		if exists && !slices.Equal(scopes, old.scopes) {
			a.problem("commit %d moves %v from %q to %q without a delete (§2.2)", seq, ref, old.scopes, scopes)
		}
		a.folded[ref] = logRow{version, slices.Clone(payload), slices.Clone(scopes)}
		delete(a.graves, ref)
		return nil
	})
	return err
}

func (a *audit) scopesOf(table string, payload []byte) []string {
	t, ok := a.schema.Table(table)
	if !ok {
		return []string{"unknown table " + table}
	}
	values, err := ssp2.DecodeRow(t.Wire, payload, nil)
	if err != nil {
		return []string{err.Error()}
	}
	scopes, ok := t.RowScopes(values, nil)
	if !ok {
		return []string{"no scopes"}
	}
	return scopes
}

// tables: the rows are those of the log, and so are their typed columns.
func (a *audit) tables(ctx context.Context, tx pgx.Tx) error {
	for _, t := range a.schema.Tables {
		encoded := "x._sync_payload"
		if t.Materialize {
			encoded = "syncpg." + schemaddl.QuoteIdent("sync_encode_"+t.Name) + "(x)"
		}
		rows, err := tx.Query(ctx, `select x._sync_row_id, x._sync_server_version, x._sync_payload, `+encoded+`, x._sync_column_versions
			from public.`+schemaddl.QuoteIdent(t.Name)+` as x where x._sync_partition = $1`, a.partition)
		if err != nil {
			return err
		}
		ref := rowRef{table: t.Name}
		var version int64
		var payload, typed []byte
		var columns []int64
		if _, err := pgx.ForEachRow(rows, []any{&ref.id, &version, &payload, &typed, &columns}, func() error {
			if !bytes.Equal(payload, typed) {
				a.problem("%v: its payload is %q, its columns encode as %q", ref, payload, typed)
			}
			if columns != nil && (len(columns) != len(t.Columns) || slices.Max(columns) > version || slices.Min(columns) < 1) {
				a.problem("%v at version %d has column versions %v", ref, version, columns)
			}
			a.rows[ref] = logRow{version, slices.Clone(payload), a.scopesOf(t.Name, payload)}
			return nil
		}); err != nil {
			return err
		}
	}
	for ref, row := range a.rows {
		if want, ok := a.folded[ref]; !ok || want.version != row.version || !bytes.Equal(want.payload, row.payload) {
			a.problem("%v is %v in its table and %v in the log", ref, row, want)
		}
	}
	for ref, row := range a.folded {
		if _, ok := a.rows[ref]; !ok {
			a.problem("%v is not in its table and %v in the log", ref, row)
		}
	}
	return nil
}

// index: the scope index has what the changes have.
func (a *audit) index(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `
		with derived as (
		  select distinct c.table_name, k.scope_key, c.commit_seq
		    from syncpg.sync_changes as c cross join lateral unnest(c.scopes) as k(scope_key) where c.partition = $1
		), stored as (
		  select x.table_name, x.scope_key, x.commit_seq from syncpg.sync_change_scopes as x where x.partition = $1
		)
		select 'missing', d.* from (table derived except table stored) as d
		union all
		select 'too much', s.* from (table stored except table derived) as s`, a.partition)
	if err != nil {
		return err
	}
	var what, table, key string
	var seq int64
	_, err = pgx.ForEachRow(rows, []any{&what, &table, &key, &seq}, func() error {
		a.problem("scope index: %s: %s %s in commit %d", what, table, key, seq)
		return nil
	})
	return err
}

// tombstones: of the rows whose last change is a delete behind the horizon, and of no others.
func (a *audit) tombstones(ctx context.Context, tx pgx.Tx) error {
	rows, err := tx.Query(ctx, `select table_name, row_id, commit_seq from syncpg.sync_tombstones where partition = $1`, a.partition)
	if err != nil {
		return err
	}
	stored := map[rowRef]int64{}
	var ref rowRef
	var seq int64
	if _, err := pgx.ForEachRow(rows, []any{&ref.table, &ref.id, &seq}, func() error {
		stored[ref] = seq
		return nil
	}); err != nil {
		return err
	}
	maps.DeleteFunc(a.graves, func(_ rowRef, seq int64) bool { return seq <= a.horizon })
	if !maps.Equal(stored, a.graves) {
		a.problem("tombstones are %v, deleted are %v", stored, a.graves)
	}
	return nil
}

// device checks what a device was told, all of it answered: every commit it was told
// is applied is in the log with that seq, every other one is not.
func (a *audit) device(d *device) error {
	var problems []error
	for _, c := range d.sent {
		ref := commitRef{d.id, c.commit.ClientCommitID}
		seq, recorded := a.outcomes[ref]
		switch {
		case c.answer == nil:
			problems = append(problems, fmt.Errorf("commit %v was never answered", ref))
		case !recorded:
			problems = append(problems, fmt.Errorf("commit %v was answered %v and has no outcome", ref, c.answer.Status))
		case c.answer.Status == ssp2.PushRejected && seq != 0, c.answer.Status != ssp2.PushRejected && seq != *c.answer.CommitSeq:
			problems = append(problems, fmt.Errorf("commit %v was answered %+v and is recorded as %d", ref, c.answer, seq))
		}
	}
	return errors.Join(problems...)
}

// replica compares a replica with the rows whose scopes are within the given values, in the
// schema version of the device.
func (a *audit) replica(d *device, table string, within ssp2.ScopeMap) error {
	newest, _ := a.schema.Table(table)
	t, _ := d.schema.Table(table)
	want := map[string]logRow{}
	for ref, row := range a.rows {
		if ref.table == table && covers(within, newest, row.scopes) {
			payload, err := inVersion(newest, t, row.payload)
			if err != nil {
				return err
			}
			want[ref.id] = logRow{row.version, payload, row.scopes}
		}
	}
	var problems []error
	have := d.Rows(table)
	for id, row := range have {
		payload, err := ssp2.AppendRow(nil, t.Wire, row.Values)
		if err != nil {
			return err
		}
		if w, ok := want[id]; !ok || w.version != row.Version || !bytes.Equal(w.payload, payload) {
			problems = append(problems, fmt.Errorf("device %s has %s %q at version %d: %q; the server has %v", d.id, table, id, row.Version, payload, a.rows[rowRef{table, id}]))
		}
	}
	for id, w := range want {
		if _, ok := have[id]; !ok {
			problems = append(problems, fmt.Errorf("device %s does not have %s %q: %v", d.id, table, id, w))
		}
	}
	return errors.Join(problems...)
}

// inVersion encodes a row of a table as another version of the table has it: the columns
// are those of the same names.
func inVersion(from, to *schema.Table, payload []byte) ([]byte, error) {
	if from == to {
		return payload, nil
	}
	values, err := ssp2.DecodeRow(from.Wire, payload, nil)
	if err != nil {
		return nil, err
	}
	picked := make([]ssp2.Value, len(to.Columns))
	for i, c := range to.Columns {
		at, ok := from.ColumnIndex(c.Name)
		if !ok {
			return nil, fmt.Errorf("table %q has no column %q any more", to.Name, c.Name)
		}
		picked[i] = values[at]
	}
	return ssp2.AppendRow(nil, to.Wire, picked)
}

// covers says that a row with these scopes is within the values of every variable
// asked for.
func covers(within ssp2.ScopeMap, t *schema.Table, scopes []string) bool {
	for i, sc := range t.Scopes {
		values, asked := within[sc.Variable]
		if asked && !slices.ContainsFunc(values, func(v string) bool { return scopes[i] == sc.Variable+"="+v }) {
			return false
		}
	}
	return true
}
