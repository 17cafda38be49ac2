package schemaddl

import (
	"fmt"
	"strings"

	"github.com/syncpg/syncpg/schema"
)

// Statements that read rows of one partition for a hook of the host (§6.8): row id,
// server version and payload, ascending by row id as bytes. They see what the
// transaction has written. An index lookup takes the values of the index columns as
// text, a scan by scope a JSON object of variable to texts; both begin after a row id
// and end with a number of rows.
const (
	// FindRowSQL reads a row: partition, array with the table, array with the row id.
	FindRowSQL = `select ($3::text[])[1], r.server_version, r.payload from syncpg.sync_prefetch_rows($1, $2, $3) as r`
	// ScanByScopeSQL reads rows by scope: partition, table, scopes, after, limit.
	ScanByScopeSQL = `select r.row_id, r.server_version, r.payload from syncpg.sync_scan_by_scope($1, $2, $3, $4, $5) as r`
	// ScanByIndexSQL reads rows by a declared index: partition, table, index, values,
	// after, limit.
	ScanByIndexSQL = `select r.row_id, r.server_version, r.payload from syncpg.sync_scan_by_index($1, $2, $3, $4, $5, $6) as r`
)

const lookupResult = "returns table (row_id text, server_version bigint, payload bytea)\n" +
	"language plpgsql stable\nset search_path = pg_catalog, pg_temp\n"

// scanByScope generates sync_scan_by_scope. Every value of the driving variable is read
// in the order of its scope index, up to the limit, so that a scan costs no more than
// values times limit, whatever the size of the partition.
func scanByScope(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_scan_by_scope(text, text, text, text, integer)"
	const header = "create or replace function syncpg.sync_scan_by_scope(\n" +
		"  p_partition text, p_table text, p_scopes text, p_after text, p_limit integer)\n" + lookupResult + scanning + "as "
	var b strings.Builder
	b.WriteString(useVariable + "declare\n  v_scopes jsonb := p_scopes;\nbegin\n")
	for _, t := range s.Tables {
		fmt.Fprintf(&b, "  if p_table = %s then\n", quoteLiteral(t.Name))
		scopeValues(&b, t, "v_scopes")
		for i, sc := range t.Scopes {
			fmt.Fprintf(&b, `          if v_%[1]d is not null then
            return query
            select r.row_id, r.server_version, r.payload
              from (select distinct u.value from unnest(v_%[1]d) as u(value)) as v
              cross join lateral (
                select t._sync_row_id as row_id, t._sync_server_version as server_version, t._sync_payload as payload
                  from %[2]s.%[3]s as t
                 where t._sync_partition = p_partition
                   and (t.%[4]s, t._sync_row_id) > (v.value, p_after) and t.%[4]s <= v.value%[5]s
                 order by t.%[4]s, t._sync_row_id
                 limit p_limit
              ) as r
             order by r.row_id
             limit p_limit;
            return;
          end if;
`, i+1, QuoteIdent(appSchema), QuoteIdent(t.Name), QuoteIdent(t.Columns[sc.Column].Name), scopeFilters(t, i))
		}
		b.WriteString("        end;\n  end if;\n")
	}
	b.WriteString("  raise exception 'the installed schema has no such table' using errcode = 'undefined_table';\nend\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "The first p_limit rows of p_table after row p_after, by row id, that match every variable of p_scopes (a JSON object of variable to values, neither empty; SQLSTATE SY005). Generated from the installed schema. Takes no locks.",
	}
}

// scanByIndex generates sync_scan_by_index. The comparison of rows and the order leave
// the declared index as the only one that will do, also for a plan made on an empty
// table; only then are the row ids put in order and the rows read.
func scanByIndex(s *schema.Schema, appSchema string) function {
	const signature = "syncpg.sync_scan_by_index(text, text, text, text[], text, integer)"
	const header = "create or replace function syncpg.sync_scan_by_index(\n" +
		"  p_partition text, p_table text, p_index text, p_values text[], p_after text, p_limit integer)\n" + lookupResult + scanning + "as "
	var b strings.Builder
	b.WriteString(useVariable + "begin\n")
	for _, t := range s.Tables {
		if !t.Materialize {
			continue
		}
		for _, x := range t.Indexes {
			lookupByIndex(&b, t, &x, QuoteIdent(appSchema)+"."+QuoteIdent(t.Name))
		}
	}
	b.WriteString("  raise exception 'the installed schema has no such index' using errcode = 'undefined_object';\nend\n")
	return function{
		signature: signature, header: header, body: b.String(),
		comment: "The first p_limit rows of p_table after row p_after, by row id, whose columns in the declared index p_index have exactly the values p_values (NULL finds NULL). Generated from the installed schema. Takes no locks.",
	}
}

// lookupByIndex writes the branch of one index. Which of the values are NULL decides
// how an index can be asked, so that such a lookup is planned each time.
func lookupByIndex(b *strings.Builder, t *schema.Table, x *schema.Index, table string) {
	columns := make([]string, len(x.Columns))
	values := make([]string, len(x.Columns))
	conditions := make([]string, len(x.Columns))
	for i, col := range x.Columns {
		columns[i] = "t." + QuoteIdent(t.Columns[col].Name)
		values[i] = fmt.Sprintf("p_values[%d]::%s", i+1, columnType(t, col))
		conditions[i] = fmt.Sprintf("%s || case when p_values[%d] is null then ' is null' else %s end",
			quoteLiteral(" and "+columns[i]), i+1, quoteLiteral(fmt.Sprintf(" = $2[%d]::%s", i+1, columnType(t, col))))
	}
	row, wanted := "("+strings.Join(columns, ", ")+")", "("+strings.Join(values, ", ")+")"
	const found = "select k.row_id, r._sync_server_version, r._sync_payload\n      from (select i.row_id from (%s offset 0) as i\n" +
		"             where i.row_id > %s order by i.row_id limit %s) as k\n      cross join lateral (\n        %s\n      ) as r\n     order by k.row_id"
	const rowPayload = "x._sync_server_version, x._sync_payload"
	static := fmt.Sprintf(found,
		fmt.Sprintf("select t._sync_row_id as row_id from %s as t\n             where t._sync_partition = p_partition and %s >= %s and %s <= %s\n             order by %s",
			table, row, wanted, row, wanted, strings.Join(columns, ", ")),
		"p_after", "p_limit", probe(table, rowPayload))
	before, after, _ := strings.Cut(fmt.Sprintf(found, "\x00", "$3", "$4", probeIn("$1", table, rowPayload)), "\x00")
	fmt.Fprintf(b, `  if p_table = %s and p_index = %s then
    if array_position(p_values, null) is null then
      return query
      %s;
    else
      return query execute %s
        || %s
        || %s
        using p_partition, p_values, p_after, p_limit;
    end if;
    return;
  end if;
`, quoteLiteral(t.Name), quoteLiteral(x.Name), static,
		quoteLiteral(before+fmt.Sprintf("select t._sync_row_id as row_id from %s as t where t._sync_partition = $1", table)),
		strings.Join(conditions, "\n        || "), quoteLiteral(after))
}
