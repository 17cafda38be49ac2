package client

import (
	"slices"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// replica holds rows by table name and row id.
type replica map[string]map[string]Row

func (r replica) put(table, id string, row Row) {
	if r[table] == nil {
		r[table] = map[string]Row{}
	}
	r[table][id] = row
}

// purge deletes the rows of a table that lie in the scopes (§3.3).
func (r replica) purge(t *schema.Table, scopes ssp2.ScopeMap) {
	for id, row := range r[t.Name] {
		if inScopes(t, row.Values, scopes) {
			delete(r[t.Name], id)
		}
	}
}

// inScopes reports whether a row matches every variable of an effective scope map (§3.2).
func inScopes(t *schema.Table, vals []ssp2.Value, effective ssp2.ScopeMap) bool {
	for variable, values := range effective {
		s, ok := t.Scope(variable)
		if !ok {
			return false
		}
		text, ok := schema.ScopeText(t.Columns[s.Column].Type, vals[s.Column])
		if !ok || !slices.Contains(values, text) {
			return false
		}
	}
	return len(effective) > 0
}

// write is one change that waits for the end of its transaction (§1.4 rule 4).
type write struct {
	table string
	id    string
	row   *Row // nil: delete
}

func (r replica) apply(writes []write) {
	for _, w := range writes {
		if w.row == nil {
			delete(r[w.table], w.id)
		} else {
			r.put(w.table, w.id, *w.row)
		}
	}
}

// commitWrites decodes and checks the changes of a COMMIT of a subscription.
func (c *Client) commitWrites(s *subscription, f *ssp2.Commit) ([]write, error) {
	writes := make([]write, 0, len(f.Changes))
	for i := range f.Changes {
		change := &f.Changes[i]
		table := f.Tables[change.TableIndex]
		if table != s.table.Name {
			return nil, protocolError("subscription %q of table %q is sent a change of table %q", s.id, s.table.Name, table)
		}
		for variable, values := range s.effective {
			if !slices.Contains(values, change.Scopes[variable]) {
				return nil, protocolError("row %q of table %q is sent with scope %s=%q, outside the effective scopes of subscription %q",
					change.RowID, table, variable, change.Scopes[variable], s.id)
			}
		}
		w := write{table: table, id: change.RowID}
		if change.Op == ssp2.OpUpsert {
			vals, err := c.decodeRow(s, change.RowID, change.Row)
			if err != nil {
				return nil, err
			}
			if err := checkStoredScopes(s.table, change, vals); err != nil {
				return nil, err
			}
			w.row = &Row{Version: *change.RowVersion, Values: vals}
		}
		writes = append(writes, w)
	}
	return writes, nil
}

// checkStoredScopes compares the scopes of a change with its row (§3.1).
func checkStoredScopes(t *schema.Table, change *ssp2.Change, vals []ssp2.Value) error {
	for _, scope := range t.Scopes {
		text, _ := schema.ScopeText(t.Columns[scope.Column].Type, vals[scope.Column])
		if stored := change.Scopes[scope.Variable]; stored != text {
			return protocolError("row %q of table %q is sent with scope %s=%q, the row itself has %q",
				change.RowID, t.Name, scope.Variable, stored, text)
		}
	}
	if len(change.Scopes) != len(t.Scopes) {
		return protocolError("row %q of table %q is sent with %d scopes, the table declares %d",
			change.RowID, t.Name, len(change.Scopes), len(t.Scopes))
	}
	return nil
}

// blockWrites decodes and checks the rows of one block of a rows segment.
func (c *Client) blockWrites(s *subscription, block []ssp2.SegmentRow) ([]write, error) {
	writes := make([]write, len(block))
	for i, r := range block {
		vals, err := c.decodeRow(s, "", r.Row)
		if err != nil {
			return nil, err
		}
		id, _ := s.table.RowID(vals)
		writes[i] = write{table: s.table.Name, id: id, row: &Row{Version: r.ServerVersion, Values: vals}}
	}
	return writes, nil
}

// decodeRow decodes a full row of a subscription's table and checks its id, if one was announced, and its scopes.
func (c *Client) decodeRow(s *subscription, announced string, payload []byte) ([]ssp2.Value, error) {
	vals, err := ssp2.DecodeRow(s.table.Wire, payload, nil)
	if err != nil {
		return nil, protocolError("a row of table %q cannot be read: %v", s.table.Name, err)
	}
	id, ok := s.table.RowID(vals)
	if !ok || (announced != "" && id != announced) {
		return nil, protocolError("row %q of table %q has %q as its primary key", announced, s.table.Name, id)
	}
	if !inScopes(s.table, vals, s.effective) {
		return nil, protocolError("row %q of table %q is outside the effective scopes of subscription %q", id, s.table.Name, s.id)
	}
	return vals, nil
}

// checkColumns compares the column table of a segment with the schema (§5.2).
func (c *Client) checkColumns(t *schema.Table, h *ssp2.SegmentHeader) error {
	if h.Table != t.Name || h.SchemaVersion != c.cfg.Schema.Version {
		return protocolError("a segment of table %q, schema version %d, where %q, version %d is due",
			h.Table, h.SchemaVersion, t.Name, c.cfg.Schema.Version)
	}
	if !slices.Equal(h.Columns, t.Wire) {
		return protocolError("the columns of the segment of table %q are not those of the schema (sync.schema_mismatch)", t.Name)
	}
	return nil
}
