package segment_test

import (
	"context"
	"encoding/json"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc/segment"
)

func postgres(t testing.TB, opts pgtest.Options, clock *testClock) (*segment.Postgres, *pgtest.DB) {
	db := pgtest.New(t, opts)
	s, err := segment.NewPostgres(db.Pool, segment.PostgresConfig{TTL: ttl, Clock: clock.Now})
	require.NoError(t, err)
	return s, db
}

// TestPostgresRoundTrips: a segment of one chunk is put, opened and read in one round trip
// each; a chunk more is a round trip more.
func TestPostgresRoundTrips(t *testing.T) {
	t.Parallel()
	var counter pgtest.Counter
	s, _ := postgres(t, pgtest.Options{MaxConns: 1, Counter: &counter}, newClock())
	trips := func(what string, want int, f func()) {
		f()
		counter.Reset()
		f()
		require.Equal(t, want, counter.RoundTrips(), "%s: %v", what, counter.Statements())
	}
	small, large := noise(1<<20), noise(3<<20)
	put := func(body string) func() {
		return func() {
			m := describe(body, "d")
			require.NoError(t, s.Put(t.Context(), m, strings.NewReader(body)))
		}
	}
	read := func(body string) func() {
		return func() {
			_, got, err := open(t.Context(), s, ref(describe(body, "d")))
			require.NoError(t, err)
			require.Len(t, got, len(body))
		}
	}
	trips("put", 1, put(small))
	trips("put of what is there", 3, put(large))
	trips("open and read", 1, read(small))
	trips("open and read three chunks", 3, read(large))
	trips("find", 1, func() { require.Len(t, find(t, s, describe("", "d").Key), 2) })
	trips("delete", 1, func() { require.Zero(t, deleteAll(t, s, 100)) })

	another := noise(3<<20 + 1)
	counter.Reset()
	put(another)()
	require.Equal(t, 6, counter.RoundTrips(), "BEGIN, the first chunk, three more, COMMIT: %v", counter.Statements())
}

// TestPostgresHoldsNoConnection: between the pieces of a body, and while a reader is slow,
// the pool is free.
func TestPostgresHoldsNoConnection(t *testing.T) {
	t.Parallel()
	s, db := postgres(t, pgtest.Options{MaxConns: 1}, newClock())
	body := noise(3 << 20)
	m := describe(body, "d")
	put(t, s, m, body)
	_, rc, err := s.Open(t.Context(), ref(m))
	require.NoError(t, err)
	for range 3 {
		_, err := io.ReadFull(rc, make([]byte, 1<<20))
		require.NoError(t, err)
		require.Zero(t, db.Pool.Stat().AcquiredConns())
		require.NoError(t, db.Pool.Ping(t.Context()))
	}
	_, err = rc.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

// TestPostgresChunks: no value is larger than 1 MiB, and the bytes stand there once.
func TestPostgresChunks(t *testing.T) {
	t.Parallel()
	s, db := postgres(t, pgtest.Options{}, newClock())
	body := noise(5<<19 + 1)
	for _, digest := range []string{"mine", "yours"} {
		put(t, s, describe(body, digest), body)
	}
	var chunks, largest, total, unlogged int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `
		select count(*), max(octet_length(body)), sum(octet_length(body)),
		       (select count(*) from pg_class where relname in ('sync_segments', 'sync_segment_chunks') and relpersistence = 'u')
		  from syncpg.sync_segment_chunks`).Scan(&chunks, &largest, &total, &unlogged))
	require.Equal(t, []int{3, 1 << 20, len(body), 2}, []int{chunks, largest, total, unlogged})
}

// TestPostgresIsShared: what one store put, another one of the same database serves, also
// when it began later.
func TestPostgresIsShared(t *testing.T) {
	t.Parallel()
	clock := newClock()
	a, db := postgres(t, pgtest.Options{}, clock)
	put(t, a, describe("body", "d"), "body")
	b, err := segment.NewPostgres(db.Pool, segment.PostgresConfig{TTL: ttl, Clock: clock.Now})
	require.NoError(t, err)
	opens(t, b, describe("body", "d"), "body")
	require.Len(t, find(t, b, describe("body", "d").Key), 1)
}

