package schemaddl

import (
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
)

// scanning is the header of the generated function that pages through rows by
// scope. Its plans are generic, and every way to read a table other than by an
// index in order is turned off: see probing.
const scanning = "set plan_cache_mode = force_generic_plan\nset jit = off\n" + probing +
	"set enable_bitmapscan = off\nset enable_sort = off\nset enable_incremental_sort = off\n"

// scanRows generates sync_scan_rows, which reads one bootstrap page (§4.7) of each
// of many subscriptions.
//
// A page is read value by value of the driving variable, the first effective one
// in sorted order, and by row id within a value: that is the order of the scope
// index, so that a page costs what it returns, however many values there are. The
// comparison of rows and the ORDER BY over both columns leave that index as the
// only one that gives the order; with an equality on the scope column the primary
// key would give it too, and a plan made for it would read the whole partition.
func scanRows(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_scan_rows(text, text[], text[], bigint[], integer[], text[], integer, bigint, bigint)"
	const header = `create or replace function syncpg.sync_scan_rows(
  p_partition text, p_tables text[], p_scopes text[], p_pins bigint[], p_firsts integer[], p_afters text[],
  p_limit integer, p_page_bytes bigint, p_max_bytes bigint)
returns table (ord integer, value_ord integer, row_id text, server_version bigint, payload bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
` + scanning + "as "
	var b strings.Builder
	// A column of the app may have the name of a variable; all columns are qualified.
	b.WriteString(`#variable_conflict use_variable
declare
  v_max     bigint;
  v_horizon bigint;
  v_total   bigint := 0;
  v_sub     record;
  v_after   text;
  v_rows    integer;
  v_bytes   bigint;
begin
  select p.max_commit_seq, p.horizon_seq into v_max, v_horizon
    from syncpg.sync_partitions as p where p.partition = p_partition;
  for v_sub in
    select u.ord, u.table_name, j.scopes, u.pin, u.first, u.after
      from unnest(p_tables, p_scopes, p_pins, p_firsts, p_afters)
           with ordinality as u(table_name, scopes, pin, first, after, ord)
      cross join lateral (select u.scopes::jsonb as scopes offset 0) as j
     order by u.ord
  loop
    exit when v_total >= p_max_bytes;
    ord := v_sub.ord;
    v_rows := 0;
    v_bytes := 0;
    if v_sub.pin is null or v_sub.pin between v_horizon and v_max then
      value_ord := v_sub.first;
      v_after := v_sub.after;
    else
      value_ord := 1;
      v_after := '';
    end if;
    <<page>>
    begin
`)
	for i, t := range s.Tables {
		word := "elsif"
		if i == 0 {
			word = "if"
		}
		fmt.Fprintf(&b, "      %s v_sub.table_name = %s then\n", word, quoteLiteral(t.Name))
		scanTable(&b, t, appSchema)
	}
	b.WriteString(`      else
        raise exception 'the installed schema has no such table' using errcode = 'undefined_table';
      end if;
      value_ord := null;
    end page;
    v_total := v_total + v_bytes;
    row_id := null;
    server_version := null;
    payload := null;
    return next;
  end loop;
end
`)
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "One bootstrap page (§4.7) of each subscription i: rows of p_tables[i] that match every variable of p_scopes[i] (a JSON object of variable to values, neither empty; SQLSTATE SY005), in the order of the values of its first variable, then of row ids. It begins after row p_afters[i] of value p_firsts[i], counted from 1; from the start when p_pins[i] is outside horizon and newest commit. It ends before it would hold over p_limit rows, or after the row that makes its payloads reach p_page_bytes. No page is begun after p_max_bytes. Each ends with a row whose row_id is NULL; its value_ord is NULL when nothing follows. Generated from the installed schema. Takes no locks.",
	}
}

// scanTable writes the branch of one table: the values of each of its variables as
// an array of the column's type, then a loop for the variable that drives.
func scanTable(b *strings.Builder, t *schema.Table, appSchema string) {
	scopeValues(b, t, "v_sub.scopes")
	for i, sc := range t.Scopes {
		word := "elsif"
		if i == 0 {
			word = "if"
		}
		column := "t." + QuoteIdent(t.Columns[sc.Column].Name)
		// A query that names the array gets a copy of all of it.
		fmt.Fprintf(b, `          %[1]s v_%[2]d is not null then
            while value_ord <= cardinality(v_%[2]d) loop
              declare
                v_value %[7]s := v_%[2]d[value_ord];
              begin
                for row_id, server_version, payload in
                  select t._sync_row_id, t._sync_server_version, t._sync_payload
                    from %[3]s.%[4]s as t
                   where t._sync_partition = p_partition
                     and (%[5]s, t._sync_row_id) > (v_value, v_after) and %[5]s <= v_value%[6]s
                   order by %[5]s, t._sync_row_id
                   limit p_limit - v_rows + 1
                loop
                  exit page when v_rows >= p_limit or v_bytes >= p_page_bytes;
                  v_rows := v_rows + 1;
                  v_bytes := v_bytes + octet_length(payload);
                  return next;
                end loop;
              end;
              value_ord := value_ord + 1;
              v_after := '';
            end loop;
`, word, i+1, QuoteIdent(appSchema), QuoteIdent(t.Name), column, scopeFilters(t, i), columnType(t, sc.Column))
	}
	b.WriteString("          end if;\n        end;\n")
}

