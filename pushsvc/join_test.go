package pushsvc_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/ssp2"
)

// orders is a table of the host.
const orders = `create table public.orders (id integer primary key)`

// hosted is a bundle with the table, a client and a way to begin transactions.
func hosted(t *testing.T, change ...func(*pgtest.Options, *pushsvc.Config)) (*bundle, *client) {
	t.Helper()
	b := setup(t, change...)
	b.exec(t, orders)
	return b, b.client(t, ssp2.WireV2)
}

// order writes a row of the host's in a transaction.
func order(t testing.TB, tx pgx.Tx, id int) {
	t.Helper()
	_, err := tx.Exec(t.Context(), fmt.Sprintf(`insert into public.orders values (%d)`, id))
	require.NoError(t, err)
}

func countOrders(t testing.TB, b *bundle) int {
	t.Helper()
	return scalar[int](t, b, `select count(*) from public.orders`)
}

func begin(t testing.TB, pool *pgxpool.Pool, options ...pgx.TxOptions) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), append(options, pgx.TxOptions{})[0])
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// TestRowsOfTheHostAndACommitAreOne: they become visible together or not at all.
func TestRowsOfTheHostAndACommitAreOne(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		end     func(t *testing.T, b *bundle, tx pgx.Tx)
		visible bool
	}{
		{"commit", func(t *testing.T, _ *bundle, tx pgx.Tx) { require.NoError(t, tx.Commit(t.Context())) }, true},
		{"rollback", func(t *testing.T, _ *bundle, tx pgx.Tx) { require.NoError(t, tx.Rollback(t.Context())) }, false},
		{"the process dies", func(t *testing.T, _ *bundle, tx pgx.Tx) {
			_ = tx.Conn().PgConn().Conn().Close()
			require.Error(t, tx.Commit(t.Context()))
		}, false},
		{"the server ends the session", func(t *testing.T, b *bundle, tx pgx.Tx) {
			b.exec(t, fmt.Sprintf(`select pg_terminate_backend(%d, 10000)`, tx.Conn().PgConn().PID()))
			require.Error(t, tx.Commit(t.Context()))
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ring := events.NewRing(10)
			var told []string
			b, c := hosted(t, withEvents(ring), withCommitted(&told))
			tx := begin(t, b.db.Pool)
			order(t, tx, 1)
			applied, n, err := b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
			require.NoError(t, err)
			require.Equal(t, ssp2.PushApplied, applied.Status)
			require.EqualValues(t, 1, applied.Seq)
			order(t, tx, 2)
			require.Zero(t, countOrders(t, b))
			require.Nil(t, c.stored(t, "notes", "a"), "it does not commit")
			require.Empty(t, told)

			tc.end(t, b, tx)
			if !tc.visible {
				require.Zero(t, countOrders(t, b))
				require.Nil(t, c.stored(t, "notes", "a"))
				require.Zero(t, writtenRows(t, b))
				again, err := b.Apply(t.Context(), c.seed("1", seedNote("a", "two")))
				require.NoError(t, err)
				require.Equal(t, ssp2.PushApplied, again.Status, "nothing was decided")
				require.EqualValues(t, 1, again.Seq)
				return
			}
			require.Equal(t, 2, countOrders(t, b))
			require.Equal(t, "one", c.stored(t, "notes", "a").Values["title"])
			require.Empty(t, ring.Query(events.Filter{}), "the caller says when")
			b.Notify(t.Context(), n)
			require.Equal(t, []string{c.req.Partition + " 1"}, told)
			require.Len(t, ring.Query(events.Filter{}), 1)
			again, err := b.Apply(t.Context(), c.seed("1", seedNote("a", "two")))
			require.NoError(t, err)
			applied.Status = ssp2.PushCached
			require.Equal(t, applied, again)
			requireSoundLog(t, b)
		})
	}
}

