package fanout_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/devpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/realtime/fanout"
)

// pollOften polls by itself.
func pollOften(c *fanout.Config) { c.PollInterval = 20 * time.Millisecond }

// free starts a Fanout whose polls and beats are its own.
func free(t testing.TB, pool *pgxpool.Pool, change ...func(*fanout.Config)) *instance {
	t.Helper()
	i := &instance{sink: newRecorder()}
	cfg := fanout.Config{Sink: i.sink, Listen: fanout.FromPool(pool)}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	i.Fanout, err = fanout.New(pool, cfg)
	require.NoError(t, err)
	require.NoError(t, i.Start(t.Context()))
	t.Cleanup(func() { i.stop(t) })
	return i
}

// TestEverySinkSeesEachCommitOnceInOrder: writers commit to several partitions, sessions
// are killed, and every sink is told of every commit once, in order, or that it was not.
func TestEverySinkSeesEachCommitOnceInOrder(t *testing.T) {
	t.Parallel()
	b := &bundle{db: pgtest.New(t, pgtest.Options{MaxConns: 8})}
	partitions := []string{"p1", "p2", "p3"}
	instances := []*instance{
		free(t, b.db.Pool),
		free(t, b.db.Pool, func(c *fanout.Config) { c.MaxBehind = 4 }),
		free(t, b.db.Pool, pollOnly, pollOften, func(c *fanout.Config) { c.Readers = 1 }),
		free(t, b.db.Pool, pollOften),
	}
	restless := instances[3] // watches and stops watching
	start := map[string]int64{}
	for _, p := range partitions {
		b.commit(t, p, one("first"))
		for _, i := range instances {
			start[p] = i.watch(t, p)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	kills := make(chan struct{}, 1)
	var writers, others sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(w)))
			for n := range 60 {
				p := partitions[random.IntN(len(partitions))]
				commits := make([]written, 1+random.IntN(4))
				for i := range commits {
					commits[i] = one(fmt.Sprint(w, n, i))
				}
				// Killed sessions fail; what they committed counts.
				if seq, err := appendCommits(ctx, b.db.Pool, p, commits...); err == nil && random.IntN(3) > 0 {
					instances[random.IntN(2)].Committed(p, seq)
				}
				if n%3 == 0 {
					select {
					case kills <- struct{}{}:
					default:
					}
				}
			}
		})
	}
	others.Go(func() {
		killer, err := pgx.Connect(ctx, b.db.DSN)
		if err != nil {
			return
		}
		defer func() { _ = killer.Close(context.WithoutCancel(ctx)) }()
		for {
			select {
			case <-ctx.Done():
				return
			case <-kills:
				// One session in the middle of whatever it does.
				_, _ = killer.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity
					where datname = current_database() and pid <> pg_backend_pid() order by random() limit 1`)
			}
		}
	})
	others.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			p := partitions[n%len(partitions)]
			restless.Unwatch(p)
			for {
				if _, err := restless.Watch(ctx, p); err == nil || ctx.Err() != nil {
					break
				}
			}
		}
	})
	writers.Wait()
	cancel()
	others.Wait()
	for _, p := range partitions {
		// The last commit ends what was not told of. Killed sessions of the pool may be left.
		var newest int64
		for {
			seq, err := appendCommits(t.Context(), b.db.Pool, p, one("last"))
			if err == nil {
				newest = seq
				break
			}
		}
		for _, i := range instances[:3] {
			i.Committed(p, newest)
			i.sink.reaches(t, p, newest)
			requireWhole(t, i.sink.of(p), start[p], newest)
		}
		at := start[p]
		for _, c := range restless.sink.of(p) {
			if c.Kind == "commits" {
				require.GreaterOrEqual(t, c.From, at, "%+v", c)
				require.Equal(t, c.Seq, c.From+int64(len(c.Commits)))
			}
			at = c.Seq
		}
	}
}

// TestTheServerIsRestarted: everybody recovers by itself, and nothing is lost.
func TestTheServerIsRestarted(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	dir := t.TempDir()
	// The account of the server passes through.
	require.NoError(t, os.Chmod(dir, 0o711))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))
	opts := devpg.Options{DataDir: filepath.Join(dir, "cluster")}
	server, err := devpg.Start(ctx, opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, server.Stop(ctx))
	})
	require.NoError(t, server.EnsureDatabase(ctx, "test"))
	cfg, err := pgxpool.ParseConfig(server.DSN("test"))
	require.NoError(t, err)
	opts.Port = int(cfg.ConnConfig.Port)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		m, err := migrations.New(conn.Conn(), migrations.Options{})
		if err != nil {
			return err
		}
		return m.Up(ctx)
	}))
	b := &bundle{db: &pgtest.DB{Pool: pool}}
	a, c := free(t, pool), free(t, pool)
	b.listening(t, 2)
	a.watch(t, "p1")
	c.watch(t, "p1")
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`})
	a.Committed("p1", b.commit(t, "p1", one("1")))
	c.sink.reaches(t, "p1", 1)

	b.commit(t, "p1", one("nobody is told")) // and the server goes
	require.NoError(t, server.Stop(ctx))
	a.Committed("p1", 2) // can be read and told when it is back
	a.PublishPresence(key("team:red", "phone"), []byte(`{"n":2}`))
	_, err = c.Watch(ctx, "p2")
	require.Error(t, err, "the caller is told")
	again, err := devpg.Start(ctx, opts)
	require.NoError(t, err)
	server = again

	for _, i := range []*instance{a, c} {
		i.sink.reaches(t, "p1", 2)
	}
	b.listening(t, 2)
	a.Committed("p1", b.commit(t, "p1", one("3")))
	for _, i := range []*instance{a, c} {
		i.sink.reaches(t, "p1", 3)
		require.EqualValues(t, 3, requireWhole(t, i.sink.of("p1"), 0, 3), "all of them")
	}
	c.sink.sees(t, map[string]string{"team:red/phone": `{"n":2}`})
}

// silentConn is a connection whose other end can go away without a word.
type silentConn struct {
	net.Conn
	gone *atomic.Bool
}

// Read loses what comes, and the deadline still counts.
func (c silentConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.gone.Load() {
			return n, err
		}
	}
}

