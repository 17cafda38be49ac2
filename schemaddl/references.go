package schemaddl

import (
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
)

// FindChildrenSQL finds the rows whose reference p_columns[i] of table p_tables[i] names
// the row p_parents[i]: partition, tables, columns, parents (text[n] each), how many of
// each parent at most, how many of each reference at most, how many bytes of payloads at
// most. It returns i, row id, server version, payload, and column versions as an array
// literal or an empty text; of references that restrict, no payload. A payload of any
// other that is NULL says that the bytes did not suffice.
//
// The caller holds the partition lock. A parent must be a text of the type of the column.
const FindChildrenSQL = `select f.ord, f.row_id, f.server_version, case when f.bytes <= $7 then f.payload end, coalesce(f.column_versions::text, '')
  from (select c.*, sum(coalesce(octet_length(c.payload), 0)) over (rows unbounded preceding) as bytes
          from syncpg.sync_find_children($1, $2, $3, $4, $5, $6) as c) as f`

// liveRows generates sync_live_rows, with a branch for every table that is a parent.
func liveRows(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_live_rows(text, text[], text[])"
	const header = "create or replace function syncpg.sync_live_rows(p_partition text, p_tables text[], p_row_ids text[])\n" +
		"returns integer[]\n" +
		"language plpgsql stable\nset search_path = pg_catalog, pg_temp\nset plan_cache_mode = force_generic_plan\n" + probing + "as "
	parents := make([]bool, len(s.Tables))
	for _, t := range s.Tables {
		for _, r := range t.References {
			parents[r.Parent.Index] = true
		}
	}
	var b strings.Builder
	b.WriteString(useVariable + "declare\n  v_live integer[] := '{}';\nbegin\n")
	for i, t := range s.Tables {
		if !parents[i] {
			continue
		}
		fmt.Fprintf(&b, `  if %[1]s = any(p_tables) then
    v_live := v_live || array(
      select k.ord::integer
        from unnest(p_tables, p_row_ids) with ordinality as k(table_name, row_id, ord)
        cross join lateral (
          %[2]s
        ) as r
       where k.table_name = %[1]s);
  end if;
`, quoteLiteral(t.Name), probe(QuoteIdent(appSchema)+"."+QuoteIdent(t.Name), "x._sync_row_id"))
	}
	b.WriteString("  return v_live;\nend\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "The i for which (p_tables[i], p_row_ids[i]) is a row, of tables that a reference names as parent. Generated from the installed schema. Takes no locks.",
	}
}

// findChildren generates sync_find_children. As in sync_scan_by_scope, the comparison of
// rows and the order leave the index of the reference as the only one that will do.
func findChildren(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_find_children(text, text[], text[], text[], integer, integer)"
	const header = "create or replace function syncpg.sync_find_children(\n" +
		"  p_partition text, p_tables text[], p_columns text[], p_parents text[], p_limit integer, p_most integer)\n" +
		"returns table (ord integer, row_id text, server_version bigint, payload bytea, column_versions bigint[])\n" +
		"language plpgsql stable\nset search_path = pg_catalog, pg_temp\n" + scanning + "as "
	var b strings.Builder
	b.WriteString(useVariable + "begin\n")
	for _, t := range s.Tables {
		for _, r := range t.References {
			row := "t._sync_payload as payload, t._sync_column_versions as column_versions"
			if r.OnDelete == schema.Restrict {
				row = "null::bytea as payload, null::bigint[] as column_versions"
			}
			name := t.Columns[r.Column].Name
			fmt.Fprintf(&b, `  if exists (select from unnest(p_tables, p_columns) as k(table_name, column_name) where k.table_name = %[1]s and k.column_name = %[2]s) then
    return query
    select k.ord::integer, r.row_id, r.server_version, r.payload, r.column_versions
      from unnest(p_tables, p_columns, p_parents) with ordinality as k(table_name, column_name, parent, ord)
      cross join lateral (
        select t._sync_row_id as row_id, t._sync_server_version as server_version, %[3]s
          from %[4]s.%[5]s as t
         where t._sync_partition = p_partition
           and (t.%[6]s, t._sync_row_id) > (k.parent::%[7]s, '') and t.%[6]s <= k.parent::%[7]s
         order by t.%[6]s, t._sync_row_id
         limit p_limit
      ) as r
     where k.table_name = %[1]s and k.column_name = %[2]s
     limit p_most;
  end if;
`, quoteLiteral(t.Name), quoteLiteral(name), row, QuoteIdent(appSchema), QuoteIdent(t.Name), QuoteIdent(name), columnType(t, r.Column))
		}
	}
	b.WriteString("end\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "The rows whose reference p_columns[i] of table p_tables[i] names the row p_parents[i], at most p_limit of each parent and p_most of each reference, by parent in the order of the arrays and then by row id; ord is i. Without payload and column versions where the reference restricts. Generated from the installed schema. Takes no locks.",
	}
}
