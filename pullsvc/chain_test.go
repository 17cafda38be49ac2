package pullsvc_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	rowsLane  = ssp2.AcceptInlineRows | ssp2.AcceptExternalRows
	imageLane = rowsLane | ssp2.AcceptSQLite
)

// fill writes n rows of about 100 bytes to a scope of items, in one commit.
func (b *bundle) fill(t testing.TB, project string, n int) {
	t.Helper()
	b.exec(t, `insert into public.items (id, project, body, _sync_partition, _sync_row_id, _sync_server_version, _sync_payload)
		select id, $2, '', $1, id, 1, decode('00' || '08000000' || encode(id::bytea, 'hex') || '01000000' || encode($2::bytea, 'hex') || '50000000' || repeat('61', 80), 'hex')
		  from (select $2 || lpad(i::text, 7, '0') as id from generate_series(1, $3::integer) as i) as r`, b.partition, project, n)
	b.exec(t, `update syncpg.sync_partitions set max_commit_seq = max_commit_seq + 1 where partition = $1`, b.partition)
	b.seq++
}

// bodies reads segments from a store, as their download would.
func body(t require.TestingT, store segment.Store, partition string, ref ssp2.SegmentRef) []byte {
	_, r, err := store.Open(context.Background(), segment.Ref{Partition: partition, LogEpoch: epoch, ID: ref.SegmentID, ScopeDigest: ref.ScopeDigest})
	require.NoError(t, err)
	defer func() { _ = r.Close() }()
	b, err := io.ReadAll(r)
	require.NoError(t, err)
	require.Equal(t, ref.SegmentID, segment.ID(b))
	require.Len(t, b, int(ref.ByteLength))
	return b
}

// segmentOf decodes what a descriptor names into rows by id.
func segmentOf(t require.TestingT, table *schema.Table, media ssp2.MediaType, raw []byte, into map[string]row) {
	if media == ssp2.MediaSQLite {
		imageRows(t, table, raw, into)
		return
	}
	decoded, err := ssp2.DecodeSegment(raw)
	require.NoError(t, err)
	for _, block := range decoded.Blocks {
		for _, r := range block {
			values, err := ssp2.DecodeRow(table.Wire, r.Row, nil)
			require.NoError(t, err)
			id, _ := table.RowID(values)
			into[id] = row{version: r.ServerVersion, payload: append([]byte(nil), r.Row...)}
		}
	}
}

// imageRows reads the rows of an image (§5.3) with a stock SQLite.
func imageRows(t require.TestingT, table *schema.Table, raw []byte, into map[string]row) {
	dir, err := os.MkdirTemp("", "")
	require.NoError(t, err)
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "image")
	require.NoError(t, os.WriteFile(path, raw, 0o600))
	conn, err := sqlite.OpenConn(path, sqlite.OpenReadOnly)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, sqlitex.Execute(conn, `select * from "`+table.Name+`"`, &sqlitex.ExecOptions{ResultFunc: func(s *sqlite.Stmt) error {
		values := make([]ssp2.Value, len(table.Columns))
		for i, c := range table.Columns {
			switch {
			case s.ColumnType(i) == sqlite.TypeNull:
				values[i].Null = true
			case c.Type == ssp2.TypeInteger || c.Type == ssp2.TypeBoolean:
				values[i].Int = s.ColumnInt64(i)
			default:
				values[i].Bytes = []byte(s.ColumnText(i))
			}
		}
		payload, err := ssp2.AppendRow(nil, table.Wire, values)
		require.NoError(t, err)
		id, _ := table.RowID(values)
		into[id] = row{version: s.ColumnInt64(len(values)), payload: payload}
		return nil
	}}))
}

// imageMeta is what an image says of itself (§5.3).
func imageMeta(t *testing.T, raw []byte) (meta string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	require.NoError(t, os.WriteFile(path, raw, 0o600))
	conn, err := sqlite.OpenConn(path, sqlite.OpenReadOnly)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, sqlitex.Execute(conn, `select format || ' ' || "table" || ' ' || schemaVersion || ' ' || asOfCommitSeq || ' ' || scopeDigest || ' ' || rowCount
		from _syncular_segment`, &sqlitex.ExecOptions{ResultFunc: func(s *sqlite.Stmt) error {
		meta += s.ColumnText(0)
		return nil
	}}))
	return meta
}

