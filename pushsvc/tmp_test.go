package pushsvc_test

import (
	"fmt"
	"testing"
	"time"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
)

type stage struct {
	start time.Time
	n     int
	total [10]time.Duration
}

func (s *stage) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context { return ctx }
func (s *stage) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (s *stage) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context { s.start = time.Now(); return ctx }
func (s *stage) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (s *stage) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) { s.total[s.n%2] += time.Since(s.start); s.n++ }

func TestTmpFunctions(t *testing.T) {
	for _, bm := range []struct{ commits, per, n int }{{1, 1, 500}, {1, 100, 100}, {500, 1, 20}} {
		st := &stage{}
		env := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) {
			o.MaxConns, o.Tracer = 1, st
			o.Configure = func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["track_functions"] = "all" }
		})
		env.fill(t, "p1")
		w := &workload{b: env, commits: bm.commits, perCommit: bm.per}
		for range 8 {
			req, _ := w.next(t, "p1")
			env.push(t, req)
		}
		env.exec(t, "select pg_stat_reset()")
		st.n, st.total = 0, [10]time.Duration{}
		var spent time.Duration
		for range bm.n {
			req, _ := w.next(t, "p1")
			spent += timed(func() { env.push(t, req) })
		}
		env.exec(t, "select pg_stat_force_next_flush()")
		fmt.Println("====", bm, "push", spent/time.Duration(bm.n), "admit", st.total[0]/time.Duration(bm.n), "apply", st.total[1]/time.Duration(bm.n))
		rows, err := env.db.Pool.Query(t.Context(), "select funcname, calls, round((1000*total_time/greatest(calls,1))::numeric,1)::text, round((1000*self_time/greatest(calls,1))::numeric,1)::text from pg_stat_user_functions where calls>0 order by total_time desc")
		require.NoError(t, err)
		var f string
		var calls int
		var a, b string
		_, err = pgx.ForEachRow(rows, []any{&f, &calls, &a, &b}, func() error { fmt.Printf("%-30s %5d  total %8s us self %8s us\n", f, calls, a, b); return nil })
		require.NoError(t, err)
	}
}
