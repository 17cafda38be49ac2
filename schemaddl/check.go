package schemaddl

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// LayoutError says that the database does not have the layout of the schema. Code
// is sync.storage.physical_layout_mismatch when the catalog differs, and
// sync.storage.stored_layout_mismatch when the layout recorded at installation
// does.
type LayoutError struct {
	Code             ssp2.Code
	Table, Column    string
	Reason           string
	Expected, Actual string
}

func (e *LayoutError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", e.Code, e.Reason)
	if e.Table != "" {
		fmt.Fprintf(&b, ", table %q", e.Table)
	}
	if e.Column != "" {
		fmt.Fprintf(&b, ", column %q", e.Column)
	}
	if e.Expected != "" || e.Actual != "" {
		fmt.Fprintf(&b, ": expected %s, found %s", e.Expected, e.Actual)
	}
	return b.String()
}

// OlderError says that clients of an older schema version cannot go on in this database.
type OlderError struct {
	Version int32
	Err     error
}

func (e *OlderError) Error() string {
	return fmt.Sprintf("older schema version %d: %v", e.Version, e.Err)
}

func (e *OlderError) Unwrap() error { return e.Err }

const columnsSQL = `
select c.relname, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
  join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where n.nspname = $1 and c.relname = any($2::text[]) and c.relkind in ('r', 'p')`

const keysSQL = `
select c.relname,
       array(select a.attname::text
               from unnest(i.indkey::smallint[]) with ordinality as k(attnum, ord)
               join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum = k.attnum
              order by k.ord)
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
  join pg_catalog.pg_index as i on i.indrelid = c.oid and i.indisprimary
 where n.nspname = $1 and c.relname = any($2::text[])`

// Check compares a database with a schema and writes nothing. It returns
// [ErrNotInstalled], a *[VersionError], a *[LayoutError], an *[OlderError] or
// [ErrFunctionsStale]; nil when the server may serve.
func Check(ctx context.Context, db Querier, s *schema.Schema, o Options) error {
	o = o.withDefaults()
	var version int32
	var layout, digest string
	err := db.QueryRow(ctx, readSQL).Scan(&version, &layout, &digest)
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotInstalled
	}
	if err != nil {
		return fmt.Errorf("reading the installed schema: %w", err)
	}
	if version != s.Version {
		return &VersionError{Installed: version, Wanted: s.Version}
	}
	if want := string(s.Layout()); layout != want {
		return storedMismatch(want, layout)
	}
	if err := checkCatalog(ctx, db, s, o); err != nil {
		return err
	}
	if len(o.Older) > 0 {
		history, err := readHistory(ctx, db)
		if err != nil {
			return err
		}
		for _, older := range o.Older {
			if err := schema.CheckHistory(older, history); err != nil {
				return &OlderError{Version: older.Version, Err: err}
			}
		}
	}
	if digest != functionsDigest(functionStatements(s, o.AppSchema)) {
		return ErrFunctionsStale
	}
	return checkFunctions(ctx, db, functions(s, o.AppSchema))
}

const functionsSQL = `
select count(*)
  from unnest($1::text[], $2::bytea[]) as f(signature, digest)
  join pg_catalog.pg_proc as p on p.oid = pg_catalog.to_regprocedure(f.signature)
 where pg_catalog.sha256(pg_catalog.convert_to(p.prosrc, 'UTF8')) = f.digest`

// checkFunctions compares the functions themselves, which may have changed since
// their digest was recorded.
func checkFunctions(ctx context.Context, db Querier, all []function) error {
	signatures, digests := make([]string, len(all)), make([][]byte, len(all))
	for i := range all {
		sum := sha256.Sum256([]byte(all[i].source()))
		signatures[i], digests[i] = all[i].signature, sum[:]
	}
	var same int
	if err := db.QueryRow(ctx, functionsSQL, signatures, digests).Scan(&same); err != nil {
		return fmt.Errorf("reading the generated functions: %w", err)
	}
	if same < len(all) {
		return ErrFunctionsStale
	}
	return nil
}

type catalogColumn struct {
	typ     string
	notNull bool
}

func checkCatalog(ctx context.Context, db Querier, s *schema.Schema, o Options) error {
	names := make([]string, len(s.Tables))
	for i, t := range s.Tables {
		names[i] = t.Name
	}
	columns, err := readColumns(ctx, db, o.AppSchema, names)
	if err != nil {
		return err
	}
	keys, err := readKeys(ctx, db, o.AppSchema, names)
	if err != nil {
		return err
	}
	for _, t := range s.Tables {
		if err := checkTable(t, nil, columns[t.Name], keys[t.Name]); err != nil {
			return err
		}
	}
	return nil
}

// checkTable compares a table with the catalog: of its stored columns those for which only
// is true, nil for all.
func checkTable(t *schema.Table, only func(column int) bool, columns map[string]catalogColumn, key []string) error {
	mismatch := func(column, reason, expected, actual string) error {
		return &LayoutError{
			Code:  ssp2.CodeStoragePhysicalLayoutMismatch,
			Table: t.Name, Column: column, Reason: reason, Expected: expected, Actual: actual,
		}
	}
	if columns == nil {
		return mismatch("", "missing table", "a table", "none")
	}
	for _, c := range systemColumns {
		got, ok := columns[c.name]
		switch {
		case !ok:
			return mismatch(c.name, "missing column", c.typ, "none")
		case got.typ != c.typ:
			return mismatch(c.name, "wrong type", c.typ, got.typ)
		case got.notNull != c.notNull:
			return mismatch(c.name, "wrong nullability", nullability(c.notNull), nullability(got.notNull))
		}
	}
	for _, i := range StoredColumns(t) {
		if only != nil && !only(i) {
			continue
		}
		name, want := t.Columns[i].Name, columnType(t, i)
		got, ok := columns[name]
		switch {
		case !ok:
			return mismatch(name, "missing column", want, "none")
		case got.typ != want:
			return mismatch(name, "wrong type", want, got.typ)
		}
	}
	if want := []string{"_sync_partition", "_sync_row_id"}; !slices.Equal(key, want) {
		return mismatch("", "wrong primary key", strings.Join(want, ", "), strings.Join(key, ", "))
	}
	return nil
}

func nullability(notNull bool) string {
	if notNull {
		return "not null"
	}
	return "nullable"
}

func readColumns(ctx context.Context, db Querier, appSchema string, tables []string) (map[string]map[string]catalogColumn, error) {
	rows, err := db.Query(ctx, columnsSQL, appSchema, tables)
	if err != nil {
		return nil, fmt.Errorf("reading the columns of the app tables: %w", err)
	}
	all := map[string]map[string]catalogColumn{}
	var table, column, typ string
	var notNull bool
	_, err = pgx.ForEachRow(rows, []any{&table, &column, &typ, &notNull}, func() error {
		if all[table] == nil {
			all[table] = map[string]catalogColumn{}
		}
		all[table][column] = catalogColumn{typ: typ, notNull: notNull}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the columns of the app tables: %w", err)
	}
	return all, nil
}

func readKeys(ctx context.Context, db Querier, appSchema string, tables []string) (map[string][]string, error) {
	rows, err := db.Query(ctx, keysSQL, appSchema, tables)
	if err != nil {
		return nil, fmt.Errorf("reading the keys of the app tables: %w", err)
	}
	all := map[string][]string{}
	var table string
	var key []string
	_, err = pgx.ForEachRow(rows, []any{&table, &key}, func() error {
		all[table] = slices.Clone(key)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the keys of the app tables: %w", err)
	}
	return all, nil
}
