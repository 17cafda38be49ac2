package pushsvc

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// change is what one operation does to the database: a row write and an entry of
// the log.
type change struct {
	opIndex int
	table   *schema.Table
	key     rowKey
	op      ssp2.Op
	row     *rowState // the row after an upsert
	scopes  []string  // of the row after an upsert, before a delete
	in      *incoming // of an upsert that the client sent
	insert  bool      // there was no row
}

// refusal ends a commit: the result record of the terminating operation, and what
// the host lets the client know of it (§6.3.1), "" for nothing.
type refusal struct {
	result  ssp2.OpResult
	details string
}

func (r *refusal) Error() string { return r.result.Code + ": " + r.result.Message }

// operation is one operation on its way through the rules.
type operation struct {
	*ssp2.Operation
	commit *commit
	index  int
	table  *schema.Table
	key    rowKey
	stored *rowState // as the operations before it left it
	in     *incoming // of an upsert
	// appended says that a reference led to it; index is the client's operation then.
	appended bool
}

func (o *operation) refuse(code ssp2.Code, message string) error {
	return &refusal{result: opError(o.index, code, message)}
}

func (o *operation) forbidden() error {
	return o.refuse(ssp2.CodeForbidden, "the actor may not write this row")
}

func (o *operation) conflict(columns ssp2.Bitmap, message string) error {
	return &refusal{result: ssp2.OpResult{
		OpIndex: int32(o.index), Status: ssp2.OpConflict, Code: string(ssp2.CodeVersionConflict), Message: message,
		ServerVersion: o.stored.version, ServerRow: o.stored.payload, ConflictColumns: columns,
	}}
}

// change is the change an upsert leads to.
func (o *operation) change(row *rowState) *change {
	return &change{
		opIndex: o.index, table: o.table, key: o.key, op: ssp2.OpUpsert, row: row, scopes: row.scopes,
		in: o.in, insert: !o.stored.exists(),
	}
}

// staged is what a commit does.
type staged struct {
	*commit
	changes  []change
	evidence []Evidence // nil when no hook wants it
	bytes    int64      // of rows
}

// stage runs the operations of a commit over the candidate state. An error is a *refusal
// or internal; the caller takes the state back. ctx is that of the hooks.
func (t *transaction) stage(ctx context.Context, c *commit) (*staged, error) {
	st := &staged{commit: c, changes: make([]change, 0, len(c.ops))}
	if t.s.judgesCommits() {
		st.evidence = make([]Evidence, 0, len(c.ops))
	}
	for i := range c.ops {
		o := operation{Operation: &c.ops[i], commit: c, index: i}
		ch, err := t.stageOperation(ctx, &o)
		if err == nil {
			err = t.add(st, &o, ch)
		}
		if err != nil {
			return nil, err
		}
	}
	return st, nil
}

// add stages the change of an operation; nil for none.
func (t *transaction) add(st *staged, o *operation, ch *change) error {
	if st.evidence != nil {
		st.evidence = append(st.evidence, o.evidence(ch))
	}
	if ch == nil {
		return nil
	}
	next := ch.row
	if ch.op == ssp2.OpDelete {
		next = &rowState{deletedBy: st.commit}
	}
	// A small change of a large row writes all of it.
	if st.bytes += int64(len(next.payload)); st.bytes > t.s.maxCommitBytes {
		return o.refuse(ssp2.CodeConstraintViolation, tooLarge)
	}
	t.state.set(ch.key, next)
	if t.s.references != nil {
		refs := t.s.references.of[ch.table.Index]
		t.state.refer(refs, ch.key.id, o.stored)
		t.state.refer(refs, ch.key.id, next)
	}
	st.changes = append(st.changes, *ch)
	return nil
}

// stageOperation decides one operation: nil for a delete of an absent row, which
// is applied and changes nothing (§6.2).
func (t *transaction) stageOperation(ctx context.Context, o *operation) (*change, error) {
	ch, err := t.decide(o)
	if err == nil && ch != nil && t.s.validators != nil {
		err = t.validateRow(ctx, o, ch)
	}
	return ch, err
}

