package pushsvc_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/schemaddl"
)

// soundness lists what must always hold between log, rows, tombstones and outcomes.
// Each query returns what breaks it; rows is every row of the app's tables.
var soundness = map[string]string{
	"the log is dense": `
		select p.partition || ' ' || p.max_commit_seq from syncpg.sync_partitions as p
		 where p.max_commit_seq <> (select count(*) from syncpg.sync_commits as c where c.partition = p.partition)
		    or p.max_commit_seq <> (select coalesce(max(c.commit_seq), 0) from syncpg.sync_commits as c where c.partition = p.partition)`,
	"a commit counts its changes": `
		select c.partition || ' ' || c.commit_seq from syncpg.sync_commits as c
		 where c.change_count <> (select count(*) from syncpg.sync_changes as x where x.partition = c.partition and x.commit_seq = c.commit_seq)
		    or c.change_count <> (select coalesce(max(x.change_index) + 1, 0) from syncpg.sync_changes as x where x.partition = c.partition and x.commit_seq = c.commit_seq)`,
	"a change belongs to a commit": `
		select x.partition || ' ' || x.commit_seq from syncpg.sync_changes as x
		 where not exists (select from syncpg.sync_commits as c where c.partition = x.partition and c.commit_seq = x.commit_seq)`,
	"the scope index is what the changes say": `
		(table syncpg.sync_change_scopes except select x.partition, x.table_name, k, x.commit_seq from syncpg.sync_changes as x, unnest(x.scopes) as k)
		union all
		(select x.partition, x.table_name, k, x.commit_seq from syncpg.sync_changes as x, unnest(x.scopes) as k except table syncpg.sync_change_scopes)`,
	"the newest change of a row is the row": `
		select coalesce(r.partition, x.partition) || ' ' || coalesce(r.row_id, x.row_id)
		  from rows as r
		  full join (select distinct on (partition, table_name, row_id) * from syncpg.sync_changes
		              order by partition, table_name, row_id, commit_seq desc, change_index desc) as x
		    on x.partition = r.partition and x.table_name = r.table_name and x.row_id = r.row_id
		 where case when r.row_id is null then x.op = 1
		            else x.op is distinct from 1 or x.payload <> r.payload or x.row_version <> r.version end`,
	"a deleted row has a tombstone, and nothing else has": `
		select coalesce(t.partition, x.partition) || ' ' || coalesce(t.row_id, x.row_id)
		  from syncpg.sync_tombstones as t
		  full join (select * from (select distinct on (partition, table_name, row_id) * from syncpg.sync_changes
		              order by partition, table_name, row_id, commit_seq desc, change_index desc) as newest where op = 2) as x
		    on x.partition = t.partition and x.table_name = t.table_name and x.row_id = t.row_id
		 where t.commit_seq is distinct from x.commit_seq`,
	"an applied outcome is a commit, and every commit has one": `
		select coalesce(o.partition, c.partition) || ' ' || coalesce(o.commit_seq, c.commit_seq)
		  from (select * from syncpg.sync_push_results where status = 1) as o
		  full join syncpg.sync_commits as c on c.partition = o.partition and c.commit_seq = o.commit_seq
		   and c.client_id = o.client_id and c.client_commit_id = o.client_commit_id
		 where o.partition is null or c.partition is null`,
	"a client that has an outcome is bound": `
		select o.partition || ' ' || o.client_id from syncpg.sync_push_results as o
		 where not exists (select from syncpg.sync_clients as c where c.partition = o.partition and c.client_id = o.client_id)`,
	"column versions are within the row's": `
		select r.partition || ' ' || r.row_id from rows as r
		 where r.columns is not null and (select max(v) from unnest(r.columns) as v) > r.version`,
}

// requireSoundLog checks a whole database.
func requireSoundLog(t testing.TB, b *bundle) {
	t.Helper()
	var parts []string
	for _, table := range b.schema.Tables {
		parts = append(parts, fmt.Sprintf(`select _sync_partition as partition, '%s' as table_name, _sync_row_id as row_id,
			_sync_server_version as version, _sync_payload as payload, _sync_column_versions as columns from public.%s`, table.Name, schemaddl.QuoteIdent(table.Name)))
	}
	for name, sql := range soundness {
		rows, err := b.db.Pool.Query(t.Context(), `with rows as (`+strings.Join(parts, " union all ")+`) select to_jsonb(broken)::text from (`+sql+`) as broken`)
		require.NoError(t, err, name)
		broken, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err, name)
		require.Empty(t, broken, name)
	}
}
