package schemaddl

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// probing is the header of a generated function that finds rows by key: a plan
// made while the table was empty must not become a scan when it has filled up.
const probing = "set enable_seqscan = off\nset enable_hashjoin = off\nset enable_mergejoin = off\n"

// useVariable heads a body whose parameters an app column may be named like: every
// column in it is qualified.
const useVariable = "#variable_conflict use_variable\n"

// probe returns the query of the row k.row_id by its key. On an empty table the scope index
// seems just as good as the primary key; asked for a range in the order of row ids,
// it would have to sort.
func probe(table, columns string) string {
	return probeIn("p_partition", table, columns)
}

func probeIn(partition, table, columns string) string {
	return fmt.Sprintf("select %[1]s from %[2]s as x\n"+
		"         where x._sync_partition = %[3]s and x._sync_row_id >= k.row_id and x._sync_row_id <= k.row_id\n"+
		"         order by x._sync_row_id limit 1", columns, table, partition)
}

// function is a generated function.
type function struct {
	signature string // qualified name and types of the parameters
	header    string // create or replace function … as
	body      string
	comment   string
}

// source returns the text of the function as the catalog holds it.
func (f *function) source() string { return "\n" + f.body }

// statements returns what creates or replaces the function, with its comment and
// grants.
func (f *function) statements() []string {
	return []string{
		f.header + dollarQuote(f.body),
		fmt.Sprintf("comment on function %s is %s", f.signature, quoteLiteral(f.comment)),
		fmt.Sprintf("revoke execute on function %s from public", f.signature),
	}
}

// functions returns the generated functions of a schema.
func functions(s *schema.Schema, appSchema string) []function {
	all := []function{prefetchRows(s, appSchema), lockTables(s, appSchema), scanRows(s, appSchema), scanByScope(s, appSchema), scanByIndex(s, appSchema), liveRows(s, appSchema), findChildren(s, appSchema)}
	for _, t := range s.Tables {
		all = append(all, findRows(t, appSchema), writeRows(t, appSchema))
		if t.Materialize {
			all = append(all, encodeRow(t, appSchema))
		}
		for i := range t.Scopes {
			all = append(all, streamRows(t, i, appSchema))
		}
	}
	return all
}

// functionStatements returns the statements of all generated functions.
func functionStatements(s *schema.Schema, appSchema string) []string {
	var statements []string
	for _, f := range functions(s, appSchema) {
		statements = append(statements, f.statements()...)
	}
	return statements
}

// functionsDigest identifies the text of the generated functions, so that a newer
// generator notices that a database still has older bodies.
func functionsDigest(statements []string) string {
	sum := sha256.Sum256([]byte(strings.Join(statements, ";\n")))
	return hex.EncodeToString(sum[:])
}

func prefetchRows(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_prefetch_rows(text, text[], text[])"
	const header = "create or replace function syncpg.sync_prefetch_rows(p_partition text, p_tables text[], p_row_ids text[])\n" +
		"returns table (ord integer, server_version bigint, payload bytea, column_versions bigint[])\n" +
		"language plpgsql stable\nset search_path = pg_catalog, pg_temp\nset plan_cache_mode = force_generic_plan\n" + probing + "as "
	var b strings.Builder
	b.WriteString(useVariable + "begin\n")
	for _, t := range s.Tables {
		row := probe(QuoteIdent(appSchema)+"."+QuoteIdent(t.Name), "x._sync_server_version, x._sync_payload, x._sync_column_versions")
		fmt.Fprintf(&b, `  if %[1]s = any(p_tables) then
    return query
    select k.ord::integer, r._sync_server_version, r._sync_payload, r._sync_column_versions
      from unnest(p_tables, p_row_ids) with ordinality as k(table_name, row_id, ord)
      cross join lateral (
        %[2]s
      ) as r
     where k.table_name = %[1]s;
  end if;
`, quoteLiteral(t.Name), row)
	}
	b.WriteString("end\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "The current rows named by (p_tables[i], p_row_ids[i]); ord is i. Generated from the installed schema. Takes no locks.",
	}
}