// TestATransactionOutlivesARejection, which stands once it has committed.
func TestATransactionOutlivesARejection(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		ops  []pushsvc.Operation
		code ssp2.Code
	}{
		{"before anything is written", []pushsvc.Operation{seedNote("a", "x").At(0).At(9)}, ssp2.CodeRowMissing},
		{"by a validator that has read", []pushsvc.Operation{seedNote("a", "x"), seedNote("b", "reject")}, "app.no"},
		{"by the database", []pushsvc.Operation{seedNote("a", "x"), pushsvc.Upsert("notes", map[string]any{"id": "b", "project_id": "pr1", "meta": `"\u0000"`})}, ssp2.CodeConstraintViolation},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var told []string
			b, c := hosted(t, withCommitted(&told), func(_ *pgtest.Options, cfg *pushsvc.Config) {
				cfg.ValidateCommit = func(ctx context.Context, cand *pushsvc.Candidate) error {
					rows, err := cand.ScanRows(ctx, pushsvc.ScopeScan{Table: "notes", Scopes: map[string][]string{"project_id": {"pr1"}}})
					if err != nil {
						return err
					}
					for i, r := range rows {
						if title, _ := r.Row.Text("title"); title == "reject" {
							return pushsvc.RejectOperation(i, "app.no", "", nil)
						}
					}
					return nil
				}
			})
			tx := begin(t, b.db.Pool)
			order(t, tx, 1)
			_, n, err := b.ApplyTx(t.Context(), tx, c.seed("bad", tc.ops...))
			first := requireRejection(t, err, tc.code, len(tc.ops)-1)
			order(t, tx, 2)
			applied, _, err := b.ApplyTx(t.Context(), tx, c.seed("good", seedNote("a", "good")))
			require.NoError(t, err, "the transaction goes on")
			require.EqualValues(t, 1, applied.Seq, "a rejection takes no seq")
			require.NoError(t, tx.Commit(t.Context()))
			b.Notify(t.Context(), n)
			require.Empty(t, told, "there is nothing to deliver")

			require.Equal(t, 2, countOrders(t, b))
			require.Equal(t, "good", c.stored(t, "notes", "a").Values["title"])
			require.Nil(t, c.stored(t, "notes", "b"))
			_, err = b.Apply(t.Context(), c.seed("bad", seedNote("b", "good")))
			again := requireRejection(t, err, tc.code, len(tc.ops)-1)
			require.True(t, again.Replay)
			again.Replay = false
			require.Equal(t, first, again)
			requireSoundLog(t, b)
		})
	}
}