// decide applies the protocol's rules to an operation.
func (t *transaction) decide(o *operation) (*change, error) {
	var ok bool
	if o.table, ok = o.commit.req.table(t.s.schema, o.Table); !ok {
		return nil, o.refuse(ssp2.CodeUnknownTable, "the schema has no such table")
	}
	o.key = rowKey{o.table.Index, o.RowID}
	o.stored = t.state.get(o.key)
	if o.stored.exists() {
		if err := o.stored.decode(o.table); err != nil {
			return nil, err
		}
	}
	if o.Op == ssp2.OpDelete {
		return o.remove()
	}
	if err := o.decodePayload(); err != nil {
		return nil, err
	}
	if o.stored.exists() {
		return o.update()
	}
	return o.insert()
}

func (o *operation) remove() (*change, error) {
	if !o.stored.exists() {
		return nil, nil
	}
	if !o.permits(o.stored.scopes) {
		return nil, o.forbidden()
	}
	return &change{opIndex: o.index, table: o.table, key: o.key, op: ssp2.OpDelete, scopes: o.stored.scopes}, nil
}

// incoming is a decoded push payload.
type incoming struct {
	payload []byte
	values  []ssp2.Value
	// present marks the columns of a sparse row; nil means all.
	present ssp2.Bitmap
	// older is what turned a row of an older schema version into this one; nil when it came
	// as it is.
	older *ssp2.Projection
}

func (in *incoming) has(column int) bool { return in.present == nil || in.present.Has(column) }

func (in *incoming) complete(columns int) bool {
	return in.present == nil || in.present.Count() == columns
}

// writtenAfter marks the present columns that were written after a base version. The
// key, which never changes, and crdt columns, which merge, are left out.
func (in *incoming) writtenAfter(base int64, table *schema.Table, stored *rowState) ssp2.Bitmap {
	columns := ssp2.NewBitmap(len(table.Columns))
	for col, c := range table.Columns {
		if in.has(col) && col != table.PrimaryKey && c.Type != ssp2.TypeCRDT && stored.columnVersion(col) > base {
			columns.Set(col)
		}
	}
	return columns
}

func (r *request) sparse() bool { return r.WireVersion >= ssp2.WireV3 }

// table returns a table that the client knows.
func (r *request) table(newest *schema.Schema, name string) (*schema.Table, bool) {
	t, ok := newest.Table(name)
	if ok && r.pushed != nil {
		_, ok = r.schema.Table(name)
	}
	return t, ok
}

// decode decodes the payload of an upsert to a table that the client knows. A row of an
// older schema version is a sparse one: it says nothing of the columns that came later.
func (r *request) decode(table *schema.Table, payload []byte) (*incoming, error) {
	if r.pushed == nil {
		return decodeIncoming(table, r.sparse(), payload)
	}
	own, ok := r.schema.Table(table.Name)
	if !ok {
		return nil, ssp2.Errorf(ssp2.CodeUnknownTable, "the schema has no such table")
	}
	in, err := decodeIncoming(own, r.sparse(), payload)
	if err != nil {
		return nil, err
	}
	_, rows := r.pushed.Rows(own)
	if rows == nil {
		return in, nil
	}
	in.older = rows
	in.values, in.present = rows.Values(make([]ssp2.Value, 0, len(table.Columns)), in.values, in.present)
	if in.present == nil {
		in.payload, err = ssp2.AppendRow(nil, table.Wire, in.values)
	}
	return in, err
}

func decodeIncoming(table *schema.Table, sparse bool, payload []byte) (*incoming, error) {
	in := &incoming{payload: payload}
	var err error
	if sparse {
		in.values, in.present, err = ssp2.DecodeSparseRow(table.Wire, table.PrimaryKey, payload, nil)
	} else {
		in.values, err = ssp2.DecodeRow(table.Wire, payload, nil)
	}
	return in, err
}