// rows are those of all segments of a section.
func (s section) rows(t testing.TB, b *bundle, store segment.Store, table string) map[string]row {
	t.Helper()
	schema, _ := b.schema.Table(table)
	into := map[string]row{}
	for i := range s.Segments {
		raw, err := ssp2.AppendSegment(nil, &s.Segments[i])
		require.NoError(t, err)
		segmentOf(t, schema, ssp2.MediaRows, raw, into)
	}
	for _, ref := range s.Refs {
		have := len(into)
		segmentOf(t, schema, ref.MediaType, body(t, store, b.partition, ref), into)
		require.Len(t, into, have+int(ref.RowCount))
	}
	return into
}

// shared is a bundle with a store, whose services deliver everything by descriptor.
func shared(t testing.TB, change ...func(*pgtest.Options, *pullsvc.Config)) (*bundle, *store) {
	t.Helper()
	kept := &store{kept: map[string]storedSegment{}}
	b := setup(t, append([]func(*pgtest.Options, *pullsvc.Config){with(func(c *pullsvc.Config) {
		c.Segments, c.InlineSegmentMaxBytes = kept, -1
	})}, change...)...)
	memory, err := segment.NewMemory(segment.MemoryConfig{Clock: func() time.Time { return b.now }})
	require.NoError(t, err)
	kept.Store = memory
	return b, kept
}

// bootstrapping is a request of a bootstrap that takes everything at once.
func bootstrapping(client string, accept ssp2.Accept, rows int32) pullsvc.Request {
	req := request(sub("s", "items", -1, project("x")))
	req.ClientID, req.Header.Accept, req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = client, accept, rows, 50
	return req
}

// scans counts the statements that read rows of tables.
func (b *bundle) scans() (n int) {
	for _, s := range b.counter.Statements() {
		if strings.Contains(s, "sync_scan_rows") {
			n++
		}
	}
	return n
}

// TestWarmBootstrap: who bootstraps a scope that somebody has bootstrapped before is
// given the same segments, on both lanes and whatever the pages of the response; no row
// of the table is read for that.
func TestWarmBootstrap(t *testing.T) {
	t.Parallel()
	for name, accept := range map[string]ssp2.Accept{"rows": rowsLane, "external rows only": ssp2.AcceptExternalRows, "image": imageLane} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 1 }))
			b.fill(t, "x", 5000)
			cold := b.pull(t, bootstrapping("c1", accept, 1000))[0]
			require.Len(t, cold.rows(t, b, kept, "items"), 5000)
			puts := kept.puts

			b.counter.Reset()
			warm := b.pull(t, bootstrapping("c2", accept, 1000))[0]
			require.Equal(t, cold, warm)
			require.Zero(t, b.scans())
			require.Equal(t, puts, kept.puts)
			require.LessOrEqual(t, b.counter.RoundTrips(), 2)

			// In pieces, over several pulls.
			req := bootstrapping("c3", accept, 1000)
			req.Header.MaxSnapshotPages = 2
			var refs []ssp2.SegmentRef
			for {
				got := b.pull(t, req)[0]
				refs = append(refs, got.Refs...)
				if req.Subscriptions[0].BootstrapState = got.End.BootstrapState; got.End.BootstrapState == nil {
					break
				}
				req.Subscriptions[0].Cursor = got.End.NextCursor
			}
			require.Equal(t, cold.Refs, refs)
			require.Zero(t, b.scans())
		})
	}
}

// TestWarmInline: stored pages that are small go out inline; they are read from the
// store and not from the table.
func TestWarmInline(t *testing.T) {
	t.Parallel()
	b, kept := shared(t, with(func(c *pullsvc.Config) { c.InlineSegmentMaxBytes = 0 }))
	b.fill(t, "x", 2500)
	for i := range 2 {
		got := b.pull(t, bootstrapping(fmt.Sprint("c", i), rowsLane, 1000))[0]
		require.Len(t, got.Segments, 3)
		require.Len(t, got.rows(t, b, kept, "items"), 2500)
		if i == 0 {
			b.counter.Reset()
		}
	}
	require.Zero(t, b.scans())
}

// TestInlineOnlyClients: who takes no descriptors gets none, whatever others have stored.
func TestInlineOnlyClients(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	b.fill(t, "x", 2500)
	require.Len(t, b.pull(t, bootstrapping("c1", rowsLane, 1000))[0].Refs, 3)
	for _, accept := range []ssp2.Accept{ssp2.AcceptInlineRows, ssp2.AcceptInlineRows | ssp2.AcceptSQLite} {
		got := b.pull(t, bootstrapping(fmt.Sprint("c", accept), accept, 1000))[0]
		require.Empty(t, got.Refs)
		require.Len(t, got.rows(t, b, kept, "items"), 2500)
	}
}

