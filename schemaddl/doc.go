// Package schemaddl turns a compiled schema into database objects: the app's
// tables, the indexes the product owns, and the SQL functions whose bodies depend
// on the tables. It is the one room that writes SQL text from a schema; names go
// through [QuoteIdent] and values through parameters, never into the text.
//
// [Install] is for a database that has no schema yet, and repeats without effect
// on one that has this very schema. [Apply] also goes from an earlier version to a later
// one; [PlanBump] says what that comes to. [Check] only compares. A database with a later
// schema version is refused by all of them.
package schemaddl
