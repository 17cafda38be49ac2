package schemaddl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// rewriteRows is how many rows a batch has at most, and rewriteBytes about how many
	// bytes; a payload over rewriteLarge is a batch of its own.
	rewriteRows  = 4096
	rewriteBytes = 4 << 20
	rewriteLarge = 64 << 10
	// rewriteFirst is the size of the first batch, which tells how large rows are.
	rewriteFirst = 128
)

// rewrite gives rows and log the layout of the new schema. Rows whose columns are filled
// too have to wait for those.
//
// Both are read by a cursor, which does not see what is written meanwhile, and written by
// where they are: nobody else writes them.
func (e *evolution) rewrite(ctx context.Context, tx pgx.Tx, done *Bump) error {
	var tables []string
	changed := map[string]*tableEvolution{}
	for _, t := range e.tables {
		if t.rows != nil {
			changed[t.next.Name] = t
		}
		if t.rewrites() {
			tables = append(tables, e.qualified(t.next.Name))
		}
	}
	if len(changed) > 0 {
		tables = append(tables, "syncpg.sync_changes")
	}
	if err := e.lockAll(ctx, tx, "share row exclusive", tables); err != nil {
		return err
	}
	for _, t := range e.tables {
		if t.rows != nil && len(t.fill) == 0 {
			if err := e.rewriteRows(ctx, tx, t, done); err != nil {
				return err
			}
		}
	}
	if len(changed) == 0 {
		return nil
	}
	return e.rewriteLog(ctx, tx, changed, done)
}

// place is where a row is.
type place struct {
	relation uint32
	tid      pgtype.TID
	table    string // changes of the log
	payload  []byte // nil: larger than rewriteLarge
}

// rewriteRows rewrites the rows of a table, and fills columns from them. The values of no
// row change, so triggers of the host are not asked.
func (e *evolution) rewriteRows(ctx context.Context, tx pgx.Tx, t *tableEvolution, done *Bump) error {
	name := e.qualified(t.next.Name)
	off, on, err := triggers(ctx, tx, e.o.AppSchema, t.next.Name)
	if err != nil {
		return err
	}
	if err := run(ctx, tx, off); err != nil {
		return err
	}
	p := Progress{Stage: StageRows, Table: t.next.Name}
	for _, r := range done.Rows {
		if r.Table == p.Table {
			p.Total = r.Rows
		}
	}
	w := newRowWriter(t, name)
	var rewritten, all int64
	err = e.walk(ctx, tx, walkSQL{
		cursor: fmt.Sprintf(`select t.tableoid, t.ctid, '', case when octet_length(t._sync_payload) <= $1 then t._sync_payload end from %s as t`, name),
		one:    fmt.Sprintf(`select t._sync_payload from %s as t where t.tableoid = $1 and t.ctid = $2`, name),
	}, p, w.add, func(ctx context.Context) error {
		n, err := w.flush(ctx, tx)
		rewritten += n
		return err
	})
	if err != nil {
		return fmt.Errorf("rewriting the rows of table %q: %w", t.next.Name, err)
	}
	if err := tx.QueryRow(ctx, "select count(*) from "+name).Scan(&all); err != nil {
		return fmt.Errorf("counting the rows of table %q: %w", t.next.Name, err)
	}
	if rewritten != all {
		return fmt.Errorf("rewriting the rows of table %q: of %d rows %d were rewritten; is there a rule or a trigger of a part of it that keeps rows from being updated?", t.next.Name, all, rewritten)
	}
	// What the update left to be checked would keep the table from being altered.
	return run(ctx, tx, append([]string{"set constraints all immediate"}, on...))
}

const triggersSQL = `
select g.tgname, g.tgenabled::text
  from pg_catalog.pg_trigger as g
  join pg_catalog.pg_class as c on c.oid = g.tgrelid
  join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
 where n.nspname = $1 and c.relname = $2 and not g.tgisinternal and g.tgenabled <> 'D'
 order by g.tgname`