// TestAListenerThatHearsNothingIsReplaced: a connection that is half open says nothing, and
// so does one on which nothing happens; they are told apart by asking.
func TestAListenerThatHearsNothingIsReplaced(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var gone atomic.Bool
	var connections atomic.Int64
	a := b.make(t, func(cfg *fanout.Config) {
		cfg.Listen = func(ctx context.Context) (*pgx.Conn, error) {
			config := b.db.Pool.Config().ConnConfig.Copy()
			config.RuntimeParams["application_name"] = fanout.ApplicationName
			if connections.Add(1) == 1 {
				dial := config.DialFunc
				config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := dial(ctx, network, addr)
					return silentConn{conn, &gone}, err
				}
			}
			return pgx.ConnectConfig(ctx, config)
		}
	})
	pings := a.WithPings(50 * time.Millisecond)
	require.NoError(t, a.Start(t.Context()))
	t.Cleanup(func() { a.stop(t) })
	b.listening(t, 1)
	a.watch(t, "p1")
	b.commit(t, "p1", one("1"))
	b.exec(t, `notify syncpg`)
	a.sink.reaches(t, "p1", 1)
	gone.Store(true)
	b.commit(t, "p1", one("2"))
	b.exec(t, `notify syncpg`) // nobody hears it
	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	asking.Go(func() {
		for {
			select {
			case pings.C <- time.Time{}:
			case <-ctx.Done():
				return
			}
		}
	})
	a.sink.reaches(t, "p1", 2)
	stop()
	asking.Wait()
	require.Greater(t, connections.Load(), int64(1))
	b.commit(t, "p1", one("3"))
	b.exec(t, `notify syncpg`)
	a.sink.reaches(t, "p1", 3)
}

// TestASlowReadStallsNobodyElse: while one read waits, another reader reads other
// partitions.
func TestASlowReadStallsNobodyElse(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.make(t, pollOnly)
	entered, leave := make(chan struct{}), make(chan struct{})
	a.sink.hold = func(c call) {
		if c.Partition == "slow" {
			close(entered)
			<-leave
		}
	}
	require.NoError(t, a.Start(t.Context()))
	t.Cleanup(func() { a.stop(t) })
	a.watch(t, "slow")
	a.watch(t, "p1")
	a.Committed("slow", b.commit(t, "slow", one("x")))
	<-entered
	for i := range int64(3) {
		a.Committed("p1", b.commit(t, "p1", one("x")))
		a.sink.reaches(t, "p1", i+1)
	}
	close(leave)
	a.sink.reaches(t, "slow", 1)
}
