package integration_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/schemaddl"
)

func (a *audit) clone() *audit {
	c := *a
	c.commits, c.outcomes, c.graves = maps.Clone(a.commits), maps.Clone(a.outcomes), maps.Clone(a.graves)
	c.rows, c.folded = maps.Clone(a.rows), maps.Clone(a.folded)
	return &c
}

// tables are the tables of a partition's truth, each with its column of the partition.
// Segments are not among them: they are kept elsewhere, and know of a time that is gone.
func (h *history) tables() map[string]string {
	of := map[string]string{}
	for _, name := range []string{"partitions", "partition_registry", "commits", "changes", "change_scopes", "push_results", "clients", "tombstones"} {
		of["syncpg.sync_"+name] = "partition"
	}
	for _, t := range h.schema.Tables {
		of["public."+schemaddl.QuoteIdent(t.Name)] = "_sync_partition"
	}
	return of
}

// keepsake is the table that keeps the rows of another one.
func keepsake(table string) string {
	_, name, _ := strings.Cut(table, ".")
	return "backups." + name
}

// makeKeepsakes makes the tables that backups are in.
func (h *history) makeKeepsakes(t *testing.T) {
	t.Helper()
	_, err := h.pool.Exec(t.Context(), `create schema backups`)
	require.NoError(t, err)
	for table := range h.tables() {
		_, err := h.pool.Exec(t.Context(), fmt.Sprintf(`create table %s (like %s)`, keepsake(table), table))
		require.NoError(t, err)
	}
}

// save makes a backup of the partition, if there is one.
func (h *history) save(ctx context.Context, rt *rapid.T) {
	h.read(ctx, rt)
	for table, column := range h.tables() {
		h.copyRows(ctx, rt, table, keepsake(table), column)
	}
	h.backup = h.ledger.clone()
}

// copyRows puts the rows that the partition has in one table in the place of those that it
// has in another, bit by bit.
func (h *history) copyRows(ctx context.Context, rt *rapid.T, from, to, column string) {
	require.NoError(rt, pgx.BeginFunc(ctx, h.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf(`delete from %s where %s = $1`, to, column), h.partition); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, fmt.Sprintf(`insert into %s select * from %s where %s = $1`, to, from, column), h.partition)
		return err
	}))
}

// restore puts the backup in the place of the partition and follows the runbook: the epoch
// rotates before anybody is served, and no server remembers anything (§2.1). Devices have
// what they were told, so what was acknowledged after the backup is lost, and what was not is
// sent again.
func (h *history) restore(ctx context.Context, rt *rapid.T) {
	for table, column := range h.tables() {
		h.copyRows(ctx, rt, keepsake(table), table, column)
	}
	h.rotate(ctx, rt)
	for i := range h.places.all {
		h.places.restart(i)
	}
	h.ledger = h.backup.clone()
	for _, d := range h.devices {
		d.sent = slices.DeleteFunc(slices.Clone(d.sent), func(c *sentCommit) bool {
			_, recorded := h.ledger.outcomes[commitRef{d.id, c.commit.ClientCommitID}]
			return c.answer != nil && !recorded
		})
	}
	h.seen.restored++
}