func lockTables(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_lock_tables(text[])"
	const header = "create or replace function syncpg.sync_lock_tables(p_tables text[])\n" +
		"returns text[]\n" +
		"language plpgsql volatile\nset search_path = pg_catalog, pg_temp\nas "
	var b strings.Builder
	b.WriteString("declare\n  v_single text[] := '{}';\nbegin\n")
	for _, t := range s.Tables {
		name, table := quoteLiteral(t.Name), QuoteIdent(appSchema)+"."+QuoteIdent(t.Name)
		fmt.Fprintf(&b, `  if %[1]s = any(p_tables) then
    lock table %[2]s in row exclusive mode;
    if syncpg.sync_writes_singly(%[3]s::regclass) then
      v_single := v_single || %[1]s::text;
    end if;
  end if;
`, name, table, quoteLiteral(table))
	}
	b.WriteString("  return v_single;\nend\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "Returns those of the app tables named in p_tables whose operations need a statement each (sync_writes_singly); the answer holds until the transaction ends. Generated from the installed schema. Locks: the tables named, ROW EXCLUSIVE.",
	}
}

// kindParameter names the parameter array of a kind.
var kindParameter = [kinds]string{"p_texts", "p_integers", "p_floats", "p_booleans", "p_bytes"}

func writeRows(t *schema.Table, appSchema string) function {
	name := functionName(writeRowsPrefix, t)
	table := QuoteIdent(appSchema) + "." + QuoteIdent(t.Name)
	signature := name + "(text, text[], text[], bigint[], bytea[], text[], text[], bigint[], double precision[], boolean[], bytea[])"

	stored := StoredColumns(t)
	var width, next [kinds]int
	for _, i := range stored {
		width[KindOf(t.Columns[i].Type)]++
	}
	columns, values, updates := make([]string, len(stored)), make([]string, len(stored)), make([]string, len(stored))
	for k, i := range stored {
		kind := KindOf(t.Columns[i].Type)
		next[kind]++
		value := fmt.Sprintf("%s[(i.i - 1) * %d + %d]", kindParameter[kind], width[kind], next[kind])
		if columnType(t, i) == "jsonb" {
			value += "::jsonb"
		}
		column := QuoteIdent(t.Columns[i].Name)
		columns[k], values[k], updates[k] = ", "+column, ",\n           "+value, ",\n      "+column+" = excluded."+column
	}

	// Triggers of the host run under the settings of this function, so it has none but
	// the path, on which their tables need no qualifier: rows to delete are found by a
	// function of its own, and the delete is planned each time, by what is there.
	header := fmt.Sprintf(`create or replace function %s(
  p_partition text, p_deleted text[], p_row_ids text[], p_versions bigint[], p_payloads bytea[], p_column_versions text[],
  p_texts text[], p_integers bigint[], p_floats double precision[], p_booleans boolean[], p_bytes bytea[])
returns void
language plpgsql volatile
set search_path = pg_catalog, %s, pg_temp
as `, name, QuoteIdent(appSchema))
	find := functionName(findRowsPrefix, t)
	remove := fmt.Sprintf("delete from %s as t using %s($1, $2) as r where t.tableoid = r.found_in and t.ctid = r.found_at", table, find)
	// A row that somebody else updates meanwhile moves away from where it was found:
	// the second attempt meets it. What a trigger skips must not enter the log.
	body := useVariable + fmt.Sprintf(`declare
  v_rows bigint;
  v_left boolean;
begin
  if cardinality(p_deleted) > 0 then
    for v_attempt in 1..2 loop
      execute %[5]s using p_partition, p_deleted;
      get diagnostics v_rows = row_count;
      v_left := v_rows < cardinality(p_deleted) and exists (select 1 from %[6]s(p_partition, p_deleted));
      exit when not v_left;
    end loop;
    if v_left then
      raise exception 'a trigger kept a row from being deleted' using errcode = '23000';
    end if;
  end if;
  if cardinality(p_row_ids) > 0 then
    insert into %[1]s as t
      (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, _sync_column_versions%[2]s)
    select p_partition, p_row_ids[i.i], p_versions[i.i], p_payloads[i.i], p_column_versions[i.i]::bigint[]%[3]s
      from generate_subscripts(p_row_ids, 1) as i(i)
     order by i.i
    on conflict (_sync_partition, _sync_row_id) do update set
      _sync_server_version = excluded._sync_server_version, _sync_payload = excluded._sync_payload,
      _sync_column_versions = excluded._sync_column_versions%[4]s;
    get diagnostics v_rows = row_count;
    if v_rows < cardinality(p_row_ids) then
      raise exception 'a trigger kept a row from being written' using errcode = '23000';
    end if;
  end if;
end
`, table,
		strings.Join(columns, ""), strings.Join(values, ""), strings.Join(updates, ""),
		quoteLiteral(remove), find)
	return function{
		signature: signature, header: header, body: body,
		comment: "Writes rows of the table: deletes p_deleted, then inserts or replaces the others in array order; app columns come flattened by kind. SQLSTATE 23000 when a trigger kept a row from that. Generated from the installed schema. The caller holds the partition lock; locks the rows it writes.",
	}
}