// triggers returns the statements that disable the triggers of a table, and those that
// leave them as they were.
func triggers(ctx context.Context, db Querier, appSchema, table string) (off, on []string, err error) {
	rows, err := db.Query(ctx, triggersSQL, appSchema, table)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the triggers of table %q: %w", table, err)
	}
	alter := "alter table " + QuoteIdent(appSchema) + "." + QuoteIdent(table)
	var name, enabled string
	_, err = pgx.ForEachRow(rows, []any{&name, &enabled}, func() error {
		off = append(off, alter+" disable trigger "+QuoteIdent(name))
		how := map[string]string{"O": " enable trigger ", "R": " enable replica trigger ", "A": " enable always trigger "}[enabled]
		if how == "" {
			return fmt.Errorf("the trigger %q is in the state %q", name, enabled)
		}
		on = append(on, alter+how+QuoteIdent(name))
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("reading the triggers of table %q: %w", table, err)
	}
	return off, on, nil
}

func (e *evolution) rewriteLog(ctx context.Context, tx pgx.Tx, changed map[string]*tableEvolution, done *Bump) error {
	names := make([]string, 0, len(changed))
	for name := range changed {
		names = append(names, name)
	}
	var batch payloads
	err := e.walk(ctx, tx, walkSQL{
		cursor: `select t.tableoid, t.ctid, t.table_name, case when octet_length(t.payload) <= $1 then t.payload end
  from syncpg.sync_changes as t where t.table_name = any($2::text[]) and t.payload is not null`,
		args: []any{names},
		one:  `select t.payload from syncpg.sync_changes as t where t.tableoid = $1 and t.ctid = $2`,
	}, Progress{Stage: StageChanges, Total: done.LogChanges}, func(at *place) error {
		return batch.add(changed[at.table].rows, at)
	}, func(ctx context.Context) error {
		_, err := batch.update(ctx, tx, `update syncpg.sync_changes as t set payload = u.payload
  from unnest($1::oid[], $2::tid[], $3::bytea[]) as u(relation, tid, payload) where t.tableoid = u.relation and t.ctid = u.tid`)
		return err
	})
	if err != nil {
		return fmt.Errorf("rewriting the log: %w", err)
	}
	return nil
}

// walkSQL reads what is to be rewritten: the cursor all of it, with the payloads up to $1
// bytes, and one the payload of one.
type walkSQL struct {
	cursor string
	args   []any
	one    string
}

// errUnread says that a row was not where the cursor had found it.
var errUnread = errors.New("a row moved although its table is locked")

// walk gives add all rows, and calls flush behind each batch.
func (e *evolution) walk(ctx context.Context, tx pgx.Tx, sql walkSQL, p Progress, add func(*place) error, flush func(context.Context) error) error {
	if _, err := tx.Exec(ctx, "declare syncpg_rewrite no scroll cursor for "+sql.cursor, append([]any{int32(rewriteLarge)}, sql.args...)...); err != nil {
		return fmt.Errorf("declaring the cursor: %w", err)
	}
	// The cursor has its plan. What is written is found by where it is, also in a table of
	// which a batch is a large part.
	if err := run(ctx, tx, []string{"set local enable_seqscan = off", "set local enable_hashjoin = off", "set local enable_mergejoin = off"}); err != nil {
		return err
	}
	e.o.Progress(p)
	for size := rewriteFirst; ; {
		var large []place
		n, total := 0, 0
		// Batches differ in size, so their statements are not worth a name.
		rows, err := tx.Query(ctx, fmt.Sprintf("fetch %d from syncpg_rewrite", size), pgx.QueryExecModeDescribeExec)
		if err != nil {
			return fmt.Errorf("reading rows: %w", err)
		}
		var at place
		var payload pgtype.DriverBytes
		_, err = pgx.ForEachRow(rows, []any{&at.relation, &at.tid, &at.table, &payload}, func() error {
			n++
			if payload == nil {
				large = append(large, at)
				return nil
			}
			total += len(payload)
			at.payload = payload
			return add(&at)
		})
		if err != nil {
			return fmt.Errorf("reading rows: %w", err)
		}
		if err := flush(ctx); err != nil {
			return err
		}
		for i := range large {
			err := tx.QueryRow(ctx, sql.one, large[i].relation, large[i].tid).Scan(&large[i].payload)
			if errors.Is(err, pgx.ErrNoRows) {
				err = errUnread
			}
			if err == nil {
				err = add(&large[i])
			}
			if err != nil {
				return fmt.Errorf("reading a row: %w", err)
			}
			if err := flush(ctx); err != nil {
				return err
			}
			large[i].payload = nil
		}
		p.Done += int64(n)
		e.o.Progress(p)
		if n < size {
			break
		}
		size = min(rewriteRows, max(1, rewriteBytes/max(1, total/n)))
	}
	return run(ctx, tx, []string{
		"close syncpg_rewrite", "set local enable_seqscan = on", "set local enable_hashjoin = on", "set local enable_mergejoin = on",
	})
}

