package pushsvc_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// hooks is a tracer that runs functions of a test at points of a push.
type hooks struct {
	mu       sync.Mutex
	query    func(sql string)
	batchEnd func(conn *pgx.Conn, err error)
}

// onQuery sets what runs before a statement that is not part of a batch.
func (h *hooks) onQuery(f func(sql string)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.query = f
}

// onBatchEnd sets what runs once, after the next batch has been answered.
func (h *hooks) onBatchEnd(f func(conn *pgx.Conn, err error)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.batchEnd = f
}

func (h *hooks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	h.mu.Lock()
	f := h.query
	h.mu.Unlock()
	if f != nil {
		f(data.SQL)
	}
	return ctx
}

func (h *hooks) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (h *hooks) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (h *hooks) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (h *hooks) TraceBatchEnd(_ context.Context, conn *pgx.Conn, data pgx.TraceBatchEndData) {
	h.mu.Lock()
	f := h.batchEnd
	h.batchEnd = nil
	h.mu.Unlock()
	if f != nil {
		f(conn, data.Err)
	}
}

// session is a connection of the test beside the pool.
func (b *bundle) session(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), b.db.DSN)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// hold takes the partition's lock in another session, which runs sql before release
// commits.
func (c *client) hold(t testing.TB) (release func(sql ...string)) {
	t.Helper()
	conn := c.b.session(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select from syncpg.sync_partitions where partition = $1 for update`, c.req.Partition)
	require.NoError(t, err)
	return func(statements ...string) {
		t.Helper()
		for _, sql := range statements {
			_, err := tx.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		require.NoError(t, tx.Commit(t.Context()))
	}
}

// answer is what a push in the background came to.
type answer struct {
	resp *pushsvc.Response
	err  error
}

func (c *client) pushing(ctx context.Context, s *pushsvc.Service, commits ...ssp2.PushCommit) <-chan answer {
	done := make(chan answer, 1)
	req := c.request(commits...)
	go func() {
		resp, err := s.Push(ctx, req)
		done <- answer{resp, err}
	}()
	return done
}

// TestTwoDeliveries: one commit arrives twice at the same moment; the one that waits
// longer for the lock answers with the outcome of the other.
//
//nolint:paralleltest // blocked sessions are counted in the whole database
func TestTwoDeliveries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, tc := range []struct {
		name   string
		op     func(t *testing.T) ssp2.Operation
		status ssp2.PushStatus
	}{
		{"applied", func(t *testing.T) ssp2.Operation { return b.upsert(t, "notes", note("n", "a")) }, ssp2.PushApplied},
		{"rejected", func(t *testing.T) ssp2.Operation { return base(b.upsert(t, "notes", note("n", "a")), 4) }, ssp2.PushRejected},
		{"refused by the database", func(t *testing.T) ssp2.Operation { return b.upsert(t, "notes", meta(`"\u0000"`)) }, ssp2.PushRejected},
	} {
		for _, swapped := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/swapped %t", tc.name, swapped), func(t *testing.T) {
				c := b.client(t, ssp2.WireV2)
				k := c.commit(tc.op(t))
				sides := []*bundle{b, b.beside(t)}
				if swapped {
					sides[0], sides[1] = sides[1], sides[0]
				}
				sides[1].counter.Reset()
				release := c.hold(t)
				first := c.pushing(t.Context(), sides[0].Service, k)
				require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
				second := c.pushing(t.Context(), sides[1].Service, k)
				require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
				release()
				answers := []answer{<-first, <-second}
				require.NoError(t, answers[0].err)
				require.NoError(t, answers[1].err)
				one, two := answers[0].resp.Results[0], answers[1].resp.Results[0]
				require.Equal(t, encoded(t, ssp2.WireV2, one), encoded(t, ssp2.WireV2, two))
				require.Equal(t, tc.status, one.Status)
				sides[1].Wait()
				require.NotContains(t, strings.Join(sides[1].counter.Statements(), " "), "sync_record_outcomes", "one pipeline run")
				if tc.status == ssp2.PushApplied {
					require.Equal(t, ssp2.PushCached, two.Status)
					require.EqualValues(t, 1, c.stored(t, "notes", "n").Version)
					require.EqualValues(t, 1, c.seq(t))
				} else {
					require.Zero(t, c.seq(t))
				}
				require.Equal(t, 1, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1`, c.req.Partition))
			})
		}
	}
}

