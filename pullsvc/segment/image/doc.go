// Package image writes the SQLite images of the bootstrap (§5.3): a database file
// with one table of rows and one row that describes it.
//
// The file is written as its format describes, page after page, instead of through
// an SQL engine: an image is built once, in order, and never changed, so everything
// that makes an engine slow is of no use to it. How much faster that is the package's
// benchmark says. Tests open what is written in a real SQLite and check it there.
//
// A build holds a few megabytes whatever the number of rows: pages go out as they
// fill up, and keys are sorted in runs on disk when there are too many.
package image
