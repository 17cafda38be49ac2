package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schemaddl"
)

// pruneSpec is the body of a prune call; nil leaves the server's default.
type pruneSpec struct {
	ActiveWindowMs     *int64 `json:"activeWindowMs"`
	AgeForceMs         *int64 `json:"ageForceMs"`
	MinRetainedCommits *int64 `json:"minRetainedCommits"`
}

// policy says the same to the server, for which zero is the default and the least
// window of a clock of milliseconds is one.
func (s pruneSpec) policy() retention.Policy {
	var p retention.Policy
	if s.ActiveWindowMs != nil {
		p.ActiveWindow = cmp.Or(time.Duration(*s.ActiveWindowMs)*time.Millisecond, -1)
	}
	if s.AgeForceMs != nil {
		p.ForceAge = cmp.Or(time.Duration(*s.AgeForceMs)*time.Millisecond, time.Nanosecond)
	}
	if s.MinRetainedCommits != nil {
		p.KeepCommits = cmp.Or(*s.MinRetainedCommits, -1)
	}
	return p
}

// prune prunes the log and returns the horizon.
func (i *instance) prune(ctx context.Context, spec pruneSpec) (int64, error) {
	s, err := retention.New(i.pool, retention.Config{Policy: spec.policy(), Clock: i.clock.now, Logger: i.log})
	if err != nil {
		return 0, badRequest("%v", err)
	}
	result, err := s.Prune(ctx, i.partition, nil)
	if err != nil {
		return 0, err
	}
	return result.Horizon, nil
}

// backupSchema holds the copies that a backup consists of.
const backupSchema = "conformance_backup"

// captureBackup copies every table that a backup has: all but segments and blobs, and
// but those that say what is installed.
func (i *instance) captureBackup(ctx context.Context) error {
	return pgx.BeginTxFunc(ctx, i.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		backup := schemaddl.QuoteIdent(backupSchema)
		if _, err := tx.Exec(ctx, "drop schema if exists "+backup+" cascade"); err != nil {
			return fmt.Errorf("drop the older backup: %w", err)
		}
		if _, err := tx.Exec(ctx, "create schema "+backup); err != nil {
			return fmt.Errorf("make a backup: %w", err)
		}
		tables, err := backedUp(ctx, tx)
		if err != nil {
			return err
		}
		for _, t := range tables {
			if _, err := tx.Exec(ctx, "create table "+backup+"."+schemaddl.QuoteIdent(t.Schema+"."+t.Name)+" as table "+t.quoted()); err != nil {
				return fmt.Errorf("back up %s: %w", t.Name, err)
			}
		}
		return nil
	})
}

// restoreBackup does what an operator does: it stops the server, puts the tables back,
// rotates the log epochs and starts a server that remembers nothing.
func (i *instance) restoreBackup(ctx context.Context) error {
	if err := i.server.Stop(ctx); err != nil {
		return err
	}
	err := pgx.BeginFunc(ctx, i.pool, func(tx pgx.Tx) error {
		tables, err := backedUp(ctx, tx)
		if err != nil {
			return err
		}
		for _, t := range tables {
			if _, err := tx.Exec(ctx, "delete from "+t.quoted()); err != nil {
				return fmt.Errorf("empty %s: %w", t.Name, err)
			}
			sql := "insert into " + t.quoted() + " table " + schemaddl.QuoteIdent(backupSchema) + "." + schemaddl.QuoteIdent(t.Schema+"."+t.Name)
			if _, err := tx.Exec(ctx, sql); err != nil {
				return fmt.Errorf("restore %s: %w", t.Name, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("restore the backup: %w", err)
	}
	if _, err := i.server.Retention().RotateEpochs(ctx); err != nil {
		return err
	}
	return i.start(ctx)
}

// backedUpTable is a table that backups have.
type backedUpTable struct{ Schema, Name string }

func (t backedUpTable) quoted() string {
	return schemaddl.QuoteIdent(t.Schema) + "." + schemaddl.QuoteIdent(t.Name)
}

func backedUp(ctx context.Context, tx pgx.Tx) ([]backedUpTable, error) {
	rows, err := tx.Query(ctx, `
		select n.nspname::text, c.relname::text
		  from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
		 where c.relkind = 'r' and n.nspname in ('syncpg', 'public')
		   and c.relname not in ('schema_version', 'sync_migrations', 'sync_blobs') and not starts_with(c.relname, 'sync_segment')
		 order by 1, 2`)
	if err != nil {
		return nil, fmt.Errorf("list the tables: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[backedUpTable])
	if err != nil {
		return nil, fmt.Errorf("list the tables: %w", err)
	}
	if len(tables) == 0 {
		return nil, errors.New("there are no tables to back up")
	}
	return tables, nil
}
