package schema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/syncpg/syncpg/ssp2"
)

// ParseLayout reads what [Schema.Layout] wrote, for a schema of which nothing else is known
// any more: one that a database was installed with. What the layout leaves out (crdtType,
// encrypted, declaredType) is zero in the result.
func ParseLayout(text []byte) (*Schema, error) {
	var l layout
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&l); err != nil {
		return nil, fmt.Errorf("schema: reading a layout: %w", err)
	}
	s := &Schema{Version: l.Version, byName: make(map[string]*Table, len(l.Tables)), variables: map[string]struct{}{}}
	for i := range l.Tables {
		t, err := l.Tables[i].table()
		if err != nil {
			return nil, fmt.Errorf("schema: reading a layout: table %q: %w", l.Tables[i].Name, err)
		}
		if s.byName[t.Name] != nil {
			return nil, fmt.Errorf("schema: reading a layout: there are two tables %q", t.Name)
		}
		t.Index = i
		s.Tables, s.byName[t.Name] = append(s.Tables, t), t
		for _, sc := range t.Scopes {
			s.variables[sc.Variable] = struct{}{}
		}
	}
	for i := range l.Tables {
		t := s.Tables[i]
		for _, r := range l.Tables[i].References {
			column, ok := t.columns[r.Column]
			parent, onDelete := s.byName[r.ParentTable], onDeleteOf(r.OnDelete)
			if !ok || parent == nil || onDelete == 0 {
				return nil, fmt.Errorf("schema: reading a layout: table %q: the reference of column %q is unreadable", t.Name, r.Column)
			}
			t.References = append(t.References, Reference{Column: column, Parent: parent, OnDelete: onDelete})
		}
	}
	// What was understood must be all there was.
	if !bytes.Equal(s.Layout(), text) {
		return nil, errors.New("schema: reading a layout: it is of a form that this build does not know")
	}
	return s, nil
}

func (l *layoutTable) table() (*Table, error) {
	t := &Table{Name: l.Name, Materialize: l.Materialize, columns: make(map[string]int, len(l.Columns))}
	for i, c := range l.Columns {
		typ, ok := columnTypes[c.Type]
		if _, twice := t.columns[c.Name]; !ok || twice {
			return nil, fmt.Errorf("the column %q is unreadable", c.Name)
		}
		t.columns[c.Name] = i
		t.Columns = append(t.Columns, Column{Name: c.Name, Type: typ, Nullable: c.Nullable})
		t.Wire = append(t.Wire, ssp2.Column{Name: c.Name, Type: typ, Nullable: c.Nullable})
	}
	var ok bool
	if t.PrimaryKey, ok = t.columns[l.PrimaryKey]; !ok {
		return nil, fmt.Errorf("there is no primary key %q", l.PrimaryKey)
	}
	for _, sc := range l.Scopes {
		prefix, variable, ok := splitPattern(sc.Pattern)
		column, found := t.columns[sc.Column]
		if !ok || !found || variable != sc.Variable {
			return nil, fmt.Errorf("the scope %q is unreadable", sc.Pattern)
		}
		t.Scopes = append(t.Scopes, Scope{Pattern: sc.Pattern, Prefix: prefix, Variable: variable, Column: column})
	}
	for _, x := range l.Indexes {
		columns := make([]int, len(x.Columns))
		for i, name := range x.Columns {
			if columns[i], ok = t.columns[name]; !ok {
				return nil, fmt.Errorf("the index %q is unreadable", x.Name)
			}
		}
		t.Indexes = append(t.Indexes, Index{Name: x.Name, Columns: columns, Unique: x.Unique})
	}
	return t, nil
}

// CheckHistory says why clients of an older version cannot go on, although they can be
// served from the newest: from the versions that were installed in between, oldest first,
// of which only layouts are known. What one of them could not hold is gone from the rows
// and the log, or was never in the log, so that those clients would miss it. An older
// version that was installed itself must have the layout it had then.
func CheckHistory(older *Schema, installed []*Schema) error {
	for _, s := range installed {
		switch {
		case s.Version < older.Version:
		case s.Version == older.Version:
			if !bytes.Equal(s.Layout(), older.Layout()) {
				return fmt.Errorf("schema: version %d is not the one that was installed under this number", older.Version)
			}
		default:
			if err := servable(s, older.bare()); err != nil {
				return fmt.Errorf("schema: clients of version %d cannot go on: version %d, which was installed since, could not serve them: %w",
					older.Version, s.Version, err)
			}
		}
	}
	return nil
}

// bare returns the schema as its layout tells it.
func (s *Schema) bare() *Schema {
	b := &Schema{Version: s.Version, Tables: make([]*Table, len(s.Tables))}
	for i, t := range s.Tables {
		c := *t
		c.Columns = slices.Clone(t.Columns)
		for j := range c.Columns {
			c.Columns[j].CRDTType, c.Columns[j].Encrypted, c.Columns[j].DeclaredType = "", false, ""
		}
		b.Tables[i] = &c
	}
	return b
}