// TestFirstWireVersionShares: its requests name no log epoch, and share all the same.
func TestFirstWireVersionShares(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	b.fill(t, "x", 2500)
	for i := range 3 {
		req := bootstrapping(fmt.Sprint("c", i), rowsLane, 1000)
		req.WireVersion, req.LogEpoch = ssp2.WireV1, nil
		p, err := b.Begin(t.Context(), req)
		require.NoError(t, err)
		require.Contains(t, string(collect(t, p)), "sha256:")
		p.Close()
		require.Equal(t, 3, kept.puts)
		require.Equal(t, 2, b.scans())
	}
	require.Len(t, b.pull(t, bootstrapping("c9", rowsLane, 1000))[0].Refs, 3)
	require.Equal(t, 3, kept.puts)
}

// TestSharedByInstances: segments of the store serve another instance, also after a
// restart; all it reads of the table is the first page, from which it learns that the
// scope is a large one.
func TestSharedByInstances(t *testing.T) {
	t.Parallel()
	for _, accept := range []ssp2.Accept{rowsLane, imageLane} {
		b := setup(t)
		instance := func() *pullsvc.Service {
			store, err := segment.NewPostgres(b.db.Pool, segment.PostgresConfig{Clock: func() time.Time { return b.now }})
			require.NoError(t, err)
			s, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: store, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now }})
			require.NoError(t, err)
			return s
		}
		b.fill(t, "x", 5000)
		b.Service = instance()
		cold := b.pull(t, bootstrapping("c1", accept, 1000))[0]
		b.Service = instance()
		b.counter.Reset()
		require.Equal(t, cold, b.pull(t, bootstrapping("c2", accept, 1000))[0])
		require.Equal(t, 1, b.scans())
		b.counter.Reset()
		require.Equal(t, cold, b.pull(t, bootstrapping("c3", accept, 1000))[0])
		require.Zero(t, b.scans())
	}
}

// TestOldPin: segments of an older pin answer while what follows it fits in a window, and
// then that window brings the rest. Otherwise the scope is read anew.
func TestOldPin(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		meddle func(b *bundle, req *pullsvc.Request)
		reused bool
		scans  int
	}{
		{"nothing happened", func(*bundle, *pullsvc.Request) {}, true, 0},
		{"a few changes", func(b *bundle, _ *pullsvc.Request) {
			b.commit(t, item("new", "x", ""))
			b.commit(t, item("new", "x", "2"))
		}, true, 0},
		{"many changes of others", func(b *bundle, req *pullsvc.Request) {
			req.Header.LimitCommits = 3
			for i := range 9 {
				b.commit(t, item(fmt.Sprint("other", i), "y", ""))
			}
		}, true, 0},
		{"as many changes as a window takes", func(b *bundle, req *pullsvc.Request) {
			req.Header.LimitCommits = 3
			for i := range 3 {
				b.commit(t, item(fmt.Sprint("new", i), "x", ""))
			}
		}, true, 0},
		{"more changes than a window takes", func(b *bundle, req *pullsvc.Request) {
			req.Header.LimitCommits = 3
			for i := range 4 {
				b.commit(t, item(fmt.Sprint("new", i), "x", ""))
			}
		}, false, 0},
		{"one commit of more changes", func(b *bundle, req *pullsvc.Request) {
			req.Header.LimitCommits = 1
			b.commit(t, item("new1", "x", ""), item("new2", "x", ""))
		}, false, 0},
		{"the log is pruned beyond", func(b *bundle, _ *pullsvc.Request) { b.commit(t, item("new", "x", "")); b.prune(t, b.seq) }, false, 0},
		{"the client's own push is newer", func(b *bundle, req *pullsvc.Request) { req.AfterSeq = b.commit(t, item("new", "x", "")) }, false, 0},
		{"the segments are about to expire", func(b *bundle, _ *pullsvc.Request) { b.now = b.now.Add(24*time.Hour - time.Minute) }, false, 0},
		{"shorter pages are wanted", func(_ *bundle, req *pullsvc.Request) { req.Header.LimitSnapshotRows = 700 }, false, 0},
		{"longer pages would do; the first one is read to see whether there are more", func(_ *bundle, req *pullsvc.Request) { req.Header.LimitSnapshotRows = 3000 }, true, 1},
		{"other scopes", func(_ *bundle, req *pullsvc.Request) {
			req.Scopes = granted(scope.Allowed{"project": {"x"}})
			req.Subscriptions[0].Scopes = project("x")
		}, true, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t)
			b.fill(t, "x", 5000)
			cold := b.pull(t, bootstrapping("c1", rowsLane, 1000))[0]
			req := bootstrapping("c2", rowsLane, 1000)
			tc.meddle(b, &req)
			b.counter.Reset()
			got := b.pull(t, req)[0]
			if tc.reused {
				require.LessOrEqual(t, b.scans(), tc.scans)
				require.Equal(t, cold.Refs, got.Refs)
				require.Equal(t, cold.End, got.End)
			} else {
				require.NotZero(t, b.scans())
				require.Equal(t, b.seq, got.End.NextCursor)
			}
			for _, ref := range got.Refs {
				require.LessOrEqual(t, ref.RowCount, int64(req.Header.LimitSnapshotRows))
			}
			have := got.rows(t, b, kept, "items")
			table, _ := b.schema.Table("items")
			for _, c := range b.one(t, sub("s", "items", got.End.NextCursor, project("x"))).Commits {
				for _, ch := range c.Changes {
					have[rowID(t, table, ch.Row)] = row{version: *ch.RowVersion, payload: ch.Row}
				}
			}
			require.Len(t, have, 5000+len(b.inScope("items", "project=x")))
		})
	}
}