// TestPostgresIsNeverHalf: until a put ends, nobody sees anything of it; a second one of
// the same bytes waits for it, and writes them itself when it fails.
func TestPostgresIsNeverHalf(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		s, db := postgres(t, pgtest.Options{MaxConns: 6}, newClock())
		body := noise(3 << 20)
		mine, yours := describe(body, "mine"), describe(body, "yours")
		r, w := io.Pipe()
		first, second := make(chan error, 1), make(chan error, 1)
		go func() { first <- s.Put(t.Context(), mine, r) }()
		_, err := io.WriteString(w, body[:2<<20])
		require.NoError(t, err)
		refuses(t, s, ref(mine), segment.ErrNotFound)
		go func() { second <- s.Put(t.Context(), yours, strings.NewReader(body)) }()
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), db.Pool, 1))
		refuses(t, s, ref(yours), segment.ErrNotFound)
		require.Empty(t, find(t, s, yours.Key))
		if fails {
			require.NoError(t, w.Close())
			require.ErrorIs(t, <-first, io.ErrUnexpectedEOF)
			require.NoError(t, <-second)
			refuses(t, s, ref(mine), segment.ErrForbidden)
		} else {
			_, err := io.WriteString(w, body[2<<20:])
			require.NoError(t, err)
			require.NoError(t, w.Close())
			require.NoError(t, <-first)
			require.NoError(t, <-second)
			opens(t, s, mine, body)
		}
		opens(t, s, yours, body)
	}
}

// TestPostgresDeletesNothingThatIsDescribedAgain: a put that describes bytes of a segment
// that expires finds them there or stores them again, whichever comes first.
func TestPostgresDeletesNothingThatIsDescribedAgain(t *testing.T) {
	t.Parallel()
	const body = "shared bytes"
	mine, yours := describe(body, "mine"), describe(body, "yours")
	putSQL := `select syncpg.sync_put_segment($1, $2, 'yours', 'x', 'e1', 'items', 1::smallint, 1, 1, null, null, 0, 1, $3, $4, $5)`
	deleteSQL := `select deleted from syncpg.sync_delete_expired_segments('', $1, 100, 1e9::bigint, 100)`

	t.Run("the put first", func(t *testing.T) {
		t.Parallel()
		clock := newClock()
		s, db := postgres(t, pgtest.Options{}, clock)
		put(t, s, mine, body)
		clock.advance(ttl)
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		var fresh bool
		require.NoError(t, tx.QueryRow(t.Context(), putSQL, yours.Partition, yours.ID, len(body), clock.Now().Add(ttl).UnixMilli(), []byte(body)).Scan(&fresh))
		require.False(t, fresh)
		deleted := make(chan error, 1)
		go func() {
			_, _, err := s.DeleteExpired(context.WithoutCancel(t.Context()), 100)
			deleted <- err
		}()
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), db.Pool, 1))
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-deleted)
		opens(t, s, yours, body)
		refuses(t, s, ref(mine), segment.ErrForbidden)
	})
	t.Run("the deletion first", func(t *testing.T) {
		t.Parallel()
		clock := newClock()
		s, db := postgres(t, pgtest.Options{}, clock)
		put(t, s, mine, body)
		clock.advance(ttl)
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		var n int
		require.NoError(t, tx.QueryRow(t.Context(), deleteSQL, clock.Now().UnixMilli()).Scan(&n))
		require.Equal(t, 1, n)
		stored := make(chan error, 1)
		go func() { stored <- s.Put(context.WithoutCancel(t.Context()), yours, strings.NewReader(body)) }()
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), db.Pool, 1))
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-stored)
		opens(t, s, yours, body)
	})
}