// TestPoolOfOneConnection: every path of a push finishes on the one connection.
func TestPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	monitor := b.session(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "slugs", map[string]any{"id": "1", "project_id": "pr1", "slug": "taken"}))
	commits := []ssp2.PushCommit{
		c.commit(b.upsert(t, "notes", note("n", "a"))),
		c.commit(base(b.upsert(t, "notes", note("n", "b")), 7)),
		c.commit(b.upsert(t, "notes", note("m", "a")), b.upsert(t, "slugs", map[string]any{"id": "2", "project_id": "pr1", "slug": "taken"})),
		c.commit(remove("notes", "n")),
	}
	release := c.hold(t)
	var waiting []<-chan answer
	for range 4 {
		waiting = append(waiting, c.pushing(t.Context(), b.Service, commits...))
	}
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), monitor, 1))
	release()
	applied := 0
	for _, done := range waiting {
		a := <-done
		require.NoError(t, a.err)
		if a.resp.Results[0].Status == ssp2.PushApplied {
			applied++
		}
		requireRejected(t, a.resp.Results[1], 0, ssp2.CodeVersionConflict)
		requireRejected(t, a.resp.Results[2], 1, ssp2.CodeConstraintViolation)
		require.EqualValues(t, 3, *a.resp.Results[3].CommitSeq)
	}
	require.Equal(t, 1, applied)
	require.EqualValues(t, 3, c.seq(t))
}

// TestPartitionsDoNotWaitForEachOther, nor do replays for anybody.
func TestPartitionsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	held, free := b.client(t, ssp2.WireV2), b.client(t, ssp2.WireV2)
	free.req.Partition = "free"
	free.req.WireVersion, free.req.LogEpoch = ssp2.WireV1, nil
	known := held.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, held.send(t, known)...)
	release := held.hold(t)
	waiting := held.pushing(t.Context(), b.Service, held.commit(b.upsert(t, "notes", note("n", "b"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	free.apply(t, b.upsert(t, "notes", note("n", "a")), b.upsert(t, "notes", note("n", "b")), remove("notes", "n"))
	// Another process; in this one it would stand in line.
	replay := <-held.pushing(t.Context(), b.beside(t).Service, known)
	require.NoError(t, replay.err)
	require.Equal(t, ssp2.PushCached, replay.resp.Results[0].Status)
	release()
	a := <-waiting
	require.NoError(t, a.err)
	requireApplied(t, a.resp.Results...)
}

// TestReadsAfterTheLock: what changed while a push waited for the lock is what it sees.
//
//nolint:paralleltest // blocked sessions are counted in the whole database
func TestReadsAfterTheLock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	row := func(t *testing.T, v int64) ssp2.Operation { return base(b.upsert(t, "notes", note("n", "late")), v) }
	for _, tc := range []struct {
		name      string
		meanwhile string
		op        func(t *testing.T) ssp2.Operation
		check     func(t *testing.T, c *client, a answer)
	}{
		{
			"the epoch is rotated", `update syncpg.sync_partition_registry set log_epoch = 'next', epoch_required = true where partition = '%s'`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) {
				require.NoError(t, a.err)
				require.Equal(t, &pushsvc.Response{Reset: true, LogEpoch: "next"}, a.resp)
			},
		},
		{
			"a backfill is declared", `insert into syncpg.sync_backfill_checkpoints (partition, name, schema_version, state, updated_at_ms) values ('%s', 'x', 1, 'declared', 0)`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) { require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(a.err)) },
		},
		{
			"a fence is raised", `insert into syncpg.sync_writer_fence values ('%s', 2)`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) {
				require.Equal(t, ssp2.CodeStorageWriterFenceRejected, ssp2.CodeOf(a.err))
			},
		},
		{
			"the client goes to another actor", `update syncpg.sync_clients set actor_id = 'bob' where partition = '%s'`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) {
				require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(a.err))
			},
		},
		{
			"the row is written", `update public.notes set _sync_server_version = 8 where _sync_partition = '%s'`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) {
				requireRejected(t, a.resp.Results[0], 0, ssp2.CodeVersionConflict)
				require.EqualValues(t, 8, a.resp.Results[0].Results[0].ServerVersion)
			},
		},
		{
			"the row is deleted", `delete from public.notes where _sync_partition = '%s'`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) { requireRejected(t, a.resp.Results[0], 0, ssp2.CodeRowMissing) },
		},
		{
			"the log grows", `update syncpg.sync_partitions set max_commit_seq = 7 where partition = '%s'`,
			func(t *testing.T) ssp2.Operation { return row(t, 1) },
			func(t *testing.T, _ *client, a answer) { require.EqualValues(t, 8, *a.resp.Results[0].CommitSeq) },
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			c.apply(t, b.upsert(t, "notes", note("n", "a")))
			release := c.hold(t)
			waiting := c.pushing(t.Context(), b.Service, c.commit(tc.op(t)))
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
			release(fmt.Sprintf(tc.meanwhile, c.req.Partition))
			tc.check(t, c, <-waiting)
		})
	}
}

