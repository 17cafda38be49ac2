// Package migrations holds the SQL that makes the schema "syncpg", and runs it.
//
// Each file NNN_name.sql is one migration in the form of tern (https://github.com/jackc/tern): the way up, a line
// "---- create above / drop below ----", the way down. The files have no template actions, so the tern command runs the
// same ones:
//
//	psql -c 'create schema if not exists syncpg'
//	tern migrate -m migrations --version-table syncpg.schema_version
//
// The head of a file says, in a comment line "-- breaking: no" or "-- breaking: yes", whether a server that was built
// before the migration can go on after it. So that such a server can find out, every migration also writes its row into
// syncpg.sync_migrations on the way up, with the same answer, and removes it on the way down.
package migrations

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"
)

// FS holds the migration files.
//
//go:embed *.sql
var FS embed.FS

// VersionTable is the table in which tern keeps the version of the schema.
const VersionTable = "syncpg.schema_version"

const (
	sqlstateUndefinedTable  = "42P01"
	sqlstateInvalidSchema   = "3F000"
	sqlstateLockUnavailable = "55P03"

	defaultLockTimeout = 15 * time.Second
	downMarker         = "---- create above / drop below ----"
)

var (
	// ErrTooOld reports a schema that is older than this build needs. Its message names the command that helps.
	ErrTooOld = errors.New("the database schema is too old: run `syncpg migrate up`")

	// ErrTooNew reports a schema that a newer build made and that this one cannot work with.
	ErrTooNew = errors.New("the database schema is too new for this version of syncpg: use a newer one")

	// ErrLocked reports that a lock was not free in time: another migration is running, this one was called from inside
	// a migration of tern, or a transaction keeps hold of a table.
	ErrLocked = errors.New("the database is locked by another migration or transaction")
)

// VersionError says how the schema differs from what this build needs. It wraps [ErrTooOld] or [ErrTooNew].
type VersionError struct {
	Current int // version of the database; 0: nothing is installed
	Target  int // version that this build brings
	err     error
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%v (database: version %d, this build: version %d)", e.err, e.Current, e.Target)
}

// Unwrap returns [ErrTooOld] or [ErrTooNew].
func (e *VersionError) Unwrap() error { return e.err }

// StepError is a migration that the database refused. It wraps the *pgconn.PgError.
type StepError struct {
	Name string // file of the migration
	Line int    // line in that file; 0 if the database did not say
	Code string // SQLSTATE
	err  *pgconn.PgError
}

func (e *StepError) Error() string {
	place := e.Name
	if e.Line > 0 {
		place = fmt.Sprintf("%s:%d", e.Name, e.Line)
	}
	return fmt.Sprintf("%s: %s (SQLSTATE %s)", place, e.err.Message, e.Code)
}

// Unwrap returns the *pgconn.PgError.
func (e *StepError) Unwrap() error { return e.err }

// Migration describes one file.
type Migration struct {
	Version  int    // version of the schema after it; the first is 1
	Name     string // file name
	Breaking bool   // a server built before it must stop
}

// Step tells of one migration that starts.
type Step struct {
	Migration
	Down bool // on the way down
}

// Options for a [Migrator]. The zero value is usable.
type Options struct {
	// LockTimeout is how long to wait for any single lock. 0: 15 seconds. -1: without limit.
	LockTimeout time.Duration

	// OnStep is called when a migration starts. Nil: nothing is called.
	OnStep func(Step)

	// FS holds other migrations than [FS]. Nil: [FS].
	FS fs.FS
}

// Migrator moves the schema of a database up and down.
type Migrator struct {
	conn  *pgx.Conn
	opts  Options
	files []file
}

type file struct {
	Migration
	text string
}

// New returns a migrator that works over conn. It does no I/O on it. The connection must be the migrator's own, direct to
// the server and not through a pooler in transaction mode: tern locks it, and resets all its settings after each step.
func New(conn *pgx.Conn, opts Options) (*Migrator, error) {
	if opts.FS == nil {
		opts.FS = FS
	}
	opts.LockTimeout = max(cmp.Or(opts.LockTimeout, defaultLockTimeout), 0)
	files, err := readFiles(opts.FS)
	if err != nil {
		return nil, fmt.Errorf("migrations: %w", err)
	}
	return &Migrator{conn: conn, opts: opts, files: files}, nil
}

var breakingPattern = regexp.MustCompile(`(?m)^-- breaking: (yes|no)$`)