// TestPostgresPutIsBounded: storing and reading a segment of 64 MiB holds some chunks of
// it at a time.
func TestPostgresPutIsBounded(t *testing.T) { //nolint:paralleltest // the heap is everybody's
	const size = 64 << 20
	s, _ := postgres(t, pgtest.Options{}, newClock())
	m := describe("", "d")
	m.ID, m.ByteLength = segment.ID([]byte("not its hash")), size
	var peak uint64
	watch := func(n int64) {
		if n%(16<<20) == 0 {
			runtime.GC()
			var stats runtime.MemStats
			runtime.ReadMemStats(&stats)
			peak = max(peak, stats.HeapAlloc)
		}
	}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	require.NoError(t, s.Put(t.Context(), m, &watched{Reader: io.LimitReader(zeros{}, size), watch: watch}))
	_, rc, err := s.Open(t.Context(), ref(m))
	require.NoError(t, err)
	n, err := io.Copy(io.Discard, &watched{Reader: rc, watch: watch})
	require.NoError(t, err)
	require.EqualValues(t, size, n)
	require.Less(t, int64(peak)-int64(before.HeapAlloc), int64(size/2))
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

type watched struct {
	io.Reader
	n     int64
	watch func(n int64)
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Reader.Read(p[:min(len(p), 1<<20)])
	before := w.n
	w.n += int64(n)
	if before>>20 != w.n>>20 {
		w.watch(w.n >> 20 << 20)
	}
	return n, err
}

// TestPlanSegments: plans made while the tables were empty probe indexes when they have
// filled up without ANALYZE.
func TestPlanSegments(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 1})
	statements := []struct {
		name, sql string
		args      []any
		most      int // buffers
	}{
		{"put", `select syncpg.sync_put_segment('p500', $1::text, 'd1', 'x', 'e', 't', 1::smallint, 1, 1, null, null, 0, 1, 1, 10, 'x')`, []any{"new"}, 40},
		{"put of known bytes", `select syncpg.sync_put_segment('p500', $1::text, 'd9', 'x', 'e', 't', 1::smallint, 1, 1, null, null, 0, 1, 1, 10, 'x')`, []any{"s7"}, 40},
		{"open", `select * from syncpg.sync_open_segment('p500', $1::text, 'd1', 'e', 0)`, []any{"s7"}, 30},
		{"open of what is unknown", `select * from syncpg.sync_open_segment('p500', $1::text, 'd1', 'e', 0)`, []any{"none"}, 40},
		{"open for other scopes", `select * from syncpg.sync_open_segment('p500', $1::text, 'none', 'e', 0)`, []any{"s7"}, 40},
		{"read", `select syncpg.sync_read_segment_chunk('p500', $1::text, 1)`, []any{"s7"}, 20},
		{"find", `select * from syncpg.sync_find_segments('p500', $1::text, 't', 'e', 1::smallint, 1, 0, 4096)`, []any{"d1"}, 200},
		{"find the first", `select * from syncpg.sync_find_segments('p500', $1::text, 't', 'e', 1::smallint, 1, 0, 2)`, []any{"d1"}, 30},
		{"find nothing", `select * from syncpg.sync_find_segments('p500', $1::text, 't', 'e', 1::smallint, 1, 0, 4096)`, []any{"none"}, 30},
		{"delete nothing in 1000 partitions", `select * from syncpg.sync_delete_expired_segments('', $1::bigint, 100, 1e9::bigint, 1000)`, []any{0}, 6000},
		{"delete ten", `select * from syncpg.sync_delete_expired_segments('p4', $1::bigint, 10, 1e9::bigint, 1000)`, []any{10}, 1500},
	}
	ctx := t.Context()
	run := func() {
		for _, st := range statements {
			tx, err := db.Pool.Begin(ctx)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, st.sql, st.args...)
			require.NoError(t, err)
			require.NoError(t, tx.Rollback(ctx))
		}
	}
	for range 7 {
		run()
	}
	for _, sql := range []string{
		`insert into syncpg.sync_segments
		   (partition, segment_id, scope_digest, description, log_epoch, table_name, media_type, schema_version,
		    as_of_commit_seq, page, row_count, byte_length, expires_at_ms)
		 select 'p' || p, 's' || s, 'd' || s % 3, '', 'e', 't', 1, 1, s % 2, s, 1, 1, 5 + s
		   from generate_series(1, 1000) as p, generate_series(1, 50) as s`,
		`insert into syncpg.sync_segment_chunks (partition, segment_id, chunk_index, body)
		 select 'p' || p, 's' || s, c, 'body' from generate_series(1, 1000) as p, generate_series(1, 50) as s, generate_series(0, 1) as c`,
	} {
		_, err := db.Pool.Exec(ctx, sql)
		require.NoError(t, err)
	}
	run() // what the catalog has to say of the grown tables is read once
	for _, st := range statements {
		tx, err := db.Pool.Begin(ctx)
		require.NoError(t, err)
		var before, after int64
		scans := `select coalesce(sum(seq_scan), 0) from pg_stat_xact_user_tables where schemaname = 'syncpg'`
		require.NoError(t, tx.QueryRow(ctx, scans).Scan(&before))
		var plan []byte
		require.NoError(t, tx.QueryRow(ctx, `explain (analyze, buffers, timing off, format json) `+st.sql,
			append([]any{pgx.QueryExecModeSimpleProtocol}, st.args...)...).Scan(&plan))
		var parsed []struct {
			Plan struct {
				Hit  int `json:"Shared Hit Blocks"`
				Read int `json:"Shared Read Blocks"`
			}
		}
		require.NoError(t, json.Unmarshal(plan, &parsed))
		require.NoError(t, tx.QueryRow(ctx, scans).Scan(&after))
		require.Equal(t, before, after, "%s scans a table", st.name)
		require.LessOrEqual(t, parsed[0].Plan.Hit+parsed[0].Plan.Read, st.most, st.name)
		require.NoError(t, tx.Rollback(ctx))
	}
}
