package fanout_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/realtime/fanout"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what has to come.
const patience = 30 * time.Second

// call is one call of a sink.
type call struct {
	Kind      string // "commits", "lost", "reset"
	Partition string
	From, Seq int64 // Seq is the newest one
	Commits   []fanout.Commit
}

// recorder is a sink that hands its calls to the test, in order.
type recorder struct {
	mu       sync.Mutex
	calls    []call
	presence []fanout.Presence
	notices  []fanout.Notice
	rotated  []string
	changed  chan struct{} // closed at the next call
	hold     func(call)    // called first, when set
}

func newRecorder() *recorder { return &recorder{changed: make(chan struct{})} }

func (r *recorder) add(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

// soFar returns what one of the lists of a recorder holds by now.
func soFar[T any](r *recorder, list *[]T) []T {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(*list)
}

func (r *recorder) record(c call) {
	if r.hold != nil {
		r.hold(c)
	}
	r.add(func() { r.calls = append(r.calls, c) })
}

func (r *recorder) Commits(partition string, from int64, commits []fanout.Commit) {
	r.record(call{Kind: "commits", Partition: partition, From: from, Seq: commits[len(commits)-1].Seq, Commits: commits})
}

func (r *recorder) Lost(partition string, seq int64) {
	r.record(call{Kind: "lost", Partition: partition, Seq: seq})
}

func (r *recorder) Reset(partition string, seq int64) {
	r.record(call{Kind: "reset", Partition: partition, Seq: seq})
}

func (r *recorder) Rotated(partition string) {
	r.add(func() { r.rotated = append(r.rotated, partition) })
}

func (r *recorder) Presence(msg fanout.Presence) {
	r.add(func() { r.presence = append(r.presence, msg) })
}

func (r *recorder) Notice(n fanout.Notice) {
	r.add(func() { r.notices = append(r.notices, n) })
}

// until waits until done, called with the lock held, is satisfied.
func (r *recorder) until(t testing.TB, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		r.mu.Lock()
		ok, changed := done(), r.changed
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			r.mu.Lock()
			defer r.mu.Unlock()
			require.FailNow(t, "still waiting for "+what, "calls: %v\npresence: %v", r.calls, r.presence)
		}
	}
}

// reaches waits until the sink has been told of a partition up to seq.
func (r *recorder) reaches(t testing.TB, partition string, seq int64) {
	t.Helper()
	r.until(t, fmt.Sprintf("%s up to %d", partition, seq), func() bool {
		for _, c := range slices.Backward(r.calls) {
			if c.Partition == partition {
				return c.Seq >= seq
			}
		}
		return false
	})
}

// of returns the calls about a partition.
func (r *recorder) of(partition string) []call {
	r.mu.Lock()
	defer r.mu.Unlock()
	var calls []call
	for _, c := range r.calls {
		if c.Partition == partition {
			calls = append(calls, c)
		}
	}
	return calls
}

// requireWhole checks the rule of a sink: from the position that Watch returned on,
// ascending, without gaps, each once, but for what it was told it lost.
func requireWhole(t testing.TB, calls []call, start, end int64) (delivered int64) {
	t.Helper()
	at := start
	for _, c := range calls {
		if c.Kind != "commits" {
			require.Greater(t, c.Seq, at, "%+v", c)
			at = c.Seq
			continue
		}
		require.Equal(t, at, c.From, "%+v", c)
		for _, commit := range c.Commits {
			at++
			require.Equal(t, at, commit.Seq, "%+v", c)
			delivered++
		}
	}
	require.Equal(t, end, at)
	return delivered
}

// bundle is a database of one test.
type bundle struct {
	db *pgtest.DB
}

func setup(t testing.TB) *bundle {
	t.Helper()
	return &bundle{db: pgtest.New(t, pgtest.Options{})}
}

// instance is a Fanout with a sink.
type instance struct {
	*fanout.Fanout
	sink       *recorder
	poll, beat *fanout.Ticker
}

// tick makes a ticker tick once; it returns when somebody took the tick.
func tick(t testing.TB, ticker *fanout.Ticker) {
	t.Helper()
	select {
	case ticker.C <- time.Now():
	case <-time.After(patience):
		require.FailNow(t, "nobody takes a tick")
	}
}

// start starts a Fanout whose polls and beats are the test's.
func (b *bundle) start(t testing.TB, change ...func(*fanout.Config)) *instance {
	t.Helper()
	i := b.make(t, change...)
	require.NoError(t, i.Start(t.Context()))
	t.Cleanup(func() { i.stop(t) })
	return i
}