// TestCommitsOfOneTransactionSeeEachOther, and so do its lookups.
func TestCommitsOfOneTransactionSeeEachOther(t *testing.T) {
	t.Parallel()
	var told []string
	b, c := hosted(t, withCommitted(&told), func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.PlanReactions = func(_ context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			return []reaction.Plan{{Key: c.ClientCommitID, Type: "mail", Version: 1, Payload: []byte(`{}`)}}, nil
		}
	})
	slug := func(id, slug string) pushsvc.Operation {
		return pushsvc.Upsert("slugs", map[string]any{"id": id, "project_id": "pr1", "slug": slug})
	}
	tx := begin(t, b.db.Pool)
	notes := make([]pushsvc.Notification, 0, 4)
	apply := func(id string, ops ...pushsvc.Operation) pushsvc.Applied {
		t.Helper()
		a, n, err := b.ApplyTx(t.Context(), tx, c.seed(id, ops...))
		require.NoError(t, err)
		notes = append(notes, n)
		return a
	}
	apply("1", slug("s1", "a"), slug("s2", "b"))
	require.Equal(t, ssp2.PushCached, apply("1", slug("s1", "z")).Status)
	apply("2", slug("s1", "c").At(1), pushsvc.Delete("slugs", "s2"))
	apply("3", slug("s3", "c2"), slug("s4", "d"))
	_, _, err := b.ApplyTx(t.Context(), tx, c.seed("4", slug("s5", "d")))
	requireRejection(t, err, ssp2.CodeConstraintViolation, 0)

	find := func(tx pgx.Tx, values ...any) (ids []string) {
		t.Helper()
		rows, err := b.ScanRowsByIndexTx(t.Context(), tx, c.req.Partition, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug", Values: values})
		require.NoError(t, err)
		for _, r := range rows {
			ids = append(ids, r.RowID)
		}
		return ids
	}
	require.Equal(t, []string{"s1"}, find(tx, "c"))
	require.Empty(t, find(tx, "b"))
	require.Empty(t, find(tx, "a\x00"), "no row can have it")
	_, err = b.ScanRowsByIndexTx(t.Context(), tx, c.req.Partition, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug"})
	require.Equal(t, pushsvc.CodeIndexValueCountMismatch, ssp2.CodeOf(err))
	_, err = b.ScanRowsByIndexTx(t.Context(), tx, c.req.Partition, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug", Values: []any{"c"}, Limit: 1001})
	require.Equal(t, pushsvc.CodeInvalidLimit, ssp2.CodeOf(err))
	other := begin(t, b.db.Pool)
	require.Empty(t, find(other, "c"))
	require.NoError(t, other.Rollback(t.Context()))

	require.NoError(t, tx.Commit(t.Context()))
	for _, n := range notes {
		b.Notify(t.Context(), n)
	}
	name := c.req.Partition
	require.Equal(t, []string{name + " 1", name + " 2", name + " 3"}, told)
	require.EqualValues(t, 2, c.stored(t, "slugs", "s1").Version)
	require.Equal(t, 3, scalar[int](t, b, `select count(*) from syncpg.sync_reactions`))
	requireSoundLog(t, b)
}

// TestATransactionThatCannotTakeAPushIn is told so, and goes on.
func TestATransactionThatCannotTakeAPushIn(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		options pgx.TxOptions
		says    string
	}{
		{"repeatable read", pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, "begin it with pgx.ReadCommitted"},
		{"serializable", pgx.TxOptions{IsoLevel: pgx.Serializable}, "begin it with pgx.ReadCommitted"},
		{"read only", pgx.TxOptions{AccessMode: pgx.ReadOnly}, "it is read only"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b, c := hosted(t)
			c.apply(t, b.upsert(t, "notes", note("n", "x")))
			tx := begin(t, b.db.Pool, tc.options)
			require.NoError(t, tx.QueryRow(t.Context(), `select 1`).Scan(new(int)), "the snapshot is taken")
			c.apply(t, b.upsert(t, "notes", note("n", "y"))) // moves the partition on
			_, _, err := b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
			require.ErrorIs(t, err, pushsvc.ErrTransaction)
			require.ErrorContains(t, err, tc.says)
			require.Empty(t, ssp2.CodeOf(err))
			require.NoError(t, tx.QueryRow(t.Context(), `select 1`).Scan(new(int)), "it goes on")
			c.apply(t, b.upsert(t, "notes", note("n", "z"))) // nothing is locked
			require.NoError(t, tx.Commit(t.Context()))
			require.Nil(t, c.stored(t, "notes", "a"))
		})
	}
	t.Run("read uncommitted is read committed", func(t *testing.T) {
		t.Parallel()
		b, c := hosted(t)
		tx := begin(t, b.db.Pool, pgx.TxOptions{IsoLevel: pgx.ReadUncommitted})
		_, _, err := b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
		require.NoError(t, err)
	})
	t.Run("none, ended and failed ones", func(t *testing.T) {
		t.Parallel()
		b, c := hosted(t)
		_, _, err := b.ApplyTx(t.Context(), nil, c.seed("1", seedNote("a", "one")))
		require.ErrorIs(t, err, pushsvc.ErrTransaction)
		tx := begin(t, b.db.Pool)
		require.NoError(t, tx.Rollback(t.Context()))
		_, _, err = b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		tx = begin(t, b.db.Pool)
		_, err = tx.Exec(t.Context(), `select 1/0`)
		require.Error(t, err)
		_, _, err = b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
		require.Equal(t, "25P02", pgtx.SQLState(err))
	})
}

