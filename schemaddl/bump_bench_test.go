package schemaddl_test

import (
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

var benchRows = flag.Int("bump.rows", 100_000, "rows that BenchmarkBump rewrites, and changes of the log")

// BenchmarkBump rewrites rows of about 100 bytes and as many changes of the log. The floor
// writes the same rows and changes with one statement each that only sets a bit, which is
// what a column at the end comes to; it does nothing else of a bump.
func BenchmarkBump(b *testing.B) {
	const columns = `,{"name":"title","type":"string","nullable":false},{"name":"body","type":"json","nullable":true},{"name":"points","type":"integer","nullable":true},{"name":"done","type":"boolean","nullable":false}`
	one, end := version(b, 1, tableIR("a", columns, "")), version(b, 2, tableIR("a", columns+column("more", "string", true), ""))
	middle := version(b, 2, tableIR("a", column("more", "string", true)+columns, ""))
	base := pgtest.New(b, pgtest.Options{})
	apply(b, base.Pool, one, schemaddl.BumpOptions{})
	exec(b, base.Pool, `insert into public.a (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, _sync_column_versions, id, team, title, body, points, done)
		select 'p' || i % 10, x.id, 1, syncpg.sync_encode_a(row(x.id, x.team, x.title, x.body, x.points, x.done, 'p', x.id, 1, '', null)::public.a), '{1,1,1,1,1,1}',
		       x.id, x.team, x.title, x.body, x.points, x.done
		  from generate_series(1, $1::int) as i
		 cross join lateral (select 'row-' || lpad(i::text, 12, '0') as id, 'team-' || i % 100 as team, 'The title of row ' || i as title,
		                            '{"n": 1}'::jsonb as body, i::bigint as points, i % 2 = 0 as done) as x`, *benchRows)
	exec(b, base.Pool, `insert into syncpg.sync_partitions (partition, max_commit_seq) select 'p' || i, $1 / 10 from generate_series(0, 9) as i`, *benchRows)
	exec(b, base.Pool, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		select _sync_partition, row_number() over (partition by _sync_partition), 0, 'a', _sync_row_id, 1, 1, array['team=' || team], _sync_payload from public.a`)
	exec(b, base.Pool, `vacuum analyze`)

	timed := func(f func(db *pgtest.DB)) time.Duration {
		db, err := base.Copy(b.Context(), pgtest.Options{})
		require.NoError(b, err)
		start := time.Now()
		f(db)
		took := time.Since(start)
		require.NoError(b, db.Close(b.Context()))
		return took
	}
	var floor, atEnd, inMiddle time.Duration
	for b.Loop() {
		floor += timed(func(db *pgtest.DB) {
			exec(b, db.Pool, `begin; update public.a set _sync_payload = set_bit(_sync_payload, 6, 1), _sync_column_versions = _sync_column_versions || 1::bigint;
				update syncpg.sync_changes set payload = set_bit(payload, 6, 1) where table_name = 'a' and payload is not null;
				drop index public.sync_ix_a__scope_team; create index sync_ix_a__scope_team on public.a (_sync_partition, team, _sync_row_id); commit`)
		})
		atEnd += timed(func(db *pgtest.DB) { apply(b, db.Pool, end, schemaddl.BumpOptions{}) })
		inMiddle += timed(func(db *pgtest.DB) { apply(b, db.Pool, middle, schemaddl.BumpOptions{}) })
	}
	rows := float64(*benchRows) * float64(b.N)
	b.ReportMetric(2*rows/atEnd.Seconds(), "rows/s")
	b.ReportMetric(atEnd.Seconds()/floor.Seconds(), "x-floor-end")
	b.ReportMetric(inMiddle.Seconds()/floor.Seconds(), "x-floor-middle")
	b.ReportMetric(floor.Seconds()/float64(b.N), "floor-s/op")
	b.ReportMetric(atEnd.Seconds()/float64(b.N), "bump-s/op")
}
