package pgtest_test

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// counts is what a Counter says at one moment.
type counts struct{ Trips, PrepareTrips, Prepares, Commits, Autocommits int }

func read(c *pgtest.Counter) counts {
	return counts{c.RoundTrips(), c.PrepareRoundTrips(), c.Prepares(), c.Commits(), c.Autocommits()}
}

func counted(t *testing.T) (*pgtest.Counter, *pgx.Conn) {
	t.Helper()
	var c pgtest.Counter
	db := pgtest.New(t, pgtest.Options{Empty: true, Counter: &c, MaxConns: 1})
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	require.Equal(t, counts{}, read(&c), "opening a connection is not counted")
	return &c, conn.Conn()
}

func TestCounter(t *testing.T) {
	t.Parallel()
	exec := func(sql string, args ...any) func(context.Context, *pgx.Conn) error {
		return func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, sql, args...)
			return err
		}
	}
	transaction := func(ctx context.Context, conn *pgx.Conn) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select $1::int`, 1)
			return err
		})
	}
	batch := func(ctx context.Context, conn *pgx.Conn) error {
		var b pgx.Batch
		b.Queue(`begin`)
		for i := range 20 {
			b.Queue(`select $1::int`, i)
			b.Queue(`select $1::text`, strings.Repeat("x", 5000))
		}
		b.Queue(`commit`)
		return conn.SendBatch(ctx, &b).Close()
	}
	// Two syncs in one flush: the client waits once.
	pipeline := func(ctx context.Context, conn *pgx.Conn) error {
		p := conn.PgConn().StartPipeline(ctx)
		for range 2 {
			p.SendQueryParams(`select $1::text`, [][]byte{[]byte("x")}, nil, nil, nil)
			if err := p.Sync(); err != nil {
				return err
			}
		}
		return p.Close()
	}
	for _, tc := range []struct {
		name       string
		do         func(context.Context, *pgx.Conn) error
		cold, warm counts
		statements []string
	}{
		{
			name:       "a simple query is one round trip",
			do:         exec(`create temporary table if not exists x ()`),
			cold:       counts{Trips: 1, Autocommits: 1},
			warm:       counts{Trips: 1, Autocommits: 1},
			statements: []string{`create temporary table if not exists x ()`},
		},
		{
			name:       "a statement is prepared once",
			do:         exec(`select $1::int`, 1),
			cold:       counts{Trips: 2, PrepareTrips: 1, Prepares: 1, Autocommits: 1},
			warm:       counts{Trips: 1, Autocommits: 1},
			statements: []string{`select $1::int`},
		},
		{
			name:       "a transaction in single steps",
			do:         transaction,
			cold:       counts{Trips: 4, PrepareTrips: 1, Prepares: 1, Commits: 1},
			warm:       counts{Trips: 3, Commits: 1},
			statements: []string{`begin`, `select $1::int`, `commit`},
		},
		{
			name: "a batch is one round trip, whatever its size",
			do:   batch,
			cold: counts{Trips: 2, PrepareTrips: 1, Prepares: 4, Commits: 1},
			warm: counts{Trips: 1, Commits: 1},
		},
		{
			name:       "a pipeline waits once",
			do:         pipeline,
			cold:       counts{Trips: 1, Autocommits: 2},
			warm:       counts{Trips: 1, Autocommits: 2},
			statements: []string{`select $1::text`, `select $1::text`},
		},
		{
			name: "a refused commit is none",
			do: func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `begin; savepoint a; rollback to a; commit; begin; savepoint a`)
				if err == nil {
					_, _ = conn.Exec(ctx, `select 1/0`)
					_, err = conn.Exec(ctx, `commit`)
				}
				return err
			},
			cold: counts{Trips: 3, Commits: 1},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, conn := counted(t)
			require.NoError(t, tc.do(t.Context(), conn))
			if diff := cmp.Diff(tc.cold, read(c)); diff != "" {
				t.Errorf("cold: %s\n%q", diff, c.Statements())
			}
			c.Reset()
			require.Equal(t, counts{}, read(c))
			require.NoError(t, tc.do(t.Context(), conn))
			if tc.warm != (counts{}) {
				require.Empty(t, cmp.Diff(tc.warm, read(c)))
			}
			if tc.statements != nil {
				require.Empty(t, cmp.Diff(tc.statements, c.Statements()))
			}
		})
	}
}

// trickle hands over one byte at a time.
type trickle struct{ net.Conn }

func (c trickle) Read(p []byte) (int, error) { return c.Conn.Read(p[:min(len(p), 1)]) }

func TestCounterReadsMessagesInPieces(t *testing.T) {
	t.Parallel()
	cfg, err := pgx.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	cfg.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
		return trickle{conn}, nil
	}
	var c pgtest.Counter
	c.Attach(&cfg.Config)
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `select generate_series(1, $1)`, 100)
		return err
	}))
	require.Equal(t, counts{Trips: 4, PrepareTrips: 1, Prepares: 1, Commits: 1}, read(&c))
}