func readFiles(fsys fs.FS) ([]file, error) {
	names, err := migrate.FindMigrations(fsys)
	if err != nil {
		return nil, fmt.Errorf("look for migrations: %w", err)
	}
	files := make([]file, len(names))
	for i, name := range names {
		b, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, fmt.Errorf("read migration: %w", err)
		}
		marks := breakingPattern.FindAllSubmatch(b, -1)
		if len(marks) != 1 {
			return nil, fmt.Errorf("%s: want one line \"-- breaking: yes\" or \"-- breaking: no\", found %d", name, len(marks))
		}
		files[i] = file{
			Migration: Migration{Version: i + 1, Name: name, Breaking: string(marks[0][1]) == "yes"},
			text:      string(b),
		}
	}
	return files, nil
}

// List returns all migrations, the first one first.
func (m *Migrator) List() []Migration {
	list := make([]Migration, len(m.files))
	for i, f := range m.files {
		list[i] = f.Migration
	}
	return list
}

// Up applies every migration that the database lacks, each in a transaction of its own. It makes the schema "syncpg"
// first if it does not exist. Several callers at once are safe: one works, the others wait.
//
// It fails with a [StepError], with [ErrLocked], or with a [VersionError] if a newer build has been here.
func (m *Migrator) Up(ctx context.Context) error {
	if err := m.ensureSchema(ctx); err != nil {
		return fmt.Errorf("migrations: up: %w", err)
	}
	if err := m.run(ctx, len(m.files), true); err != nil {
		return fmt.Errorf("migrations: up: %w", err)
	}
	return nil
}

// Down takes migrations back until the schema is at the given version; 0 removes everything but the schema "syncpg" and
// the version table. The data of what is removed is lost. It does nothing if the schema is at that version or below.
//
// It fails like [Migrator.Up]. What a newer build applied only that build can take back.
func (m *Migrator) Down(ctx context.Context, to int) error {
	if to < 0 || to > len(m.files) {
		return fmt.Errorf("migrations: down: no version %d: want 0 to %d", to, len(m.files))
	}
	state, err := readState(ctx, m.conn)
	if err != nil {
		return fmt.Errorf("migrations: down: %w", err)
	}
	if state.current <= to {
		return nil
	}
	if err := m.run(ctx, to, false); err != nil {
		return fmt.Errorf("migrations: down: %w", err)
	}
	return nil
}

