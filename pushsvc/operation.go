package pushsvc

import (
	"bytes"
	"errors"
	"fmt"
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
}

// refusal ends a commit: the result record of the terminating operation.
type refusal struct{ result ssp2.OpResult }

func (r *refusal) Error() string { return r.result.Code + ": " + r.result.Message }

func refuse(op int, code ssp2.Code, message string) error {
	return &refusal{opError(op, code, message)}
}

// stage runs the operations of a commit over the candidate state and returns its
// changes. A *refusal leaves the state as it was; any other error is internal.
func (t *transaction) stage(c *commit) ([]change, error) {
	mark := t.state.mark()
	changes := make([]change, 0, len(c.ops))
	for i := range c.ops {
		ch, err := t.stageOperation(c, i)
		if err != nil {
			t.state.rollback(mark)
			return nil, err
		}
		if ch == nil {
			continue
		}
		next := ch.row
		if ch.op == ssp2.OpDelete {
			next = &rowState{deletedBy: c}
		}
		t.state.set(ch.key, next)
		changes = append(changes, *ch)
	}
	return changes, nil
}

// stageOperation decides one operation: nil for a delete of an absent row, which
// is applied and changes nothing (§6.2).
func (t *transaction) stageOperation(c *commit, i int) (*change, error) {
	op := &c.ops[i]
	table, ok := t.s.schema.Table(op.Table)
	if !ok {
		return nil, refuse(i, ssp2.CodeUnknownTable, "the schema has no such table")
	}
	key := rowKey{table.Index, op.RowID}
	stored := t.state.get(key)
	if stored.exists() {
		if err := stored.decode(table); err != nil {
			return nil, err
		}
	}
	if op.Op == ssp2.OpDelete {
		return t.stageDelete(i, table, key, stored)
	}
	in, err := t.decodePayload(i, table, op)
	if err != nil {
		return nil, err
	}
	if stored.exists() {
		return t.stageUpdate(i, table, key, stored, op, in)
	}
	// A commit may bring back what it deleted itself.
	deleted := stored.deletedBy != nil && stored.deletedBy != c
	return t.stageInsert(i, table, key, deleted, op, in)
}

func (t *transaction) stageDelete(i int, table *schema.Table, key rowKey, stored *rowState) (*change, error) {
	if !stored.exists() {
		return nil, nil
	}
	if !t.permits(stored.scopes) {
		return nil, forbidden(i)
	}
	return &change{opIndex: i, table: table, key: key, op: ssp2.OpDelete, scopes: stored.scopes}, nil
}

