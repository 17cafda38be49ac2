package schema

import (
	"slices"

	"github.com/syncpg/syncpg/ssp2"
)

// Schema is a compiled schema of one version. Only Parse makes one, and it
// never changes afterwards, so it may be shared between goroutines.
type Schema struct {
	Version int32
	Tables  []*Table // in declaration order, which is the bootstrap order (§4.7)

	byName    map[string]*Table
	variables map[string]struct{}
}

// Table is one synced table.
type Table struct {
	Index      int // position in Schema.Tables
	Name       string
	Columns    []Column
	PrimaryKey int     // index into Columns
	Scopes     []Scope // ascending by Variable, UTF-16 code units
	Indexes    []Index
	References []Reference
	// Materialize says that app columns beyond the scope columns are stored
	// typed. False keeps only the _sync_* and scope columns.
	Materialize bool
	// Wire is Columns as the row codec wants them, same order.
	Wire []ssp2.Column

	columns map[string]int
}

// Column is one app column.
type Column struct {
	Name         string
	Type         ssp2.ColumnType
	Nullable     bool
	CRDTType     string // crdt columns
	Encrypted    bool
	DeclaredType string // encrypted columns: the app's own type
}

// Scope is one scope pattern of a table (§3.1).
type Scope struct {
	Pattern  string // "org:{org_id}"
	Prefix   string // "org"
	Variable string // "org_id"
	Column   int    // index into Table.Columns
}

// Index is one declared index that the server builds. A declared index over an
// encrypted column is not among a table's Indexes: it is of use only to clients,
// which hold the plaintext.
type Index struct {
	Name    string
	Columns []int // indexes into Table.Columns
	Unique  bool
}

// OnDelete is what happens to the children of a deleted parent.
type OnDelete uint8

// Actions of a Reference.
const (
	Restrict OnDelete = 1
	Cascade  OnDelete = 2
	SetNull  OnDelete = 3
)

var onDeleteNames = map[OnDelete]string{
	Restrict: "RESTRICT",
	Cascade:  "CASCADE",
	SetNull:  "SET NULL",
}

// String returns the action as the IR spells it.
func (d OnDelete) String() string { return onDeleteNames[d] }

// Reference is one declared reference: a column that holds the primary key of a row of Parent.
type Reference struct {
	Column   int
	Parent   *Table
	OnDelete OnDelete
}

// Table returns the table of that name.
func (s *Schema) Table(name string) (*Table, bool) {
	t, ok := s.byName[name]
	return t, ok
}

// HasVariable says whether any table declares the scope variable: the set
// against which a resolver's answer is checked (§3.2 rule 3).
func (s *Schema) HasVariable(name string) bool {
	_, ok := s.variables[name]
	return ok
}

// Scope returns the table's scope of that variable.
func (t *Table) Scope(variable string) (*Scope, bool) {
	i := slices.IndexFunc(t.Scopes, func(s Scope) bool { return s.Variable == variable })
	if i < 0 {
		return nil, false
	}
	return &t.Scopes[i], true
}

// ColumnIndex returns the position of the column of that name in Columns.
func (t *Table) ColumnIndex(name string) (int, bool) {
	i, ok := t.columns[name]
	return i, ok
}

// IsScope says whether the column at that position holds a scope value. Such a
// column is immutable on update (§3.4 rule 5).
func (t *Table) IsScope(column int) bool {
	return slices.ContainsFunc(t.Scopes, func(s Scope) bool { return s.Column == column })
}

// RowID renders the primary key of a row, given as one value per column, the
// way a row id is spelled (§2.2). It is false when the key is NULL or empty:
// such a row has no id.
func (t *Table) RowID(vals []ssp2.Value) (string, bool) {
	return ScopeText(t.Columns[t.PrimaryKey].Type, vals[t.PrimaryKey])
}

// RowScopes appends the entries of a row in the log's scope index to dst: one
// "variable=value" per declared scope, in the order of Scopes. vals holds one
// value per column. It is false when a scope value is missing, that is NULL or
// empty (§3.4 rule 2); what it returns then is of no use.
func (t *Table) RowScopes(vals []ssp2.Value, dst []string) ([]string, bool) {
	var buf [96]byte
	for i := range t.Scopes {
		s := &t.Scopes[i]
		entry := append(buf[:0], s.Variable...)
		entry = append(entry, '=')
		entry, ok := appendText(entry, t.Columns[s.Column].Type, vals[s.Column])
		if !ok {
			return dst, false
		}
		dst = append(dst, string(entry))
	}
	return dst, true
}

// samePatterns says whether two tables declare the same scope patterns.
func samePatterns(a, b *Table) bool {
	return slices.EqualFunc(a.Scopes, b.Scopes, func(x, y Scope) bool {
		return x.Pattern == y.Pattern
	})
}