// TestInsertRace: two clients insert the same row at once; the loser learns of the
// winner's row if it may see it.
//
//nolint:paralleltest // blocked sessions are counted in the whole database
func TestInsertRace(t *testing.T) {
	t.Parallel()
	b := setup(t)
	beside := b.beside(t)
	for _, wire := range wires {
		t.Run(string('0'+rune(wire)), func(t *testing.T) {
			c := b.client(t, wire)
			insert := func(title string) ssp2.Operation {
				if wire == ssp2.WireV3 {
					return base(b.patch(t, "notes", fullNote("n", title)), 0)
				}
				return base(b.upsert(t, "notes", note("n", title)), 0)
			}
			loser := c.with(func(r *pushsvc.Request) { r.ClientID, r.Actor = "c2", "bob" })
			release := c.hold(t)
			first := c.pushing(t.Context(), b.Service, c.commit(insert("winner")))
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
			second := loser.pushing(t.Context(), beside.Service, loser.commit(insert("loser")))
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
			release()
			requireApplied(t, (<-first).resp.Results...)
			lost := (<-second).resp.Results[0]
			requireRejected(t, lost, 0, ssp2.CodeVersionConflict)
			require.EqualValues(t, 1, lost.Results[0].ServerVersion)
			require.Equal(t, note("n", "winner"), b.decoded(t, "notes", lost.Results[0].ServerRow))
		})
	}
}

