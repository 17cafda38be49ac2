package pushsvc_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
	"github.com/syncpg/syncpg/ssp2"
)

// reactions lists what is stored for a partition: seq, commit id, key, type, payload.
func (c *client) reactions(t testing.TB) []string {
	t.Helper()
	rows, err := c.b.db.Pool.Query(t.Context(), `
		select format('%s %s %s %s v%s %s max %s', commit_seq, client_commit_id, reaction_key, reaction_type, reaction_version, payload, max_attempts)
		  from syncpg.sync_reactions where partition = $1 order by commit_seq, reaction_key`, c.req.Partition)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

// mail plans a mail for each upsert of a commit.
func mail(_ context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
	var plans []reaction.Plan
	for _, e := range c.Operations {
		if e.Op == ssp2.OpUpsert {
			plans = append(plans, reaction.Plan{Key: e.RowID, Type: "mail", Version: 1, Payload: json.RawMessage(`{"to": "` + c.Actor + `"}`)})
		}
	}
	return plans, nil
}

func TestReactionsAreStoredWithTheirCommit(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	var planned atomic.Int64
	b := setup(t, withEvents(ring), func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.Validators = map[string]pushsvc.Validator{"notes": func(_ context.Context, v *pushsvc.RowValidation) error {
			if v.RowID == "bad-row" {
				return pushsvc.Reject("app.row", "", nil)
			}
			return nil
		}}
		cfg.ValidateCommit = func(_ context.Context, c *pushsvc.Candidate) error {
			if c.Operations[0].RowID == "bad-commit" {
				return pushsvc.Reject("app.commit", "", nil)
			}
			return nil
		}
		cfg.PlanReactions = func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			planned.Add(1)
			return mail(ctx, c)
		}
	})
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "slugs", map[string]any{"id": "taken", "project_id": "pr1", "slug": "taken"}))
	planned.Store(0)
	insert := func(id string) ssp2.Operation { return b.upsert(t, "notes", note(id, "x")) }
	dup := b.upsert(t, "slugs", map[string]any{"id": "dup", "project_id": "pr1", "slug": "taken"})
	req := c.request(
		commit("one", insert("a"), insert("b")),
		commit("conflict", base(insert("a"), 7)),
		commit("row", insert("bad-row")),
		commit("commit", insert("bad-commit")),
		commit("database", dup),
		commit("none", remove("notes", "a")),
		commit("two", insert("c")))
	results := b.push(t, req).Results
	requireApplied(t, results[0], results[5], results[6])
	want := []string{
		`1 k1 taken mail v1 {"to":"alice"} max 10`,
		`2 one a mail v1 {"to":"alice"} max 10`,
		`2 one b mail v1 {"to":"alice"} max 10`,
		`4 two c mail v1 {"to":"alice"} max 10`,
	}
	require.Equal(t, want, c.reactions(t))
	before := planned.Load()
	b.push(t, req)
	require.Equal(t, before, planned.Load(), "a replay plans nothing")
	require.Equal(t, want, c.reactions(t))
	var queued []string
	for _, e := range told(b, ring) {
		if q, ok := e.(events.ReactionQueued); ok {
			queued = append(queued, fmt.Sprintf("%d %s %s %d %s", q.CommitSeq, q.ClientCommitID, q.Type, q.Version, q.IdempotencyKey))
		}
	}
	require.Equal(t, []string{
		fmt.Sprintf(`1 k1 mail 1 ["%s","c1","k1","taken"]`, c.req.Partition),
		fmt.Sprintf(`2 one mail 1 ["%s","c1","one","a"]`, c.req.Partition),
		fmt.Sprintf(`2 one mail 1 ["%s","c1","one","b"]`, c.req.Partition),
		fmt.Sprintf(`4 two mail 1 ["%s","c1","two","c"]`, c.req.Partition),
	}, queued)
	requireSoundLog(t, b)
}