// payloads is a batch of rewritten payloads and where they belong.
type payloads struct {
	relations pgtype.FlatArray[uint32]
	tids      pgtype.FlatArray[pgtype.TID]
	rows      pgtype.FlatArray[[]byte]
	buf       []byte
}

// add projects a payload; without a projection it stays as it is.
func (b *payloads) add(p *ssp2.Projection, at *place) (err error) {
	start := len(b.buf)
	if p == nil {
		b.buf = append(b.buf, at.payload...)
	} else if b.buf, err = p.AppendRow(b.buf, at.payload); err != nil {
		return err
	}
	b.relations, b.tids = append(b.relations, at.relation), append(b.tids, at.tid)
	b.rows = append(b.rows, b.buf[start:len(b.buf):len(b.buf)])
	return nil
}

// update writes the batch, and forgets it.
func (b *payloads) update(ctx context.Context, tx pgx.Tx, sql string, more ...any) (int64, error) {
	n := len(b.rows)
	if n == 0 {
		return 0, nil
	}
	args := append([]any{b.relations, b.tids, b.rows}, more...)
	if mode := tx.Conn().Config().DefaultQueryExecMode; mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol {
		args = append([]any{pgx.QueryExecModeDescribeExec}, args...) // the types of arrays are the server's
	}
	tag, err := tx.Exec(ctx, sql, args...)
	if err != nil {
		return 0, fmt.Errorf("writing rows: %w", err)
	}
	*b = payloads{relations: b.relations[:0], tids: b.tids[:0], rows: b.rows[:0], buf: b.buf[:0]}
	if cap(b.buf) > 4*rewriteBytes {
		b.buf = nil
	}
	if tag.RowsAffected() != int64(n) {
		return 0, fmt.Errorf("of %d rows %d were updated; is there a rule or a trigger that keeps rows from being updated?", n, tag.RowsAffected())
	}
	return int64(n), nil
}

// rowWriter rewrites rows of a table.
type rowWriter struct {
	payloads
	t      *tableEvolution
	sql    string
	values []ssp2.Value
	fills  []any // by t.fill: the array of its values
}

func newRowWriter(t *tableEvolution, name string) *rowWriter {
	w := &rowWriter{t: t}
	var set, names, arrays strings.Builder
	if t.rows != nil {
		set.WriteString("_sync_payload = u.payload, _sync_column_versions = " + versionsExpression(t.source))
	}
	for k, i := range t.fill {
		typ, array := columnType(t.next, i), columnType(t.next, i)
		if array == "jsonb" {
			array = "text"
		}
		if set.Len() > 0 {
			set.WriteString(", ")
		}
		fmt.Fprintf(&set, "%s = u.f%d::%s", QuoteIdent(t.next.Columns[i].Name), k, typ)
		fmt.Fprintf(&names, ", f%d", k)
		fmt.Fprintf(&arrays, ", $%d::%s[]", 4+k, array)
	}
	w.sql = fmt.Sprintf(`update %s as t set %s
  from unnest($1::oid[], $2::tid[], $3::bytea[]%s) as u(relation, tid, payload%s) where t.tableoid = u.relation and t.ctid = u.tid`,
		name, set.String(), arrays.String(), names.String())
	w.reset()
	return w
}

