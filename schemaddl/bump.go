package schemaddl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/syncpg/syncpg/schema"
)

// BumpOptions says how a database goes from one schema version to a later one. The zero
// value is usable.
type BumpOptions struct {
	Options
	// Drop deletes the columns and tables that the new version does not have. Default: they
	// stay in the database, columns nullable, and nothing reads or writes them any more.
	Drop bool
	// Progress is told how far a bump is, from the goroutine that called it; nil: nobody.
	Progress func(Progress)
}

// Progress says how far a bump is.
type Progress struct {
	// Stage is what it does now: "waiting", for pushes under way; "rows" of Table or
	// "changes" of the log, which get the new layout; "locking", waiting for who reads the
	// tables; "tables", the statements that change them; "indexes".
	Stage string
	Table string
	// Done and Total are numbers of rows or changes; Total is an estimate.
	Done, Total int64
}

// Stages of a bump.
const (
	StageWaiting = "waiting"
	StageRows    = "rows"
	StageChanges = "changes"
	StageLocking = "locking"
	StageTables  = "tables"
	StageIndexes = "indexes"
)

// Rewrite is a table whose rows get a new layout, with estimates of what there is to do.
type Rewrite struct {
	Table string `json:"table"`
	Rows  int64  `json:"rows"`
	Bytes int64  `json:"bytes"` // of the table, without its indexes
}

// Bump is what a database lacks of a schema.
type Bump struct {
	// From is the installed version; 0: none is installed. It is To when only generated
	// functions are of another build.
	From  int32     `json:"from"`
	To    int32     `json:"to"`
	Steps []Step    `json:"steps"`
	Rows  []Rewrite `json:"rewrites"`
	// LogChanges estimates the changes of the log, all of which are looked at when rows are
	// rewritten, and LogBytes their size. 0 when it stays as it is.
	LogChanges int64 `json:"logChanges"`
	LogBytes   int64 `json:"logBytes"`
}

const (
	historySQL = `select layout from syncpg.sync_schema_layouts where partition = '' order by schema_version`
	recordSQL  = `insert into syncpg.sync_schema_layouts (partition, schema_version, layout, installed_at_ms)
select partition, schema_version, layout, installed_at_ms from syncpg.sync_schema_meta where partition = ''
    on conflict (partition, schema_version) do update set layout = excluded.layout, installed_at_ms = excluded.installed_at_ms`
	updateSQL = `update syncpg.sync_schema_meta
   set schema_version = $1, layout = $2, index_signatures = $3, functions_digest = $4, installed_at_ms = $5
 where partition = ''`
	raiseSQL = `insert into syncpg.sync_writer_fence as f (partition, required_writer_version)
select p.partition, $1 from syncpg.sync_partitions as p
    on conflict (partition) do update set required_writer_version = greatest(f.required_writer_version, excluded.required_writer_version)`
	forgetBlobsSQL = `delete from syncpg.sync_blob_refs where table_name = any($1::text[])`
	// What is left of tables that an earlier version had under these names.
	forgetChangesSQL    = `delete from syncpg.sync_changes where table_name = any($1::text[])`
	forgetScopesSQL     = `delete from syncpg.sync_change_scopes where table_name = any($1::text[])`
	forgetTombstonesSQL = `delete from syncpg.sync_tombstones where table_name = any($1::text[])`
	// Functions of the installed schema that are not of the one that is installed now.
	staleFunctionsSQL = `
select p.oid::regprocedure::text
  from pg_catalog.pg_proc as p
 where p.pronamespace = 'syncpg'::regnamespace
   and pg_catalog.obj_description(p.oid, 'pg_proc') like '%Generated from the installed schema.%'
   and p.oid <> all(array(select pg_catalog.to_regprocedure(s.signature)::oid
                            from unnest($1::text[]) as s(signature)
                           where pg_catalog.to_regprocedure(s.signature) is not null))
 order by 1`
	sizesSQL = `
select c.relname, greatest(c.reltuples, -1)::bigint, pg_catalog.pg_table_size(c.oid)
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
 where (n.nspname = $1 and c.relname = any($2::text[])) or (n.nspname = 'syncpg' and c.relname = 'sync_changes' and $3)`
	// A transaction that has a lock on one of the tables and waits for one of this session.
	crossedSQL = `
select l.pid
  from pg_catalog.pg_locks as l
 where l.granted and l.locktype = 'relation' and l.pid <> pg_catalog.pg_backend_pid()
   and l.database = (select d.oid from pg_catalog.pg_database as d where d.datname = pg_catalog.current_database())
   and l.relation = any($1::text[]::regclass[]::oid[])
   and pg_catalog.pg_backend_pid() = any(pg_catalog.pg_blocking_pids(l.pid))
 limit 1`
	notifySQL = `notify syncpg`
	// Tables that the current role may not alter.
	foreignSQL = `
select t.name
  from unnest($1::text[]) with ordinality as t(name, position)
  join pg_catalog.pg_class as c on c.oid = pg_catalog.to_regclass(t.name)
 where not pg_catalog.pg_has_role(current_user, c.relowner, 'USAGE')
 order by t.position
 limit 1`
)

