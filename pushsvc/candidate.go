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

// candidate is the state of the rows a request names: what admission read, changed
// by the operations staged since. Changes can be taken back.
type candidate struct {
	rows   map[rowKey]*rowState
	graves map[rowKey]bool // rows that may have a tombstone in the database
	undo   []undone
}

type undone struct {
	key  rowKey
	prev *rowState
}

func newCandidate() *candidate {
	return &candidate{rows: map[rowKey]*rowState{}, graves: map[rowKey]bool{}}
}

func (c *candidate) load(key rowKey, version int64, payload []byte, columns []int64) {
	c.rows[key] = &rowState{version: version, payload: payload, columns: columns}
}

// loadTombstone takes over a tombstone. One at or below the horizon counts for
// nothing but has to be cleared.
func (c *candidate) loadTombstone(key rowKey, insideHorizon bool) {
	c.graves[key] = true
	if insideHorizon && c.rows[key] == nil {
		c.rows[key] = &rowState{deletedBy: earlier}
	}
}

// buried says that the row may have a tombstone.
func (c *candidate) buried(key rowKey) bool { return c.graves[key] }

// bury notes the tombstones that written commits may have left.
func (c *candidate) bury(commits []appliedCommit) {
	for i := range commits {
		for j := range commits[i].changes {
			if ch := &commits[i].changes[j]; ch.op == ssp2.OpDelete {
				c.graves[ch.key] = true
			}
		}
	}
}

var (
	absent  = &rowState{}
	earlier = &commit{} // any commit before this transaction
)

func (c *candidate) get(key rowKey) *rowState {
	if r := c.rows[key]; r != nil {
		return r
	}
	return absent
}

func (c *candidate) set(key rowKey, r *rowState) {
	c.undo = append(c.undo, undone{key, c.rows[key]})
	c.rows[key] = r
}

// mark names the present state for rollback.
func (c *candidate) mark() int { return len(c.undo) }

// rollback takes back every change since mark.
func (c *candidate) rollback(mark int) {
	for i := len(c.undo) - 1; i >= mark; i-- {
		u := c.undo[i]
		if u.prev == nil {
			delete(c.rows, u.key)
		} else {
			c.rows[u.key] = u.prev
		}
	}
	c.undo = c.undo[:mark]
}
