package pushsvc_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// recorder is a tracer that keeps the statements of batches, with their arguments.
type recorder struct {
	hooks
	mu         sync.Mutex
	statements []pgx.TraceBatchQueryData
}

func (r *recorder) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(data.Args) > 0 {
		r.statements = append(r.statements, data)
	}
}

func (r *recorder) take() []pgx.TraceBatchQueryData {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.statements
	r.statements = nil
	return taken
}

// load fills a partition with n rows, a log of 1,000 commits with n changes and as many
// outcomes, and n/10 tombstones.
const load = `
	insert into public.notes (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, id, project_id, title)
	select $1, 'r' || i, 1, $3::bytea, 'r' || i, 'pr1', 'loaded' from generate_series(1, $2::int) as i;
	insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count)
	select $1, i, 'c1', 'loaded' || i, 'alice', 1, 1, $2::int / 1000 from generate_series(1, 1000) as i;
	insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
	select $1, 1 + i % 1000, i / 1000, 'notes', 'r' || i, 1, 1, '{project_id=pr1}', $3::bytea from generate_series(1, $2::int) as i;
	insert into syncpg.sync_change_scopes (partition, table_name, scope_key, commit_seq)
	select $1, 'notes', 'project_id=pr1', i from generate_series(1, 1000) as i;
	insert into syncpg.sync_push_results (partition, client_id, client_commit_id, status, commit_seq, results, recorded_at_ms, outcome_id, schema_version)
	select $1, 'c1', 'loaded' || i, 1, i, '\x010100000000000000' || '\x01'::bytea, 1, gen_random_uuid(), 1 from generate_series(1, 1000) as i;
	insert into syncpg.sync_tombstones (partition, table_name, row_id, commit_seq)
	select $1, 'notes', 'dead' || i, 1 + i % 1000 from generate_series(1, $2::int / 10) as i;
	insert into syncpg.sync_clients (partition, client_id, actor_id, created_at_ms, updated_at_ms) values ($1, 'c1', 'alice', 1, 1);
	insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) values ($1, 'e', 1, 1);
	insert into syncpg.sync_partitions (partition, max_commit_seq) values ($1, 1000);`

// TestPlanCliff: statements that a connection prepared while the tables were empty
// still find everything by key when they have filled up, without ANALYZE; and a push
// touches as much of a large partition as of a small one.
func TestPlanCliff(t *testing.T) {
	t.Parallel()
	one := func(change func(*pgxpool.Config)) func(*pgtest.Options, *pushsvc.Config) {
		return func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns, o.Configure = 1, change }
	}
	recorder := &recorder{}
	auto := setup(t, one(func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = recorder }))
	generic := auto.beside(t, one(func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["plan_cache_mode"] = "force_generic_plan" }))
	auto.exec(t, `vacuum`)
	auto.warm(t, "c1")
	generic.warm(t, "c2")
	for partition, rows := range map[string]int{"scratch": 1000, "small": 1000, "large": 100_000} {
		_, err := auto.db.Pool.Exec(t.Context(), load, pgx.QueryExecModeSimpleProtocol, partition, rows, auto.full(t, "notes", note("r1", "loaded")))
		require.NoError(t, err)
	}
	pushes := auto.record(t, recorder)
	type footprint struct{ small, large map[string]int64 }
	stale := map[string]footprint{}
	for name, b := range map[string]*bundle{"auto": auto, "generic": generic} {
		stale[name] = footprint{b.footprints(t, pushes, "small"), b.footprints(t, pushes, "large")}
	}
	auto.exec(t, `vacuum analyze`)
	auto.footprints(t, pushes, "large") // plans anew, which reads the catalog
	fresh := auto.footprints(t, pushes, "large")
	for name, f := range stale {
		for _, p := range pushes {
			t.Logf("%-28s %-8s buffers: small %6d, large %6d, large with fresh plans %6d", p.name, name, f.small[p.name], f.large[p.name], fresh[p.name])
			require.LessOrEqual(t, f.large[p.name], 2*fresh[p.name], p.name)
			require.LessOrEqual(t, f.large[p.name], f.small[p.name]+f.small[p.name]/2, p.name)
		}
	}
}