// decodePayload reads the payload of an upsert and checks what it must satisfy on
// its own: the codec, and the key being the row id.
func (o *operation) decodePayload() error {
	in, err := (*incoming)(nil), error(nil)
	if o.commit.decoded != nil {
		in = o.commit.decoded[o.index]
	}
	if in == nil {
		in, err = o.commit.req.decode(o.table, o.Payload)
	}
	if err != nil {
		message := "the payload does not decode"
		if perr := (*ssp2.Error)(nil); errors.As(err, &perr) {
			message = perr.Message
		}
		return o.refuse(ssp2.CodeInvalidRequest, message)
	}
	id, ok := o.table.RowID(in.values)
	if !ok || id != o.RowID {
		return o.refuse(ssp2.CodeInvalidRequest, "the primary key in the payload is not the row id")
	}
	o.in = in
	return nil
}

// update decides an upsert of an existing row (§6.2, SEMANTICS §1).
func (o *operation) update() (*change, error) {
	stored, in, table := o.stored, o.in, o.table
	if !o.permits(stored.scopes) {
		return nil, o.forbidden()
	}
	if o.commit.req.sparse() {
		if err := o.checkSparseUpdate(); err != nil {
			return nil, err
		}
	} else if o.BaseVersion != nil && *o.BaseVersion != stored.version {
		// The row conflicts as a whole, which a replay in wire version 3 tells.
		return nil, o.conflict(in.writtenAfter(0, table, stored), "the row is not at the base version")
	}

	// Scope columns stay what they were (§3.4 rule 5); so do absent ones.
	values := in.values
	same := in.present == nil
	for col := range table.Columns {
		keep := !in.has(col)
		if !keep && table.IsScope(col) && !equalValues(values[col], stored.values[col]) {
			keep = true
		}
		if keep {
			if same {
				values, same = slices.Clone(values), false
			}
			values[col] = stored.values[col]
		}
	}
	next := &rowState{version: stored.version + 1, values: values, scopes: stored.scopes, payload: in.payload}
	if !same {
		payload, err := ssp2.AppendRow(nil, table.Wire, values)
		if err != nil {
			return nil, internal("encoding a merged row", err)
		}
		next.payload = payload
	}
	if !in.complete(len(table.Columns)) {
		next.columns = make([]int64, len(table.Columns))
		for col := range table.Columns {
			next.columns[col] = stored.columnVersion(col)
			if in.has(col) && col != table.PrimaryKey {
				next.columns[col] = next.version
			}
		}
	}
	if err := o.checkValues(); err != nil {
		return nil, err
	}
	return o.change(next), nil
}

// checkSparseUpdate applies the rules of a wire version 3 update in their order:
// scope columns, impossible base, lost insert race, column conflicts.
func (o *operation) checkSparseUpdate() error {
	for _, sc := range o.table.Scopes {
		if o.in.has(sc.Column) && !equalValues(o.in.values[sc.Column], o.stored.values[sc.Column]) {
			return o.refuse(ssp2.CodeInvalidRequest, "a scope column cannot be changed by a push")
		}
	}
	if o.BaseVersion == nil {
		return nil
	}
	base := *o.BaseVersion
	if base > o.stored.version {
		return o.refuse(ssp2.CodeInvalidRequest, "the base version is above the row's version")
	}
	columns := o.in.writtenAfter(base, o.table, o.stored)
	switch {
	case base <= 0:
		return o.conflict(columns, "the row exists already")
	case columns.Count() > 0:
		return o.conflict(columns, "columns were written after the base version")
	}
	return nil
}

