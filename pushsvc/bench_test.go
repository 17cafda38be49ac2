package pushsvc_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// The floor: what a careful engineer writes by hand to store the same rows, log and
// outcomes, knowing that nothing can go wrong. Two round trips, one statement per
// table, no rules, no conflicts, no constraints to attribute.
const (
	floorLock     = `select max_commit_seq from syncpg.sync_partitions where partition = $1 for update`
	floorOutcomes = `select o.client_commit_id, o.status, o.commit_seq, o.results from unnest($3::text[]) as k(id)
		join syncpg.sync_push_results as o on o.partition = $1 and o.client_id = $2 and o.client_commit_id = k.id`
	floorRows = `select r._sync_row_id, r._sync_server_version, r._sync_payload from public.notes as r where r._sync_partition = $1 and r._sync_row_id = any($2)`
	floorNote = `insert into public.notes (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, id, project_id, title)
		select $1, k.id, 1, k.payload, k.id, 'pr1', k.title from unnest($2::text[], $3::bytea[], $4::text[]) as k(id, payload, title)
		on conflict (_sync_partition, _sync_row_id) do update set _sync_server_version = excluded._sync_server_version, _sync_payload = excluded._sync_payload, title = excluded.title`
	floorSeq    = `update syncpg.sync_partitions set max_commit_seq = max_commit_seq + $2 where partition = $1`
	floorCommit = `insert into syncpg.sync_commits select $1, $2 + k.ord, $3, k.id, 'alice', $4, 1, $6 from unnest($5::text[]) with ordinality as k(id, ord)`
	floorChange = `insert into syncpg.sync_changes select $1, $2 + 1 + (k.ord - 1) / $3, (k.ord - 1) % $3, 'notes', k.id, 1, 1, '{project_id=pr1}', k.payload
		from unnest($4::text[], $5::bytea[]) with ordinality as k(id, payload, ord)`
	floorScope   = `insert into syncpg.sync_change_scopes select $1, 'notes', 'project_id=pr1', $2 + i from generate_series(1, $3::int) as i`
	floorOutcome = `insert into syncpg.sync_push_results select $1, $2, k.id, 1, $3 + k.ord, k.results, null, $4, gen_random_uuid(), 1
		from unnest($5::text[], $6::bytea[]) with ordinality as k(id, results, ord)`
)

// floor stores commits of notes by hand; each has the same number of operations.
func (b *bundle) floor(ctx context.Context, req *pushsvc.Request, titles []string) error {
	conn, err := b.db.Pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	perCommit := len(req.Commits[0].Operations)
	var commits, rows []string
	var payloads, results [][]byte
	for _, c := range req.Commits {
		commits = append(commits, c.ClientCommitID)
		applied := make([]ssp2.OpResult, perCommit)
		for i, op := range c.Operations {
			applied[i] = ssp2.OpResult{OpIndex: int32(i), Status: ssp2.OpApplied}
			rows, payloads = append(rows, op.RowID), append(payloads, op.Payload)
		}
		encoded, err := ssp2.AppendResults(nil, applied)
		if err != nil {
			return err
		}
		results = append(results, encoded)
	}
	var seq int64
	admission := &pgx.Batch{}
	admission.Queue(`begin`)
	admission.Queue(floorLock, req.Partition).QueryRow(func(row pgx.Row) error { return row.Scan(&seq) })
	admission.Queue(floorOutcomes, req.Partition, req.ClientID, commits).Query(drain)
	admission.Queue(floorRows, req.Partition, rows).Query(drain)
	if err := conn.SendBatch(ctx, admission).Close(); err != nil {
		return err
	}
	now := b.now.UnixMilli()
	apply := &pgx.Batch{}
	apply.Queue(floorNote, req.Partition, rows, payloads, titles)
	apply.Queue(floorSeq, req.Partition, len(commits))
	apply.Queue(floorCommit, req.Partition, seq, req.ClientID, now, commits, perCommit)
	apply.Queue(floorChange, req.Partition, seq, perCommit, rows, payloads)
	apply.Queue(floorScope, req.Partition, seq, len(commits))
	apply.Queue(floorOutcome, req.Partition, req.ClientID, seq, now, commits, results)
	apply.Queue(`commit`)
	return conn.SendBatch(ctx, apply).Close()
}

// floorReplay looks known outcomes up by hand.
func (b *bundle) floorReplay(ctx context.Context, req *pushsvc.Request) error {
	commits := make([]string, len(req.Commits))
	for i := range req.Commits {
		commits[i] = req.Commits[i].ClientCommitID
	}
	rows, err := b.db.Pool.Query(ctx, floorOutcomes, req.Partition, req.ClientID, commits)
	if err != nil {
		return err
	}
	return drain(rows)
}

