// Package smoke checks a running sync server from outside, the way an operator does after a deploy: two SSP2 clients write
// to it and read from it, and every row, value and version they end up with is compared with what was written.
//
// [Run] writes to one table of a schema, and to the parents that the rows of that table cannot do without, under scope
// values of its own. It deletes at the end what it wrote, so what stays is the history of the log.
package smoke