// lockBump is the advisory lock, of class lockClass, that every push holds in shared mode.
// While a bump waits for it or has it, pushes are answered sync.schema_not_ready instead of
// waiting with a connection each (sync_admit_push).
const lockBump = 2

// Settings of the operator that are for requests must not end a bump, and row level security
// must not hide rows from it.
var bumpSettings = []string{
	"set local statement_timeout = 0",
	"set local lock_timeout = 0",
	"set local idle_in_transaction_session_timeout = 0",
	"select pg_catalog.set_config(s.name, '0', true) from pg_catalog.pg_settings as s where s.name = 'transaction_timeout'", // from Postgres 17 on
	"set local row_security = off",
	"set local jit = off",
}

func (o BumpOptions) withDefaults() BumpOptions {
	o.Options = o.Options.withDefaults()
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	return o
}

// readHistory returns the schemas that were installed before the present one, oldest first.
func readHistory(ctx context.Context, db Querier) ([]*schema.Schema, error) {
	rows, err := db.Query(ctx, historySQL)
	if err != nil {
		return nil, fmt.Errorf("reading the earlier schemas: %w", err)
	}
	layouts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("reading the earlier schemas: %w", err)
	}
	history := make([]*schema.Schema, len(layouts))
	for i, text := range layouts {
		if history[i], err = schema.ParseLayout([]byte(text)); err != nil {
			return nil, fmt.Errorf("reading the earlier schemas: %w", err)
		}
	}
	return history, nil
}

// readInstalled returns the schema that is installed, as far as its layout tells.
func readInstalled(ctx context.Context, db Querier) (*schema.Schema, error) {
	var version int32
	var layout, digest string
	err := db.QueryRow(ctx, readSQL).Scan(&version, &layout, &digest)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotInstalled
	}
	if err != nil {
		return nil, fmt.Errorf("reading the installed schema: %w", err)
	}
	s, err := schema.ParseLayout([]byte(layout))
	if err != nil {
		return nil, fmt.Errorf("reading the installed schema: %w", err)
	}
	return s, nil
}

// PlanBump says what [Apply] would do. It writes nothing, but looks for rows that stand in
// the way. The result is nil when nothing is to be done. Errors are those of [Apply].
func PlanBump(ctx context.Context, db Querier, s *schema.Schema, o BumpOptions) (*Bump, error) {
	o = o.withDefaults()
	switch state, err := state(ctx, db, s, o); {
	case err != nil || state == current:
		return nil, err
	case state == stale:
		return staleBump(s), nil
	case state == absent:
		return firstBump(s, o)
	}
	e, err := evolve(ctx, db, s, o)
	if err != nil {
		return nil, err
	}
	return e.describe(ctx, db)
}

// standing is what a database has of a schema.
type standing int

const (
	current standing = iota + 1
	stale            // other generated functions
	absent           // no schema
	behind           // an earlier version
)

func state(ctx context.Context, db Querier, s *schema.Schema, o BumpOptions) (standing, error) {
	err := Check(ctx, db, s, o.Options)
	var version *VersionError
	switch {
	case err == nil:
		return current, nil
	case errors.Is(err, ErrFunctionsStale):
		return stale, nil
	case errors.Is(err, ErrNotInstalled):
		return absent, nil
	case errors.As(err, &version) && version.Installed < version.Wanted:
		return behind, nil
	}
	return 0, err
}

func staleBump(s *schema.Schema) *Bump {
	return &Bump{
		From: s.Version, To: s.Version, Rows: []Rewrite{},
		Steps: []Step{{Action: Change, Note: "the generated functions, which are of another build"}},
	}
}

func firstBump(s *schema.Schema, o BumpOptions) (*Bump, error) {
	if _, err := Plan(s, o.Options); err != nil {
		return nil, err
	}
	indexes, err := ownedIndexes(s)
	if err != nil {
		return nil, err
	}
	b := &Bump{To: s.Version, Steps: []Step{}, Rows: []Rewrite{}}
	for _, t := range s.Tables {
		b.Steps = append(b.Steps, Step{Action: CreateTable, Table: t.Name})
	}
	for _, x := range indexes {
		b.Steps = append(b.Steps, Step{Action: CreateIndex, Table: x.table, Name: IndexName(x.declared)})
	}
	return b, nil
}

