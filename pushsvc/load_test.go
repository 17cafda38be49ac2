package pushsvc_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// TestManyPushersOfManyPartitions over few connections, with a validator that reads: nobody
// waits for ever, and nobody for another partition.
func TestManyPushersOfManyPartitions(t *testing.T) {
	t.Parallel()
	const pushers, partitions, each = 200, 20, 2
	entered, proceed := make(chan struct{}, 1), make(chan struct{})
	b := setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
		o.MaxConns = 4
		cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error {
			rows, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "notes", Scopes: map[string][]string{"project_id": {"pr1"}}, Limit: 5})
			if err == nil && len(rows) == 0 {
				return errors.New("its own row is missing")
			}
			if c.Partition == "p0" {
				select {
				case entered <- struct{}{}:
				default:
				}
				<-proceed
			}
			return err
		}
	})
	template := b.client(t, ssp2.WireV1)
	push := func(i int) error {
		c := template.with(func(r *pushsvc.Request) {
			r.Partition, r.ClientID, r.Actor = fmt.Sprint("p", i%partitions), fmt.Sprint("c", i), fmt.Sprint("a", i)
		})
		for j := range each {
			resp, err := b.Push(t.Context(), c.request(commit(fmt.Sprint("k", j), b.upsert(t, "notes", note(fmt.Sprint(i, "-", j), "x")))))
			if err != nil {
				return err
			}
			if s := resp.Results[0].Status; s != ssp2.PushApplied {
				return fmt.Errorf("pusher %d, commit %d: %v %+v", i, j, s, resp.Results[0].Results)
			}
		}
		return nil
	}
	results := make(chan error, pushers)
	var blocked atomic.Int64
	for i := range pushers {
		go func() {
			err := push(i)
			if i%partitions == 0 {
				blocked.Add(1)
			}
			results <- err
		}()
	}
	<-entered
	for range pushers - pushers/partitions {
		require.NoError(t, <-results)
	}
	require.Zero(t, blocked.Load(), "its validator has not returned")
	close(proceed)
	for range pushers / partitions {
		require.NoError(t, <-results)
	}
	require.Equal(t, partitions, scalar[int](t, b, `select count(*) from syncpg.sync_partitions as p where max_commit_seq = $1
		and (select array_agg(commit_seq order by commit_seq) from syncpg.sync_commits as c where c.partition = p.partition) = array(select generate_series(1, $1))`, int64(pushers/partitions*each)))
	require.Equal(t, pushers*each, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where status = 1 and commit_seq is not null`))
	requireSoundLog(t, b)
}

// inFlight counts the batches that are under way, which are what pushes are made of.
type inFlight struct{ now, most atomic.Int64 }

func (f *inFlight) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (*inFlight) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (f *inFlight) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	for n := f.now.Add(1); ; {
		most := f.most.Load()
		if n <= most || f.most.CompareAndSwap(most, n) {
			return ctx
		}
	}
}
func (*inFlight) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (f *inFlight) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)   { f.now.Add(-1) }

// TestABusyPartitionUsesOneConnection, however many clients push, and few transactions.
func TestABusyPartitionUsesOneConnection(t *testing.T) {
	t.Parallel()
	const clients, each = 64, 10
	flying := &inFlight{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns, o.Tracer = 8, flying })
	c := b.client(t, ssp2.WireV2)
	fleet := c.fleet(clients)
	commits := make([][]ssp2.PushCommit, clients)
	for i := range commits {
		for j := range each {
			commits[i] = append(commits[i], c.commit(b.upsert(t, "notes", note(fmt.Sprint(i, "-", j), "x"))))
		}
	}
	b.counter.Reset()
	parallel(t, clients, func(i int) error {
		last := int64(0)
		for _, k := range commits[i] {
			resp, err := b.Push(t.Context(), fleet[i].request(k))
			if err != nil {
				return err
			}
			seq := *resp.Results[0].CommitSeq
			if seq <= last {
				return fmt.Errorf("client %d: seq %d after %d", i, seq, last)
			}
			last = seq
		}
		return nil
	})
	b.Wait()
	require.EqualValues(t, 1, flying.most.Load())
	perTransaction := float64(clients*each) / float64(b.counter.Commits())
	t.Logf("%.1f commits per transaction", perTransaction)
	require.GreaterOrEqual(t, perTransaction, 5.0)
	requireSoundLog(t, b)
}

// TestTheConnectionIsCutWhileARejectionIsRecorded: behind the rollback to the savepoint. It
// is replaced, the error is that of the cut, and the next delivery decides anew.
func TestTheConnectionIsCutWhileARejectionIsRecorded(t *testing.T) {
	t.Parallel()
	for name, second := range map[string]error{"rejected then": pushsvc.Reject("app.no", "no", nil), "applied then": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			verdict := pushsvc.Reject("app.no", "no", nil)
			b := setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
				o.MaxConns = 1
				cfg.ValidateCommit = func(ctx context.Context, c *pushsvc.Candidate) error {
					if _, err := c.GetRow(ctx, "notes", "elsewhere"); err != nil { // writes the rows of the commit
						return err
					}
					return verdict
				}
			})
			monitor, holder := b.session(t), b.session(t)
			b.exec(t, `create function public.pause() returns trigger language plpgsql as $$ begin perform pg_catalog.pg_advisory_xact_lock(1); return new; end $$`,
				`create trigger pause before insert on syncpg.sync_push_results for each row execute function public.pause()`)
			_, err := holder.Exec(t.Context(), `select pg_advisory_lock(1)`)
			require.NoError(t, err)
			c := b.client(t, ssp2.WireV2)
			k := c.commit(b.upsert(t, "notes", note("n", "x")))
			pushing := c.pushing(t.Context(), b.Service, k)
			require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), monitor, 1))
			_, err = monitor.Exec(t.Context(), `select pg_terminate_backend(pid, 10000) from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0`)
			require.NoError(t, err)
			a := <-pushing
			require.Error(t, a.err)
			require.Nil(t, a.resp)
			require.Empty(t, ssp2.CodeOf(a.err))
			require.ErrorContains(t, a.err, "recording outcomes", "the error of the finalization")
			_, err = holder.Exec(t.Context(), `select pg_advisory_unlock(1)`)
			require.NoError(t, err)
			b.Wait()
			require.Zero(t, c.contents(t), "nothing stands")

			verdict = second
			result := c.send(t, k)[0]
			if second == nil {
				requireApplied(t, result)
			} else {
				require.Equal(t, ssp2.PushRejected, result.Status)
				require.Equal(t, "app.no", result.Results[0].Code)
				require.Nil(t, c.stored(t, "notes", "n"))
			}
			requireSoundLog(t, b)
		})
	}
}
