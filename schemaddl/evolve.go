package schemaddl

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Action is what a bump does to a table, a column or an index.
type Action string

// Actions of a bump. What is kept stays in the database and leaves the schema: nothing
// reads or writes it any more.
const (
	CreateTable  Action = "create table"
	KeepTable    Action = "keep table"
	DropTable    Action = "drop table"
	AddColumn    Action = "add column"
	FillColumn   Action = "fill column" // from the rows as clients have them
	KeepColumn   Action = "keep column"
	DropColumn   Action = "drop column"
	MakeNullable Action = "make nullable"
	RewriteRows  Action = "rewrite rows"
	CreateIndex  Action = "create index"
	RebuildIndex Action = "rebuild index"
	DropIndex    Action = "drop index"
	Change       Action = "change" // of what has no form in the database but functions
)

// Step is one thing that a bump does.
type Step struct {
	Action Action `json:"action"`
	Table  string `json:"table"`
	// Name is that of the column or index, in the database; empty for a table.
	Name string `json:"name,omitempty"`
	// Note says more, for people.
	Note string `json:"note,omitempty"`
}

// Problem is a reason why a database cannot be bumped.
type Problem struct {
	Table   string `json:"table,omitempty"`
	Column  string `json:"column,omitempty"`
	Message string `json:"message"`
	// Help is what can be done instead.
	Help string `json:"help,omitempty"`
}

func (p Problem) String() string {
	var b strings.Builder
	if p.Table != "" {
		fmt.Fprintf(&b, "table %q", p.Table)
		if p.Column != "" {
			fmt.Fprintf(&b, ", column %q", p.Column)
		}
		b.WriteString(": ")
	}
	b.WriteString(p.Message)
	if p.Help != "" {
		b.WriteString("; " + p.Help)
	}
	return b.String()
}

// BumpError says why a database cannot be bumped: all reasons that were found. Nothing was
// changed.
type BumpError struct {
	From, To int32
	Problems []Problem
}

func (e *BumpError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the schema cannot go from version %d to version %d:", e.From, e.To)
	for _, p := range e.Problems {
		b.WriteString("\n  " + p.String())
	}
	return b.String()
}

// evolution is the way from one schema to the next in a database.
type evolution struct {
	old, next *schema.Schema
	o         BumpOptions
	columns   map[string]map[string]catalogColumn
	taken     []string // names of relations of any kind, among the tables
	history   []*schema.Schema

	steps    []Step
	problems []Problem
	tables   []*tableEvolution // of both, in the order of next
	created  []*schema.Table
	removed  []*schema.Table
	drop     []catalogIndex // owned indexes
	create   []ownedIndex
	dropped  []string // tables, with Drop
}

// tableEvolution is what becomes of a table of both schemas.
type tableEvolution struct {
	old, next *schema.Table
	// rows turns rows of the old layout into the new one; nil when they are the same.
	rows *ssp2.Projection
	// source is, by column of next, its index in old, or -1.
	source []int
	// alter are the clauses of its ALTER TABLE.
	alter []string
	// fill are the columns of next, by index, that rows have in their payload and the
	// database does not have yet.
	fill []int
}

// rewrites says whether rows of the table are written.
func (t *tableEvolution) rewrites() bool { return t.rows != nil || len(t.fill) > 0 }

func (e *evolution) refuse(table, column, help, format string, args ...any) {
	e.problems = append(e.problems, Problem{Table: table, Column: column, Message: fmt.Sprintf(format, args...), Help: help})
}

func (e *evolution) step(a Action, table, name, format string, args ...any) {
	e.steps = append(e.steps, Step{Action: a, Table: table, Name: name, Note: fmt.Sprintf(format, args...)})
}