func evolve(ctx context.Context, db Querier, s *schema.Schema, o BumpOptions) (*evolution, error) {
	if err := CheckAppSchema(o.AppSchema); err != nil {
		return nil, err
	}
	old, err := readInstalled(ctx, db)
	if err != nil {
		return nil, err
	}
	return readEvolution(ctx, db, old, s, o)
}

// describe adds to what is to be done how much there is.
func (e *evolution) describe(ctx context.Context, db Querier) (*Bump, error) {
	b := &Bump{From: e.old.Version, To: e.next.Version, Steps: append([]Step{}, e.steps...), Rows: []Rewrite{}}
	var names []string
	log := false
	for _, t := range e.tables {
		if t.rewrites() {
			names = append(names, t.next.Name)
		}
		log = log || t.rows != nil
	}
	if len(names) == 0 {
		return b, nil
	}
	rows, err := db.Query(ctx, sizesSQL, e.o.AppSchema, names, log)
	if err != nil {
		return nil, fmt.Errorf("reading the sizes of the tables: %w", err)
	}
	var name string
	var count, size int64
	_, err = pgx.ForEachRow(rows, []any{&name, &count, &size}, func() error {
		if slices.Contains(names, name) {
			b.Rows = append(b.Rows, Rewrite{Table: name, Rows: count, Bytes: size})
		} else {
			b.LogChanges, b.LogBytes = count, size
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the sizes of the tables: %w", err)
	}
	// What was never analyzed is counted: it is new, and mostly small.
	for i := range b.Rows {
		if b.Rows[i].Rows < 0 {
			if err := db.QueryRow(ctx, "select count(*) from "+QuoteIdent(e.o.AppSchema)+"."+QuoteIdent(b.Rows[i].Table)).Scan(&b.Rows[i].Rows); err != nil {
				return nil, fmt.Errorf("counting the rows of a table: %w", err)
			}
		}
	}
	if b.LogChanges < 0 {
		if err := db.QueryRow(ctx, "select count(*) from syncpg.sync_changes").Scan(&b.LogChanges); err != nil {
			return nil, fmt.Errorf("counting the changes of the log: %w", err)
		}
	}
	slices.SortFunc(b.Rows, func(x, y Rewrite) int { return strings.Compare(x.Table, y.Table) })
	return b, nil
}

// Apply brings a migrated database to a schema: it installs it, or bumps an earlier version
// of it, or replaces generated functions of another build, in one transaction. It returns
// what it did, nil when the database has the schema already. Of several at once, one does it.
//
// During a bump pushes are answered sync.schema_not_ready, by processes of both versions;
// pulls go on while rows and log are rewritten, and wait while tables are changed. Errors:
// *[BumpError], *[LayoutError], *[VersionError] when a later version is installed, or what
// the database said, with the statement. After an error nothing has changed.
func Apply(ctx context.Context, db Beginner, s *schema.Schema, o BumpOptions) (*Bump, error) {
	o = o.withDefaults()
	tx, err := db.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("applying the schema: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := tx.Exec(ctx, lockSQL, lockClass, lockInstall); err != nil {
		return nil, fmt.Errorf("waiting for other installers: %w", err)
	}
	var done *Bump
	switch found, err := state(ctx, tx, s, o); {
	case err != nil || found == current:
		return nil, err
	case found == absent:
		if done, err = firstBump(s, o); err == nil {
			err = install(ctx, tx, s, o.Options)
		}
		if err != nil {
			return nil, err
		}
	case found == stale:
		done = staleBump(s)
		if err := refresh(ctx, tx, s, o.Options); err != nil {
			return nil, err
		}
	default:
		if done, err = bump(ctx, tx, s, o); err != nil {
			return nil, fmt.Errorf("bumping the schema to version %d: %w", s.Version, err)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return nil, fmt.Errorf("applying schema version %d: %w", s.Version, err)
	}
	return done, nil
}

func bump(ctx context.Context, tx pgx.Tx, s *schema.Schema, o BumpOptions) (*Bump, error) {
	var isolation string
	if err := tx.QueryRow(ctx, `select current_setting('transaction_isolation')`).Scan(&isolation); err != nil {
		return nil, fmt.Errorf("reading the isolation level: %w", err)
	}
	if isolation != "read committed" {
		// A snapshot would not have what pushes commit while this waits for them.
		return nil, fmt.Errorf("the isolation level is %s and must be read committed", isolation)
	}
	if err := run(ctx, tx, bumpSettings); err != nil {
		return nil, err
	}
	// Pushes have both of these locks in this order, and wait for none of ours after it. The
	// second keeps out who prunes, and new partitions, which would have no fence.
	err := o.patiently(ctx, tx, StageWaiting, []string{
		fmt.Sprintf("select pg_catalog.pg_advisory_xact_lock(%d, %d)", lockClass, lockBump),
		"lock table syncpg.sync_partitions in exclusive mode",
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("waiting for pushes under way: %w", err)
	}
	e, err := evolve(ctx, tx, s, o)
	if err != nil {
		return nil, err
	}
	done, err := e.describe(ctx, tx)
	if err != nil {
		return nil, err
	}
	if err := e.owns(ctx, tx); err != nil {
		return nil, err
	}
	if err := e.rewrite(ctx, tx, done); err != nil {
		return nil, err
	}
	if err := e.change(ctx, tx, done); err != nil {
		return nil, err
	}
	return done, e.record(ctx, tx)
}

// owns finds out before the rewriting, which may take long, whether tables may be altered
// after it.
func (e *evolution) owns(ctx context.Context, db Querier) error {
	var name string
	switch err := db.QueryRow(ctx, foreignSQL, e.touched()).Scan(&name); {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("looking for the owners of the tables: %w", err)
	}
	return fmt.Errorf("this user is not the owner of table %s: run it as the owner", name)
}

const (
	// lockPatience is how long an attempt at a lock waits: others queue behind it.
	lockPatience = 2 * time.Second
	// lockPause is how long others go on between two attempts.
	lockPause = time.Second
)

// lockAll locks tables.
func (e *evolution) lockAll(ctx context.Context, tx pgx.Tx, mode string, tables []string) error {
	if len(tables) == 0 {
		return nil
	}
	return e.o.patiently(ctx, tx, StageLocking, []string{fmt.Sprintf("lock table %s in %s mode", strings.Join(tables, ", "), mode)}, tables)
}

// patiently takes locks that other transactions may hold for long, or in another order: what
// it has of them is given back when it cannot have all, before the next attempt. It fails
// when one that holds one of the tables waits for a lock that this transaction had before:
// neither would ever go on, and deadlock detection ends only the attempts.
func (o BumpOptions) patiently(ctx context.Context, tx pgx.Tx, stage string, locks, tables []string) error {
	for {
		o.Progress(Progress{Stage: stage})
		err := tryLocks(ctx, tx, locks)
		pgErr := (*pgconn.PgError)(nil)
		if !errors.As(err, &pgErr) || pgErr.Code != "55P03" && pgErr.Code != "40P01" { // lock_not_available, deadlock_detected
			return err
		}
		var pid int32
		switch err := tx.QueryRow(ctx, crossedSQL, tables).Scan(&pid); {
		case err == nil:
			return fmt.Errorf("the transaction of the database process %d uses a table that is to be changed, and waits for this one: "+
				"neither can go on; run it again, when there are none that write the app's tables by other means than pushes", pid)
		case !errors.Is(err, pgx.ErrNoRows):
			return fmt.Errorf("looking for who waits: %w", err)
		}
		pause := time.NewTimer(lockPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return fmt.Errorf("taking locks: %w", context.Cause(ctx))
		}
	}
}

func tryLocks(ctx context.Context, tx pgx.Tx, locks []string) error {
	point, err := tx.Begin(ctx)
	if err != nil {
		return fmt.Errorf("taking locks: %w", err)
	}
	defer func() { _ = point.Rollback(context.WithoutCancel(ctx)) }()
	statements := append([]string{fmt.Sprintf("set local lock_timeout = %d", lockPatience.Milliseconds())}, locks...)
	if err := run(ctx, point, append(statements, "set local lock_timeout = 0")); err != nil {
		return err
	}
	if err := point.Commit(ctx); err != nil {
		return fmt.Errorf("taking locks: %w", err)
	}
	return nil
}

func (e *evolution) qualified(name string) string {
	return QuoteIdent(e.o.AppSchema) + "." + QuoteIdent(name)
}

// change runs the statements that change tables, indexes and functions, and fills columns.
// Readers wait from here to the end: rounds for the stored version, which they read first,
// so that they hold no table by then.
func (e *evolution) change(ctx context.Context, tx pgx.Tx, done *Bump) error {
	// Together, so that rounds do not wait for longer than an attempt while another reader
	// has one of the tables.
	if err := e.lockAll(ctx, tx, "access exclusive", append([]string{"syncpg.sync_schema_meta"}, e.touched()...)); err != nil {
		return err
	}
	e.o.Progress(Progress{Stage: StageTables})
	var statements []string
	for _, x := range e.drop {
		statements = append(statements, "drop index "+e.qualified(x.Name))
	}
	for _, name := range e.dropped {
		// Its encoder takes its rows.
		statements = append(statements, fmt.Sprintf("drop function if exists syncpg.%s(%s)", QuoteIdent(limited(encodePrefix, name)), e.qualified(name)),
			"drop table "+e.qualified(name))
	}
	for _, t := range e.tables {
		if len(t.alter) > 0 {
			statements = append(statements, fmt.Sprintf("alter table %s\n  %s", e.qualified(t.next.Name), strings.Join(t.alter, ",\n  ")))
		}
	}
	for _, t := range e.created {
		statements = append(statements, createTable(t, e.o.AppSchema))
	}
	if err := run(ctx, tx, statements); err != nil {
		return err
	}
	for _, t := range e.tables {
		if len(t.fill) > 0 {
			if err := e.rewriteRows(ctx, tx, t, done); err != nil {
				return err
			}
		}
	}
	e.o.Progress(Progress{Stage: StageIndexes})
	statements = statements[:0]
	for _, x := range e.create {
		statements = append(statements, x.create(e.o.AppSchema))
	}
	return run(ctx, tx, append(statements, functionStatements(e.next, e.o.AppSchema)...))
}

// touched are the tables that are changed in a way that readers must not see half of.
func (e *evolution) touched() []string {
	var names []string
	add := func(name string) {
		if q := e.qualified(name); !slices.Contains(names, q) {
			names = append(names, q)
		}
	}
	for _, x := range e.drop {
		add(x.Table)
	}
	for _, name := range e.dropped {
		add(name)
	}
	for _, t := range e.tables {
		if len(t.alter) > 0 || len(t.fill) > 0 {
			add(t.next.Name)
		}
	}
	return names
}

// record notes what is installed now, and who may write.
func (e *evolution) record(ctx context.Context, tx pgx.Tx) error {
	exec := func(what, sql string, args ...any) error {
		if _, err := tx.Exec(ctx, sql, args...); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	all := functions(e.next, e.o.AppSchema)
	signatures := make([]string, len(all))
	for i := range all {
		signatures[i] = all[i].signature
	}
	rows, err := tx.Query(ctx, staleFunctionsSQL, signatures)
	if err != nil {
		return fmt.Errorf("reading the functions: %w", err)
	}
	gone, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("reading the functions: %w", err)
	}
	for i, f := range gone {
		gone[i] = "drop function " + f // as the catalog spells and quotes it
	}
	if err := run(ctx, tx, gone); err != nil {
		return err
	}
	if len(e.removed) > 0 {
		if err := exec("deleting the blob references of removed tables", forgetBlobsSQL, tableNames(e.removed)); err != nil {
			return err
		}
	}
	if names := tableNames(slices.DeleteFunc(slices.Clone(e.created), func(t *schema.Table) bool { return !e.knew(t.Name) })); len(names) > 0 {
		for _, sql := range []string{forgetBlobsSQL, forgetChangesSQL, forgetScopesSQL, forgetTombstonesSQL} {
			if err := exec("deleting what is left of earlier tables of a name", sql, names); err != nil {
				return err
			}
		}
	}
	if err := exec("raising the writer fences", raiseSQL, e.next.Version); err != nil {
		return err
	}
	if err := exec("recording the earlier schema", recordSQL); err != nil {
		return err
	}
	signed, err := indexSignatures(e.next)
	if err != nil {
		return err
	}
	if err := exec("recording the schema", updateSQL, e.next.Version, string(e.next.Layout()), signed,
		functionsDigest(functionStatements(e.next, e.o.AppSchema)), e.o.Now.UnixMilli()); err != nil {
		return err
	}
	// Tells the processes that run, when this commits.
	return exec("notifying the servers", notifySQL)
}

func tableNames(tables []*schema.Table) []string {
	names := make([]string, len(tables))
	for i, t := range tables {
		names[i] = t.Name
	}
	return names
}

// indexSignatures is text and no bytes, which a connection without descriptions would send as
// a bytea.
func indexSignatures(s *schema.Schema) (string, error) {
	indexes, err := ownedIndexes(s)
	if err != nil {
		return "", err
	}
	signatures := make(map[string]string, len(indexes))
	for _, x := range indexes {
		signatures[IndexName(x.declared)] = x.signature()
	}
	encoded, err := json.Marshal(signatures)
	if err != nil {
		return "", fmt.Errorf("encoding the index signatures: %w", err)
	}
	return string(encoded), nil
}
