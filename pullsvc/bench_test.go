package pullsvc_test

import (
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// load writes 100,000 rows of about 100 bytes, a tenth of them in scope x, and 1,000
// commits of which every tenth is in scope x.
func load(b *testing.B) *bundle {
	b.Helper()
	s := setup(b)
	s.exec(b, `insert into public.items (id, project, body, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		select id, project, '', 'p1', id, 1, decode('00' || '06000000' || encode(id::bytea, 'hex') || '01000000' || encode(project::bytea, 'hex') || '50000000' || repeat('61', 80), 'hex')
		  from (select lpad(i::text, 6, '0') as id, case when i % 10 = 0 then 'x' else 'y' end as project from generate_series(0, 99999) as i) as r`)
	s.exec(b, `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
		select 'p1', i, 'w', i::text, 'alice', 0, 1 from generate_series(1, 10000) as i`)
	s.exec(b, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
		select 'p1', i, 0, 'items', lpad(i::text, 6, '0'), 1, 1, array['project=' || case when i % 10 = 0 then 'x' else 'y' end], repeat('a', 100)::bytea
		  from generate_series(1, 10000) as i`)
	s.exec(b, `insert into syncpg.sync_change_scopes select partition, table_name, scopes[1], commit_seq from syncpg.sync_changes`)
	s.exec(b, `update syncpg.sync_partitions set max_commit_seq = 10000`)
	s.exec(b, `vacuum analyze`)
	return s
}

func drain(b *testing.B, s *bundle, req pullsvc.Request) (sent int) {
	b.Helper()
	p, err := s.Begin(b.Context(), req)
	require.NoError(b, err)
	defer p.Close()
	require.NoError(b, p.Stream(b.Context(), func(piece []byte) error { sent += len(piece); return nil }))
	return sent
}

// BenchmarkBootstrap sends 90,000 rows on the rows lane and compares with COPY of the
// same payloads.
func BenchmarkBootstrap(b *testing.B) {
	s := load(b)
	for _, rows := range []int32{1000, 50000} {
		b.Run(fmt.Sprint("pages of ", rows), func(b *testing.B) {
			req := request(sub("s", "items", -1, project("y")))
			req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = rows, 50
			conn, err := s.db.Pool.Acquire(b.Context())
			require.NoError(b, err)
			defer conn.Release()
			var copying, pulling time.Duration
			for b.Loop() {
				start := time.Now()
				_, err := conn.Conn().PgConn().CopyTo(b.Context(), io.Discard,
					`copy (select _sync_payload from public.items where _sync_partition = 'p1' and project = 'y') to stdout`)
				require.NoError(b, err)
				copying += time.Since(start)
				start = time.Now()
				left, sent := 90000, 0
				next := req
				for left > 0 {
					sent += drain(b, s, next)
					left -= int(rows) * 50
					next.Subscriptions = []ssp2.Subscription{sub("s", "items", 10000, project("y"))}
					next.Subscriptions[0].BootstrapState = token(10000, "items", new(fmt.Sprintf("1:y%06d", (90000-left)/9*10+(90000-left)%9)))
				}
				pulling += time.Since(start)
				require.Greater(b, sent, 9_000_000)
			}
			b.ReportMetric(float64(pulling)/float64(copying), "×COPY")
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(pulling.Milliseconds())/float64(b.N), "ms/bootstrap")
		})
	}
}

func BenchmarkPull(b *testing.B) {
	s := load(b)
	for _, tc := range []struct {
		name   string
		n      int
		cursor int64
	}{
		{"quiet, 1 subscription", 1, 10000},
		{"quiet, 10 subscriptions", 10, 10000},
		{"quiet, 68 subscriptions", 68, 10000},
		{"100 commits behind, 10 subscriptions", 10, 9900},
		{"100 commits behind, 68 subscriptions", 68, 9900},
		{"10,000 commits behind, 1 subscription", 1, 0},
	} {
		b.Run(tc.name, func(b *testing.B) {
			req := request(many(tc.n, tc.cursor)...)
			req.ClientID = tc.name
			b.ReportAllocs()
			for b.Loop() {
				drain(b, s, req)
			}
		})
	}
}