// TestClientIDRace: two actors use one new client id at once; it belongs to the first.
func TestClientIDRace(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	bob := c.with(func(r *pushsvc.Request) { r.Actor = "bob" })
	release := c.hold(t)
	first := c.pushing(t.Context(), b.Service, c.commit(b.upsert(t, "notes", note("n", "a"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
	second := bob.pushing(t.Context(), b.beside(t).Service, bob.commit(b.upsert(t, "notes", note("m", "a"))))
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
	release()
	requireApplied(t, (<-first).resp.Results...)
	require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf((<-second).err))
	require.Nil(t, c.stored(t, "notes", "m"))
}

// TestCancelWhileWaiting: a push that waits for the lock ends with its context, on
// the server too, and the pool goes on.
func TestCancelWhileWaiting(t *testing.T) {
	t.Parallel()
	for name, configure := range map[string]func(*pgxpool.Config){
		"the connection is closed": func(*pgxpool.Config) {},
		"the query is cancelled": func(cfg *pgxpool.Config) {
			cfg.ConnConfig.BuildContextWatcherHandler = func(pg *pgconn.PgConn) ctxwatch.Handler {
				return &pgconn.CancelRequestContextWatcherHandler{Conn: pg, DeadlineDelay: 10 * time.Second}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns, o.Configure = 1, configure })
			monitor := b.session(t)
			c := b.client(t, ssp2.WireV2)
			c.apply(t, b.upsert(t, "notes", note("n", "a")))
			before := c.contents(t)
			release := c.hold(t)
			ctx, cancel := context.WithCancel(t.Context())
			waiting := c.pushing(ctx, b.Service, c.commit(b.upsert(t, "notes", note("n", "b"))))
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), monitor, 1))
			cancel()
			a := <-waiting // while the lock is still held
			require.Error(t, a.err)
			require.NoError(t, pgtest.WaitFor(t.Context(), monitor, `select not exists (select from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0)`))
			release()
			require.Equal(t, before, c.contents(t))
			require.NotNil(t, c.stored(t, "notes", "n"))
			requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "c"))))
		})
	}
	t.Run("while waiting for a connection", func(t *testing.T) {
		t.Parallel()
		b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
		c := b.client(t, ssp2.WireV2)
		conn, err := b.db.Pool.Acquire(t.Context())
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		waiting := c.pushing(ctx, b.Service, c.commit(b.upsert(t, "notes", note("n", "b"))))
		cancel()
		require.ErrorIs(t, (<-waiting).err, context.Canceled)
		conn.Release()
		requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "c"))))
	})
}

// TestBackendKilled: whenever the server loses the session, nothing is written, the
// connection is replaced, and the same push succeeds when it comes again.
//
//nolint:paralleltest // the cases share a tracer
func TestBackendKilled(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.Tracer = hooks })
	monitor := b.session(t)
	b.exec(t, `create function public.pause() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock(1); return new; end $$`,
		`create trigger pause before insert on public.guarded for each row execute function public.pause()`)
	kill := func(t *testing.T, pid uint32) {
		_, err := monitor.Exec(context.WithoutCancel(t.Context()), `select pg_terminate_backend($1, 10000)`, int64(pid))
		require.NoError(t, err)
	}
	killBlocked := func(t *testing.T) {
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), monitor, 1))
		kill(t, uint32(scalar[int64](t, b, `select pid from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0`)))
	}
	for _, tc := range []struct {
		name string
		push func(t *testing.T, c *client, k ssp2.PushCommit) answer
	}{
		{"while it waits for the lock", func(t *testing.T, c *client, k ssp2.PushCommit) answer {
			release := c.hold(t)
			waiting := c.pushing(t.Context(), b.Service, k)
			killBlocked(t)
			a := <-waiting
			release()
			return a
		}},
		{"between admission and apply", func(t *testing.T, c *client, k ssp2.PushCommit) answer {
			hooks.onBatchEnd(func(conn *pgx.Conn, err error) {
				if err == nil {
					kill(t, conn.PgConn().PID())
				}
			})
			return <-c.pushing(t.Context(), b.Service, k)
		}},
		{"while rows are written", func(t *testing.T, c *client, k ssp2.PushCommit) answer {
			holder := b.session(t)
			_, err := holder.Exec(t.Context(), `select pg_advisory_lock(1)`)
			require.NoError(t, err)
			waiting := c.pushing(t.Context(), b.Service, k)
			killBlocked(t)
			a := <-waiting
			_, err = holder.Exec(t.Context(), `select pg_advisory_unlock(1)`)
			require.NoError(t, err)
			return a
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			k := c.commit(b.upsert(t, "notes", note("n", "a")), b.upsert(t, "guarded", map[string]any{"id": 1, "project_id": "pr1", "org": 1}))
			a := tc.push(t, c, k)
			require.Error(t, a.err)
			require.Nil(t, a.resp)
			require.Empty(t, ssp2.CodeOf(a.err))
			require.Zero(t, c.contents(t))
			requireApplied(t, c.send(t, k)...)
			require.EqualValues(t, 1, c.seq(t))
		})
	}
}

