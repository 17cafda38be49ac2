// Package schema reads the schema IR and compiles it into the form the server
// works with.
//
// The IR is a JSON document that the app's code generator writes: tables with
// typed columns (§2.4), one primary key each, scope patterns (§3.1), declared
// indexes and declared references. [Parse] refuses whatever the protocol or the
// database forbids before anything is served, and reports every problem at once,
// each with its table, column and [Rule].
//
// The package also fixes how a column value is spelled as text ([ScopeText]),
// which is how scope values and row ids appear everywhere else.
package schema
