package schemaddl

import (
	"fmt"
	"hash/fnv"
	"strings"

	"github.com/syncpg/syncpg/schema"
)

// maxIdentifier is the longest name Postgres keeps; it cuts longer ones silently.
const maxIdentifier = 63

// ownSchema is the database schema of the product's own objects.
const ownSchema = "syncpg"

// indexPrefix marks the indexes the product owns (SEMANTICS, schema life cycle).
const indexPrefix = "sync_ix_"

// QuoteIdent quotes a name for SQL text.
func QuoteIdent(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

// quoteLiteral quotes a string constant for SQL text. Only names of the schema
// pass through it, never a client's values.
func quoteLiteral(s string) string {
	quoted := "'" + strings.ReplaceAll(s, "'", "''") + "'"
	if strings.Contains(s, `\`) {
		return "E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

// dollarQuote quotes a function body with a tag that does not occur in it.
func dollarQuote(body string) string {
	tag := "$body$"
	for n := 1; strings.Contains(body, tag); n++ {
		tag = fmt.Sprintf("$body%d$", n)
	}
	return tag + "\n" + body + tag
}

// limited returns prefix+name, or prefix and 16 hex digits of the FNV-1a 64-bit
// hash of name when the whole would be over 63 bytes.
func limited(prefix, name string) string {
	if len(prefix)+len(name) <= maxIdentifier {
		return prefix + name
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return fmt.Sprintf("%s%016x", prefix, h.Sum64())
}

// IndexName is the name in the database of an index declared under name.
func IndexName(name string) string { return limited(indexPrefix, name) }

// scopeIndexName is the declared name of the index that scans a scope column.
func scopeIndexName(t *schema.Table, column int) string {
	return t.Name + "__scope_" + t.Columns[column].Name
}

// referenceIndexName is the declared name of the index that finds children.
func referenceIndexName(t *schema.Table, column int) string {
	return t.Name + "__ref_" + t.Columns[column].Name
}

// functionName is the qualified, quoted name of a function generated for a table.
func functionName(prefix string, t *schema.Table) string {
	return "syncpg." + QuoteIdent(limited(prefix, t.Name))
}

// Prefixes of the functions generated for each table.
const (
	findRowsPrefix  = "sync_find_rows_"
	writeRowsPrefix = "sync_write_rows_"
	encodePrefix    = "sync_encode_"
)

// streamRowsPrefix is the prefix of the function that reads by a scope of the table.
func streamRowsPrefix(driving int) string { return fmt.Sprintf("sync_scan_rows_%d_", driving+1) }

// StreamRowsSQL is the statement that reads rows of a table by the values of one of its
// scope variables, the one at index driving of its scopes. Parameters: partition, the
// values (text[]), the row id behind which to begin among the rows of the first value,
// the scopes whose later variables have to match too (a JSON object of variable to
// values, text), the size over which a payload is left out (integer), the most rows to
// return (integer). Columns: index of the value, counted from 1; row id; server
// version; payload, NULL when it is left out. Rows come in the order of the values,
// then of row ids.
//
// The plans of the transaction must be pinned (PullPinPlans).
func StreamRowsSQL(t *schema.Table, driving int) string {
	return "select r.value_ord, r.row_id, r.server_version, r.payload from " +
		functionName(streamRowsPrefix(driving), t) + "($1,$2,$3,$4,$5,$6) as r"
}

// WriteRowsSQL is the statement that writes rows of a table: deletes first, then
// upserts in array order. Parameters, n upserts and a table with k columns of a
// kind: partition, deleted row ids (text[]), row ids (text[n]), server versions
// (bigint[n]), payloads (bytea[n]), column versions as array literals or NULL
// (text[n]), then the stored columns flattened row by row, by kind: text
// (string, json, blob_ref; text[n·k]), integer (bigint[n·k]), float (double
// precision[n·k]), boolean (boolean[n·k]), bytes (bytes, crdt; bytea[n·k]).
// Which columns are stored follows from [StoredColumns].
//
// The caller holds the partition lock.
func WriteRowsSQL(t *schema.Table) string {
	return "select " + functionName(writeRowsPrefix, t) + "($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11)"
}