// TestFirstOutcomeStands: an outcome that somebody stored in between, against the
// rules, is the answer all the same.
//
//nolint:paralleltest // the cases share a tracer
func TestFirstOutcomeStands(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.Tracer = hooks })
	monitor := b.session(t)
	c := b.client(t, ssp2.WireV2)
	foreign, err := ssp2.AppendResults(nil, []ssp2.OpResult{{Status: ssp2.OpError, Code: "host.code", Message: "first"}})
	require.NoError(t, err)
	for name, op := range map[string]ssp2.Operation{
		"to be applied":  b.upsert(t, "notes", note("n", "a")),
		"to be rejected": base(b.upsert(t, "notes", note("n", "a")), 5),
	} {
		t.Run(name, func(t *testing.T) {
			k := c.commit(op)
			hooks.onBatchEnd(func(*pgx.Conn, error) {
				_, err := monitor.Exec(context.WithoutCancel(t.Context()), `insert into syncpg.sync_push_results values ($1, 'c1', $2, 3, null, $3, null, 1, gen_random_uuid(), 1)`, c.req.Partition, k.ClientCommitID, foreign)
				require.NoError(t, err)
			})
			result := c.send(t, k)[0]
			require.Equal(t, ssp2.PushRejected, result.Status)
			require.Equal(t, "host.code", result.Results[0].Code)
			require.Zero(t, c.seq(t))
			require.Nil(t, c.stored(t, "notes", "n"))
		})
	}
}

// TestAttemptsAgain: a transaction that the server gave up is run again.
func TestAttemptsAgain(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) {
		o.Tracer = hooks
		o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["lock_timeout"] = "20ms" }
	})
	c := b.client(t, ssp2.WireV2)
	release := c.hold(t)
	hooks.onBatchEnd(func(_ *pgx.Conn, err error) {
		if pgtx.SQLState(err) == "55P03" {
			release()
		}
	})
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "a"))))
	require.EqualValues(t, 1, c.seq(t))

	release = c.hold(t)
	_, err := b.Push(t.Context(), c.request(c.commit(b.upsert(t, "notes", note("n", "b")))))
	require.Equal(t, "55P03", pgtx.SQLState(err), "not for ever")
	release()
}

// TestTriggerWaitsForAPush: what admission learned of a table holds until the push
// has committed.
//
//nolint:paralleltest // the cases share a tracer
func TestTriggerWaitsForAPush(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.Tracer = hooks })
	monitor, host := b.session(t), b.session(t)
	b.exec(t, `create function public.refuse() returns trigger language plpgsql as $$ begin raise exception 'no' using errcode = 'check_violation'; end $$`)
	for name, ddl := range map[string]string{
		"trigger": `create constraint trigger refuse after insert on public.guarded deferrable initially deferred for each row execute function public.refuse()`,
		"index":   `create unique index refuse on public.guarded (_sync_partition, position)`,
	} {
		t.Run(name, func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			created := make(chan error, 1)
			hooks.onBatchEnd(func(*pgx.Conn, error) {
				go func() {
					_, err := host.Exec(context.WithoutCancel(t.Context()), ddl)
					created <- err
				}()
				require.NoError(t, pgtest.WaitBlocked(context.WithoutCancel(t.Context()), monitor, host.PgConn().PID()))
			})
			at := func(id, position int) ssp2.Operation {
				return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
			}
			requireApplied(t, c.push(t, at(1, 1)))
			require.NoError(t, <-created)
			requireRejected(t, c.push(t, at(2, 1)), 0, ssp2.CodeConstraintViolation)
			b.exec(t, map[string]string{"trigger": `drop trigger refuse on public.guarded`, "index": `drop index public.refuse`}[name])
		})
	}
}

