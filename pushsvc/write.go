package pushsvc

import (
	"strconv"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// queueWrites queues the row writes of the commits, so that the outcome is the one
// of writing operation by operation. Tables without constraints of their own are
// netted: one statement each, with the last state of every row. The others keep
// the order of operations and commits.
func (t *transaction) queueWrites(f *flush, commits []appliedCommit) {
	netted := map[int]map[rowKey]*change{}
	var order []*change // first change of each netted row, in order
	for i := range commits {
		for j := range commits[i].changes {
			ch := &commits[i].changes[j]
			if t.admitted.modeOf[ch.table.Name] != modeNetted {
				continue
			}
			rows := netted[ch.table.Index]
			if rows == nil {
				rows = map[rowKey]*change{}
				netted[ch.table.Index] = rows
			}
			if _, ok := rows[ch.key]; !ok {
				order = append(order, ch)
			}
			rows[ch.key] = ch
		}
	}
	for _, table := range t.s.schema.Tables {
		rows := netted[table.Index]
		if rows == nil {
			continue
		}
		final := make([]*change, 0, len(rows))
		for _, first := range order {
			if first.table == table {
				final = append(final, rows[first.key])
			}
		}
		t.queueRows(f, table, final)
	}

	for i := range commits {
		t.queueOrdered(f, commits[i].changes)
	}
}

// queueOrdered queues the changes of one commit to tables that keep the order of
// operations: runs of one table, one operation and distinct rows, or single
// operations where the table asks for it. Deferred checks are made at the end.
func (t *transaction) queueOrdered(f *flush, changes []change) {
	var run []*change
	seen := map[rowKey]bool{}
	end := func() {
		if len(run) > 0 {
			t.queueRows(f, run[0].table, run)
			run = nil
			clear(seen)
		}
	}
	single := false
	for i := range changes {
		ch := &changes[i]
		mode := t.admitted.modeOf[ch.table.Name]
		if mode == modeNetted {
			continue
		}
		if len(run) > 0 && (run[0].table != ch.table || run[0].op != ch.op || seen[ch.key] || mode == modeSingle) {
			end()
		}
		run = append(run, ch)
		seen[ch.key] = true
		if mode == modeSingle {
			single = true
			end()
		}
	}
	end()
	if single {
		f.queue("probing", pgtx.ProbeSavepoint)
		f.queue("checking constraints", pgtx.CheckConstraints)
		f.queue("probing", pgtx.ProbeRollbackTo)
		f.queue("probing", pgtx.ProbeRelease)
	}
}

// queueRows queues one statement that writes changes of one table: at most one
// per row.
func (t *transaction) queueRows(f *flush, table *schema.Table, changes []*change) {
	w := rowWrites{stored: t.s.stored[table.Index]}
	for _, ch := range changes {
		w.add(table, ch)
	}
	f.queue("writing rows", t.s.write[table.Index], t.req.Partition, w.deleted, w.ids, w.versions, w.payloads, w.columns,
		w.texts, w.integers, w.floats, w.booleans, w.bytes)
	if len(changes) == 1 {
		f.statements[len(f.statements)-1].op = changes[0].opIndex
	}
}

// rowWrites holds the parameters of schemaddl.WriteRowsSQL.
type rowWrites struct {
	stored   []int
	deleted  []string
	ids      []string
	versions []int64
	payloads [][]byte
	columns  []pgtype.Text
	texts    [][]byte // nil: NULL
	integers []pgtype.Int8
	floats   []pgtype.Float8
	booleans []pgtype.Bool
	bytes    [][]byte // nil: NULL
}

func (w *rowWrites) add(table *schema.Table, ch *change) {
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
		switch schemaddl.KindOf(table.Columns[col].Type) {
		case schemaddl.KindInteger:
			w.integers = append(w.integers, pgtype.Int8{Int64: v.Int, Valid: !v.Null})
		case schemaddl.KindFloat:
			w.floats = append(w.floats, pgtype.Float8{Float64: v.Float, Valid: !v.Null})
		case schemaddl.KindBoolean:
			w.booleans = append(w.booleans, pgtype.Bool{Bool: v.Int != 0, Valid: !v.Null})
		case schemaddl.KindBytes:
			w.bytes = append(w.bytes, nullable(v))
		default:
			w.texts = append(w.texts, nullable(v))
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
