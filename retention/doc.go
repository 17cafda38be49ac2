// Package retention looks after the logs of partitions: it prunes them (§4.6), compacts
// them, and gives them a new epoch after a backup was restored (§2.1).
//
// Pruning advances the horizon of a partition and deletes the commits up to it, with their
// changes, scope entries and tombstones. How far it goes is for a [Policy] to say, and for
// the cursors of the clients that still pull. A client that stayed away for longer is
// answered with a reset (sync.cursor_expired) and bootstraps again. Outcomes of pushes stay
// for ever: a client that comes back after years may still send a commit again (§2.3).
//
// Compaction deletes changes between the horizon and the newest commit that a later change
// of the same row, under the same scopes, supersedes. Every client converges as before. A
// change goes when what supersedes it is among the 200,000 changes or so that are looked at
// together; more than that are not, so that no memory depends on the length of a log.
//
// Both work in batches, each in a transaction of its own that decides anew, so that they
// can be interrupted at any time and that a push waits for one batch at most. Between two
// batches others go first, if there are any.
package retention