// scopeValues writes the declaration of an array for the values of each variable of a
// table, taken from a JSON object and of the column's type, and the check that the
// object names some.
func scopeValues(b *strings.Builder, t *schema.Table, scopes string) {
	b.WriteString("        declare\n")
	for i, sc := range t.Scopes {
		fmt.Fprintf(b, "          v_%[1]d %[2]s[] := case when %[4]s ? %[3]s then array(select e.value::%[2]s from jsonb_array_elements_text(%[4]s -> %[3]s) as e(value)) end;\n",
			i+1, columnType(t, sc.Column), quoteLiteral(sc.Variable), scopes)
	}
	counts := make([]string, len(t.Scopes))
	for i := range counts {
		counts[i] = fmt.Sprintf("nullif(cardinality(v_%d), 0)", i+1)
	}
	// An empty list or a variable of another table must not widen the scan.
	fmt.Fprintf(b, `        begin
          if num_nonnulls(%s) <> greatest((select count(*) from jsonb_object_keys(%s)), 1) then
            raise exception 'a scan needs a scope' using errcode = 'SY005';
          end if;
`, strings.Join(counts, ", "), scopes)
}

// scopeFilters returns the conditions on the variables after the one that drives.
func scopeFilters(t *schema.Table, driving int) string {
	var filters strings.Builder
	for i := driving + 1; i < len(t.Scopes); i++ {
		fmt.Fprintf(&filters, "\n                   and (v_%[1]d is null or t.%[2]s = any(v_%[1]d))",
			i+1, QuoteIdent(t.Columns[t.Scopes[i].Column].Name))
	}
	return filters.String()
}

// streamRows generates the function that reads the rows of one table by one driving
// variable. It is a plain query in the language SQL without settings, so that the
// planner puts it in the place of its call and rows come as they are found; a function
// that is called would hand them over when it has found the last. Who calls it turns
// off every way to read a table but by an index in order (PullPinPlans); for the
// conditions see [scanRows].
//
// The parameters have numbers, since columns of the app may have any name.
func streamRows(t *schema.Table, driving int, appSchema string) function {
	name := functionName(streamRowsPrefix(driving), t)
	column := "t." + QuoteIdent(t.Columns[t.Scopes[driving].Column].Name)
	var filters strings.Builder
	for _, sc := range t.Scopes[driving+1:] {
		fmt.Fprintf(&filters, `
       and ((select not $4::jsonb ? %[1]s)
            or t.%[2]s = any((select array(select e.value::%[3]s from jsonb_array_elements_text($4::jsonb -> %[1]s) as e(value)))::%[3]s[]))`,
			quoteLiteral(sc.Variable), QuoteIdent(t.Columns[sc.Column].Name), columnType(t, sc.Column))
	}
	return function{
		signature: name + "(text, text[], text, text, integer, integer)",
		header: fmt.Sprintf(`create or replace function %s(
  p_partition text, p_values text[], p_after text, p_scopes text, p_max_bytes integer, p_limit integer)
returns table (value_ord integer, row_id text, server_version bigint, payload bytea)
language sql stable
as `, name),
		body: fmt.Sprintf(`select u.ord::integer, r.row_id, r.server_version, r.payload
  from unnest((select $2::%[1]s[])) with ordinality as u(value, ord)
 cross join lateral (
    select t._sync_row_id as row_id, t._sync_server_version as server_version,
           case when octet_length(t._sync_payload) <= $5 then t._sync_payload end as payload
      from %[2]s.%[3]s as t
     where t._sync_partition = $1
       and (%[4]s, t._sync_row_id) > (u.value, case when u.ord = 1 then $3 else '' end)
       and %[4]s <= u.value%[5]s
     order by %[4]s, t._sync_row_id
 ) as r
 order by u.ord
 limit $6
`, columnType(t, t.Scopes[driving].Column), QuoteIdent(appSchema), QuoteIdent(t.Name), column, filters.String()),
		comment: fmt.Sprintf("Rows of the table whose %s is one of p_values, in the order of the values, then of row ids, and that match the variables after it in p_scopes (a JSON object of variable to values). It begins behind row p_after of the first value; at most p_limit rows. The payload of a row over p_max_bytes is NULL. For a caller that pins its plans (PullPinPlans). Generated from the installed schema. Takes no locks.",
			t.Scopes[driving].Variable),
	}
}
