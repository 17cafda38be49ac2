package pushsvc_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// model is what wire version 3 does to a partition, in as few words as possible.
type model struct {
	seq    int64
	rows   map[modelKey]*modelRow
	graves map[modelKey]bool
}

type modelKey struct{ table, id string }

// modelRow is never changed; a write replaces it.
type modelRow struct {
	version int64
	values  map[string]any
	written map[string]int64 // version of each column's last write
}

func newModel() *model {
	return &model{rows: map[modelKey]*modelRow{}, graves: map[modelKey]bool{}}
}

// verdict is what becomes of a commit.
type verdict struct {
	Seq      int64 // 0: rejected
	Op       int
	Code     ssp2.Code
	Version  int64    // conflict: of the server's row
	Conflict []string // conflict: the columns, sorted
}

func (m *model) commit(ops []intent, allowed func(variable string, v any) bool) verdict {
	next := &model{rows: maps.Clone(m.rows), graves: maps.Clone(m.graves), seq: m.seq + 1}
	states := []map[modelKey]*modelRow{maps.Clone(m.rows)}
	deleted := map[modelKey]bool{}
	for i, in := range ops {
		if v := next.operation(in, deleted, allowed); v != nil {
			v.Op = i
			return *v
		}
		states = append(states, maps.Clone(next.rows))
	}
	if i := refusedByConstraint(ops, states); i >= 0 {
		return verdict{Op: i, Code: ssp2.CodeConstraintViolation}
	}
	*m = *next
	return verdict{Seq: m.seq}
}

// operation applies one operation, nil, or says why not.
func (m *model) operation(in intent, deleted map[modelKey]bool, allowed func(string, any) bool) *verdict {
	key := modelKey{in.table, in.id}
	row := m.rows[key]
	permitted := func(values map[string]any) bool {
		for _, variable := range []string{"project_id", "org"} {
			if v, ok := values[variable]; ok && !allowed(variable, v) {
				return false
			}
		}
		return true
	}
	switch {
	case in.remove && row == nil:
		return nil
	case row != nil && !permitted(row.values), row == nil && !permitted(in.values):
		return &verdict{Code: ssp2.CodeForbidden}
	case in.remove:
		delete(m.rows, key)
		m.graves[key], deleted[key] = true, true
		return nil
	case row == nil:
		return m.insert(key, in, deleted)
	}
	var conflict []string
	for column, v := range in.values {
		if (column == "project_id" || column == "org") && v != row.values[column] {
			return &verdict{Code: ssp2.CodeInvalidRequest}
		}
		if column != "id" && column != "body" && in.base >= 0 && row.written[column] > in.base {
			conflict = append(conflict, column)
		}
	}
	slices.Sort(conflict)
	switch {
	case in.base > row.version:
		return &verdict{Code: ssp2.CodeInvalidRequest}
	case in.base == 0 || len(conflict) > 0:
		return &verdict{Code: ssp2.CodeVersionConflict, Version: row.version, Conflict: conflict}
	}
	next := &modelRow{version: row.version + 1, values: maps.Clone(row.values), written: maps.Clone(row.written)}
	for column, v := range in.values {
		next.values[column], next.written[column] = v, next.version
	}
	m.rows[key] = next
	return nil
}

func (m *model) insert(key modelKey, in intent, deleted map[modelKey]bool) *verdict {
	switch {
	case in.base > 0:
		return &verdict{Code: ssp2.CodeRowMissing}
	case in.base < 0 && m.graves[key] && !deleted[key]:
		return &verdict{Code: ssp2.CodeRowDeleted}
	case !in.whole:
		return &verdict{Code: ssp2.CodeRowMissing}
	}
	row := &modelRow{version: 1, values: maps.Clone(in.values), written: map[string]int64{}}
	for column := range in.values {
		row.written[column] = 1
	}
	m.rows[key] = row
	delete(m.graves, key)
	return nil
}

// refusedByConstraint returns the operation the database refuses, -1 for none:
// states[i] is before operation i. JSON that jsonb cannot hold and slugs are checked
// at each operation; positions in the end, and then the operation to blame is the one
// since which they have been wrong.
func refusedByConstraint(ops []intent, states []map[modelKey]*modelRow) int {
	for i, in := range ops {
		after := states[i+1]
		if row := after[modelKey{in.table, in.id}]; row != nil && !in.remove && row.values["meta"] == `"\u0000"` {
			return i
		}
		if in.table == "slugs" && !unique(after, "slugs", "slug") {
			return i
		}
	}
	for i := len(ops); i >= 0; i-- {
		if unique(states[i], "guarded", "position") {
			if i == len(ops) {
				return -1
			}
			return i
		}
	}
	return -1
}

func unique(rows map[modelKey]*modelRow, table, column string) bool {
	seen := map[any]bool{}
	for key, row := range rows {
		if v := row.values[column]; key.table == table && v != nil {
			if seen[v] {
				return false
			}
			seen[v] = true
		}
	}
	return true
}

// stored renders the row like that of the server.
func (r *modelRow) stored(b *bundle, table string) *storedRow {
	s := &storedRow{Version: r.version, Values: changed(r.values, nil)}
	tab, _ := b.schema.Table(table)
	for _, c := range tab.Columns {
		s.Columns = append(s.Columns, r.written[c.Name])
	}
	return s
}

// verdict renders the server's result like that of the model.
func (b *bundle) verdict(t testing.TB, ops []intent, r ssp2.PushResult) verdict {
	t.Helper()
	if r.Status == ssp2.PushApplied {
		return verdict{Seq: *r.CommitSeq}
	}
	require.Len(t, r.Results, 1, fmt.Sprint(r))
	end := r.Results[0]
	v := verdict{Op: int(end.OpIndex), Code: ssp2.Code(end.Code), Version: end.ServerVersion}
	if end.Status == ssp2.OpConflict {
		v.Conflict = b.columnsOf(t, ops[v.Op].table, end.ConflictColumns)
		slices.Sort(v.Conflict)
	}
	return v
}
