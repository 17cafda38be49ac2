package schemaddl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/syncpg/syncpg/schema"
)

// Options says where and when a schema is installed. The zero value is usable.
type Options struct {
	// AppSchema is the database schema of the app's tables. Default "public".
	AppSchema string
	// Now is the time recorded for the installation. Default the current time.
	Now time.Time
	// Older are earlier schema versions that a server is to serve too. Check refuses those
	// whose clients cannot go on (schema.CheckHistory); nobody else looks at them.
	Older []*schema.Schema
}

func (o Options) withDefaults() Options {
	if o.AppSchema == "" {
		o.AppSchema = DefaultAppSchema
	}
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	return o
}

// CheckAppSchema refuses names of database schemas that Postgres would cut or
// keeps for itself, and our own.
func CheckAppSchema(name string) error {
	switch {
	case len(name) > maxIdentifier || strings.ContainsRune(name, 0):
		return fmt.Errorf("%q is no name of a schema: a name has at most %d bytes and no U+0000", name, maxIdentifier)
	case name == ownSchema || strings.HasPrefix(name, "pg_") || name == "information_schema":
		return fmt.Errorf("%q is not for app tables: use another schema", name)
	}
	return nil
}

// ErrNotInstalled says that the database has no app schema yet.
var ErrNotInstalled = errors.New("no schema is installed in this database: run `syncpg schema apply`")

// ErrFunctionsStale says that the generated functions in the database are not
// those this program generates: another build made them, or migrations that went
// down and up again have put the bodies back that they had before a schema.
var ErrFunctionsStale = errors.New("the generated functions are of another build of syncpg: run `syncpg schema apply`")

// VersionError says that the database has another schema version installed.
type VersionError struct {
	Installed, Wanted int32
}

func (e *VersionError) Error() string {
	if e.Installed < e.Wanted {
		return fmt.Sprintf("schema version %d is installed and this server has version %d: `syncpg schema plan` shows what is to be done, "+
			"and `syncpg schema apply` does it", e.Installed, e.Wanted)
	}
	return fmt.Sprintf("schema version %d is installed and this server has version %d: an installed schema cannot go back; "+
		"start the server with schema version %d, or install what was version %d as version %d",
		e.Installed, e.Wanted, e.Installed, e.Wanted, e.Installed+1)
}

// Beginner starts a transaction: a *pgx.Conn, a pool, or a pgx.Tx (savepoint).
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Querier runs one statement that returns rows.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Plan returns the statements a first installation runs, in order.
func Plan(s *schema.Schema, o Options) ([]string, error) {
	o = o.withDefaults()
	if err := CheckAppSchema(o.AppSchema); err != nil {
		return nil, fmt.Errorf("planning schema version %d: %w", s.Version, err)
	}
	indexes, err := ownedIndexes(s)
	if err != nil {
		return nil, fmt.Errorf("planning schema version %d: %w", s.Version, err)
	}
	var statements []string
	if o.AppSchema != DefaultAppSchema {
		statements = append(statements, "create schema if not exists "+QuoteIdent(o.AppSchema))
	}
	for _, t := range s.Tables {
		statements = append(statements, createTable(t, o.AppSchema))
	}
	for _, x := range indexes {
		statements = append(statements, x.create(o.AppSchema))
	}
	return append(statements, functionStatements(s, o.AppSchema)...), nil
}

// The advisory lock that serializes installers: a class of our own, so that it
// cannot meet a host's lock by chance.
const (
	lockClass   = 0x73796e63 // "sync"
	lockInstall = 1
)

const (
	lockSQL    = `select pg_catalog.pg_advisory_xact_lock($1, $2)`
	readSQL    = `select schema_version, layout, functions_digest from syncpg.sync_schema_meta where partition = ''`
	insertSQL  = `insert into syncpg.sync_schema_meta (partition, schema_version, layout, index_signatures, functions_digest, installed_at_ms) values ('', $1, $2, $3, $4, $5)`
	refreshSQL = `update syncpg.sync_schema_meta set functions_digest = $1 where partition = ''`
)

// Install installs a schema in a migrated database: tables, owned indexes,
// generated functions and the stored layout, in one transaction. On a database
// that has this schema already it compares (see [Check]) and writes nothing,
// except that it replaces generated functions of another build. Errors:
// *[VersionError], *[LayoutError], or what the database said, with the statement.
func Install(ctx context.Context, db Beginner, s *schema.Schema, o Options) error {
	o = o.withDefaults()
	tx, err := db.Begin(ctx)
	if err != nil {
		return fmt.Errorf("installing the schema: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, lockSQL, lockClass, lockInstall); err != nil {
		return fmt.Errorf("waiting for other installers: %w", err)
	}

	err = Check(ctx, tx, s, o)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNotInstalled):
		err = install(ctx, tx, s, o)
	case errors.Is(err, ErrFunctionsStale):
		err = refresh(ctx, tx, s, o)
	}
	if err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("installing schema version %d: %w", s.Version, err)
	}
	return nil
}

func install(ctx context.Context, tx pgx.Tx, s *schema.Schema, o Options) error {
	statements, err := Plan(s, o)
	if err != nil {
		return err
	}
	encoded, err := indexSignatures(s)
	if err != nil {
		return err
	}
	if err := run(ctx, tx, statements); err != nil {
		return fmt.Errorf("installing schema version %d: %w", s.Version, err)
	}
	if _, err := tx.Exec(ctx, insertSQL, s.Version, string(s.Layout()), encoded,
		functionsDigest(functionStatements(s, o.AppSchema)), o.Now.UnixMilli()); err != nil {
		return fmt.Errorf("recording schema version %d: %w", s.Version, err)
	}
	return nil
}

func refresh(ctx context.Context, tx pgx.Tx, s *schema.Schema, o Options) error {
	statements := functionStatements(s, o.AppSchema)
	if err := run(ctx, tx, statements); err != nil {
		return fmt.Errorf("replacing the generated functions: %w", err)
	}
	if _, err := tx.Exec(ctx, refreshSQL, functionsDigest(statements)); err != nil {
		return fmt.Errorf("recording the generated functions: %w", err)
	}
	return nil
}

// run executes statements in order; an error carries the first line of its statement.
func run(ctx context.Context, tx pgx.Tx, statements []string) error {
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "42P07" {
				return fmt.Errorf("%s: an object of this name exists already and is not ours to replace; rename it, "+
					"drop it if it is left of an earlier installation, or choose another app schema: %w", firstLine(sql), err)
			}
			if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "2BP01" { // its detail names objects only
				return fmt.Errorf("%s: %w: %s", firstLine(sql), err, pgErr.Detail)
			}
			return fmt.Errorf("%s: %w", firstLine(sql), err)
		}
	}
	return nil
}

func firstLine(sql string) string {
	line, _, _ := strings.Cut(sql, "\n")
	return strings.TrimSuffix(line, " (")
}
