package schema

import (
	"fmt"
	"strings"
)

// Rule names what a schema violates.
type Rule string

// Rules about the form of the document.
const (
	// RuleSyntax: the document is UTF-8 and well-formed JSON.
	RuleSyntax Rule = "syntax"
	// RuleUnknownField: an object has no field the IR does not know.
	RuleUnknownField Rule = "unknown_field"
	// RuleDuplicateField: an object has each field once.
	RuleDuplicateField Rule = "duplicate_field"
	// RuleMissingField: an object has every field that is not optional.
	RuleMissingField Rule = "missing_field"
	// RuleFieldType: a field has the JSON type the IR gives it; a number is an
	// integer of 32 bits.
	RuleFieldType Rule = "field_type"
	// RuleIRVersion: irVersion is 1.
	RuleIRVersion Rule = "ir_version"
	// RuleVersion: schemaVersion is at least 1, and schemaVersions ascends to it.
	RuleVersion Rule = "version"
)

// Rules about names (SEMANTICS §4).
const (
	// RuleIdentifier: a name is neither empty nor holds U+0000.
	RuleIdentifier Rule = "identifier"
	// RuleIdentifierTooLong: a table or column name has at most 63 bytes, since
	// Postgres would cut it silently.
	RuleIdentifierTooLong Rule = "identifier_too_long"
	// RuleReservedName: no table begins with sync_, no column with _sync_ or
	// _syncular_ (in any case), and no column is named like a system column of
	// Postgres.
	RuleReservedName Rule = "reserved_name"
	// RuleDuplicateTable: table names are unique.
	RuleDuplicateTable Rule = "duplicate_table"
	// RuleDuplicateColumn: column names are unique in their table.
	RuleDuplicateColumn Rule = "duplicate_column"
	// RuleDuplicateIndex: index names are unique in the schema, as in Postgres.
	RuleDuplicateIndex Rule = "duplicate_index"
)

// Rules about tables and columns.
const (
	// RuleNoTables: a schema has a table.
	RuleNoTables Rule = "no_tables"
	// RuleTooManyColumns: a table has at most 1,590 columns; Postgres ends at
	// 1,600 with ours.
	RuleTooManyColumns Rule = "too_many_columns"
	// RuleColumnType: a column has one of the eight types (§2.4).
	RuleColumnType Rule = "column_type"
	// RuleUnknownColumn: a key, scope, index or reference names a column of its
	// table.
	RuleUnknownColumn Rule = "unknown_column"
	// RuleKeyType: the primary key is not bytes, blob_ref or crdt (§5.9.1, §5.10.1).
	RuleKeyType Rule = "key_type"
	// RuleKeyNullable: the primary key is not nullable.
	RuleKeyNullable Rule = "key_nullable"
	// RuleKeyEncrypted: the primary key is not encrypted (§5.11).
	RuleKeyEncrypted Rule = "key_encrypted"
	// RuleCRDTType: a crdt column, and no other, names a crdtType with a merger
	// (§5.10.1).
	RuleCRDTType Rule = "crdt_type"
	// RuleEncryptedCRDT: a crdt column is not encrypted (§5.11).
	RuleEncryptedCRDT Rule = "encrypted_crdt"
	// RuleEncryptedType: an encrypted column has type bytes (§5.11).
	RuleEncryptedType Rule = "encrypted_type"
	// RuleDeclaredType: an encrypted column, and no other, has a declaredType,
	// which is one of the column types (§5.11).
	RuleDeclaredType Rule = "declared_type"
)

// Rules about scopes (§3.1).
const (
	// RuleNoScope: a table has a scope pattern.
	RuleNoScope Rule = "no_scope"
	// RuleScopePattern: a pattern is prefix:{variable}, nothing empty, exactly
	// one variable, without '=' or ':' in it.
	RuleScopePattern Rule = "scope_pattern"
	// RuleScopeVariable: a scope's variable, when given, is that of its pattern.
	RuleScopeVariable Rule = "scope_variable"
	// RuleScopeTwoColumns: a variable stands for one column of a table.
	RuleScopeTwoColumns Rule = "scope_two_columns"
	// RuleDuplicateScope: a table declares a variable once.
	RuleDuplicateScope Rule = "duplicate_scope"
	// RuleScopeType: a scope column is not bytes, blob_ref or crdt.
	RuleScopeType Rule = "scope_type"
	// RuleScopeEncrypted: a scope column is not encrypted (§5.11).
	RuleScopeEncrypted Rule = "scope_encrypted"
)

// Rules about declared indexes.
const (
	// RuleIndexColumns: an index has 1 to 31 columns (Postgres takes 32, one of
	// which is the partition), each once.
	RuleIndexColumns Rule = "index_columns"
	// RuleIndexCRDT: an index has no crdt column.
	RuleIndexCRDT Rule = "index_crdt"
	// RuleIndexEncrypted: a unique index has no encrypted column. Equal
	// plaintexts have different envelopes (§5.11), so the server could not
	// keep the promise.
	RuleIndexEncrypted Rule = "index_encrypted"
)

// Rules about declared references (SEMANTICS §1).
const (
	// RuleReferenceParent: the parent is a table of the schema.
	RuleReferenceParent Rule = "reference_parent"
	// RuleReferenceType: the column has the type of the parent's key, which is
	// not json: equal documents with different texts are different row ids.
	RuleReferenceType Rule = "reference_type"
	// RuleReferenceScopes: child and parent declare the same scope patterns.
	RuleReferenceScopes Rule = "reference_scopes"
	// RuleReferenceAction: onDelete is RESTRICT, CASCADE or SET NULL.
	RuleReferenceAction Rule = "reference_action"
	// RuleReferenceSetNull: SET NULL needs a nullable column that is not a scope
	// column, since those never change (§3.4 rule 5).
	RuleReferenceSetNull Rule = "reference_set_null"
	// RuleDuplicateReference: a column references one parent.
	RuleDuplicateReference Rule = "duplicate_reference"
	// RuleReferenceStored: the column is stored typed, so a table with
	// materialize false may reference only by its scope columns.
	RuleReferenceStored Rule = "reference_stored"
)

// Problem is one violation of a rule by a schema.
type Problem struct { //nolint:errname // a problem of the schema, listed and printed; being an error is secondary
	Path    string // place in the document, such as tables[0].columns[2]; "" for the whole
	Table   string // table name, "" outside tables
	Column  string // column name, "" where no column is concerned
	Rule    Rule
	Message string // what is wrong, in words
}

// Error names table, column, rule and place.
func (p Problem) Error() string {
	var b strings.Builder
	if p.Table != "" {
		fmt.Fprintf(&b, "table %q: ", p.Table)
	}
	if p.Column != "" {
		fmt.Fprintf(&b, "column %q: ", p.Column)
	}
	fmt.Fprintf(&b, "%s [%s", p.Message, p.Rule)
	if p.Path != "" {
		fmt.Fprintf(&b, " at %s", p.Path)
	}
	b.WriteByte(']')
	return b.String()
}

// Errors is everything that is wrong with a schema: its form first, then its
// meaning.
type Errors struct { //nolint:errname // holds problems, and is what Parse returns
	Problems []Problem // never empty
}

// Error has one problem on each line.
func (e *Errors) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.Error()
	}
	return "schema: " + strings.Join(lines, "\n")
}

// Unwrap returns the problems, so that errors.As finds a Problem.
func (e *Errors) Unwrap() []error {
	errs := make([]error, len(e.Problems))
	for i, p := range e.Problems {
		errs[i] = p
	}
	return errs
}