// versionsExpression puts column versions in the order of the new columns. A column that is
// new was never written since the insert: its version is 1.
func versionsExpression(source []int) string {
	elements := make([]string, len(source))
	for i, j := range source {
		elements[i] = "1"
		if j >= 0 {
			elements[i] = fmt.Sprintf("t._sync_column_versions[%d]", j+1)
		}
	}
	return "case when t._sync_column_versions is not null then array[" + strings.Join(elements, ", ") + "]::bigint[] end"
}

func (w *rowWriter) reset() {
	w.fills = make([]any, len(w.t.fill))
	for k, i := range w.t.fill {
		switch KindOf(w.t.next.Columns[i].Type) {
		case KindInteger:
			w.fills[k] = &pgtype.FlatArray[pgtype.Int8]{}
		case KindFloat:
			w.fills[k] = &pgtype.FlatArray[pgtype.Float8]{}
		case KindBoolean:
			w.fills[k] = &pgtype.FlatArray[pgtype.Bool]{}
		case KindBytes:
			w.fills[k] = &pgtype.FlatArray[[]byte]{}
		default:
			w.fills[k] = &pgtype.FlatArray[pgtype.Text]{}
		}
	}
}

func (w *rowWriter) add(at *place) error {
	if len(w.t.fill) > 0 {
		if err := w.fill(at.payload); err != nil {
			return err
		}
	}
	return w.payloads.add(w.t.rows, at)
}

// fill reads the values of columns from a row in the old layout.
func (w *rowWriter) fill(payload []byte) (err error) {
	if w.values, err = ssp2.DecodeRow(w.t.old.Wire, payload, w.values); err != nil {
		return fmt.Errorf("a row cannot be read: %s", err.Error()) // not the client's error
	}
	for k, i := range w.t.fill {
		v, c := w.values[w.t.source[i]], &w.t.next.Columns[i]
		if w.t.next.IsScope(i) {
			if _, ok := schema.ScopeText(c.Type, v); !ok {
				return fmt.Errorf("column %q becomes a scope column, and a row has no value in it: give every row one with commits of the app first", c.Name)
			}
		}
		switch a := w.fills[k].(type) {
		case *pgtype.FlatArray[pgtype.Int8]:
			*a = append(*a, pgtype.Int8{Int64: v.Int, Valid: !v.Null})
		case *pgtype.FlatArray[pgtype.Float8]:
			*a = append(*a, pgtype.Float8{Float64: v.Float, Valid: !v.Null})
		case *pgtype.FlatArray[pgtype.Bool]:
			*a = append(*a, pgtype.Bool{Bool: v.Int != 0, Valid: !v.Null})
		case *pgtype.FlatArray[[]byte]:
			var b []byte
			if !v.Null {
				b = append([]byte{}, v.Bytes...)
			}
			*a = append(*a, b)
		case *pgtype.FlatArray[pgtype.Text]:
			*a = append(*a, pgtype.Text{String: string(v.Bytes), Valid: !v.Null})
		}
	}
	return nil
}

func (w *rowWriter) flush(ctx context.Context, tx pgx.Tx) (int64, error) {
	args := make([]any, len(w.fills))
	for k := range w.fills {
		switch a := w.fills[k].(type) {
		case *pgtype.FlatArray[pgtype.Int8]:
			args[k] = *a
		case *pgtype.FlatArray[pgtype.Float8]:
			args[k] = *a
		case *pgtype.FlatArray[pgtype.Bool]:
			args[k] = *a
		case *pgtype.FlatArray[[]byte]:
			args[k] = *a
		case *pgtype.FlatArray[pgtype.Text]:
			args[k] = *a
		}
	}
	n, err := w.update(ctx, tx, w.sql, args...)
	if len(w.t.fill) > 0 {
		w.reset()
	}
	return n, err
}
