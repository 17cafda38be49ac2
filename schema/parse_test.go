package schema_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/ssp2"
)

// object and list are JSON under construction.
type (
	object = map[string]any
	list   = []any
)

func column(name, typ string, more ...object) object {
	c := object{"name": name, "type": typ, "nullable": false}
	for _, m := range more {
		maps.Copy(c, m)
	}
	return c
}

func nullable(name, typ string, more ...object) object {
	return column(name, typ, append(more, object{"nullable": true})...)
}

func encrypted(name, declaredType string) object {
	return column(name, "bytes", object{"encrypted": true, "declaredType": declaredType})
}

func index(name string, columns ...any) object {
	return object{"name": name, "columns": append(list{}, columns...)}
}

func reference(column, parent, onDelete string) object {
	return object{"column": column, "parentTable": parent, "onDelete": onDelete}
}

// table has a key "id" and a scope "org:{org_id}", and what is given.
func table(name string, columns ...any) object {
	return object{
		"name": name, "primaryKey": "id",
		"columns": append(list{column("id", "string"), column("org_id", "string")}, columns...),
		"scopes":  list{object{"pattern": "org:{org_id}"}},
	}
}

// with replaces fields of a JSON object.
func with(o object, field string, value any) object {
	o[field] = value
	return o
}

func without(o object, field string) object {
	delete(o, field)
	return o
}

func document(tables ...any) object {
	return object{"irVersion": 1, "schemaVersion": 1, "tables": append(list{}, tables...)}
}

func marshal(tb testing.TB, v any) []byte {
	tb.Helper()
	b, err := json.Marshal(v)
	require.NoError(tb, err)
	return b
}

// problems parses and returns what is wrong, messages left out.
func problems(tb testing.TB, ir []byte) []schema.Problem {
	tb.Helper()
	_, err := schema.Parse(ir)
	if err == nil {
		return nil
	}
	var errs *schema.Errors
	require.ErrorAs(tb, err, &errs)
	require.NotEmpty(tb, errs.Problems)
	return errs.Problems
}

var problem = cmpopts.IgnoreFields(schema.Problem{}, "Message", "Path")