// startGated starts an instance that listens, and once more for each send to mayConnect.
// connected says which backend it listens at.
func (b *bundle) startGated(t testing.TB) (i *instance, mayConnect chan<- struct{}, connected <-chan uint32) {
	t.Helper()
	may, backends := make(chan struct{}, 1), make(chan uint32, 2)
	may <- struct{}{}
	i = b.start(t, func(cfg *fanout.Config) {
		connect := cfg.Listen
		cfg.Listen = func(ctx context.Context) (*pgx.Conn, error) {
			select {
			case <-may:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			conn, err := connect(ctx)
			if err == nil {
				backends <- conn.PgConn().PID()
			}
			return conn, err
		}
	})
	return i, may, backends
}

func (i *instance) stop(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	require.NoError(t, i.Stop(ctx))
}

func (b *bundle) make(t testing.TB, change ...func(*fanout.Config)) *instance {
	t.Helper()
	i := &instance{sink: newRecorder()}
	cfg := fanout.Config{Sink: i.sink, Listen: fanout.FromPool(b.db.Pool)}
	for _, f := range change {
		f(&cfg)
	}
	var err error
	i.Fanout, err = fanout.New(b.db.Pool, cfg)
	require.NoError(t, err)
	i.poll, i.beat = i.WithTickers()
	return i
}

// pollOnly listens to nothing.
func pollOnly(c *fanout.Config) { c.Listen = nil }

func (i *instance) watch(t testing.TB, partition string) int64 {
	t.Helper()
	seq, err := i.Watch(t.Context(), partition)
	require.NoError(t, err)
	return seq
}

// written is a commit to append: the payloads of its changes.
type written [][]byte

func one(payload string) written { return written{[]byte(payload)} }

// commit appends commits of one transaction as a push does, and returns the newest seq.
func (b *bundle) commit(t testing.TB, partition string, commits ...written) int64 {
	t.Helper()
	seq, err := appendCommits(t.Context(), b.db.Pool, partition, commits...)
	require.NoError(t, err)
	return seq
}

func appendCommits(ctx context.Context, pool *pgxpool.Pool, partition string, commits ...written) (newest int64, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, sql := range []string{
			`insert into syncpg.sync_partitions (partition) values ($1) on conflict do nothing`,
			`insert into syncpg.sync_partition_registry (partition, log_epoch, created_at_ms, last_seen_ms) values ($1, 'epoch', 0, 0) on conflict do nothing`,
		} {
			if _, err := tx.Exec(ctx, sql, partition); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, `select max_commit_seq from syncpg.sync_partitions where partition = $1 for update`, partition).Scan(&newest); err != nil {
			return err
		}
		for _, c := range commits {
			newest++
			if _, err := tx.Exec(ctx, `insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
				values ($1, $2::bigint, 'client', $2::bigint::text, 'ada', 1000 + $2::bigint, $3)`, partition, newest, len(c)); err != nil {
				return err
			}
			for i, payload := range c {
				op, version := 1, &newest
				if payload == nil {
					op, version = 2, nil
				}
				if _, err := tx.Exec(ctx, `insert into syncpg.sync_changes (partition, commit_seq, change_index, table_name, row_id, op, row_version, scopes, payload)
					values ($1, $2, $3::integer, 'items', 'r' || $3::integer::text, $4, $5, array['team=red'], $6)`, partition, newest, i, op, version, payload); err != nil {
					return err
				}
			}
		}
		_, err := tx.Exec(ctx, `update syncpg.sync_partitions set max_commit_seq = $2 where partition = $1`, partition, newest)
		return err
	})
	return newest, err
}

func (b *bundle) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := b.db.Pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// kill ends the sessions that listen, of which there are n.
func (b *bundle) kill(t testing.TB, n int) {
	t.Helper()
	var killed int
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
		where datname = current_database() and application_name = $1`, fanout.ApplicationName).Scan(&killed))
	require.Equal(t, n, killed)
}

// listening waits until n sessions of the database listen.
func (b *bundle) listening(t testing.TB, n int) {
	t.Helper()
	require.NoError(t, pgtest.WaitFor(t.Context(), b.db.Pool,
		`select count(*) = $1 from pg_stat_activity
			where datname = current_database() and application_name = $2 and state = 'idle' and query <> ''`, n, fanout.ApplicationName))
}