// readEvolution works out how the installed schema becomes next. Problems with the schemas
// or the rows are an *[BumpError]; a catalog that is not the installed schema, a
// *[LayoutError].
func readEvolution(ctx context.Context, db Querier, old, next *schema.Schema, o BumpOptions) (*evolution, error) {
	e := &evolution{old: old, next: next, o: o}
	var names []string
	for _, s := range []*schema.Schema{old, next} {
		for _, t := range s.Tables {
			if !slices.Contains(names, t.Name) {
				names = append(names, t.Name)
			}
		}
	}
	var err error
	if e.columns, err = readColumns(ctx, db, o.AppSchema, names); err != nil {
		return nil, err
	}
	if e.taken, err = readRelations(ctx, db, o.AppSchema, names); err != nil {
		return nil, err
	}
	keys, err := readKeys(ctx, db, o.AppSchema, names)
	if err != nil {
		return nil, err
	}
	if e.history, err = readHistory(ctx, db); err != nil {
		return nil, err
	}
	for _, t := range next.Tables {
		was, ok := old.Table(t.Name)
		if !ok {
			e.newTable(t)
			continue
		}
		if err := checkTable(was, func(column int) bool {
			_, stays := t.ColumnIndex(was.Columns[column].Name)
			return stays
		}, e.columns[t.Name], keys[t.Name]); err != nil {
			return nil, err
		}
		e.table(was, t)
	}
	for _, t := range old.Tables {
		if _, ok := next.Table(t.Name); !ok {
			e.removedTable(t)
		}
	}
	if err := e.indexes(ctx, db); err != nil {
		return nil, err
	}
	if len(e.problems) == 0 {
		if err := e.checkRows(ctx, db); err != nil {
			return nil, err
		}
	}
	if len(e.problems) > 0 {
		return nil, &BumpError{From: old.Version, To: next.Version, Problems: e.problems}
	}
	return e, nil
}

func (e *evolution) newTable(t *schema.Table) {
	e.created = append(e.created, t)
	e.step(CreateTable, t.Name, "", "")
	if !slices.Contains(e.taken, t.Name) {
		return
	}
	help := "rename it, or choose another name for the table"
	if e.knew(t.Name) {
		help = "it is left from an earlier version; rename it, or drop it if its rows are not needed any more"
	}
	e.refuse(t.Name, "", help, "the database has a table of this name already, which is not ours to replace")
}

const relationsSQL = `
select c.relname
  from pg_catalog.pg_class as c
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
 where n.nspname = $1 and c.relname = any($2::text[])`

