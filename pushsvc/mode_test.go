package pushsvc_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// TestExecModes: whatever way the owner of the pool lets pgx run statements, as for a
// pooler in transaction mode, a push comes to the same.
func TestExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) {
				o.MaxConns = 1
				o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
			})
			b.exec(t, `alter table public.guarded add constraint lone unique (_sync_partition, position) deferrable initially deferred`)
			at := func(id, position int) ssp2.Operation {
				return b.upsert(t, "guarded", map[string]any{"id": id, "project_id": "pr1", "org": 1, "position": position})
			}
			rich := map[string]any{
				"id": "n", "project_id": `q"\{},'`, "title": "ü\\\"'", "rank": ssp2.MaxSafeInteger, "weight": -0.1, "done": true,
				"meta": `{"a": [1, "\"", null]}`, "thumb": "\x00\xff\\'",
			}
			c := b.client(t, ssp2.WireV2)
			for round := range 2 { // the second time over what the connection has cached
				if round > 0 {
					c = c.with(func(r *pushsvc.Request) { r.ClientID = "c2"; c.ids = new(int) })
				}
				commits := []ssp2.PushCommit{
					c.commit(b.upsert(t, "notes", rich), b.upsert(t, "notes", note("m", "a")), at(1, 1), at(2, 2)),
					c.commit(at(1, 2), at(2, 1)),
					c.commit(b.upsert(t, "notes", note("k", "a")), b.upsert(t, "notes", meta(`"\u0000"`))),
					c.commit(b.upsert(t, "slugs", map[string]any{"id": "1", "project_id": "pr1", "slug": "s"})),
					c.commit(at(3, 3), b.upsert(t, "slugs", map[string]any{"id": "2", "project_id": "pr1", "slug": "s"})),
					c.commit(at(4, 1)),
					c.commit(base(b.upsert(t, "notes", rich), 99)),
					c.commit(remove("notes", "m"), remove("guarded", "1"), remove("guarded", "2"), remove("slugs", "1")),
				}
				first := c.send(t, commits...)
				requireApplied(t, first[0], first[1], first[3], first[7])
				for i, at := range map[int]int{2: 1, 4: 1, 5: 0} {
					requireRejected(t, first[i], at, ssp2.CodeConstraintViolation)
				}
				requireRejected(t, first[6], 0, ssp2.CodeVersionConflict)
				for i, r := range c.send(t, commits...) {
					require.Equal(t, encoded(t, ssp2.WireV2, first[i]), encoded(t, ssp2.WireV2, r))
				}
				rich["rank"] = int(ssp2.MaxSafeInteger)
				require.Equal(t, rich, c.stored(t, "notes", "n").Values)
				patched := c.as(ssp2.WireV3).push(t, b.patch(t, "notes", map[string]any{"id": "n", "title": "p"}))
				requireApplied(t, patched)
				require.NotNil(t, c.stored(t, "notes", "n").Columns)
			}
			requireSoundLog(t, b)
			require.True(t, scalar[bool](t, b, `select bool_and(syncpg.sync_encode_notes(r) = r._sync_payload) from public.notes as r`))
		})
	}
}