// incoming is a decoded push payload.
type incoming struct {
	payload []byte
	values  []ssp2.Value
	// present marks the columns of a sparse row; nil means all.
	present ssp2.Bitmap
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

func (t *transaction) sparse() bool { return t.req.WireVersion >= ssp2.WireV3 }

// decodePayload reads the payload of an upsert and checks what it must satisfy on
// its own: the codec, and the key being the row id.
func (t *transaction) decodePayload(i int, table *schema.Table, op *ssp2.Operation) (*incoming, error) {
	in := &incoming{payload: op.Payload}
	var err error
	if t.sparse() {
		in.values, in.present, err = ssp2.DecodeSparseRow(table.Wire, table.PrimaryKey, op.Payload, nil)
	} else {
		in.values, err = ssp2.DecodeRow(table.Wire, op.Payload, nil)
	}
	if err != nil {
		message := "the payload does not decode"
		if perr := (*ssp2.Error)(nil); errors.As(err, &perr) {
			message = perr.Message
		}
		return nil, refuse(i, ssp2.CodeInvalidRequest, message)
	}
	id, ok := table.RowID(in.values)
	if !ok || id != op.RowID {
		return nil, refuse(i, ssp2.CodeInvalidRequest, "the primary key in the payload is not the row id")
	}
	return in, nil
}

// stageUpdate decides an upsert of an existing row (§6.2, SEMANTICS §1).
func (t *transaction) stageUpdate(i int, table *schema.Table, key rowKey, stored *rowState, op *ssp2.Operation, in *incoming) (*change, error) {
	if !t.permits(stored.scopes) {
		return nil, forbidden(i)
	}
	if t.sparse() {
		if err := checkSparseUpdate(i, table, stored, op, in); err != nil {
			return nil, err
		}
	} else if op.BaseVersion != nil && *op.BaseVersion != stored.version {
		// The row conflicts as a whole, which a replay in wire version 3 tells.
		return nil, conflict(i, stored, in.writtenAfter(0, table, stored), "the row is not at the base version")
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
			return nil, fmt.Errorf("encoding a merged row: %w", err)
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
	if err := t.checkValues(i, table, in); err != nil {
		return nil, err
	}
	return &change{opIndex: i, table: table, key: key, op: ssp2.OpUpsert, row: next, scopes: next.scopes}, nil
}

// checkSparseUpdate applies the rules of a wire version 3 update in their order:
// scope columns, impossible base, lost insert race, column conflicts.
func checkSparseUpdate(i int, table *schema.Table, stored *rowState, op *ssp2.Operation, in *incoming) error {
	for _, sc := range table.Scopes {
		if in.has(sc.Column) && !equalValues(in.values[sc.Column], stored.values[sc.Column]) {
			return refuse(i, ssp2.CodeInvalidRequest, "a scope column cannot be changed by a push")
		}
	}
	if op.BaseVersion == nil {
		return nil
	}
	base := *op.BaseVersion
	if base > stored.version {
		return refuse(i, ssp2.CodeInvalidRequest, "the base version is above the row's version")
	}
	columns := in.writtenAfter(base, table, stored)
	switch {
	case base <= 0:
		return conflict(i, stored, columns, "the row exists already")
	case columns.Count() > 0:
		return conflict(i, stored, columns, "columns were written after the base version")
	}
	return nil
}

// stageInsert decides an upsert of an absent row (§6.2, SEMANTICS §1). deleted says
// that there is a tombstone for it.
func (t *transaction) stageInsert(i int, table *schema.Table, key rowKey, deleted bool, op *ssp2.Operation, in *incoming) (*change, error) {
	if !t.permitsPayload(table, in) {
		return nil, forbidden(i)
	}
	switch base := op.BaseVersion; {
	case base != nil && *base != 0:
		return nil, refuse(i, ssp2.CodeRowMissing, "the row does not exist")
	case base == nil && deleted && t.sparse():
		return nil, refuse(i, ssp2.CodeRowDeleted, "the row was deleted")
	case !in.complete(len(table.Columns)):
		return nil, refuse(i, ssp2.CodeRowMissing, "the row does not exist and the payload has not every column")
	}
	scopes, ok := table.RowScopes(in.values, nil)
	if !ok {
		return nil, forbidden(i)
	}
	next := &rowState{version: 1, values: in.values, scopes: scopes, payload: in.payload}
	if in.present != nil {
		payload, err := ssp2.AppendRow(nil, table.Wire, in.values)
		if err != nil {
			return nil, fmt.Errorf("encoding an inserted row: %w", err)
		}
		next.payload = payload
	}
	if !storableRowID(key.id) {
		return nil, refuse(i, ssp2.CodeConstraintViolation, refusedByDatabase)
	}
	if err := t.checkValues(i, table, in); err != nil {
		return nil, err
	}
	return &change{opIndex: i, table: table, key: key, op: ssp2.OpUpsert, row: next, scopes: next.scopes}, nil
}

// permitsPayload authorizes the payload of an absent row (§3.4 rule 2). A sparse one
// may leave scope columns out: what is present must be permitted, and of the rest
// the actor must hold something, so that it could have known the row.
func (t *transaction) permitsPayload(table *schema.Table, in *incoming) bool {
	if t.req.Scopes.Err != nil {
		return false
	}
	grants := t.req.Scopes.Grants
	for _, sc := range table.Scopes {
		if !in.has(sc.Column) {
			if !grants.Holds(sc.Variable) {
				return false
			}
			continue
		}
		text, ok := schema.ScopeText(table.Columns[sc.Column].Type, in.values[sc.Column])
		if !ok || !grants.Permits(sc.Variable, text) {
			return false
		}
	}
	return true
}

// maxRowIDBytes bounds row ids. An index entry holds 2,704 bytes, and the id shares
// the one of a tombstone with partition and table: without a bound, a row that just
// fits its own table could never be deleted.
const maxRowIDBytes = 2000

// storableRowID says whether a row may have this id.
func storableRowID(id string) bool {
	return len(id) <= maxRowIDBytes && strings.IndexByte(id, 0) < 0
}

// refusedByDatabase is all a client learns of a constraint.
const refusedByDatabase = "the database cannot hold this row"

// checkValues refuses what cannot be stored: crdt columns and blobs that this
// server does not handle, and text with U+0000.
func (t *transaction) checkValues(i int, table *schema.Table, in *incoming) error {
	for col, c := range table.Columns {
		v := in.values[col]
		if !in.has(col) || v.Null {
			continue
		}
		switch c.Type {
		case ssp2.TypeCRDT:
			return refuse(i, ssp2.CodeCRDTMergeFailed, "no merger is registered for this column's crdt type")
		case ssp2.TypeBlobRef:
			return refuse(i, ssp2.CodeBlobNotFound, "the referenced blob is not stored")
		case ssp2.TypeString:
			if bytes.IndexByte(v.Bytes, 0) >= 0 {
				return refuse(i, ssp2.CodeConstraintViolation, refusedByDatabase)
			}
		}
	}
	return nil
}

// permits authorizes a row by all its declared scopes (§3.4 rule 3).
func (t *transaction) permits(scopes []string) bool {
	return t.req.Scopes.Err == nil && t.req.Scopes.Grants.AuthorizeRow(scopes)
}

func forbidden(i int) error {
	return refuse(i, ssp2.CodeForbidden, "the actor may not write this row")
}

func conflict(i int, stored *rowState, columns ssp2.Bitmap, message string) error {
	return &refusal{ssp2.OpResult{
		OpIndex: int32(i), Status: ssp2.OpConflict, Code: string(ssp2.CodeVersionConflict), Message: message,
		ServerVersion: stored.version, ServerRow: stored.payload, ConflictColumns: columns,
	}}
}

func equalValues(a, b ssp2.Value) bool {
	return a.Null == b.Null && a.Int == b.Int && bytes.Equal(a.Bytes, b.Bytes) &&
		(a.Float == b.Float || a.Float != a.Float && b.Float != b.Float)
}