// TestAPlannerThatFails: no outcome is recorded, nothing is written, the neighbours go
// on, and a later delivery plans again.
func TestAPlannerThatFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error){
		"an error": func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) { return nil, errors.New("x") },
		"an error of the protocol": func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) {
			return nil, ssp2.Errorf(ssp2.CodeForbidden, "x")
		},
		"a rejection": func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) {
			return nil, pushsvc.Reject("app.no", "", nil)
		},
		"a panic": func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) { panic("x") },
		"a plan that breaks a limit": func(context.Context, *pushsvc.Candidate) ([]reaction.Plan, error) {
			return []reaction.Plan{{Key: "", Type: "mail", Version: 1}}, nil
		},
		"after a read": func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			if _, err := c.ScanRows(ctx, inProject("pr1")); err != nil {
				return nil, err
			}
			return nil, errors.New("x")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var healed atomic.Bool
			b := setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) {
				o.MaxConns = 2
				cfg.PlanReactions = func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
					if c.ClientID == "failing" && c.ClientCommitID == "bad" && !healed.Load() {
						return fail(ctx, c)
					}
					return mail(ctx, c)
				}
			})
			c := b.client(t, ssp2.WireV2)
			failing := c.with(func(r *pushsvc.Request) { r.ClientID = "failing" })
			commits := []ssp2.PushCommit{
				commit("good", b.upsert(t, "notes", note("good", "x"))),
				commit("bad", b.upsert(t, "notes", note("bad", "x"))),
				commit("last", b.upsert(t, "notes", note("last", "x"))),
			}
			clients := c.fleet(2)
			neighbour := func(i int) func() <-chan answer {
				k := clients[i].commit(b.upsert(t, "notes", note(fmt.Sprint("n", i), "x")))
				return func() <-chan answer { return clients[i].pushing(t.Context(), b.Service, k) }
			}
			first, rest, release := c.behind(t, b, neighbour(0), func() <-chan answer { return failing.pushing(t.Context(), b.Service, commits...) }, neighbour(1))
			release()
			requireApplied(t, (<-first).resp.Results...)
			requireApplied(t, (<-rest[0]).resp.Results...)
			err := (<-rest[1]).err
			require.Error(t, err)
			require.Empty(t, ssp2.CodeOf(err), "a failure of the server")
			requireApplied(t, (<-rest[2]).resp.Results...)
			b.Wait()
			require.Zero(t, b.db.Pool.Stat().AcquiredConns())
			require.Nil(t, c.stored(t, "notes", "bad"))
			require.Nil(t, c.stored(t, "notes", "last"), "what comes after a failure waits for its retry")
			require.Equal(t, 1, scalar[int](t, b, `select count(*) from syncpg.sync_push_results where client_id = 'failing'`))
			require.False(t, slices.ContainsFunc(c.reactions(t), func(s string) bool { return s[2:5] == "bad" }))

			healed.Store(true)
			results := failing.send(t, commits...)
			require.Equal(t, ssp2.PushCached, results[0].Status)
			requireApplied(t, results[1], results[2])
			require.Len(t, c.reactions(t), 6)
			requireSoundLog(t, b)
		})
	}
}

// TestAPlannerThatIgnoresARefusal: the database refused the rows that the planner wanted
// to read, so that there is no commit to react to.
func TestAPlannerThatIgnoresARefusal(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(10)
	b := setup(t, withEvents(ring), func(_ *pgtest.Options, cfg *pushsvc.Config) {
		cfg.PlanReactions = func(ctx context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
			_, _ = c.ScanRows(ctx, inProject("pr1"))
			return mail(ctx, c)
		}
	})
	c := b.client(t, ssp2.WireV2)
	slug := func(id string) ssp2.Operation {
		return b.upsert(t, "slugs", map[string]any{"id": id, "project_id": "pr1", "slug": "taken"})
	}
	c.apply(t, slug("1"))
	requireRejected(t, c.push(t, slug("2")), 0, ssp2.CodeConstraintViolation)
	require.Len(t, c.reactions(t), 1)
	require.Len(t, told(b, ring), 3, "applied, queued, rejected")
}

// TestRoundTripsOfReactions: they are part of the flush of their commits.
func TestRoundTripsOfReactions(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, cfg *pushsvc.Config) { o.MaxConns, cfg.PlanReactions = 1, mail })
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("warm", "x")))
	b.Wait()
	b.counter.Reset()
	requireApplied(t, c.send(t, c.commit(b.upsert(t, "notes", note("a", "x"))), c.commit(b.upsert(t, "notes", note("b", "x"))))...)
	b.Wait()
	require.Zero(t, b.counter.PrepareRoundTrips())
	require.Equal(t, 2, b.counter.RoundTrips())
	require.Equal(t, 1, b.counter.Commits())
	require.Len(t, c.reactions(t), 3)
}