// ensureSchema makes the schema in which tern wants to make its table. A role that may not create one needs it made
// beforehand, and is not asked to make it again.
func (m *Migrator) ensureSchema(ctx context.Context) error {
	// Two sessions that make one schema at once fail on a unique index; the lock lets the second one see the first.
	err := pgx.BeginFunc(ctx, m.conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `select pg_catalog.set_config('lock_timeout', $1, true)`, m.lockTimeout())
		if err != nil {
			return fmt.Errorf("set lock_timeout: %w", err)
		}
		_, err = tx.Exec(ctx, `select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('syncpg: create schema', 0))`)
		if err != nil {
			return fmt.Errorf("wait for others: %w", err)
		}
		var exists bool
		if err := tx.QueryRow(ctx, `select pg_catalog.to_regnamespace('syncpg') is not null`).Scan(&exists); err != nil {
			return fmt.Errorf("look for it: %w", err)
		}
		if exists {
			return nil
		}
		if _, err = tx.Exec(ctx, `create schema syncpg`); err != nil {
			return fmt.Errorf("make it: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("create schema syncpg: %w", lockError(err))
	}
	return nil
}

// lockTimeout is the setting for the time to wait for a lock.
func (m *Migrator) lockTimeout() string {
	return fmt.Sprintf("%dms", m.opts.LockTimeout.Milliseconds())
}

// run moves to a version with tern.
func (m *Migrator) run(ctx context.Context, to int, up bool) error {
	setTimeout := func() error {
		if _, err := m.conn.Exec(ctx, `select pg_catalog.set_config('lock_timeout', $1, false)`, m.lockTimeout()); err != nil {
			return fmt.Errorf("set lock_timeout: %w", err)
		}
		return nil
	}
	if err := setTimeout(); err != nil {
		return err
	}
	tern, err := migrate.NewMigrator(ctx, m.conn, VersionTable)
	if err != nil {
		return fmt.Errorf("prepare the version table: %w", lockError(err))
	}
	if err := tern.LoadMigrations(m.opts.FS); err != nil {
		return fmt.Errorf("load migrations: %w", err)
	}
	var stepErr error
	tern.OnStart = func(version int32, _, _, _ string) {
		// tern has reset the setting after the step before. A failure here ends the transaction, and so the step.
		stepErr = errors.Join(stepErr, setTimeout())
		if m.opts.OnStep != nil {
			m.opts.OnStep(Step{Migration: m.files[version-1].Migration, Down: !up})
		}
	}
	err = tern.MigrateTo(ctx, int32(to))
	if _, outside := errors.AsType[migrate.BadVersionError](err); outside {
		state, stateErr := readState(ctx, m.conn)
		if stateErr != nil {
			return errors.Join(err, stateErr)
		}
		return &VersionError{Current: state.current, Target: len(m.files), err: ErrTooNew}
	}
	if err != nil {
		return errors.Join(m.stepError(err), stepErr)
	}
	return nil
}

// stepError turns an error of tern into one that names the place in the file.
func (m *Migrator) stepError(err error) error {
	failed, ok := errors.AsType[migrate.MigrationPgError](err)
	if !ok {
		return lockError(err)
	}
	e := &StepError{Name: failed.MigrationName, Code: failed.Code, err: failed.PgError}
	for _, f := range m.files {
		if f.Name == failed.MigrationName {
			e.Line = lineOf(f.text, failed.Sql, int(failed.Position))
		}
	}
	return lockError(e)
}

// lineOf returns the line in text of a position, counted in characters from 1, in the part of it that is sql.
func lineOf(text, sql string, position int) int {
	start := strings.Index(text, sql)
	if start < 0 || position < 1 {
		return 0
	}
	for offset := range sql {
		if position--; position == 0 {
			return 1 + strings.Count(text[:start+offset], "\n")
		}
	}
	return 0
}

func lockError(err error) error {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == sqlstateLockUnavailable {
		return fmt.Errorf("%w: %w", ErrLocked, err)
	}
	return err
}

// Status says where a database stands.
type Status struct {
	Current int         // version of the database; 0: nothing is installed
	Target  int         // version that this build brings
	Pending []Migration // what Up would apply, in that order
}

// Status reads where the database stands. It changes nothing.
func (m *Migrator) Status(ctx context.Context) (Status, error) {
	state, err := readState(ctx, m.conn)
	if err != nil {
		return Status{}, fmt.Errorf("migrations: status: %w", err)
	}
	s := Status{Current: state.current, Target: len(m.files)}
	if state.current < len(m.files) {
		s.Pending = m.List()[state.current:]
	}
	return s, nil
}

// Querier runs a query: a *pgx.Conn, a *pgxpool.Pool or a pgx.Tx. A transaction is aborted by the question whether the
// schema exists if it does not.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Checked is the result of a [Check] that found a usable schema.
type Checked struct {
	Current int // version of the database
	Target  int // version that this build brings

	// Newer is set when a newer build has migrated the database without breaking this one, as happens during a rolling
	// deploy. It is worth a warning.
	Newer bool
}

// Check tells whether this build can work with the schema of the database, and changes nothing. A
// database at the version of this build passes, and so does one that later migrations have changed without breaking it.
// Any other fails with a [VersionError].
func Check(ctx context.Context, db Querier) (Checked, error) {
	files, err := readFiles(FS)
	if err != nil {
		return Checked{}, fmt.Errorf("migrations: check: %w", err)
	}
	return check(ctx, db, len(files))
}

func check(ctx context.Context, db Querier, target int) (Checked, error) {
	state, err := readState(ctx, db)
	if err != nil {
		return Checked{}, fmt.Errorf("migrations: check: %w", err)
	}
	switch {
	case state.current < target:
		return Checked{}, &VersionError{Current: state.current, Target: target, err: ErrTooOld}
	case state.breaking > target:
		return Checked{}, &VersionError{Current: state.current, Target: target, err: ErrTooNew}
	}
	return Checked{Current: state.current, Target: target, Newer: state.current > target}, nil
}

// state is what the database says about itself.
type state struct {
	current  int // its version
	breaking int // the newest version that broke older servers; 0: none did
}

func readState(ctx context.Context, db Querier) (state, error) {
	var s state
	err := db.QueryRow(ctx, `select version from `+VersionTable).Scan(&s.current)
	if notThere(err) || errors.Is(err, pgx.ErrNoRows) {
		return state{}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("read the version of the schema: %w", err)
	}
	if s.current == 0 {
		return s, nil
	}
	err = db.QueryRow(ctx, `select coalesce(max(version), 0) from syncpg.sync_migrations where breaking`).Scan(&s.breaking)
	if err != nil {
		return state{}, fmt.Errorf("read what newer versions broke: %w", err)
	}
	return s, nil
}

func notThere(err error) bool {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pg.Code == sqlstateUndefinedTable || pg.Code == sqlstateInvalidSchema)
}