func TestParseRefuses(t *testing.T) {
	t.Parallel()

	long := strings.Repeat("ü", 31) + "ab" // 64 bytes, 33 characters
	scopes := func(scopes ...any) object {
		return document(with(table("t", column("other", "string"), column("n", "integer")), "scopes", scopes))
	}
	keyed := func(key object) object {
		return document(with(with(table("t"), "columns", list{column("org_id", "string"), key}), "primaryKey", key["name"]))
	}
	scoped := func(col object) object {
		return document(with(table("t", col), "scopes", list{object{"pattern": "x:{x}", "column": col["name"]}}))
	}
	indexed := func(x object, columns ...any) object {
		return document(with(table("t", columns...), "indexes", list{x}))
	}
	many := func(n int) list {
		columns := list{}
		for i := range n {
			columns = append(columns, column(fmt.Sprintf("c%d", i), "string"))
		}
		return columns
	}
	names := func(n int) list {
		names := list{}
		for i := range n {
			names = append(names, fmt.Sprintf("c%d", i))
		}
		return names
	}
	referring := func(refs ...any) object {
		return document(table("parents"), with(table("t",
			column("parent_id", "string"), nullable("other_id", "string"), nullable("n", "integer"),
		), "references", refs))
	}

	for _, tt := range []struct {
		name string
		ir   object
		want schema.Problem
	}{
		// Form.
		{"unknown field of the document", with(document(table("t")), "schemaVerison", 1), schema.Problem{Rule: schema.RuleUnknownField}},
		{"unknown field of a table", document(with(table("t"), "primary_key", "id")), schema.Problem{Table: "t", Rule: schema.RuleUnknownField}},
		{"unknown field of a column", document(table("t", column("a", "string", object{"null": true}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleUnknownField}},
		{"unknown field of a scope", scopes(object{"pattern": "org:{org_id}", "col": "org_id"}), schema.Problem{Table: "t", Rule: schema.RuleUnknownField}},
		{"unknown field of an index", indexed(with(index("i", "id"), "where", "true")), schema.Problem{Table: "t", Rule: schema.RuleUnknownField}},
		{"unknown field of a reference", referring(with(reference("parent_id", "parents", "CASCADE"), "onUpdate", "CASCADE")), schema.Problem{Table: "t", Rule: schema.RuleUnknownField}},
		{"field in another case", document(with(table("t"), "PrimaryKey", "id")), schema.Problem{Table: "t", Rule: schema.RuleUnknownField}},
		{"missing irVersion", without(document(table("t")), "irVersion"), schema.Problem{Rule: schema.RuleMissingField}},
		{"missing schemaVersion", without(document(table("t")), "schemaVersion"), schema.Problem{Rule: schema.RuleMissingField}},
		{"missing table name", document(without(table("t"), "name")), schema.Problem{Rule: schema.RuleMissingField}},
		{"missing primary key", document(without(table("t"), "primaryKey")), schema.Problem{Table: "t", Rule: schema.RuleMissingField}},
		{"missing column type", document(table("t", without(column("a", "string"), "type"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleMissingField}},
		{"missing nullable", document(table("t", without(column("a", "string"), "nullable"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleMissingField}},
		{"string for a number", with(document(table("t")), "schemaVersion", "1"), schema.Problem{Rule: schema.RuleFieldType}},
		{"fraction for an integer", with(document(table("t")), "schemaVersion", json.Number("1.0")), schema.Problem{Rule: schema.RuleFieldType}},
		{"version beyond 32 bits", with(document(table("t")), "schemaVersion", json.Number("4294967297")), schema.Problem{Rule: schema.RuleFieldType}},
		{"null for a boolean", document(with(table("t"), "materialize", nil)), schema.Problem{Table: "t", Rule: schema.RuleFieldType}},
		{"number for a boolean", document(with(table("t"), "materialize", 1)), schema.Problem{Table: "t", Rule: schema.RuleFieldType}},
		{"number for a string", document(with(table("t"), "primaryKey", 1)), schema.Problem{Table: "t", Rule: schema.RuleFieldType}},
		{"object for an array", document(with(table("t"), "scopes", object{})), schema.Problem{Table: "t", Rule: schema.RuleFieldType}},
		{"string for an object", document("t"), schema.Problem{Rule: schema.RuleFieldType}},
		{"number in index columns", indexed(index("i", "id", 1)), schema.Problem{Table: "t", Rule: schema.RuleFieldType}},
		{"other irVersion", with(document(table("t")), "irVersion", 2), schema.Problem{Rule: schema.RuleIRVersion}},
		{"version zero", with(document(table("t")), "schemaVersion", 0), schema.Problem{Rule: schema.RuleVersion}},
		{"negative version", with(document(table("t")), "schemaVersion", -1), schema.Problem{Rule: schema.RuleVersion}},
		{"history ends elsewhere", with(document(table("t")), "schemaVersions", list{object{"version": 1}, object{"version": 2}}), schema.Problem{Rule: schema.RuleVersion}},
		{"history repeats a version", with(document(table("t")), "schemaVersions", list{object{"version": 1}, object{"version": 1}}), schema.Problem{Rule: schema.RuleVersion}},
		{"history begins at zero", with(document(table("t")), "schemaVersions", list{object{"version": 0}, object{"version": 1}}), schema.Problem{Rule: schema.RuleVersion}},
		{"no tables", document(), schema.Problem{Rule: schema.RuleNoTables}},
		{"tables missing", without(document(), "tables"), schema.Problem{Rule: schema.RuleNoTables}},

		// Names.
		{"empty table name", document(table("")), schema.Problem{Rule: schema.RuleIdentifier}},
		{"empty column name", document(table("t", column("", "string"))), schema.Problem{Table: "t", Rule: schema.RuleIdentifier}},
		{"empty index name", indexed(index("", "id")), schema.Problem{Table: "t", Rule: schema.RuleIdentifier}},
		{"NUL in a table name", document(table("a\x00b")), schema.Problem{Table: "a\x00b", Rule: schema.RuleIdentifier}},
		{"NUL in a column name", document(table("t", column("a\x00b", "string"))), schema.Problem{Table: "t", Column: "a\x00b", Rule: schema.RuleIdentifier}},
		{"NUL in an index name", indexed(index("a\x00b", "id")), schema.Problem{Table: "t", Rule: schema.RuleIdentifier}},
		{"table name of 64 bytes", document(table(long)), schema.Problem{Table: long, Rule: schema.RuleIdentifierTooLong}},
		{"column name of 64 bytes", document(table("t", column(long, "string"))), schema.Problem{Table: "t", Column: long, Rule: schema.RuleIdentifierTooLong}},
		{"table named sync_", document(table("sync_commits")), schema.Problem{Table: "sync_commits", Rule: schema.RuleReservedName}},
		{"table named SYNC_", document(table("SYNC_commits")), schema.Problem{Table: "SYNC_commits", Rule: schema.RuleReservedName}},
		{"column named _sync_", document(table("t", column("_sync_payload", "bytes"))), schema.Problem{Table: "t", Column: "_sync_payload", Rule: schema.RuleReservedName}},
		{"column named _syncular_", document(table("t", column("_syncular_version", "integer"))), schema.Problem{Table: "t", Column: "_syncular_version", Rule: schema.RuleReservedName}},
		{"column named _Syncular_", document(table("t", column("_Syncular_version", "integer"))), schema.Problem{Table: "t", Column: "_Syncular_version", Rule: schema.RuleReservedName}},
		{"column named like a system column", document(table("t", column("xmin", "string"))), schema.Problem{Table: "t", Column: "xmin", Rule: schema.RuleReservedName}},
		{"duplicate table", document(table("t"), table("t")), schema.Problem{Table: "t", Rule: schema.RuleDuplicateTable}},
		{"duplicate column", document(table("t", column("a", "string"), column("a", "integer"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleDuplicateColumn}},
		{"duplicate index in a table", document(with(table("t"), "indexes", list{index("i", "id"), index("i", "org_id")})), schema.Problem{Table: "t", Rule: schema.RuleDuplicateIndex}},
		{"duplicate index in two tables", document(with(table("s"), "indexes", list{index("i", "id")}), with(table("t"), "indexes", list{index("i", "id")})), schema.Problem{Table: "t", Rule: schema.RuleDuplicateIndex}},

		// Columns and keys.
		{"too many columns", document(table("t", many(1589)...)), schema.Problem{Table: "t", Rule: schema.RuleTooManyColumns}},
		{"unknown column type", document(table("t", column("a", "text"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleColumnType}},
		{"key names no column", document(with(table("t"), "primaryKey", "ID")), schema.Problem{Table: "t", Column: "ID", Rule: schema.RuleUnknownColumn}},
		{"key of type bytes", keyed(column("k", "bytes")), schema.Problem{Table: "t", Column: "k", Rule: schema.RuleKeyType}},
		{"key of type blob_ref", keyed(column("k", "blob_ref")), schema.Problem{Table: "t", Column: "k", Rule: schema.RuleKeyType}},
		{"key of type crdt", keyed(column("k", "crdt", object{"crdtType": "yjs-doc"})), schema.Problem{Table: "t", Column: "k", Rule: schema.RuleKeyType}},
		{"encrypted key", keyed(encrypted("k", "string")), schema.Problem{Table: "t", Column: "k", Rule: schema.RuleKeyEncrypted}},
		{"nullable key", keyed(nullable("k", "string")), schema.Problem{Table: "t", Column: "k", Rule: schema.RuleKeyNullable}},
		{"unknown crdtType", document(table("t", nullable("a", "crdt", object{"crdtType": "rga"}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleCRDTType}},
		{"crdt without crdtType", document(table("t", nullable("a", "crdt"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleCRDTType}},
		{"crdtType of another column", document(table("t", nullable("a", "bytes", object{"crdtType": "yjs-doc"}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleCRDTType}},
		{"encrypted crdt", document(table("t", column("a", "crdt", object{"crdtType": "yjs-doc", "encrypted": true, "declaredType": "bytes"}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleEncryptedCRDT}},
		{"encrypted, declared crdt", document(table("t", encrypted("a", "crdt"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleEncryptedCRDT}},
		{"encrypted, not bytes", document(table("t", column("a", "string", object{"encrypted": true, "declaredType": "string"}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleEncryptedType}},
		{"encrypted without declaredType", document(table("t", column("a", "bytes", object{"encrypted": true}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleDeclaredType}},
		{"unknown declaredType", document(table("t", encrypted("a", "text"))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleDeclaredType}},
		{"declaredType without encrypted", document(table("t", column("a", "bytes", object{"declaredType": "string"}))), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleDeclaredType}},

		// Scopes.
		{"no scope pattern", document(with(table("t"), "scopes", list{})), schema.Problem{Table: "t", Rule: schema.RuleNoScope}},
		{"scopes missing", document(without(table("t"), "scopes")), schema.Problem{Table: "t", Rule: schema.RuleNoScope}},
		{"pattern without variable", scopes(object{"pattern": "org"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern without prefix", scopes(object{"pattern": "{org_id}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern with an empty prefix", scopes(object{"pattern": ":{org_id}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern with an empty variable", scopes(object{"pattern": "org:{}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern with two variables", scopes(object{"pattern": "org:{org_id}:{other}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern with a tail", scopes(object{"pattern": "org:{org_id}/x"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern with nested braces", scopes(object{"pattern": "org:{{org_id}}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern without colon", scopes(object{"pattern": "org{org_id}"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"pattern not closed", scopes(object{"pattern": "org:{org_id"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"variable with =", scopes(object{"pattern": "org:{a=b}", "column": "org_id"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"variable with a colon", scopes(object{"pattern": "org:{a:b}", "column": "org_id"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"variable with NUL", scopes(object{"pattern": "org:{a\x00b}", "column": "org_id"}), schema.Problem{Table: "t", Rule: schema.RuleScopePattern}},
		{"variable other than the pattern's", scopes(object{"pattern": "org:{org_id}", "variable": "org"}), schema.Problem{Table: "t", Rule: schema.RuleScopeVariable}},
		{"one variable on two columns", scopes(object{"pattern": "org:{org_id}"}, object{"pattern": "o:{org_id}", "column": "other"}), schema.Problem{Table: "t", Column: "other", Rule: schema.RuleScopeTwoColumns}},
		{"the same variable twice", scopes(object{"pattern": "org:{org_id}"}, object{"pattern": "o:{org_id}"}), schema.Problem{Table: "t", Column: "org_id", Rule: schema.RuleDuplicateScope}},
		{"scope names no column", scopes(object{"pattern": "org:{org_id}", "column": "nope"}), schema.Problem{Table: "t", Column: "nope", Rule: schema.RuleUnknownColumn}},
		{"scope without column names no column", scopes(object{"pattern": "org:{nope}"}), schema.Problem{Table: "t", Column: "nope", Rule: schema.RuleUnknownColumn}},
		{"scope of type bytes", scoped(column("a", "bytes")), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleScopeType}},
		{"scope of type blob_ref", scoped(column("a", "blob_ref")), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleScopeType}},
		{"scope of type crdt", scoped(column("a", "crdt", object{"crdtType": "yjs-doc"})), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleScopeType}},
		{"encrypted scope", scoped(encrypted("a", "string")), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleScopeEncrypted}},

		// Indexes.
		{"index without columns", indexed(index("i")), schema.Problem{Table: "t", Rule: schema.RuleIndexColumns}},
		{"index of 32 columns", indexed(index("i", names(32)...), many(32)...), schema.Problem{Table: "t", Rule: schema.RuleIndexColumns}},
		{"index with a column twice", indexed(index("i", "id", "id")), schema.Problem{Table: "t", Column: "id", Rule: schema.RuleIndexColumns}},
		{"index names no column", indexed(index("i", "nope")), schema.Problem{Table: "t", Column: "nope", Rule: schema.RuleUnknownColumn}},
		{"index over crdt", indexed(index("i", "a"), nullable("a", "crdt", object{"crdtType": "yjs-doc"})), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleIndexCRDT}},
		{"unique index over an encrypted column", indexed(with(index("i", "org_id", "a"), "unique", true), encrypted("a", "string")), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleIndexEncrypted}},

		// References.
		{"reference to no table", referring(reference("parent_id", "nope", "CASCADE")), schema.Problem{Table: "t", Column: "parent_id", Rule: schema.RuleReferenceParent}},
		{"reference by no column", referring(reference("nope", "parents", "CASCADE")), schema.Problem{Table: "t", Column: "nope", Rule: schema.RuleUnknownColumn}},
		{"reference of another type", referring(reference("n", "parents", "CASCADE")), schema.Problem{Table: "t", Column: "n", Rule: schema.RuleReferenceType}},
		{"reference to a json key", document(
			with(with(table("parents"), "columns", list{column("id", "json"), column("org_id", "string")}), "primaryKey", "id"),
			with(table("t", column("a", "json")), "references", list{reference("a", "parents", "CASCADE")}),
		), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleReferenceType}},
		{"parent with other patterns", document(
			with(table("parents"), "scopes", list{object{"pattern": "company:{org_id}"}}),
			with(table("t", column("a", "string")), "references", list{reference("a", "parents", "CASCADE")}),
		), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleReferenceScopes}},
		{"parent with fewer patterns", document(
			table("parents"),
			with(with(table("t", column("a", "string")), "references", list{reference("a", "parents", "CASCADE")}),
				"scopes", list{object{"pattern": "org:{org_id}"}, object{"pattern": "a:{a}"}}),
		), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleReferenceScopes}},
		{"unknown onDelete", referring(reference("parent_id", "parents", "NO ACTION")), schema.Problem{Table: "t", Column: "parent_id", Rule: schema.RuleReferenceAction}},
		{"onDelete in lower case", referring(reference("parent_id", "parents", "cascade")), schema.Problem{Table: "t", Column: "parent_id", Rule: schema.RuleReferenceAction}},
		{"SET NULL of a column that is not nullable", referring(reference("parent_id", "parents", "SET NULL")), schema.Problem{Table: "t", Column: "parent_id", Rule: schema.RuleReferenceSetNull}},
		{"SET NULL of a scope column", document(
			with(table("parents", nullable("a", "string")), "scopes", list{object{"pattern": "a:{a}"}}),
			with(with(table("t", nullable("a", "string")), "references", list{reference("a", "parents", "SET NULL")}), "scopes", list{object{"pattern": "a:{a}"}}),
		), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleReferenceSetNull}},
		{"two references of a column", referring(reference("parent_id", "parents", "CASCADE"), reference("parent_id", "parents", "RESTRICT")), schema.Problem{Table: "t", Column: "parent_id", Rule: schema.RuleDuplicateReference}},
		{"reference of a column that is not stored", document(table("parents"),
			with(with(table("t", column("a", "string")), "references", list{reference("a", "parents", "CASCADE")}), "materialize", false),
		), schema.Problem{Table: "t", Column: "a", Rule: schema.RuleReferenceStored}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := problems(t, marshal(t, tt.ir))
			require.Empty(t, cmp.Diff([]schema.Problem{tt.want}, got, problem))
			require.NotEmpty(t, got[0].Message)
		})
	}
}

func TestParseRefusesText(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name, ir string
		want     schema.Problem
	}{
		{"empty", ``, schema.Problem{Rule: schema.RuleSyntax}},
		{"not JSON", `{"irVersion":1,}`, schema.Problem{Rule: schema.RuleSyntax}},
		{"two documents", `{} {}`, schema.Problem{Rule: schema.RuleSyntax}},
		{"not UTF-8", "{\"irVersion\":\"\xff\"}", schema.Problem{Rule: schema.RuleSyntax}},
		{"nested without end", strings.Repeat(`{"extensions":`, 1_000_000), schema.Problem{Rule: schema.RuleSyntax}},
		{"not an object", ` [1]`, schema.Problem{Rule: schema.RuleFieldType}},
		{
			"duplicate field",
			`{"irVersion":1,"schemaVersion":1,"schemaVersion":2,"tables":[{"name":"t","primaryKey":"id",
			"columns":[{"name":"id","type":"string","nullable":false}],"scopes":[{"pattern":"x:{id}"}]}]}`,
			schema.Problem{Rule: schema.RuleDuplicateField},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			require.Empty(t, cmp.Diff([]schema.Problem{tt.want}, problems(t, []byte(tt.ir)), problem))
		})
	}
}

func TestParseReportsEveryProblem(t *testing.T) {
	t.Parallel()

	ir := document(
		with(table("a", column("x", "text"), column("xmin", "string", object{"lenght": 1})), "primaryKey", "nope"),
		with(table("sync_b"), "scopes", list{}),
		with(table("c"), "references", list{reference("org_id", "z", "NEVER")}),
	)
	ir["schemaVersion"] = 0
	_, err := schema.Parse(marshal(t, ir))

	var errs *schema.Errors
	require.ErrorAs(t, err, &errs)
	type at struct {
		Path, Column string
		Rule         schema.Rule
	}
	got := make([]at, len(errs.Problems))
	for i, p := range errs.Problems {
		got[i] = at{p.Path, p.Column, p.Rule}
	}
	require.ElementsMatch(t, []at{
		{"schemaVersion", "", schema.RuleVersion},
		{"tables[0].columns[3].lenght", "xmin", schema.RuleUnknownField},
		{"tables[0].columns[2]", "x", schema.RuleColumnType},
		{"tables[0].columns[3]", "xmin", schema.RuleReservedName},
		{"tables[0].primaryKey", "nope", schema.RuleUnknownColumn},
		{"tables[1]", "", schema.RuleReservedName},
		{"tables[1]", "", schema.RuleNoScope},
		{"tables[2].references[0]", "org_id", schema.RuleReferenceParent},
		{"tables[2].references[0]", "org_id", schema.RuleReferenceAction},
	}, got)

	var one schema.Problem
	require.ErrorAs(t, err, &one)
	require.Equal(t, len(errs.Problems), strings.Count(err.Error(), "\n")+1)
	require.Contains(t, err.Error(), `table "a": column "x": there is no column type "text" [column_type at tables[0].columns[2]]`)
	require.ErrorIs(t, err, errs.Problems[0])
}

func TestParseAccepts(t *testing.T) {
	t.Parallel()

	limit := strings.Repeat("ü", 31) + "a" // 63 bytes
	columns := list{}
	for i := range 1588 {
		columns = append(columns, column(fmt.Sprintf("c%d", i), "string"))
	}
	for name, ir := range map[string]object{
		"names that differ in case": document(
			with(table("T", column("a", "string"), column("A", "string")), "indexes", list{index("i", "id"), index("I", "id")}),
			table("t"),
		),
		"names of 63 bytes":             document(table(limit, column(limit, "string"))),
		"index name of more":            document(with(table("t"), "indexes", list{index(strings.Repeat("i", 200), "id")})),
		"1,590 columns":                 document(table("t", columns...)),
		"a name that needs quoting":     document(table(`t"; drop table x`, column("order", "string"), column("XMIN", "string"))),
		"an index over bytes":           document(with(table("t", column("b", "bytes")), "indexes", list{index("i", "b")})),
		"ignored fields anywhere":       with(document(with(table("t", column("a", "string", object{"extensions": 1})), "ftsIndexes", list{object{"x": list{}}})), "subscriptions", nil),
		"an empty history":              with(document(table("t")), "schemaVersions", list{}),
		"a history with a gap":          with(with(document(table("t")), "schemaVersion", 7), "schemaVersions", list{object{"version": 2, "migrations": list{"a"}}, object{"version": 7}}),
		"reference to itself":           document(with(table("t", nullable("up", "string")), "references", list{reference("up", "t", "SET NULL")})),
		"reference to a later table":    document(with(table("t", column("a", "string")), "references", list{reference("a", "u", "RESTRICT")}), table("u")),
		"two variables of one column":   document(with(table("t"), "scopes", list{object{"pattern": "a:{a}", "column": "org_id"}, object{"pattern": "b:{b}", "column": "org_id"}})),
		"a prefix with colons":          document(with(table("t"), "scopes", list{object{"pattern": "a:b:{org_id}"}})),
		"the key as scope":              document(with(table("t"), "scopes", list{object{"pattern": "id:{id}"}})),
		"encrypted false":               document(table("t", column("a", "string", object{"encrypted": false}))),
		"reference by a scope, untyped": document(table("u"), with(with(table("t"), "references", list{reference("org_id", "u", "RESTRICT")}), "materialize", false)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := schema.Parse(marshal(t, ir))
			require.NoError(t, err)
		})
	}
}

func TestParseCompiles(t *testing.T) {
	t.Parallel()

	ir := document(
		table("parents"),
		with(with(with(table("t",
			nullable("parent_id", "string"),
			column("n", "integer"),
			nullable("doc", "crdt", object{"crdtType": "yjs-doc"}),
			encrypted("secret", "string"),
		), "references", list{reference("parent_id", "parents", "SET NULL")}),
			"indexes", list{
				with(index("by_n", "n", "parent_id"), "unique", true),
				index("on_clients_only", "secret", "n"),
			}), "scopes", list{object{"pattern": "org:{org_id}"}}),
	)
	s, err := schema.Parse(marshal(t, ir))
	require.NoError(t, err)

	require.Len(t, s.Tables, 2)
	got, ok := s.Table("t")
	require.True(t, ok)
	require.Same(t, s.Tables[1], got)
	require.Equal(t, 1, got.Index)
	require.Equal(t, []schema.Column{
		{Name: "id", Type: ssp2.TypeString},
		{Name: "org_id", Type: ssp2.TypeString},
		{Name: "parent_id", Type: ssp2.TypeString, Nullable: true},
		{Name: "n", Type: ssp2.TypeInteger},
		{Name: "doc", Type: ssp2.TypeCRDT, Nullable: true, CRDTType: "yjs-doc"},
		{Name: "secret", Type: ssp2.TypeBytes, Encrypted: true, DeclaredType: "string"},
	}, got.Columns)
	require.Equal(t, ssp2.Column{Name: "doc", Type: ssp2.TypeCRDT, Nullable: true}, got.Wire[4])
	require.Len(t, got.Wire, len(got.Columns))
	require.Equal(t, 0, got.PrimaryKey)
	require.Equal(t, []schema.Scope{{Pattern: "org:{org_id}", Prefix: "org", Variable: "org_id", Column: 1}}, got.Scopes)
	require.Equal(t, []schema.Index{{Name: "by_n", Columns: []int{3, 2}, Unique: true}}, got.Indexes)
	require.Len(t, got.References, 1)
	require.Equal(t, 2, got.References[0].Column)
	require.Same(t, s.Tables[0], got.References[0].Parent)
	require.Equal(t, schema.SetNull, got.References[0].OnDelete)
	require.True(t, got.Materialize)

	i, ok := got.ColumnIndex("n")
	require.True(t, ok)
	require.Equal(t, 3, i)
	_, ok = got.ColumnIndex("N")
	require.False(t, ok)
	_, ok = s.Table("T")
	require.False(t, ok)
	scope, ok := got.Scope("org_id")
	require.True(t, ok)
	require.Equal(t, 1, scope.Column)
	_, ok = got.Scope("org")
	require.False(t, ok)
	require.True(t, got.IsScope(1))
	require.False(t, got.IsScope(0))
}

func TestParseOrdersScopesByUTF16(t *testing.T) {
	t.Parallel()

	// U+1F600 is a surrogate pair from U+D83D, below U+FF5E, though above in UTF-8.
	s, err := schema.Parse(marshal(t, document(with(table("t"), "scopes", list{
		object{"pattern": "p:{\uff5e}", "column": "id"},
		object{"pattern": "p:{b}", "column": "id"},
		object{"pattern": "p:{\U0001F600}", "column": "id"},
		object{"pattern": "p:{a}", "column": "id"},
	}))))
	require.NoError(t, err)
	var got []string
	for _, scope := range s.Tables[0].Scopes {
		got = append(got, scope.Variable)
	}
	require.Equal(t, []string{"a", "b", "\U0001F600", "\uff5e"}, got)
}

func TestHasVariableIsTheUnionOverTables(t *testing.T) {
	t.Parallel()

	s, err := schema.Parse(marshal(t, document(
		table("a"), with(table("b"), "scopes", list{object{"pattern": "row:{row}", "column": "id"}}),
	)))
	require.NoError(t, err)
	require.True(t, s.HasVariable("org_id"))
	require.True(t, s.HasVariable("row"))
	require.False(t, s.HasVariable("id"))
}

func TestMaterializeDefaults(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name  string
		table object
		want  bool
	}{
		{"plain columns", table("t", column("a", "string")), true},
		{"only key and scopes", table("t"), true},
		{"one of two encrypted", table("t", column("a", "string"), encrypted("b", "string")), true},
		{"all encrypted", table("t", encrypted("a", "json"), encrypted("b", "string")), false},
		{"all encrypted, asked for", with(table("t", encrypted("a", "string")), "materialize", true), true},
		{"plain, declined", with(table("t", column("a", "string")), "materialize", false), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, err := schema.Parse(marshal(t, document(tt.table)))
			require.NoError(t, err)
			require.Equal(t, tt.want, s.Tables[0].Materialize)
		})
	}
}

func TestParseOptionsAddMergers(t *testing.T) {
	t.Parallel()

	ir := marshal(t, document(table("t", nullable("a", "crdt", object{"crdtType": "rga"}), nullable("b", "crdt", object{"crdtType": "yjs-doc"}))))
	s, err := schema.ParseOptions{CRDTTypes: []string{"rga"}}.Parse(ir)
	require.NoError(t, err)
	require.Equal(t, "rga", s.Tables[0].Columns[2].CRDTType)
}

func TestSampleCoversTheIR(t *testing.T) {
	t.Parallel()

	s, err := schema.Parse(sample.IR())
	require.NoError(t, err)
	types := map[ssp2.ColumnType]bool{}
	references, indexes, unique := 0, 0, 0
	for _, table := range s.Tables {
		for _, c := range table.Columns {
			types[c.Type] = true
		}
		references += len(table.References)
		indexes += len(table.Indexes)
		for _, x := range table.Indexes {
			if x.Unique {
				unique++
			}
		}
	}
	for typ := ssp2.TypeString; typ <= ssp2.TypeBlobRef; typ++ {
		require.True(t, types[typ], "column type %d", typ)
	}
	require.Positive(t, references)
	require.Positive(t, unique)
	require.Greater(t, indexes, unique)

	changed := sample.IR()
	changed[0] = 'x'
	require.NotEqual(t, changed, sample.IR(), "IR gives every caller a copy")
}

// The project's shared sample is not part of the repository; it is compared
// where it exists.
func TestParseReadsTheSharedSample(t *testing.T) {
	t.Parallel()

	ir, err := os.ReadFile(filepath.Join("..", "..", "shared", "schema", "sample.ir.json"))
	if errors.Is(err, os.ErrNotExist) {
		ir = sample.IR()
	} else {
		require.NoError(t, err)
	}
	s, err := schema.Parse(ir)
	require.NoError(t, err)
	again, err := schema.Parse(ir)
	require.NoError(t, err)
	require.Equal(t, s.Layout(), again.Layout())
}