// TestAnErrorLeavesATransactionAsItWas: without a lock, without a row.
func TestAnErrorLeavesATransactionAsItWas(t *testing.T) {
	t.Parallel()
	planner := errors.New("no plan today")
	b, c := hosted(t, func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.PlanReactions = func(ctx context.Context, cand *pushsvc.Candidate) ([]reaction.Plan, error) {
			if cand.ClientCommitID == "unplanned" {
				if _, err := cand.GetRow(ctx, "notes", "elsewhere"); err != nil {
					return nil, err
				}
				return nil, planner
			}
			return nil, nil
		}
	})
	b.exec(t, `create function public.fail() returns trigger language plpgsql as $$ begin raise exception 'not today'; end $$`,
		`create trigger fail before insert on public.slugs for each row execute function public.fail()`)
	_, err := b.Apply(t.Context(), c.seed("first", seedNote("n", "one")))
	require.NoError(t, err)
	for _, tc := range []struct {
		name   string
		req    pushsvc.ApplyRequest
		verify func(error)
	}{
		{"the database fails", c.seed("triggered", seedNote("a", "x"), pushsvc.Upsert("slugs", map[string]any{"id": "s", "project_id": "pr1"})), func(err error) {
			require.Equal(t, "P0001", pgtx.SQLState(err))
		}},
		{"the planner fails", c.seed("unplanned", seedNote("a", "x")), func(err error) { require.ErrorContains(t, err, "no plan today") }},
		{"another actor", func() pushsvc.ApplyRequest {
			r := c.seed("x", seedNote("a", "x"))
			r.Actor = "mallory"
			return r
		}(), func(err error) { require.Equal(t, ssp2.CodeInvalidClientID, ssp2.CodeOf(err)) }},
		{"an operation that is none", c.seed("x", seedNote("a", "x").At(-1)), func(err error) { require.ErrorAs(t, err, new(*pushsvc.OperationError)) }},
	} {
		t.Log(tc.name)
		tx := begin(t, b.db.Pool)
		_, _, err := b.ApplyTx(t.Context(), tx, tc.req)
		require.Error(t, err)
		tc.verify(err)
		require.NotErrorAs(t, err, new(*pushsvc.RejectedError))
		require.NoError(t, tx.QueryRow(t.Context(), `select 1`).Scan(new(int)))
		require.NoError(t, tx.Commit(t.Context()))
		require.Nil(t, c.stored(t, "notes", "a"))
		require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where client_commit_id = $1`, tc.req.ClientCommitID))
	}
	requireSoundLog(t, b)
}

// TestAPartitionMadeInATransaction goes with it, and is remembered by nobody.
func TestAPartitionMadeInATransaction(t *testing.T) {
	t.Parallel()
	b, _ := hosted(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := &client{b: b, ids: new(int), req: pushsvc.Request{Partition: "fresh"}}
	tx := begin(t, b.db.Pool)
	_, _, err := b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "one")))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, scalar[int](t, b, `select count(*) from syncpg.sync_partition_registry where partition = 'fresh'`))

	tx = begin(t, b.db.Pool)
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("a", "two")))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "two", c.stored(t, "notes", "a").Values["title"])
	device := b.client(t, ssp2.WireV2).with(func(r *pushsvc.Request) { r.Partition = "fresh" })
	resp, err := b.Push(t.Context(), device.req)
	require.NoError(t, err)
	require.Equal(t, scalar[string](t, b, `select log_epoch from syncpg.sync_partition_registry where partition = 'fresh'`), resp.LogEpoch)
}

// TestAPushWaitsForTheTransaction that has the partition, and sees what it did.
func TestAPushWaitsForTheTransaction(t *testing.T) {
	t.Parallel()
	b, c := hosted(t)
	tx := begin(t, b.db.Pool)
	_, _, err := b.ApplyTx(t.Context(), tx, c.seed("1", seedNote("n", "host")))
	require.NoError(t, err)
	push := c.pushing(t.Context(), b.Service, c.commit(base(b.upsert(t, "notes", note("n", "device")), 0)))
	seed, other := make(chan error, 1), b.beside(t)
	go func() {
		_, err := other.Apply(t.Context(), c.seed("1", seedNote("n", "another process")))
		seed <- err
	}()
	require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 2))
	require.NoError(t, tx.Commit(t.Context()))
	requireRejected(t, (<-push).resp.Results[0], 0, ssp2.CodeVersionConflict)
	require.NoError(t, <-seed)
	require.Equal(t, "host", c.stored(t, "notes", "n").Values["title"], "the seed was applied once")
	requireSoundLog(t, b)
}

// TestDeferredConstraintsOfTheHost are not blamed on the commit.
func TestDeferredConstraintsOfTheHost(t *testing.T) {
	t.Parallel()
	b, c := hosted(t)
	b.exec(t, `create table public.lines (order_id integer references public.orders deferrable initially deferred)`,
		`alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable initially deferred`)
	at := func(id, position int) pushsvc.Operation {
		return pushsvc.Upsert("guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
	}
	tx := begin(t, b.db.Pool)
	_, err := tx.Exec(t.Context(), `insert into public.lines values (1)`)
	require.NoError(t, err)
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("1", at(1, 1), at(2, 2)))
	require.ErrorIs(t, err, pushsvc.ErrTransaction)
	require.ErrorContains(t, err, "deferred constraints that do not hold yet")
	order(t, tx, 1)
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("1", at(1, 1), at(2, 2)))
	require.NoError(t, err)
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("2", at(1, 2), at(2, 1)))
	require.NoError(t, err, "swapped")
	_, _, err = b.ApplyTx(t.Context(), tx, c.seed("3", at(1, 3), at(3, 1)))
	requireRejection(t, err, ssp2.CodeConstraintViolation, 1)
	_, err = tx.Exec(t.Context(), `insert into public.lines values (2)`)
	require.NoError(t, err, "the host's constraints are still deferred")
	order(t, tx, 2)
	require.NoError(t, tx.Commit(t.Context()))
	requireSoundLog(t, b)
}

// TestJoinedTransactionsOfEveryKind: of a pool, of a connection, nested, in whatever way
// pgx runs statements.
func TestJoinedTransactionsOfEveryKind(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b, c := hosted(t, func(o *pgtest.Options, _ *pushsvc.Config) {
				o.MaxConns = 2
				o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
			})
			cfg, err := pgx.ParseConfig(b.db.DSN)
			require.NoError(t, err)
			cfg.DefaultQueryExecMode = mode
			conn, err := pgx.ConnectConfig(t.Context(), cfg)
			require.NoError(t, err)
			t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
			ofConn, err := conn.Begin(t.Context())
			require.NoError(t, err)
			for i, tx := range []pgx.Tx{ofConn, begin(t, b.db.Pool)} {
				id := fmt.Sprint("n", i)
				bad := pushsvc.Upsert("notes", map[string]any{"id": "x", "project_id": "pr1", "meta": `"\u0000"`})
				order(t, tx, i)
				_, _, err := b.ApplyTx(t.Context(), tx, c.seed("bad"+id, seedNote("y", "x"), bad))
				requireRejection(t, err, ssp2.CodeConstraintViolation, 1)
				_, _, err = b.ApplyTx(t.Context(), tx, c.seed(id, seedNote(id, "x")))
				require.NoError(t, err)
				nested, err := tx.Begin(t.Context())
				require.NoError(t, err)
				_, _, err = b.ApplyTx(t.Context(), nested, c.seed("nested"+id, seedNote(id, "nested")))
				require.NoError(t, err)
				rows, err := b.ScanRowsByIndexTx(t.Context(), nested, c.req.Partition, pushsvc.IndexScan{Table: "slugs", Index: "slugs_by_slug", Values: []any{"none"}})
				require.NoError(t, err)
				require.Empty(t, rows)
				require.NoError(t, nested.Rollback(t.Context()))
				again, _, err := b.ApplyTx(t.Context(), tx, c.seed(id, seedNote(id, "z")))
				require.NoError(t, err)
				require.Equal(t, ssp2.PushCached, again.Status)
				require.NoError(t, tx.Commit(t.Context()))
				require.Equal(t, "x", c.stored(t, "notes", id).Values["title"])
			}
			require.Equal(t, 2, countOrders(t, b))
			requireSoundLog(t, b)
		})
	}
}

// TestRoundTripsOfAJoinedPush: what a push costs, without its own BEGIN and COMMIT.
func TestRoundTripsOfAJoinedPush(t *testing.T) {
	t.Parallel()
	b, c := hosted(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	for i, want := range []struct{ first, replay int }{{-1, -1}, {2, 2}} { // the first time prepares
		tx := begin(t, b.db.Pool)
		for _, trips := range []int{want.first, want.replay} {
			b.counter.Reset()
			_, _, err := b.ApplyTx(t.Context(), tx, c.seed(strconv.Itoa(i), seedNote("a", "x"), seedNote("b", "x")))
			require.NoError(t, err)
			if trips >= 0 {
				require.Equal(t, trips, b.counter.RoundTrips())
			}
		}
		require.NoError(t, tx.Commit(t.Context()))
	}
}
