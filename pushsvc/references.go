package pushsvc

import (
	"context"
	"errors"
	"slices"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Declared references (SEMANTICS §1) are checked once per commit, over the candidate
// state that its operations leave. Whether a row that an upsert refers to exists comes
// with the admission, and so do the children of the rows that are to be deleted; theirs
// are read level by level (children.go). What the transaction has staged decides about
// every row that it knows.

// DefaultMaxCascade is how many operations one commit may have appended to it.
const DefaultMaxCascade = 1000

// Reasons in the details of sync.reference_violation.
const (
	reasonMissingParent    = "missing_parent"
	reasonRestrictedDelete = "restricted_delete"
	reasonCascadeLimit     = "cascade_limit"
)

// errTransaction says that the transaction cannot go on.
var errTransaction = errors.New("the push cannot go on")

// reference is a declared reference, from one table to another or to itself.
type reference struct {
	child *schema.Table
	*schema.Reference
	column string
}

// parentKey returns the row that a child with this value refers to; null says that it
// refers to none. A value that is no row id, the empty text, names a row that cannot be.
func (r *reference) parentKey(v ssp2.Value) (key rowKey, null bool) {
	id, _ := schema.ScopeText(r.child.Columns[r.Column].Type, v)
	return rowKey{r.Parent.Index, id}, v.Null
}

// references is what a schema declares.
type references struct {
	of   [][]*reference // by Table.Index of the child, in order of declaration
	to   [][]*reference // by Table.Index of the parent, likewise
	from [][]int        // by Table.Index: the tables that a delete may write besides
}

// newReferences returns nil for a schema that declares none.
func newReferences(s *schema.Schema) *references {
	n := len(s.Tables)
	r := &references{of: make([][]*reference, n), to: make([][]*reference, n), from: make([][]int, n)}
	declared := false
	for _, t := range s.Tables {
		for i := range t.References {
			ref := &reference{child: t, Reference: &t.References[i], column: t.Columns[t.References[i].Column].Name}
			r.of[t.Index] = append(r.of[t.Index], ref)
			r.to[ref.Parent.Index] = append(r.to[ref.Parent.Index], ref)
			declared = true
		}
	}
	if !declared {
		return nil
	}
	for _, t := range s.Tables {
		written, deleted := make([]bool, n), make([]bool, n)
		r.reach(t.Index, written, deleted)
		for i, yes := range written {
			if yes {
				r.from[t.Index] = append(r.from[t.Index], i)
			}
		}
	}
	return r
}

// reach marks the tables of which rows may be written when rows of a table are deleted,
// and those of which rows may be deleted then.
func (r *references) reach(table int, written, deleted []bool) {
	for _, ref := range r.to[table] {
		child := ref.child.Index
		written[child] = written[child] || ref.OnDelete != schema.Restrict
		if ref.OnDelete == schema.Cascade && !deleted[child] {
			deleted[child] = true
			r.reach(child, written, deleted)
		}
	}
}

// askReferences adds to an admission what the references of the schema need: the rows
// referred to, except those named anyway, and the tables that deletes may lead to, which
// it marks as written. It returns the rows asked for, and expects the deletes.
func (t *transaction) askReferences(p *db.PushAdmitParams, written []bool) []rowKey {
	p.ParentTables, p.ParentRows, p.ReachedTables = []string{}, []string{}, []string{}
	if t.s.references == nil {
		return nil
	}
	var parents []rowKey
	asked := map[rowKey]bool{}
	reached := make([]bool, len(written))
	for _, c := range t.commits {
		c.decoded = make([]*incoming, len(c.ops))
		for i := range c.ops {
			op := &c.ops[i]
			table, ok := t.s.schema.Table(op.Table)
			if !ok {
				continue
			}
			if op.Op == ssp2.OpDelete {
				for _, i := range t.s.references.from[table.Index] {
					reached[i] = true
				}
				// The database could not even look for what is no key.
				if _, ok := schema.ParseScopeText(table.Columns[table.PrimaryKey].Type, op.RowID); ok && storableRowID(op.RowID) {
					t.expect(rowKey{table.Index, op.RowID})
				}
				continue
			}
			refs := t.s.references.of[table.Index]
			if len(refs) == 0 {
				continue
			}
			in, err := c.req.decode(table, op.Payload)
			if err != nil {
				continue // is refused in its place
			}
			c.decoded[i] = in
			for _, ref := range refs {
				if !in.has(ref.Column) {
					continue
				}
				key, null := ref.parentKey(in.values[ref.Column])
				if null || asked[key] || t.state.known[key] || !storableRowID(key.id) {
					continue
				}
				asked[key] = true
				parents = append(parents, key)
				p.ParentTables, p.ParentRows = append(p.ParentTables, ref.Parent.Name), append(p.ParentRows, key.id)
			}
		}
	}
	for i, yes := range reached {
		if yes {
			written[i] = true
			p.ReachedTables = append(p.ReachedTables, t.s.schema.Tables[i].Name)
		}
	}
	return parents
}

// refer checks the references of a commit whose operations are staged, and stages what
// its deletes lead to. ctx is that of the transaction, hooks that of the hooks. An error
// is a *refusal, internal, or errTransaction.
func (t *transaction) refer(ctx, hooks context.Context, st *staged) error {
	if t.s.references == nil {
		return nil
	}
	if err := t.checkParents(st); err != nil {
		return err
	}
	w := &cascade{t: t, staged: st, rows: map[rowKey]*consequence{}}
	if err := w.collect(ctx); err != nil {
		return err
	}
	if err := w.checkRestricted(); err != nil {
		return err
	}
	for _, q := range w.order {
		if err := t.stageConsequence(hooks, st, q); err != nil {
			return err
		}
	}
	return nil
}

// checkParents refuses a commit that leaves a row whose reference it wrote without the
// row referred to. A reference that it did not write still names one, unless the commit
// deletes that, which is the business of the delete.
func (t *transaction) checkParents(st *staged) error {
	type written struct {
		key rowKey
		ref *reference
	}
	last := map[written]int{} // the change that wrote it last
	for i := range st.changes {
		ch := &st.changes[i]
		for _, ref := range t.s.references.of[ch.table.Index] {
			if ch.wrote(ref.Column) {
				last[written{ch.key, ref}] = i
			}
		}
	}
	if len(last) == 0 {
		return nil
	}
	for i := range st.changes {
		ch := &st.changes[i]
		state := t.state.get(ch.key)
		for _, ref := range t.s.references.of[ch.table.Index] {
			if !state.exists() || !ch.wrote(ref.Column) || last[written{ch.key, ref}] != i {
				continue
			}
			if key, null := ref.parentKey(state.values[ref.Column]); !null && !t.state.live(key) {
				return violation(ch.opIndex, "the row refers to a row that does not exist", ssp2.Details{
					Reason: reasonMissingParent, FieldPaths: []string{ref.column},
					References: map[string]string{"parent": ref.Parent.Name, "row": key.id},
				})
			}
		}
	}
	return nil
}

// wrote says whether an upsert wrote the column: a scope column only as an insert.
func (ch *change) wrote(column int) bool {
	return ch.in != nil && ch.in.has(column) && (ch.insert || !ch.table.IsScope(column))
}

// violation refuses a commit because of a reference. What details cannot hold is left
// out of them.
func violation(op int, message string, d ssp2.Details) error {
	holds := func(d ssp2.Details) bool {
		_, err := d.JSON()
		return err == nil
	}
	if !holds(ssp2.Details{FieldPaths: d.FieldPaths}) {
		d.FieldPaths = nil
	}
	for key, value := range d.References {
		if !holds(ssp2.Details{References: map[string]string{key: value}}) {
			delete(d.References, key)
		}
	}
	details, err := d.JSON()
	if err != nil {
		return internal("encoding the details of a violated reference", err)
	}
	return &refusal{result: opError(op, ssp2.CodeReferenceViolation, message), details: details}
}

// consequence is an operation that a delete leads to.
type consequence struct {
	table *schema.Table
	key   rowKey
	op    int   // of the client, which deletes the parent
	nulls []int // columns that become NULL; nil: the row is deleted
}

// cascade collects what the deletes of a commit lead to. Nothing is staged before all of
// it is known, so that the outcome does not depend on the order in which it is found.
type cascade struct {
	t      *transaction
	staged *staged
	rows   map[rowKey]*consequence // each row once
	order  []*consequence

	restricted []restriction
}

// restriction is a deleted parent with children that may keep it.
type restriction struct {
	ref      *reference
	op       int
	children []rowKey
}

// parent is a row that is deleted.
type parent struct {
	key rowKey
	op  int
}

// collect follows references from the rows that the commit deletes.
func (w *cascade) collect(ctx context.Context) error {
	level := w.deleted()
	for len(level) > 0 {
		var probes []probe
		for _, p := range level {
			for _, ref := range w.t.s.references.to[p.key.table] {
				probes = append(probes, probe{p, ref})
			}
		}
		if len(probes) == 0 {
			return nil
		}
		children, err := w.t.findChildren(ctx, probes)
		if err != nil {
			return err
		}
		level = nil
		for i, p := range probes {
			if p.ref.OnDelete == schema.Restrict {
				w.restricted = append(w.restricted, restriction{p.ref, p.op, children[i]})
				continue
			}
			for _, key := range children[i] {
				if w.follow(p, key) {
					level = append(level, parent{key, p.op})
				}
				if len(w.rows) > w.t.s.maxCascade {
					return violation(p.op, "the delete leads to too many changes of other rows", ssp2.Details{Reason: reasonCascadeLimit})
				}
			}
		}
	}
	return nil
}

// deleted returns the rows that are gone after the operations of the commit, each with
// the one that deleted it.
func (w *cascade) deleted() []parent {
	var parents []parent
	seen := map[rowKey]bool{}
	for i := len(w.staged.changes) - 1; i >= 0; i-- {
		ch := &w.staged.changes[i]
		if len(w.t.s.references.to[ch.table.Index]) == 0 || seen[ch.key] {
			continue
		}
		seen[ch.key] = true
		if ch.op == ssp2.OpDelete {
			parents = append(parents, parent{ch.key, ch.opIndex})
		}
	}
	slices.Reverse(parents)
	return parents
}

// follow notes what becomes of a child, and says whether it is deleted now.
func (w *cascade) follow(p probe, key rowKey) bool {
	q := w.rows[key]
	known := q != nil
	if !known {
		q = &consequence{table: p.ref.child, key: key, op: p.op}
		w.rows[key] = q
		w.order = append(w.order, q)
	}
	switch {
	case known && q.nulls == nil:
		return false
	case p.ref.OnDelete == schema.Cascade:
		q.nulls, q.op = nil, p.op
		return true
	}
	q.nulls = append(q.nulls, p.ref.Column)
	return false
}

// checkRestricted refuses a commit that deletes a row and leaves one that refers to it.
func (w *cascade) checkRestricted() error {
	for _, r := range w.restricted {
		for _, key := range r.children {
			if q := w.rows[key]; q == nil || q.nulls != nil {
				return violation(r.op, "other rows refer to the row", ssp2.Details{
					Reason: reasonRestrictedDelete, References: map[string]string{"child": r.ref.child.Name},
				})
			}
		}
	}
	return nil
}

// stageConsequence stages an operation that a delete leads to. It is authorized and
// validated like one that the client sent: a parent that the actor may write does not
// open the rows of others that refer to it.
func (t *transaction) stageConsequence(ctx context.Context, st *staged, q *consequence) error {
	o := operation{
		Operation: &ssp2.Operation{Table: q.table.Name, RowID: q.key.id, Op: ssp2.OpDelete},
		commit:    st.commit, index: q.op, table: q.table, key: q.key, stored: t.state.get(q.key), appended: true,
	}
	if err := o.stored.decode(o.table); err != nil {
		return err
	}
	decide := o.remove
	if q.nulls != nil {
		o.Op = ssp2.OpUpsert
		decide = func() (*change, error) { return o.nullify(q.nulls) }
	}
	ch, err := decide()
	if err == nil && t.s.validators != nil {
		err = t.validateRow(ctx, &o, ch)
	}
	if err != nil {
		return err
	}
	return t.add(st, &o, ch)
}

// nullify is a sparse upsert that sets columns to NULL.
func (o *operation) nullify(columns []int) (*change, error) {
	stored := o.stored
	if !o.permits(stored.scopes) {
		return nil, o.forbidden()
	}
	next := &rowState{
		version: stored.version + 1, values: slices.Clone(stored.values), scopes: stored.scopes,
		columns: make([]int64, len(o.table.Columns)),
	}
	for col := range o.table.Columns {
		next.columns[col] = stored.columnVersion(col)
	}
	for _, col := range columns {
		next.values[col], next.columns[col] = ssp2.Value{Null: true}, next.version
	}
	var err error
	if next.payload, err = ssp2.AppendRow(nil, o.table.Wire, next.values); err != nil {
		return nil, internal("encoding a row that loses its parent", err)
	}
	return o.change(next), nil
}