// warm makes the connection plan every statement of the push path.
func (b *bundle) warm(t *testing.T, clientID string) {
	t.Helper()
	c := b.client(t, ssp2.WireV1).with(func(r *pushsvc.Request) { r.ClientID = clientID })
	slug := func(id string) ssp2.Operation {
		return b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": id})
	}
	for i := range 10 {
		id := strconv.Itoa(i)
		k := c.commit(b.upsert(t, "notes", note(id, "a")), slug(id))
		requireApplied(t, c.send(t, k)...)
		c.send(t, k)
		requireApplied(t, c.push(t, remove("notes", id), remove("slugs", id)))
		requireApplied(t, c.push(t, b.upsert(t, "notes", note(id, "a"))), c.push(t, remove("notes", id)))
	}
}

// recorded is a push with the statements it sent.
type recorded struct {
	name       string
	statements []pgx.TraceBatchQueryData
}

// record pushes to the partition "scratch" and keeps what was sent.
func (b *bundle) record(t *testing.T, r *recorder) []recorded {
	t.Helper()
	many := func(n int, f func(i int) ssp2.Operation) []ssp2.Operation {
		ops := make([]ssp2.Operation, n)
		for i := range ops {
			ops[i] = f(i)
		}
		return ops
	}
	update := func(i int) ssp2.Operation { return b.upsert(t, "notes", note(fmt.Sprint("r", 1+i), "b")) }
	var replay, single []ssp2.PushCommit
	for i := range 500 {
		replay = append(replay, commit(fmt.Sprint("loaded", 1+i), remove("notes", "x")))
		single = append(single, commit(fmt.Sprint("single", i), b.upsert(t, "notes", note(fmt.Sprint("single", i), "a"))))
	}
	pushes := []struct {
		name    string
		commits []ssp2.PushCommit
	}{
		{"one insert", []ssp2.PushCommit{commit("insert", b.upsert(t, "notes", note("new", "a")))}},
		{"one update", []ssp2.PushCommit{commit("update", update(0))}},
		{"one delete", []ssp2.PushCommit{commit("delete", remove("notes", "r2"))}},
		{"one insert over a tombstone", []ssp2.PushCommit{commit("revive", b.upsert(t, "notes", note("dead1", "a")))}},
		{"100 updates", []ssp2.PushCommit{commit("updates", many(100, func(i int) ssp2.Operation { return update(100 + i) })...)}},
		{"100 deletes", []ssp2.PushCommit{commit("deletes", many(100, func(i int) ssp2.Operation { return remove("notes", fmt.Sprint("r", 500+i)) })...)}},
		{"100 inserts over tombstones", []ssp2.PushCommit{commit("revivals", many(100, func(i int) ssp2.Operation {
			return b.upsert(t, "notes", note(fmt.Sprint("dead", 100+i), "a"))
		})...)}},
		{"500 commits", single},
		{"replay of 500 commits", replay},
	}
	list := make([]recorded, 0, len(pushes))
	for _, p := range pushes {
		r.take()
		req := request(p.commits...)
		req.Partition = "scratch"
		for _, result := range b.push(t, req).Results {
			require.NotEqual(t, ssp2.PushRejected, result.Status)
		}
		b.Wait()
		list = append(list, recorded{p.name, r.take()})
	}
	return list
}

// footprints repeats recorded pushes in another partition over the pool's only
// connection, whose cached plans are those under test, and returns how many buffers
// each touched. Everything is rolled back.
func (b *bundle) footprints(t *testing.T, pushes []recorded, partition string) map[string]int64 {
	t.Helper()
	rows, err := b.db.Pool.Query(t.Context(), `select name, statement from pg_prepared_statements`)
	require.NoError(t, err)
	texts := map[string]string{}
	var name, text string
	_, err = pgx.ForEachRow(rows, []any{&name, &text}, func() error { texts[name] = text; return nil })
	require.NoError(t, err)

	buffers := map[string]int64{}
	for _, p := range pushes {
		tx, err := b.db.Pool.Begin(t.Context())
		require.NoError(t, err)
		for _, st := range p.statements {
			args := append([]any{partition}, st.Args[1:]...)
			if _, ok := args[1].(int64); ok && len(args) > 20 {
				args[1] = int64(1000) // the log to append to ends there
			}
			var plan []struct {
				Plan struct {
					Hit  int64 `json:"Shared Hit Blocks"`
					Read int64 `json:"Shared Read Blocks"`
				}
			}
			require.NoError(t, tx.QueryRow(t.Context(), `explain (analyze, buffers, format json) `+texts[st.SQL], args...).Scan(&plan), p.name)
			buffers[p.name] += plan[0].Plan.Hit + plan[0].Plan.Read
		}
		require.NoError(t, tx.Rollback(t.Context()))
	}
	return buffers
}