// drain reads rows like somebody who needs them.
func drain(rows pgx.Rows) error {
	for rows.Next() {
		if _, err := rows.Values(); err != nil {
			return err
		}
	}
	return rows.Err()
}

// workload makes requests of new notes.
type workload struct {
	b                  *bundle
	commits, perCommit int
	made               atomic.Int64
}

// next returns a request and the titles in it, for the floor.
func (w *workload) next(tb testing.TB, partition string) (pushsvc.Request, []string) {
	run := w.made.Add(1)
	titles := make([]string, 0, w.commits*w.perCommit)
	req := request(make([]ssp2.PushCommit, w.commits)...)
	req.Partition = partition
	for i := range req.Commits {
		req.Commits[i].ClientCommitID = fmt.Sprintf("%d-%d", run, i)
		for j := range w.perCommit {
			title := fmt.Sprint("title ", j)
			req.Commits[i].Operations = append(req.Commits[i].Operations, w.b.upsert(tb, "notes", note(fmt.Sprintf("%d-%d-%d", run, i, j), title)))
			titles = append(titles, title)
		}
	}
	return req, titles
}

// fill gives partitions some rows and the floor the statistics it needs: its plans
// rely on them.
func (b *bundle) fill(tb testing.TB, partitions ...string) {
	for _, p := range partitions {
		_, err := b.db.Pool.Exec(tb.Context(), load, pgx.QueryExecModeSimpleProtocol, p, 10_000, b.full(tb, "notes", note("r1", "loaded")))
		require.NoError(tb, err)
	}
	b.exec(tb, `vacuum analyze`)
}

// BenchmarkPush measures pushes of new rows against the floor in the same run.
func BenchmarkPush(b *testing.B) {
	for _, bm := range []struct {
		name               string
		commits, perCommit int
		replay             bool
	}{
		{"1 operation", 1, 1, false},
		{"100 operations", 1, 100, false},
		{"500 commits", 500, 1, false},
		{"replay of 500", 500, 1, true},
	} {
		b.Run(bm.name, func(b *testing.B) {
			env := setup(b, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 2 })
			env.fill(b, "p1", "floor")
			w := &workload{b: env, commits: bm.commits, perCommit: bm.perCommit}
			known, _ := w.next(b, "p1")
			env.push(b, known)
			byHand, titles := w.next(b, "floor")
			require.NoError(b, env.floor(b.Context(), &byHand, titles))
			var spent, floor time.Duration
			b.ReportAllocs()
			for b.Loop() {
				if bm.replay {
					spent += timed(func() { env.push(b, known) })
					floor += timed(func() { require.NoError(b, env.floorReplay(b.Context(), &byHand)) })
					continue
				}
				b.StopTimer()
				req, _ := w.next(b, "p1")
				hand, titles := w.next(b, "floor")
				b.StartTimer()
				spent += timed(func() { env.push(b, req) })
				floor += timed(func() { require.NoError(b, env.floor(b.Context(), &hand, titles)) })
			}
			b.ReportMetric(float64(spent)/float64(b.N), "ns/op")
			b.ReportMetric(float64(spent)/float64(floor), "x_floor")
		})
	}
}

func timed(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

// BenchmarkParallel measures 8 clients that push one operation after the other.
func BenchmarkParallel(b *testing.B) {
	const clients = 8
	for _, partitions := range []int{8, 1} {
		b.Run(fmt.Sprintf("%d clients on %d partitions", clients, partitions), func(b *testing.B) {
			env := setup(b, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = clients })
			w := &workload{b: env, commits: 1, perCommit: 1}
			for p := range partitions {
				env.fill(b, fmt.Sprint("p", p), fmt.Sprint("floor", p))
			}
			// run lets every client push n times and returns the time it took.
			run := func(n int, kind string, push func(*pushsvc.Request, []string) error) time.Duration {
				requests := make([][]pushsvc.Request, clients)
				titles := []string{"title 0"}
				for c := range requests {
					for range n {
						req, _ := w.next(b, fmt.Sprint(kind, c%partitions))
						req.ClientID = fmt.Sprint("c", c)
						requests[c] = append(requests[c], req)
					}
				}
				return timed(func() {
					parallel(b, clients, func(c int) error {
						for i := range requests[c] {
							if err := push(&requests[c][i], titles); err != nil {
								return err
							}
						}
						return nil
					})
				})
			}
			service := func(req *pushsvc.Request, _ []string) error { _, err := env.Push(b.Context(), *req); return err }
			hand := func(req *pushsvc.Request, titles []string) error { return env.floor(b.Context(), req, titles) }
			run(5, "p", service)
			run(5, "floor", hand)
			n := max(b.N/clients, 1)
			b.ResetTimer()
			spent, floor := run(n, "p", service), run(n, "floor", hand)
			b.ReportMetric(float64(spent)/float64(n*clients), "ns/op")
			b.ReportMetric(float64(n*clients)/spent.Seconds(), "pushes/s")
			b.ReportMetric(float64(spent)/float64(floor), "x_floor")
		})
	}
}