// inScope are the rows written by commit that have a scope.
func (b *bundle) inScope(table, scope string) map[string]*row {
	all := map[string]*row{}
	for id, r := range b.rows[table] {
		for _, s := range r.scopes {
			if s == scope {
				all[id] = r
			}
		}
	}
	return all
}

// TestNewEpochSharesNothing: segments of a replaced log answer nobody (§2.1).
func TestNewEpochSharesNothing(t *testing.T) {
	t.Parallel()
	b, _ := shared(t)
	b.fill(t, "x", 2500)
	cold := b.pull(t, bootstrapping("c1", rowsLane, 1000))[0]
	b.exec(t, `delete from public.items where _sync_row_id like '%7'`)
	b.exec(t, `update syncpg.sync_partition_registry set log_epoch = 'e2'`)
	req := bootstrapping("c2", rowsLane, 1000)
	e := "e2"
	req.LogEpoch = &e
	got := b.pull(t, req)[0]
	require.Len(t, got.Refs, 3)
	for i := range got.Refs {
		require.NotEqual(t, cold.Refs[i].SegmentID, got.Refs[i].SegmentID)
	}
}

// TestImageLane: an image is for clients that take one, at the start of a table that has
// more rows than a page, and counts as one page; everything else is on the rows lane
// (§5.3).
func TestImageLane(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	b.fill(t, "x", 2500)
	media := func(s section) (all []ssp2.MediaType) {
		for _, r := range s.Refs {
			all = append(all, r.MediaType)
		}
		return all
	}
	rows, image := ssp2.MediaRows, ssp2.MediaSQLite
	for _, tc := range []struct {
		name   string
		accept ssp2.Accept
		rows   int32
		pages  int32
		want   []ssp2.MediaType
	}{
		{"no bit 2", rowsLane, 1000, 50, []ssp2.MediaType{rows, rows, rows}},
		{"bit 2", imageLane, 1000, 50, []ssp2.MediaType{image}},
		{"bit 2, one page", imageLane, 1, 1, []ssp2.MediaType{image}},
		{"one row more than a page", imageLane, 2499, 50, []ssp2.MediaType{image}},
		{"exactly a page", imageLane, 2500, 50, []ssp2.MediaType{rows}},
		{"bit 2 without bit 0", ssp2.AcceptExternalRows | ssp2.AcceptSQLite, 1000, 50, []ssp2.MediaType{image}},
	} {
		req := bootstrapping(tc.name, tc.accept, tc.rows)
		req.Header.MaxSnapshotPages = tc.pages
		got := b.pull(t, req)[0]
		require.Equal(t, tc.want, media(got), tc.name)
		require.Nil(t, got.End.BootstrapState)
		require.Equal(t, b.seq, got.End.NextCursor)
		require.Len(t, got.rows(t, b, kept, "items"), 2500)
		if got.Refs[0].MediaType == image {
			require.Equal(t, "1 items 3 1 "+got.Refs[0].ScopeDigest+" 2500", imageMeta(t, body(t, kept, b.partition, got.Refs[0])))
			require.Nil(t, got.Refs[0].RowCursor)
			require.Nil(t, got.Refs[0].NextRowCursor)
			require.Equal(t, int64(2500), got.Refs[0].RowCount)
		}
	}
	req := bootstrapping("resumed", rowsLane, 1000)
	req.Header.MaxSnapshotPages = 1
	first := b.pull(t, req)[0]
	req.Header.Accept = imageLane
	req.Header.MaxSnapshotPages = 50
	req.Subscriptions[0].Cursor, req.Subscriptions[0].BootstrapState = first.End.NextCursor, first.End.BootstrapState
	require.Equal(t, []ssp2.MediaType{rows, rows}, media(b.pull(t, req)[0]), "a bootstrap stays on its lane")
}

