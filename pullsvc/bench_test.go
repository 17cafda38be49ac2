package pullsvc_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// load writes rows of about 100 bytes, ten of eleven in scope y and the others in x, and
// 10,000 commits of which every tenth is in scope x.
func load(b *testing.B, rows int, change ...func(*pgtest.Options, *pullsvc.Config)) *bundle {
	b.Helper()
	s := setup(b, change...)
	s.exec(b, `insert into public.items (id, project, body, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		select id, project, '', 'p1', id, 1, decode('00' || '07000000' || encode(id::bytea, 'hex') || '01000000' || encode(project::bytea, 'hex') || '50000000' || repeat('61', 80), 'hex')
		  from (select lpad(i::text, 7, '0') as id, case when i % 11 = 0 then 'x' else 'y' end as project from generate_series(1, $1::integer) as i) as r`, rows)
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

// bootstrap pulls a subscription until it has all rows, and counts the bytes. It reads
// of the responses only what says how to go on.
func bootstrap(b *testing.B, s *bundle, req pullsvc.Request) (sent int) {
	b.Helper()
	req.Subscriptions = slices.Clone(req.Subscriptions)
	for {
		p, err := s.Begin(b.Context(), req)
		require.NoError(b, err)
		var last []byte
		require.NoError(b, p.Stream(b.Context(), func(piece []byte) error {
			sent += len(piece)
			last = append(last[:0], piece[max(0, len(piece)-4096):]...)
			return nil
		}))
		p.Close()
		end, err := lastFrame(last)
		require.NoError(b, err)
		req.Subscriptions[0].Cursor, req.Subscriptions[0].BootstrapState = end.NextCursor, end.BootstrapState
		if end.BootstrapState == nil {
			return sent
		}
	}
}

// lastFrame decodes the SUB_END that frames end with.
func lastFrame(frames []byte) (*ssp2.SubEnd, error) {
	for at := len(frames) - 5; at >= 0; at-- {
		if frames[at] != byte(ssp2.FrameSubEnd) || int(binary.LittleEndian.Uint32(frames[at+1:])) != len(frames)-at-5 {
			continue
		}
		message := ssp2.AppendEnvelope(nil, ssp2.WireV2, ssp2.KindResponse)
		message, err := ssp2.AppendFrame(message, ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: epoch})
		if err != nil {
			return nil, err
		}
		if message, err = ssp2.AppendFrame(message, ssp2.WireV2, &ssp2.SubStart{ID: "s", Status: ssp2.SubActive}); err != nil {
			return nil, err
		}
		decoded, err := ssp2.DecodeMessage(ssp2.AppendEnd(append(message, frames[at:]...)))
		if err != nil {
			continue
		}
		return decoded.Frames[len(decoded.Frames)-1].(*ssp2.SubEnd), nil
	}
	return nil, errors.New("the frames do not end with SUB_END")
}

// peak reports by how much the process grew at most while run ran, in MiB. It knows only
// on Linux.
func peak(b *testing.B, run func()) {
	b.Helper()
	resident := func(field string) (kB int) {
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			return 0
		}
		_, rest, _ := strings.Cut(string(status), field+":")
		_, _ = fmt.Sscan(rest, &kB)
		return kB
	}
	debug.FreeOSMemory()
	if os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) != nil {
		run()
		return
	}
	before := resident("VmRSS")
	run()
	b.ReportMetric(float64(resident("VmHWM")-before)/1024, "peak-MiB")
}

// BenchmarkBootstrap sends 100,000 rows on the rows lane and compares with COPY of the
// same payloads.
func BenchmarkBootstrap(b *testing.B) { benchmarkBootstrap(b, 100_000) }

// BenchmarkMillion is the same with a million rows, for the memory that takes.
func BenchmarkMillion(b *testing.B) { benchmarkBootstrap(b, 1_000_000) }

func benchmarkBootstrap(b *testing.B, rows int) {
	b.Helper()
	s := load(b, rows/10*11)
	for _, pageRows := range []int32{1000, 50000} {
		b.Run(fmt.Sprint("pages of ", pageRows), func(b *testing.B) {
			req := request(sub("s", "items", -1, project("y")))
			req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = pageRows, 50
			conn, err := s.db.Pool.Acquire(b.Context())
			require.NoError(b, err)
			defer conn.Release()
			var copying, pulling time.Duration
			bootstrap(b, s, req)
			peak(b, func() {
				for b.Loop() {
					start := time.Now()
					copyPayloads(b, conn)
					copying += time.Since(start)
					start = time.Now()
					sent := bootstrap(b, s, req)
					pulling += time.Since(start)
					require.Greater(b, sent, rows*100)
				}
			})
			b.ReportMetric(float64(pulling)/float64(copying), "×COPY")
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(pulling.Milliseconds())/float64(b.N), "ms/bootstrap")
		})
	}
}

// copyPayloads is the floor: the payloads of the scope, as they are.
func copyPayloads(b *testing.B, conn *pgxpool.Conn) {
	b.Helper()
	_, err := conn.Conn().PgConn().CopyTo(b.Context(), io.Discard,
		`copy (select _sync_payload from public.items where _sync_partition = 'p1' and project = 'y') to stdout`)
	require.NoError(b, err)
}

func BenchmarkPull(b *testing.B) {
	s := load(b, 110_000)
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
