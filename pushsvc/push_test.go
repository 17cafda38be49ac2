package pushsvc_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

//
//nolint:paralleltest // the cases are counted on one connection
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	hooks := &hooks{}
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns, o.Tracer = 1, hooks })
	// Warm the connection: every statement is prepared once.
	b.push(t, request(commit("warm", b.upsert(t, "notes", note("w", "")), b.upsert(t, "slugs", map[string]any{"id": "w", "project_id": "pr1"}))))
	b.push(t, request(commit("warm2", base(b.upsert(t, "notes", note("w", "")), 9))))
	b.push(t, request(commit("warm3",
		b.upsert(t, "slugs", map[string]any{"id": "w1", "project_id": "pr1", "slug": "warm"}),
		b.upsert(t, "slugs", map[string]any{"id": "w2", "project_id": "pr1", "slug": "warm"}))))

	hundred := func(prefix string) []ssp2.Operation {
		var ops []ssp2.Operation
		for i := range 50 {
			id := fmt.Sprintf("%s-%d", prefix, i)
			ops = append(ops, b.upsert(t, "notes", note(id, "x")), b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": id}))
		}
		return ops
	}
	var many []ssp2.PushCommit
	for i := range 500 {
		many = append(many, commit(fmt.Sprintf("many-%d", i), b.upsert(t, "notes", note(fmt.Sprintf("many-%d", i), "x"))))
	}
	for _, tc := range []struct {
		name           string
		commits        []ssp2.PushCommit
		trips, durable int
	}{
		{"one operation", []ssp2.PushCommit{commit("one", b.upsert(t, "notes", note("one", "x")))}, 2, 1},
		{"a hundred operations over two tables", []ssp2.PushCommit{commit("hundred", hundred("h")...)}, 2, 1},
		{"five hundred commits of one operation", many, 2, 1},
		{"refused in Go", []ssp2.PushCommit{commit("stale", base(b.upsert(t, "notes", note("one", "y")), 7))}, 2, 1},
		{"refused by a unique index, one operation", []ssp2.PushCommit{commit("dup", b.upsert(t, "slugs", map[string]any{"id": "other", "project_id": "pr1", "slug": "h-1"}))}, 3, 1},
		{"refused by a unique index, the search", []ssp2.PushCommit{commit("dup2",
			b.upsert(t, "slugs", map[string]any{"id": "other1", "project_id": "pr1", "slug": "fresh"}),
			b.upsert(t, "slugs", map[string]any{"id": "other2", "project_id": "pr1", "slug": "h-1"}))}, 4, 1},
		{"replay of five hundred commits, before the answer", many, 1, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b.Wait()
			b.counter.Reset()
			answered := make(chan struct{})
			hooks.onQuery(func(string) { <-answered }) // closing the transaction may follow the answer
			resp, err := b.Push(t.Context(), request(tc.commits...))
			trips := b.counter.RoundTrips()
			close(answered)
			require.NoError(t, err)
			require.Zero(t, b.counter.PrepareRoundTrips())
			require.Equal(t, tc.trips, trips, "%v", b.counter.Statements())
			require.Zero(t, b.counter.Autocommits())
			b.Wait()
			require.Equal(t, tc.durable, b.counter.Commits())
			require.Len(t, resp.Results, len(tc.commits))
		})
	}
}

// TestOneDurableCommit: everything a push leaves, the client it saw for the first
// time included, is part of one transaction.
func TestOneDurableCommit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "a")))
	b.counter.Reset()
	fresh := c.with(func(r *pushsvc.Request) { r.ClientID = "c2" })
	results := fresh.send(t, fresh.commit(b.upsert(t, "notes", note("n", "b"))), fresh.commit(base(b.upsert(t, "notes", note("n", "c")), 7)), fresh.commit(remove("notes", "n")))
	require.Equal(t, 1, b.counter.Commits())
	require.Zero(t, b.counter.Autocommits())
	requireApplied(t, results[0], results[2])
	require.Equal(t, 3, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where partition = $1 and client_id = 'c2'`, t.Name()))
	require.Equal(t, "alice", scalar[string](t, b, `select actor_id from syncpg.sync_clients where partition = $1 and client_id = 'c2'`, t.Name()))
}
