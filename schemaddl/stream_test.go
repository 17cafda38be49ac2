package schemaddl_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

// streamed are the row ids that the stream of a table returns, by a driving variable;
// a payload that was left out is marked.
func streamed(t *testing.T, pool *pgxpool.Pool, sql string, values []string, after, scopes string, most, limit int) []string {
	t.Helper()
	ids := []string{}
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		require.NoError(t, db.New(tx).PullPinPlans(t.Context()))
		rows, err := tx.Query(t.Context(), sql, "p", values, after, scopes, most, limit)
		require.NoError(t, err)
		var value int
		var version int64
		var id string
		var payload []byte
		_, err = pgx.ForEachRow(rows, []any{&value, &id, &version, &payload}, func() error {
			require.LessOrEqual(t, value, len(values))
			require.Equal(t, int64(1), version)
			if payload == nil {
				id += " too large"
			}
			ids = append(ids, id)
			return nil
		})
		return err
	}))
	return ids
}

// TestStreamRowsOfAnyName: every driving variable finds the rows that a scan finds,
// from any row on, whatever tables, columns and variables are called.
func TestStreamRowsOfAnyName(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, scanIR)
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	odd := pgx.Identifier{"public", `Or'der "%s\`}.Sanitize()
	for i, row := range []struct {
		partition, a string
		b            any
		c            bool
	}{
		{"p", "x", 1, true}, {"p", "x", 2, false}, {"p", "y", 1, true}, {"p", "y", nil, true}, {"other", "x", 1, true}, {"p", "x", 1, false},
	} {
		_, err := pool.Exec(t.Context(), `insert into `+odd+` values ($1, $2, $3, $4, $5, $1, 1, $6, null)`,
			"r"+string(rune('0'+i)), row.a, row.b, row.c, row.partition, make([]byte, 10*i))
		require.NoError(t, err)
	}
	table, _ := s.Table(`Or'der "%s\`)
	for _, tc := range []struct {
		driving int
		values  []string
		after   string
		scopes  string
		most    int
		want    []string
	}{
		{0, []string{"1", "2"}, "", `{}`, 1000, []string{"r0", "r2", "r5", "r1"}},
		{0, []string{"2", "1"}, "", `{}`, 1000, []string{"r1", "r0", "r2", "r5"}},
		{0, []string{"1", "2"}, "r0", `{}`, 1000, []string{"r2", "r5", "r1"}},
		{0, []string{"1", "2"}, "r5", `{}`, 1000, []string{"r1"}},
		{0, []string{"1"}, "r5", `{}`, 1000, []string{}},
		{0, []string{"1"}, "", `{"v_after":["y"]}`, 1000, []string{"r2"}},
		{0, []string{"1"}, "", `{"v_after":["x","y"],"p_partition":["true"]}`, 1000, []string{"r0", "r2"}},
		{0, []string{"1"}, "", `{"v_after":[]}`, 1000, []string{}},
		{1, []string{"true"}, "", `{}`, 1000, []string{"r0", "r2", "r3"}},
		{1, []string{"true"}, "", `{"v_after":["x"]}`, 1000, []string{"r0"}},
		{2, []string{"x", "y"}, "", `{}`, 1000, []string{"r0", "r1", "r5", "r2", "r3"}},
		{2, []string{"x", "y"}, "", `{}`, 20, []string{"r0", "r1", "r5 too large", "r2", "r3 too large"}},
		{2, []string{"x"}, "", `{"p_partition":["false"]}`, 1000, []string{"r0", "r1", "r5"}}, // a variable before the driving one is not looked at
		{2, []string{"X"}, "", `{}`, 1000, []string{}},
		{2, []string{}, "", `{}`, 1000, []string{}},
	} {
		sql := schemaddl.StreamRowsSQL(table, tc.driving)
		require.Equal(t, tc.want, streamed(t, pool, sql, tc.values, tc.after, tc.scopes, tc.most, 100), "%+v", tc)
		for n := range tc.want {
			require.Equal(t, tc.want[:n], streamed(t, pool, sql, tc.values, tc.after, tc.scopes, tc.most, n), "%+v", tc)
		}
	}
}

// TestStreamRowsPlan: the planner puts the query in the place of the call, and reads
// the scope index in order, without a sort, though the plan was made of an empty table
// without statistics.
func TestStreamRowsPlan(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := parse(t, scanIR)
	require.NoError(t, install(t, pool, s, schemaddl.Options{}))
	for _, name := range []string{`Or'der "%s\`, "secrets"} {
		table, _ := s.Table(name)
		for driving, sc := range table.Scopes {
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				require.NoError(t, db.New(tx).PullPinPlans(t.Context()))
				_, err := tx.Prepare(t.Context(), "stream", schemaddl.StreamRowsSQL(table, driving))
				require.NoError(t, err)
				var raw []byte
				require.NoError(t, tx.QueryRow(t.Context(), `explain (verbose, format json) execute stream('p', '{a,b}', '', '{}', 100, 100)`,
					pgx.QueryExecModeSimpleProtocol).Scan(&raw))
				var plan []struct{ Plan planNode }
				require.NoError(t, json.Unmarshal(raw, &plan))
				var indexes []string
				plan[0].Plan.walk(func(n planNode) {
					require.NotContains(t, []string{"Sort", "Incremental Sort", "Seq Scan", "Bitmap Heap Scan", "Hash Join", "Materialize"}, n.Type, string(raw))
					require.False(t, strings.HasPrefix(n.Function, "sync_"), "the function is called, not inlined: %s", raw)
					if n.Index != "" {
						indexes = append(indexes, n.Index)
					}
				})
				require.Equal(t, []string{schemaddl.IndexName(table.Name + "__scope_" + table.Columns[sc.Column].Name)}, indexes, string(raw))
				_, err = tx.Exec(t.Context(), `deallocate stream`)
				return err
			}))
		}
	}
}

type planNode struct {
	Type     string     `json:"Node Type"`
	Index    string     `json:"Index Name"`
	Function string     `json:"Function Name"`
	Plans    []planNode `json:"Plans"`
}

func (n planNode) walk(visit func(planNode)) {
	visit(n)
	for _, p := range n.Plans {
		p.walk(visit)
	}
}