// BenchmarkQueue: clients of one partition, with the queue and without it, by turns in one
// run. x_off is the latency of one client with the queue over that without, and of many
// their commits/s.
func BenchmarkQueue(b *testing.B) {
	for _, clients := range []int{1, 64} {
		b.Run(fmt.Sprintf("%d clients", clients), func(b *testing.B) {
			env := setup(b, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 8 })
			off, err := pushsvc.New(env.db.Pool, pushsvc.Config{Schema: env.schema, MaxBatchOperations: -1})
			require.NoError(b, err)
			b.Cleanup(off.Wait)
			sides := [2]struct {
				service *pushsvc.Service
				fleet   []*client
				spent   time.Duration
				pushes  int
				commits int // durable
			}{
				{service: env.Service, fleet: env.client(b, ssp2.WireV2).fleet(clients)},
				{service: off, fleet: env.client(b, ssp2.WireV2).fleet(clients)},
			}
			var made atomic.Int64
			// turn lets every client of a side push n times.
			turn := func(at, n int) {
				side := &sides[at]
				commits := make([][]ssp2.PushCommit, clients)
				for i, cl := range side.fleet {
					for range n {
						commits[i] = append(commits[i], cl.commit(env.upsert(b, "notes", note(fmt.Sprint("n", made.Add(1)), "x"))))
					}
				}
				env.counter.Reset()
				side.spent += timed(func() {
					parallel(b, clients, func(i int) error {
						for _, k := range commits[i] {
							if _, err := side.service.Push(b.Context(), side.fleet[i].request(k)); err != nil {
								return err
							}
						}
						return nil
					})
				})
				side.service.Wait()
				side.pushes += n * clients
				side.commits += env.counter.Commits()
			}
			for at := range sides {
				turn(at, 3)
				sides[at].spent, sides[at].pushes, sides[at].commits = 0, 0, 0
			}
			const each = 5
			b.ResetTimer()
			for i := 0; sides[0].pushes < b.N; i++ {
				turn(i%2, each)
				turn(1-i%2, each)
			}
			per := func(at int) float64 { return float64(sides[at].spent) / float64(sides[at].pushes) }
			b.ReportMetric(per(0), "ns/op")
			if clients == 1 {
				b.ReportMetric(per(0)/per(1), "x_off")
				return
			}
			b.ReportMetric(1e9/per(0), "commits/s")
			b.ReportMetric(float64(sides[0].pushes)/float64(sides[0].commits), "commits/tx")
			b.ReportMetric(per(1)/per(0), "x_off")
		})
	}
}

// BenchmarkHooks: what hooks add to a push of 100 commits of one operation. Those that
// are not configured add nothing.
func BenchmarkHooks(b *testing.B) {
	read := func(ctx context.Context, c *pushsvc.Candidate) error {
		_, err := c.ScanRows(ctx, pushsvc.ScopeScan{Table: "notes", Scopes: map[string][]string{"project_id": {"pr1"}}, Limit: 1})
		return err
	}
	for _, bm := range []struct {
		name   string
		change func(*pushsvc.Config)
	}{
		{"none", func(*pushsvc.Config) {}},
		{"of another table", func(cfg *pushsvc.Config) {
			cfg.Validators = map[string]pushsvc.Validator{"slugs": func(context.Context, *pushsvc.RowValidation) error { return nil }}
		}},
		{"rows", func(cfg *pushsvc.Config) {
			cfg.Validators = map[string]pushsvc.Validator{"notes": func(context.Context, *pushsvc.RowValidation) error { return nil }}
		}},
		{"commits", func(cfg *pushsvc.Config) {
			cfg.ValidateCommit = func(context.Context, *pushsvc.Candidate) error { return nil }
		}},
		{"commits, reading", func(cfg *pushsvc.Config) { cfg.ValidateCommit = read }},
	} {
		b.Run(bm.name, func(b *testing.B) {
			env := setup(b, func(o *pgtest.Options, cfg *pushsvc.Config) { o.MaxConns = 1; bm.change(cfg) })
			env.fill(b, "p1")
			w := &workload{b: env, commits: 100, perCommit: 1}
			warm, _ := w.next(b, "p1")
			env.push(b, warm)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				req, _ := w.next(b, "p1")
				b.StartTimer()
				env.push(b, req)
			}
		})
	}
}
