package schemaddl

import (
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// DefaultAppSchema is where app tables live unless the host says otherwise.
const DefaultAppSchema = "public"

// Kind says in which parameter array of a generated function a column travels.
type Kind uint8

// The parameter arrays, in the order of the function's parameters.
const (
	KindText Kind = iota
	KindInteger
	KindFloat
	KindBoolean
	KindBytes
	kinds
)

// KindOf returns the parameter array of a column type.
func KindOf(t ssp2.ColumnType) Kind {
	switch t {
	case ssp2.TypeInteger:
		return KindInteger
	case ssp2.TypeFloat:
		return KindFloat
	case ssp2.TypeBoolean:
		return KindBoolean
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return KindBytes
	default:
		return KindText
	}
}

// StoredColumns returns the indexes of the columns that have a typed column in
// the database, in declaration order: all of a materialized table, the scope
// columns of another.
func StoredColumns(t *schema.Table) []int {
	var stored []int
	for i := range t.Columns {
		if t.Materialize || t.IsScope(i) {
			stored = append(stored, i)
		}
	}
	return stored
}

// columnType is the database type of an app column. A json scope column is text:
// its scope value is the document as written, and has to be found by it.
func columnType(t *schema.Table, column int) string {
	switch t.Columns[column].Type {
	case ssp2.TypeInteger:
		return "bigint"
	case ssp2.TypeFloat:
		return "double precision"
	case ssp2.TypeBoolean:
		return "boolean"
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return "bytea"
	case ssp2.TypeJSON:
		if t.IsScope(column) {
			return "text"
		}
		return "jsonb"
	default:
		return "text"
	}
}

// systemColumn is one of the columns every app table has.
type systemColumn struct {
	name, typ string
	notNull   bool
}

var systemColumns = [...]systemColumn{
	{"_sync_partition", "text", true},
	{"_sync_row_id", "text", true},
	{"_sync_server_version", "bigint", true},
	{"_sync_payload", "bytea", true},
	{"_sync_column_versions", "bigint[]", false},
}

// ownedIndex is an index the product creates and may drop.
type ownedIndex struct {
	declared string // name before the prefix
	table    string
	columns  []string // after _sync_partition
	unique   bool
	rowID    bool // ends with _sync_row_id, so that a scan comes in row order
	fresh    bool // of a bump: the database does not have it like this yet
}

// keys returns the columns of the index, ours included.
func (x ownedIndex) keys() []string {
	keys := append([]string{"_sync_partition"}, x.columns...)
	if x.rowID {
		keys = append(keys, "_sync_row_id")
	}
	return keys
}

// signature identifies the definition, for telling a changed index from an equal one.
func (x ownedIndex) signature() string {
	return fmt.Sprintf("%s(%s) unique=%t rowid=%t", x.table, strings.Join(x.columns, ","), x.unique, x.rowID)
}

func (x ownedIndex) create(appSchema string) string {
	unique := ""
	if x.unique {
		unique = "unique "
	}
	columns := x.keys()
	for i, c := range columns {
		if !strings.HasPrefix(c, "_sync_") { // a reserved prefix
			columns[i] = QuoteIdent(c)
		}
	}
	return fmt.Sprintf("create %sindex %s on %s.%s (%s)", unique, QuoteIdent(IndexName(x.declared)),
		QuoteIdent(appSchema), QuoteIdent(x.table), strings.Join(columns, ", "))
}

// ownedIndexes returns the indexes of a schema: one per scope column, one per
// reference, and the declared ones of materialized tables.
func ownedIndexes(s *schema.Schema) ([]ownedIndex, error) {
	var all []ownedIndex
	for _, t := range s.Tables {
		covered := map[int]bool{}
		for _, sc := range t.Scopes {
			covered[sc.Column] = true
			all = append(all, ownedIndex{
				declared: scopeIndexName(t, sc.Column), table: t.Name,
				columns: []string{t.Columns[sc.Column].Name}, rowID: true,
			})
		}
		if !t.Materialize {
			continue
		}
		for _, r := range t.References {
			if covered[r.Column] {
				continue
			}
			covered[r.Column] = true
			all = append(all, ownedIndex{
				declared: referenceIndexName(t, r.Column), table: t.Name,
				columns: []string{t.Columns[r.Column].Name}, rowID: true,
			})
		}
		for _, x := range t.Indexes {
			columns := make([]string, len(x.Columns))
			for i, c := range x.Columns {
				columns[i] = t.Columns[c].Name
			}
			all = append(all, ownedIndex{declared: x.Name, table: t.Name, columns: columns, unique: x.Unique})
		}
	}
	seen := map[string]ownedIndex{}
	for _, x := range all {
		name := IndexName(x.declared)
		if other, ok := seen[name]; ok {
			return nil, fmt.Errorf("index %q of table %q and index %q of table %q have the same name in the database (%s): rename one",
				x.declared, x.table, other.declared, other.table, name)
		}
		seen[name] = x
	}
	return all, nil
}

func createTable(t *schema.Table, appSchema string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "create table %s.%s (\n", QuoteIdent(appSchema), QuoteIdent(t.Name))
	for _, i := range StoredColumns(t) {
		null := ""
		if !t.Columns[i].Nullable {
			null = " not null"
		}
		fmt.Fprintf(&b, "  %s %s%s,\n", QuoteIdent(t.Columns[i].Name), columnType(t, i), null)
	}
	for _, c := range systemColumns {
		collate, null := "", ""
		if c.typ == "text" {
			collate = ` collate "C"`
		}
		if c.notNull {
			null = " not null"
		}
		fmt.Fprintf(&b, "  %s %s%s%s,\n", c.name, c.typ, collate, null)
	}
	b.WriteString("  primary key (_sync_partition, _sync_row_id)\n)")
	return b.String()
}