func readRelations(ctx context.Context, db Querier, appSchema string, names []string) ([]string, error) {
	rows, err := db.Query(ctx, relationsSQL, appSchema, names)
	if err != nil {
		return nil, fmt.Errorf("reading the names of relations: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("reading the names of relations: %w", err)
	}
	return found, nil
}

// knew says whether an earlier version had a table.
func (e *evolution) knew(table string) bool {
	return slices.ContainsFunc(e.history, func(s *schema.Schema) bool {
		_, ok := s.Table(table)
		return ok
	})
}

func (e *evolution) removedTable(t *schema.Table) {
	e.removed = append(e.removed, t)
	if !slices.Contains(e.taken, t.Name) {
		return // dropped by hand
	}
	if e.o.Drop {
		e.dropped = append(e.dropped, t.Name)
		e.step(DropTable, t.Name, "", "its rows are deleted")
		return
	}
	e.step(KeepTable, t.Name, "", "it leaves the schema, its rows stay in the database")
}

// table compares the table of both schemas.
func (e *evolution) table(was, t *schema.Table) {
	ev := &tableEvolution{old: was, next: t, source: make([]int, len(t.Columns))}
	e.tables = append(e.tables, ev)
	if then, now := was.Columns[was.PrimaryKey].Name, t.Columns[t.PrimaryKey].Name; then != now {
		e.refuse(t.Name, "", "make a new table, and move the rows with commits of the app", "its primary key was %q and is %q", then, now)
	}
	before := len(e.problems)
	for i := range t.Columns {
		ev.source[i] = -1
		if j, ok := was.ColumnIndex(t.Columns[i].Name); ok {
			ev.source[i] = j
			e.keptColumn(ev, j, i)
		} else {
			e.newColumn(ev, i)
		}
	}
	for j := range was.Columns {
		if i, ok := t.ColumnIndex(was.Columns[j].Name); !ok {
			e.removedColumn(ev, j)
		} else if stored(was, j) && !stored(t, i) {
			e.leftColumn(ev, was.Columns[j].Name, "rows keep it, outside of the typed columns")
		}
	}
	if then, now := was.Materialize, t.Materialize; then != now {
		e.step(Change, t.Name, "", "materialize was %t and is %t", then, now)
	}
	if then, now := patterns(was), patterns(t); then != now {
		e.step(Change, t.Name, "", "scopes were %s and are %s", then, now)
	}
	if then, now := references(was), references(t); then != now {
		e.step(Change, t.Name, "", "references were %s and are %s", then, now)
	}
	if len(e.problems) > before {
		return
	}
	if !slices.EqualFunc(was.Wire, t.Wire, func(a, b ssp2.Column) bool { return a.Name == b.Name }) {
		if err := ev.project(); err != nil {
			e.refuse(t.Name, "", "", "%v", err)
			return
		}
		e.step(RewriteRows, t.Name, "", "rows and log get the new layout")
	}
}

// project sets the projection of rows. A column that is new and not nullable has no value
// for one; that the table has no rows is checked elsewhere.
func (t *tableEvolution) project() error {
	to := slices.Clone(t.next.Wire)
	for i, j := range t.source {
		if j < 0 {
			to[i].Nullable = true
		}
	}
	p, err := ssp2.NewProjection(t.old.Wire, to)
	if err != nil {
		return fmt.Errorf("rows cannot be rewritten: %w", err)
	}
	t.rows = p
	return nil
}

// keptColumn compares the column of both schemas, by index.
func (e *evolution) keptColumn(ev *tableEvolution, j, i int) {
	was, now, t := &ev.old.Columns[j], &ev.next.Columns[i], ev.next
	switch {
	case was.Type != now.Type:
		e.refuse(t.Name, now.Name, "add a column of another name and type, let the app copy the values with commits, and remove this one later",
			"its type was %v and is %v", was.Type, now.Type)
		return
	case was.Nullable && !now.Nullable:
		e.refuse(t.Name, now.Name, "leave it nullable, and let validators demand a value", "it was nullable and is not any more, and rows and the log may have NULL in it")
		return
	}
	if !stored(t, i) {
		return
	}
	was2, there := e.columns[t.Name][now.Name]
	want := columnType(t, i)
	switch {
	case !stored(ev.old, j):
		if there && was2.typ != want {
			e.refuse(t.Name, now.Name, "drop or rename the one in the database", "the database has a column of this name and of type %s, left from an earlier version", was2.typ)
			return
		}
		if !there {
			ev.alter = append(ev.alter, "add column "+QuoteIdent(now.Name)+" "+want)
			e.step(AddColumn, t.Name, now.Name, "%s", want)
		}
		ev.fill = append(ev.fill, i)
		e.step(FillColumn, t.Name, now.Name, "from the rows")
	case was2.typ != want:
		e.refuse(t.Name, now.Name, "add a column of another name", "json scope columns are stored as text and others as jsonb, so that it cannot become the other")
	}
	if there && was2.notNull && now.Nullable {
		ev.alter = append(ev.alter, "alter column "+QuoteIdent(now.Name)+" drop not null")
		e.step(MakeNullable, t.Name, now.Name, "")
	}
}

func (e *evolution) newColumn(ev *tableEvolution, i int) {
	t, c := ev.next, &ev.next.Columns[i]
	if !stored(t, i) {
		e.step(Change, t.Name, c.Name, "a new column, in the rows only")
		return
	}
	want := columnType(t, i)
	got, there := e.columns[t.Name][c.Name]
	switch {
	case !there:
		ev.alter = append(ev.alter, "add column "+QuoteIdent(c.Name)+" "+want)
		e.step(AddColumn, t.Name, c.Name, "%s", want)
	case got.typ != want:
		e.refuse(t.Name, c.Name, "drop or rename the one in the database", "the database has a column of this name and of type %s", got.typ)
	default:
		if got.notNull {
			ev.alter = append(ev.alter, "alter column "+QuoteIdent(c.Name)+" drop not null")
		}
		e.step(Change, t.Name, c.Name, "the column that the database has already is taken")
	}
}

func (e *evolution) removedColumn(ev *tableEvolution, j int) {
	t, name := ev.next, ev.old.Columns[j].Name
	if !stored(ev.old, j) && !e.o.Drop {
		e.refuse(t.Name, name, "give --drop to delete them", "it is removed, and its values are nowhere but in the rows that would lose them")
		return
	}
	e.leftColumn(ev, name, "it leaves the schema, its values stay in the database")
}

// leftColumn lets a typed column go.
func (e *evolution) leftColumn(ev *tableEvolution, name, note string) {
	t := ev.next
	got, there := e.columns[t.Name][name]
	switch {
	case !there && e.o.Drop:
		e.step(DropColumn, t.Name, name, "its values are deleted")
	case !there:
		e.step(Change, t.Name, name, "it leaves the schema, and was dropped before")
	case e.o.Drop:
		ev.alter = append(ev.alter, "drop column "+QuoteIdent(name))
		e.step(DropColumn, t.Name, name, "its values are deleted")
	default:
		if got.notNull {
			ev.alter = append(ev.alter, "alter column "+QuoteIdent(name)+" drop not null")
		}
		e.step(KeepColumn, t.Name, name, "%s", note)
	}
}

// stored says whether a column has a typed column in the database.
func stored(t *schema.Table, column int) bool { return t.Materialize || t.IsScope(column) }

func patterns(t *schema.Table) string {
	all := make([]string, len(t.Scopes))
	for i, s := range t.Scopes {
		all[i] = s.Pattern + " of " + t.Columns[s.Column].Name
	}
	return strings.Join(all, ", ")
}

func references(t *schema.Table) string {
	all := make([]string, len(t.References))
	for i, r := range t.References {
		all[i] = fmt.Sprintf("%s → %s %s", t.Columns[r.Column].Name, r.Parent.Name, r.OnDelete)
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// checkRows looks for rows that the new schema could not hold.
func (e *evolution) checkRows(ctx context.Context, db Querier) error {
	for _, t := range e.tables {
		if err := e.checkNewColumns(ctx, db, t); err != nil {
			return err
		}
		if err := e.checkScopes(ctx, db, t); err != nil {
			return err
		}
		if err := e.checkReferences(ctx, db, t); err != nil {
			return err
		}
	}
	return e.checkUnique(ctx, db)
}

func (e *evolution) relation(t *schema.Table) string {
	return QuoteIdent(e.o.AppSchema) + "." + QuoteIdent(t.Name)
}

func exists(ctx context.Context, db Querier, what, sql string, args ...any) (found bool, err error) {
	if err := db.QueryRow(ctx, "select exists ("+sql+")", args...).Scan(&found); err != nil {
		return false, fmt.Errorf("%s: %w", what, err)
	}
	return found, nil
}

func (e *evolution) checkNewColumns(ctx context.Context, db Querier, t *tableEvolution) error {
	for i, j := range t.source {
		c := &t.next.Columns[i]
		if j >= 0 {
			continue
		}
		if _, there := e.columns[t.next.Name][c.Name]; there && stored(t.next, i) {
			found, err := exists(ctx, db, "looking for values that are left in a column",
				fmt.Sprintf("select 1 from %s as t where t.%s is not null", e.relation(t.next), QuoteIdent(c.Name)))
			if err != nil {
				return err
			}
			if found {
				e.refuse(t.next.Name, c.Name, "drop or rename the one in the database, or choose another name",
					"it is new, and the database has a column of this name with values, which no client has")
			}
		}
		if c.Nullable {
			continue
		}
		found, err := exists(ctx, db, "looking for rows", fmt.Sprintf(`select 1 from %s
			union all select 1 from syncpg.sync_changes as c where c.table_name = $1 and c.payload is not null`, e.relation(t.next)), t.next.Name)
		if err != nil {
			return err
		}
		if found {
			e.refuse(t.next.Name, c.Name, "make it nullable, and let validators demand a value",
				"it is new and not nullable, and there are rows, or changes in the log, that have no value for it")
		}
	}
	return nil
}

// checkScopes looks for rows without a value for a scope that is new (§3.4 rule 2). Those
// of columns that are filled are looked at then.
func (e *evolution) checkScopes(ctx context.Context, db Querier, t *tableEvolution) error {
	for _, sc := range t.next.Scopes {
		j, name := t.source[sc.Column], t.next.Columns[sc.Column].Name
		if j >= 0 && (t.old.IsScope(j) || !stored(t.old, j)) {
			continue
		}
		condition := ""
		if j >= 0 {
			condition = fmt.Sprintf(" where t.%[1]s is null or t.%[1]s::text = ''", QuoteIdent(name))
		}
		found, err := exists(ctx, db, "looking for rows without a scope value", fmt.Sprintf("select 1 from %s as t%s", e.relation(t.next), condition))
		if err != nil {
			return err
		}
		if found {
			e.refuse(t.next.Name, name, "give every row a value with commits of the app first", "it becomes a scope column, and rows have no value in it")
		}
	}
	return nil
}

// checkReferences looks for rows whose new reference names no row.
func (e *evolution) checkReferences(ctx context.Context, db Querier, t *tableEvolution) error {
	for _, r := range t.next.References {
		column := t.next.Columns[r.Column].Name
		j := t.source[r.Column]
		if j < 0 || slices.ContainsFunc(t.old.References, func(o schema.Reference) bool {
			return o.Column == j && o.Parent.Name == r.Parent.Name
		}) {
			continue
		}
		if !stored(t.old, j) {
			e.refuse(t.next.Name, column, "let it become a typed column in one version, and a reference in the next",
				"whether its values name rows cannot be told, since it is not a typed column yet")
			continue
		}
		parent, missing := e.parentTest(r, "t."+QuoteIdent(column))
		if missing != "" {
			e.refuse(t.next.Name, column, "", "%s", missing)
			continue
		}
		sql := fmt.Sprintf("select 1 from %s as t where t.%s is not null", e.relation(t.next), QuoteIdent(column))
		if parent != "" {
			sql += " and not exists (" + parent + ")"
		}
		found, err := exists(ctx, db, "looking for references without a row", sql)
		if err != nil {
			return err
		}
		if found {
			e.refuse(t.next.Name, column, "correct these rows with commits of the app first", "it becomes a reference to table %q, and rows refer to none", r.Parent.Name)
		}
	}
	return nil
}

// parentTest returns a query that finds the parent of a value, empty when there can be
// none, or why there is no such query.
func (e *evolution) parentTest(r schema.Reference, value string) (sql, missing string) {
	old, ok := e.old.Table(r.Parent.Name)
	if !ok {
		return "", "" // its table is new
	}
	key := &old.Columns[old.PrimaryKey]
	condition := "p._sync_row_id = " + value + "::text"
	switch {
	case stored(old, old.PrimaryKey):
		condition = "p." + QuoteIdent(key.Name) + " = " + value
	case key.Type == ssp2.TypeFloat:
		return "", "whether its values name rows cannot be told, since the key of the parent is a number in the rows only"
	}
	return fmt.Sprintf("select 1 from %s as p where p._sync_partition = t._sync_partition and %s", e.relation(r.Parent), condition), ""
}

// checkUnique looks for rows that a new unique index would refuse.
func (e *evolution) checkUnique(ctx context.Context, db Querier) error {
	for _, x := range e.create {
		t := slices.IndexFunc(e.tables, func(t *tableEvolution) bool { return t.next.Name == x.table })
		if !x.unique || !x.fresh || t < 0 {
			continue
		}
		ev := e.tables[t]
		columns, values := make([]string, len(x.columns)), make([]string, len(x.columns))
		known := true
		for k, name := range x.columns {
			i, _ := ev.next.ColumnIndex(name)
			known = known && ev.source[i] >= 0 && stored(ev.old, ev.source[i])
			columns[k] = "t." + QuoteIdent(name)
			values[k] = columns[k] + " is not null"
		}
		if !known {
			continue // all NULL, or not typed yet: the index itself will tell
		}
		found, err := exists(ctx, db, "looking for values that are not unique", fmt.Sprintf(
			"select 1 from %s as t where %s group by t._sync_partition, %s having count(*) > 1",
			QuoteIdent(e.o.AppSchema)+"."+QuoteIdent(x.table), strings.Join(values, " and "), strings.Join(columns, ", ")))
		if err != nil {
			return err
		}
		if found {
			e.refuse(x.table, "", "correct these rows with commits of the app first", "the index %q is unique, and rows have the same values", x.declared)
		}
	}
	return nil
}
