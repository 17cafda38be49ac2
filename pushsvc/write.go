package pushsvc

import (
	"strconv"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// queueWrites queues the row writes of the commits, so that the outcome is the one
// of writing operation by operation: no write is left out for a later one of the
// same row, since the database might refuse it. Tables of which none has triggers do
// not see each other, so that the operations on each can be written together; a
// trigger may look anywhere, so that nothing is moved past it.
func (t *transaction) queueWrites(f *flush, commits []appliedCommit) {
	if t.admitted.single != nil {
		for i := range commits {
			t.queueInOrder(f, commits[i].changes)
		}
		return
	}
	byTable := make([][]*change, len(t.s.schema.Tables))
	for _, c := range commits {
		for j := range c.changes {
			ch := &c.changes[j]
			byTable[ch.table.Index] = append(byTable[ch.table.Index], ch)
		}
	}
	for _, changes := range byTable {
		t.queueRuns(f, changes)
	}
}

// queueInOrder queues the changes of one commit in the order of its operations, and
// then the deferred checks if a table may have some.
func (t *transaction) queueInOrder(f *flush, changes []change) {
	ordered := make([]*change, len(changes))
	deferred := false
	for i := range changes {
		ordered[i] = &changes[i]
		deferred = deferred || t.single(changes[i].table)
	}
	t.queueRuns(f, ordered)
	if deferred {
		f.queueChecks()
	}
}

// single says that every operation on a table needs a statement of its own.
func (t *transaction) single(table *schema.Table) bool {
	return t.admitted.single != nil && t.admitted.single[table.Index]
}

// queueRuns cuts changes into runs and queues a statement for each.
func (t *transaction) queueRuns(f *flush, changes []*change) {
	seen := make(map[rowKey]bool, len(changes))
	start := 0
	for i, ch := range changes {
		if i > start && (seen[ch.key] || t.endsRun(changes[i-1], ch)) {
			t.queueRun(f, changes[start:i])
			start = i
			clear(seen)
		}
		seen[ch.key] = true
	}
	if start < len(changes) {
		t.queueRun(f, changes[start:])
	}
}

// endsRun says that two changes cannot share a statement: it writes one table, and
// deletes before it upserts.
func (t *transaction) endsRun(prev, next *change) bool {
	return next.table != prev.table || t.single(next.table) || prev.op == ssp2.OpUpsert && next.op == ssp2.OpDelete
}

// queueRun queues one statement that writes changes of one table: at most one per
// row, deletes first.
func (t *transaction) queueRun(f *flush, changes []*change) {
	table := changes[0].table
	w := rowWrites{table: table, stored: t.s.stored[table.Index]}
	for _, ch := range changes {
		w.add(ch)
	}
	f.queueRow("writing rows", t.s.write[table.Index], t.partition, w.deleted, w.ids, w.versions, w.payloads, w.columns,
		w.texts, w.integers, w.floats, w.booleans, w.bytes)
}

// rowWrites holds the parameters of schemaddl.WriteRowsSQL. Flat arrays spare pgx
// the reflection it needs for slices of slices and structs.
type rowWrites struct {
	table    *schema.Table
	stored   []int
	deleted  []string
	ids      []string
	versions []int64
	payloads pgtype.FlatArray[[]byte]
	columns  pgtype.FlatArray[pgtype.Text]
	texts    pgtype.FlatArray[pgtype.Text]
	integers pgtype.FlatArray[pgtype.Int8]
	floats   pgtype.FlatArray[pgtype.Float8]
	booleans pgtype.FlatArray[pgtype.Bool]
	bytes    pgtype.FlatArray[[]byte] // nil: NULL
}

func (w *rowWrites) add(ch *change) {
	if ch.op == ssp2.OpDelete {
		w.deleted = append(w.deleted, ch.key.id)
		return
	}
	w.ids = append(w.ids, ch.key.id)
	w.versions = append(w.versions, ch.row.version)
	w.payloads = append(w.payloads, ch.row.payload)
	w.columns = append(w.columns, versionsLiteral(ch.row.columns))
	for _, col := range w.stored {
		v := ch.row.values[col]
		switch schemaddl.KindOf(w.table.Columns[col].Type) {
		case schemaddl.KindInteger:
			w.integers = append(w.integers, pgtype.Int8{Int64: v.Int, Valid: !v.Null})
		case schemaddl.KindFloat:
			w.floats = append(w.floats, pgtype.Float8{Float64: v.Float, Valid: !v.Null})
		case schemaddl.KindBoolean:
			w.booleans = append(w.booleans, pgtype.Bool{Bool: v.Int != 0, Valid: !v.Null})
		case schemaddl.KindBytes:
			w.bytes = append(w.bytes, nullable(v))
		default:
			w.texts = append(w.texts, pgtype.Text{String: string(v.Bytes), Valid: !v.Null})
		}
	}
}

// nullable returns the bytes of a value, nil for NULL and only then.
func nullable(v ssp2.Value) []byte {
	switch {
	case v.Null:
		return nil
	case v.Bytes == nil:
		return []byte{}
	}
	return v.Bytes
}

// versionsLiteral renders column versions as an array literal, NULL for none.
func versionsLiteral(versions []int64) pgtype.Text {
	if versions == nil {
		return pgtype.Text{}
	}
	b := []byte{'{'}
	for i, v := range versions {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, v, 10)
	}
	return pgtype.Text{String: string(append(b, '}')), Valid: true}
}