// insert decides an upsert of an absent row (§6.2, SEMANTICS §1).
func (o *operation) insert() (*change, error) {
	if !o.permitsPayload() {
		return nil, o.forbidden()
	}
	// A commit may bring back what it deleted itself.
	deleted := o.stored.deletedBy != nil && o.stored.deletedBy != o.commit
	switch {
	case o.BaseVersion != nil && *o.BaseVersion != 0:
		return nil, o.refuse(ssp2.CodeRowMissing, "the row does not exist")
	case o.BaseVersion == nil && deleted && o.commit.req.sparse():
		return nil, o.refuse(ssp2.CodeRowDeleted, "the row was deleted")
	case !o.in.complete(len(o.table.Columns)) && !o.fillIn():
		return nil, o.refuse(ssp2.CodeRowMissing, "the row does not exist and the payload has not every column")
	}
	scopes, ok := o.table.RowScopes(o.in.values, nil)
	if !ok {
		return nil, o.forbidden()
	}
	next := &rowState{version: 1, values: o.in.values, scopes: scopes, payload: o.in.payload}
	if o.in.present != nil {
		payload, err := ssp2.AppendRow(nil, o.table.Wire, o.in.values)
		if err != nil {
			return nil, internal("encoding an inserted row", err)
		}
		next.payload = payload
	}
	if !storableRowID(o.RowID) {
		return nil, o.refuse(ssp2.CodeConstraintViolation, refusedByDatabase)
	}
	if err := o.checkValues(); err != nil {
		return nil, err
	}
	return o.change(next), nil
}

// fillIn completes a new row: what the host's code left out is NULL, where it may be, and so
// are the columns that an older schema version does not have.
func (o *operation) fillIn() bool {
	trusted := o.commit.req.trusted
	if !trusted && o.in.older == nil {
		return false
	}
	for col, c := range o.table.Columns {
		if o.in.has(col) {
			continue
		}
		if !c.Nullable || !trusted && o.in.older.Has(col) {
			return false
		}
		o.in.values[col] = ssp2.Value{Null: true}
	}
	return true
}

// permitsPayload authorizes the payload of an absent row (§3.4 rule 2). A sparse one
// may leave scope columns out: what is present must be permitted, and of the rest
// the actor must hold something, so that it could have known the row.
func (o *operation) permitsPayload() bool {
	scopes := o.commit.req.Scopes
	if scopes.Err != nil {
		return false
	}
	for _, sc := range o.table.Scopes {
		if !o.in.has(sc.Column) {
			if !scopes.Grants.Holds(sc.Variable) {
				return false
			}
			continue
		}
		text, ok := schema.ScopeText(o.table.Columns[sc.Column].Type, o.in.values[sc.Column])
		if !ok || !scopes.Grants.Permits(sc.Variable, text) {
			return false
		}
	}
	return true
}

// permits authorizes a row by all its declared scopes (§3.4 rule 3).
func (o *operation) permits(scopes []string) bool {
	resolved := o.commit.req.Scopes
	return resolved.Err == nil && resolved.Grants.AuthorizeRow(scopes)
}

// maxRowIDBytes bounds row ids. An index entry holds 2,704 bytes, and the id shares
// the one of a tombstone with partition and table: without a bound, a row that just
// fits its own table could never be deleted.
const maxRowIDBytes = 2000

// storableRowID says whether a row may have this id.
func storableRowID(id string) bool {
	return len(id) <= maxRowIDBytes && strings.IndexByte(id, 0) < 0
}

// tooLarge is said of a commit that cannot be written because of its size.
const tooLarge = "the rows of this commit are too large to be written together"

// refusedByDatabase is all a client learns of a constraint.
const refusedByDatabase = "the database cannot hold this row"

// checkValues refuses what cannot be stored: crdt columns and blobs that this
// server does not handle, and text with U+0000.
func (o *operation) checkValues() error {
	for col, c := range o.table.Columns {
		v := o.in.values[col]
		if !o.in.has(col) || v.Null {
			continue
		}
		switch {
		case c.Type == ssp2.TypeCRDT:
			return o.refuse(ssp2.CodeCRDTMergeFailed, "no merger is registered for this column's crdt type")
		case c.Type == ssp2.TypeBlobRef:
			return o.refuse(ssp2.CodeBlobNotFound, "the referenced blob is not stored")
		case c.Type == ssp2.TypeString && bytes.IndexByte(v.Bytes, 0) >= 0:
			return o.refuse(ssp2.CodeConstraintViolation, refusedByDatabase)
		}
	}
	return nil
}

func equalValues(a, b ssp2.Value) bool {
	return a.Null == b.Null && a.Int == b.Int && bytes.Equal(a.Bytes, b.Bytes) &&
		(a.Float == b.Float || a.Float != a.Float && b.Float != b.Float)
}