// parallel runs f n times at once.
func parallel(t testing.TB, n int, f func(i int) error) {
	t.Helper()
	failures := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { failures[i] = f(i) })
	}
	group.Wait()
	require.NoError(t, errors.Join(failures...))
}

// TestNewPartition: several processes meet a new partition at once and agree on its
// epoch.
func TestNewPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	epochs := make([]string, 4)
	services := make([]*pushsvc.Service, len(epochs))
	for i := range services {
		services[i] = b.beside(t).Service
	}
	parallel(t, len(epochs), func(i int) error {
		resp, err := services[i].Push(t.Context(), pushsvc.Request{Partition: "new", Actor: "alice", ClientID: "c1", WireVersion: ssp2.WireV2})
		if err == nil {
			epochs[i] = resp.LogEpoch
		}
		return err
	})
	for _, epoch := range epochs {
		require.NotEmpty(t, epoch)
		require.Equal(t, epochs[0], epoch)
	}
}

// TestManyPushers: whatever meets, every log is dense, every commit has one outcome,
// and the newest change of a row is the row.
func TestManyPushers(t *testing.T) {
	t.Parallel()
	const pushers, rounds, partitions = 12, 12, 3
	b := setup(t)
	parallel(t, pushers, func(p int) error {
		random := rand.New(rand.NewPCG(7, uint64(p)))
		for r := range rounds {
			id := strconv.Itoa(random.IntN(6))
			req := request(
				commit(fmt.Sprint(r, "a"), b.upsert(t, "notes", note(id, fmt.Sprint(p, r))), b.upsert(t, "slugs", map[string]any{"id": strconv.Itoa(p), "project_id": "pr1", "slug": id})),
				commit(fmt.Sprint(r, "b"), remove("notes", strconv.Itoa(random.IntN(6)))))
			req.Partition, req.ClientID = fmt.Sprint("p", random.IntN(partitions)), fmt.Sprint("c", p)
			for range 1 + random.IntN(2) { // some are delivered twice
				if _, err := b.Push(t.Context(), req); err != nil {
					return err
				}
			}
		}
		return nil
	})
	requireSoundLog(t, b)
	require.Equal(t, 2*pushers*rounds, scalar[int](t, b, `select count(*) from (select distinct partition, client_id, client_commit_id from syncpg.sync_push_results) as r`))
}

// TestHostUpdatesARowMeanwhile: a row whose own columns the host is just updating is
// deleted or written all the same.
//
//nolint:paralleltest // blocked sessions are counted in the whole database
func TestHostUpdatesARowMeanwhile(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `alter table public.notes add column seen bigint`)
	for name, op := range map[string]ssp2.Operation{"delete": remove("notes", "n"), "update": b.upsert(t, "notes", note("n", "b"))} {
		t.Run(name, func(t *testing.T) {
			c := b.client(t, ssp2.WireV2)
			requireApplied(t, c.push(t, b.upsert(t, "notes", note("n", "a")), b.upsert(t, "notes", note("m", "a"))))
			host, err := b.session(t).Begin(t.Context())
			require.NoError(t, err)
			_, err = host.Exec(t.Context(), `update public.notes set seen = 1 where _sync_partition = $1`, c.req.Partition)
			require.NoError(t, err)
			waiting := c.pushing(t.Context(), b.Service, c.commit(remove("notes", "m"), op))
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
			require.NoError(t, host.Commit(t.Context()))
			a := <-waiting
			require.NoError(t, a.err)
			requireApplied(t, a.resp.Results...)
			require.Nil(t, c.stored(t, "notes", "m"))
			if name == "delete" {
				require.Nil(t, c.stored(t, "notes", "n"))
			}
		})
	}
	requireSoundLog(t, b)
}
