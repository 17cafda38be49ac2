package pushsvc

import (
	"fmt"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// rowKey names a row: table index and row id.
type rowKey struct {
	table int
	id    string
}

// rowState is a row as the next operation meets it. It never changes once it
// stands in a candidate.
type rowState struct {
	version int64 // 0: absent
	payload []byte
	// columns holds the column versions, nil when every column is at version.
	columns []int64
	// deletedBy is the commit that deleted an absent row, earlier for one that left
	// a tombstone inside the horizon, nil when there is none.
	deletedBy *commit

	values []ssp2.Value // decoded from payload on first use
	scopes []string     // variable=value, decoded on first use
}

func (r *rowState) exists() bool { return r.version > 0 }

// decode reads the stored row.
func (r *rowState) decode(t *schema.Table) error {
	if r.values != nil {
		return nil
	}
	values, err := ssp2.DecodeRow(t.Wire, r.payload, nil)
	if err != nil {
		return internal(fmt.Sprintf("decoding a stored row of table %q", t.Name), err)
	}
	scopes, ok := t.RowScopes(values, nil)
	if !ok {
		return fmt.Errorf("a stored row of table %q has no scopes", t.Name)
	}
	r.values, r.scopes = values, scopes
	return nil
}

// columnVersion is the version column i was last written at. A column without one
// counts as written with the row.
func (r *rowState) columnVersion(i int) int64 {
	if i < len(r.columns) {
		return r.columns[i]
	}
	return r.version
}

// rowStates is the candidate state of the rows a request names: what admission read, changed
// by the operations staged since. Changes can be taken back.
type rowStates struct {
	rows   map[rowKey]*rowState
	known  map[rowKey]bool // rows whose state is known, as absent when rows has none
	graves map[rowKey]bool // rows that may have a tombstone in the database
	undo   []undone

	// Of references: rows that are there, of those that are not known; and of rows that
	// were changed those that referred to a parent before or after, more often than once
	// perhaps.
	parents   map[rowKey]bool
	referring map[referringKey][]string
}

// referringKey names the children of a parent by the reference.
type referringKey struct {
	ref    *reference
	parent string
}

type undone struct {
	key  rowKey
	prev *rowState
}

func newRowStates() *rowStates {
	return &rowStates{
		rows: map[rowKey]*rowState{}, known: map[rowKey]bool{}, graves: map[rowKey]bool{},
		parents: map[rowKey]bool{}, referring: map[referringKey][]string{},
	}
}

// live says whether there is a row, of those known or asked for as parents.
func (s *rowStates) live(key rowKey) bool {
	if s.known[key] {
		return s.get(key).exists()
	}
	return s.parents[key]
}

// refer notes what a row refers to, before or after a change of it.
func (s *rowStates) refer(refs []*reference, id string, row *rowState) {
	if !row.exists() {
		return
	}
	for _, ref := range refs {
		if key, null := ref.parentKey(row.values[ref.Column]); !null {
			at := referringKey{ref, key.id}
			if ids := s.referring[at]; len(ids) == 0 || ids[len(ids)-1] != id {
				s.referring[at] = append(ids, id)
			}
		}
	}
}

func (s *rowStates) load(key rowKey, version int64, payload []byte, columns []int64) {
	s.rows[key] = &rowState{version: version, payload: payload, columns: columns}
}

// loadTombstone takes over a tombstone. One at or below the horizon counts for
// nothing but has to be cleared.
func (s *rowStates) loadTombstone(key rowKey, insideHorizon bool) {
	s.graves[key] = true
	if insideHorizon && s.rows[key] == nil {
		s.rows[key] = &rowState{deletedBy: earlier}
	}
}

// buried says that the row may have a tombstone.
func (s *rowStates) buried(key rowKey) bool { return s.graves[key] }

// bury notes the tombstones that written commits may have left.
func (s *rowStates) bury(commits []appliedCommit) {
	for i := range commits {
		for j := range commits[i].changes {
			if ch := &commits[i].changes[j]; ch.op == ssp2.OpDelete {
				s.graves[ch.key] = true
			}
		}
	}
}

var (
	absent  = &rowState{}
	earlier = &commit{} // any commit before this transaction
)

func (s *rowStates) get(key rowKey) *rowState {
	if r := s.rows[key]; r != nil {
		return r
	}
	return absent
}

func (s *rowStates) set(key rowKey, r *rowState) {
	s.undo = append(s.undo, undone{key, s.rows[key]})
	s.rows[key] = r
}

// mark names the present state for rollback.
func (s *rowStates) mark() int { return len(s.undo) }

// rollback takes back every change since mark.
func (s *rowStates) rollback(mark int) {
	for i := len(s.undo) - 1; i >= mark; i-- {
		u := s.undo[i]
		if u.prev == nil {
			delete(s.rows, u.key)
		} else {
			s.rows[u.key] = u.prev
		}
	}
	s.undo = s.undo[:mark]
}
