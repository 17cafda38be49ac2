package schema

import (
	"bytes"
	"encoding/json"
)

// The fields stand in ascending order of their JSON names.
type (
	layout struct {
		Tables  []layoutTable `json:"tables"`
		Version int32         `json:"version"`
	}
	layoutTable struct {
		Columns     []layoutColumn    `json:"columns"`
		Indexes     []layoutIndex     `json:"indexes"`
		Materialize bool              `json:"materialize"`
		Name        string            `json:"name"`
		PrimaryKey  string            `json:"primaryKey"`
		References  []layoutReference `json:"references"`
		Scopes      []layoutScope     `json:"scopes"`
	}
	layoutColumn struct {
		Name     string `json:"name"`
		Nullable bool   `json:"nullable"`
		Type     string `json:"type"`
	}
	layoutIndex struct {
		Columns []string `json:"columns"`
		Name    string   `json:"name"`
		Unique  bool     `json:"unique"`
	}
	layoutReference struct {
		Column      string `json:"column"`
		OnDelete    string `json:"onDelete"`
		ParentTable string `json:"parentTable"`
	}
	layoutScope struct {
		Column   string `json:"column"`
		Pattern  string `json:"pattern"`
		Variable string `json:"variable"`
	}
)

// Layout renders what stored rows and generated SQL depend on as canonical JSON
// (keys sorted, no white space): of each table, in order, the columns with type
// and nullability, the key, scopes, indexes, references and materialization, and
// the version. Equal layouts have equal bytes, so a server can tell whether a
// database was installed from its schema. What only clients and mergers look at
// (crdtType, encrypted, declaredType) is left out.
func (s *Schema) Layout() []byte {
	l := layout{Tables: make([]layoutTable, len(s.Tables)), Version: s.Version}
	for i, t := range s.Tables {
		l.Tables[i] = t.layout()
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(l); err != nil {
		panic("schema: strings, booleans and integers always encode: " + err.Error())
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
}

func (t *Table) layout() layoutTable {
	l := layoutTable{
		Columns:     make([]layoutColumn, len(t.Columns)),
		Indexes:     make([]layoutIndex, len(t.Indexes)),
		Materialize: t.Materialize,
		Name:        t.Name,
		PrimaryKey:  t.Columns[t.PrimaryKey].Name,
		References:  make([]layoutReference, len(t.References)),
		Scopes:      make([]layoutScope, len(t.Scopes)),
	}
	for i, c := range t.Columns {
		l.Columns[i] = layoutColumn{Name: c.Name, Nullable: c.Nullable, Type: c.Type.String()}
	}
	for i, x := range t.Indexes {
		columns := make([]string, len(x.Columns))
		for j, c := range x.Columns {
			columns[j] = t.Columns[c].Name
		}
		l.Indexes[i] = layoutIndex{Columns: columns, Name: x.Name, Unique: x.Unique}
	}
	for i, r := range t.References {
		l.References[i] = layoutReference{
			Column: t.Columns[r.Column].Name, OnDelete: r.OnDelete.String(), ParentTable: r.Parent.Name,
		}
	}
	for i, s := range t.Scopes {
		l.Scopes[i] = layoutScope{Column: t.Columns[s.Column].Name, Pattern: s.Pattern, Variable: s.Variable}
	}
	return l
}