// TestNoImage: what cannot be had as an image is served by the rows lane.
func TestNoImage(t *testing.T) {
	t.Parallel()
	b, kept := shared(t, with(func(c *pullsvc.Config) { c.ImageDir = filepath.Join(t.TempDir(), "does not exist") }))
	b.fill(t, "x", 2500)
	got := b.pull(t, bootstrapping("c1", imageLane, 1000))[0]
	require.Len(t, got.rows(t, b, kept, "items"), 2500)
	for _, r := range got.Refs {
		require.Equal(t, ssp2.MediaRows, r.MediaType)
	}
	puts := kept.puts
	require.Equal(t, got, b.pull(t, bootstrapping("c2", imageLane, 1000))[0], "its segments are shared too")
	require.Equal(t, puts, kept.puts)
}

// TestHerd: 200 clients that bootstrap a scope at once read it once.
func TestHerd(t *testing.T) {
	t.Parallel()
	const clients, n = 200, 20_000
	for name, accept := range map[string]ssp2.Accept{"rows": rowsLane, "image": imageLane} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t, withDatabase(func(o *pgtest.Options) { o.MaxConns = 6 }))
			b.fill(t, "x", n)
			admin := b.admin(t)
			before := fetched(t, b, admin)
			var all sync.WaitGroup
			ids := make([][]string, clients)
			begin := make(chan struct{})
			for i := range clients {
				all.Go(func() {
					<-begin
					got := b.pull(t, bootstrapping(fmt.Sprint("c", i), accept, 1000))[0]
					for _, r := range got.Refs {
						ids[i] = append(ids[i], r.SegmentID)
					}
				})
			}
			close(begin)
			all.Wait()
			for i := range ids {
				require.Equal(t, ids[0], ids[i])
			}
			require.Equal(t, len(ids[0]), kept.puts)
			read := fetched(t, b, admin) - before
			t.Logf("%d rows read of %d, %.5f of the table, by %d clients", read, n, float64(read)/n, clients)
			require.LessOrEqual(t, read, int64(n)*105/100)
		})
	}
}

// admin is a connection outside the pool.
func (b *bundle) admin(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// fetched is how many rows of items indexes have led to so far. Sessions tell what they
// did at the latest when they end.
func fetched(t testing.TB, b *bundle, admin *pgx.Conn) (n int64) {
	t.Helper()
	b.db.Pool.Reset()
	require.NoError(t, pgtest.WaitFor(t.Context(), admin, `select not exists (select from pg_stat_activity
		where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend')`))
	require.NoError(t, admin.QueryRow(t.Context(), `select idx_tup_fetch + seq_tup_read from pg_stat_user_tables where relname = 'items'`).Scan(&n))
	return n
}

// TestSmallHerd: clients that bootstrap a small scope at once share its only page.
func TestSmallHerd(t *testing.T) {
	t.Parallel()
	const clients = 20
	b, _ := shared(t, with(func(c *pullsvc.Config) { c.InlineSegmentMaxBytes = 0 }), withDatabase(func(o *pgtest.Options) { o.MaxConns = 2 }))
	b.fill(t, "x", 50)
	locker, admin := b.admin(t), b.admin(t)
	_, err := locker.Exec(t.Context(), `begin; lock table public.items in access exclusive mode`)
	require.NoError(t, err)
	var all sync.WaitGroup
	pull := func(i int) {
		got := b.pull(t, bootstrapping(fmt.Sprint("c", i), rowsLane, 1000))[0]
		require.Len(t, got.Segments, 1)
		require.Equal(t, int64(1), got.End.NextCursor)
	}
	all.Go(func() { pull(0) })
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), admin, 1))
	for i := 1; i < clients; i++ {
		all.Go(func() { pull(i) })
	}
	require.NoError(t, pgtest.WaitFor(t.Context(), admin, `select count(*) = $1 from syncpg.sync_clients`, clients-1))
	_, err = locker.Exec(t.Context(), `commit`)
	require.NoError(t, err)
	all.Wait()
	require.Equal(t, 1, b.scans())
}