// findRows generates the function that says where rows are, for deleting them.
func findRows(t *schema.Table, appSchema string) function {
	name := functionName(findRowsPrefix, t)
	header := fmt.Sprintf(`create or replace function %s(p_partition text, p_row_ids text[])
returns table (found_in oid, found_at tid)
language plpgsql stable rows 1
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
%sas `, name, probing)
	body := fmt.Sprintf(`%sbegin
  return query
  select r.tableoid, r.ctid
    from unnest(p_row_ids) as k(row_id)
    cross join lateral (
        %s
    ) as r;
end
`, useVariable, probe(QuoteIdent(appSchema)+"."+QuoteIdent(t.Name), "x.tableoid, x.ctid"))
	return function{
		signature: name + "(text, text[])", header: header, body: body,
		comment: "Where the rows named are now: table and position. Generated from the installed schema. Takes no locks.",
	}
}

// encodeRow generates the function that renders a row of the table as the bytes
// clients read (§2.4).
func encodeRow(t *schema.Table, appSchema string) function {
	name := functionName(encodePrefix, t)
	table := QuoteIdent(appSchema) + "." + QuoteIdent(t.Name)
	signature := name + "(" + table + ")"
	nulls := make([]string, len(t.Columns))
	parts := make([]string, len(t.Columns))
	for i, c := range t.Columns {
		column := "p_row." + QuoteIdent(c.Name)
		nulls[i] = column + " is null"
		parts[i] = fmt.Sprintf("coalesce(%s, ''::bytea)", wireExpression(c.Type, columnType(t, i), column))
	}
	header := fmt.Sprintf(`create or replace function %s(p_row %s)
returns bytea
language sql stable parallel safe
set search_path = pg_catalog, pg_temp
as `, name, table)
	body := fmt.Sprintf("select syncpg.sync_wire_null_bitmap(array[%s])\n    || %s\n",
		strings.Join(nulls, ", "), strings.Join(parts, "\n    || "))
	return function{
		signature: signature, header: header, body: body,
		comment: "The row as the wire bytes of the full-row codec, from its typed columns. Generated from the installed schema. Takes no locks.",
	}
}

func wireExpression(t ssp2.ColumnType, dbType, column string) string {
	switch t {
	case ssp2.TypeInteger:
		return "syncpg.sync_wire_i64(" + column + ")"
	case ssp2.TypeFloat:
		return "syncpg.sync_wire_f64(" + column + ")"
	case ssp2.TypeBoolean:
		return "syncpg.sync_wire_bool(" + column + ")"
	case ssp2.TypeBytes, ssp2.TypeCRDT:
		return "syncpg.sync_wire_bytes(" + column + ")"
	default:
		if dbType != "text" {
			column += "::text"
		}
		return "syncpg.sync_wire_str(" + column + ")"
	}
}
