//go:build unix

package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/devpg"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

const faultsDatabase = "faults"

// cluster is a PostgreSQL server that a test may kill. Its commits are durable.
type cluster struct {
	opts   devpg.Options
	server *devpg.Server
	dsn    string
}

func newCluster(t *testing.T, s *schema.Schema) *cluster {
	t.Helper()
	dir := t.TempDir()
	// The account of the server passes through.
	require.NoError(t, os.Chmod(dir, 0o711))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))
	c := &cluster{opts: devpg.Options{DataDir: filepath.Join(dir, "cluster"), Fsync: true}}
	var err error
	c.server, err = devpg.Start(t.Context(), c.opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, c.server.Stop(ctx))
	})
	require.NoError(t, c.server.EnsureDatabase(t.Context(), faultsDatabase))
	c.dsn = c.server.DSN(faultsDatabase)
	cfg, err := pgx.ParseConfig(c.dsn)
	require.NoError(t, err)
	c.opts.Port = int(cfg.Port) // also after a crash
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	m, err := migrations.New(conn, migrations.Options{})
	require.NoError(t, err)
	require.NoError(t, m.Up(t.Context()))
	require.NoError(t, installWorld(s)(t.Context(), conn))
	return c
}

// crash kills the server the way that leaves it no time for anything, and starts it
// again, which recovers from the log.
func (c *cluster) crash(ctx context.Context) error {
	if err := syscall.Kill(c.server.PID(), syscall.SIGKILL); err != nil {
		return err
	}
	<-c.server.Done()
	_ = c.server.Stop(ctx) // says that it ended badly
	// Until its last session has noticed, its memory is in use.
	return await(func() error {
		server, err := devpg.Start(ctx, c.opts)
		if err == nil {
			c.server = server
		}
		return err
	})
}

// hang stops every process of the server in the middle of what it does, until
// meanwhile returns.
func (c *cluster) hang(ctx context.Context, meanwhile func() error) error {
	db, err := pgx.Connect(ctx, c.dsn)
	if err != nil {
		return err
	}
	rows, err := db.Query(ctx, `select pid from pg_catalog.pg_stat_activity where pid <> pg_catalog.pg_backend_pid()`)
	if err != nil {
		return errors.Join(err, db.Close(ctx))
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err = errors.Join(err, db.Close(ctx)); err != nil {
		return err
	}
	pids = append(pids, c.server.PID())
	for _, pid := range pids {
		err = errors.Join(err, signalled(pid, syscall.SIGSTOP))
	}
	if err == nil {
		err = meanwhile()
	}
	for _, pid := range pids {
		err = errors.Join(err, signalled(pid, syscall.SIGCONT))
	}
	return err
}

// signalled sends a signal to a process, which may have ended by itself.
func signalled(pid int, signal syscall.Signal) error {
	if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return nil
}

// relay is the network between the devices and the node: one address, from which
// connections go to whichever node serves, and may break anywhere.
type relay struct {
	l      net.Listener
	target atomic.Pointer[string]
	breaks atomic.Int64 // in 100 connections

	mu     sync.Mutex
	random *rand.Rand
	open   map[net.Conn]bool
	wg     sync.WaitGroup
}

func newRelay(t *testing.T, random *rand.Rand) *relay {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{l: l, random: random, open: map[net.Conn]bool{}}
	r.wg.Go(r.accept)
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		r.mu.Lock()
		for conn := range r.open {
			_ = conn.Close()
		}
		r.open = nil
		r.mu.Unlock()
		r.wg.Wait()
	})
	return r
}

func (r *relay) url() string { return "http://" + r.l.Addr().String() }

func (r *relay) accept() {
	for {
		conn, err := r.l.Accept()
		if err != nil {
			return
		}
		r.wg.Go(func() { r.serve(conn) })
	}
}

// track notes a connection, so that it ends with the relay.
func (r *relay) track(conn net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open == nil {
		_ = conn.Close()
		return false
	}
	r.open[conn] = true
	return true
}

// budgets are how many bytes a connection carries to the node and back before it
// breaks, negative for any number.
func (r *relay) budgets() (up, down int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	up, down = -1, -1
	if r.random.Int64N(100) < r.breaks.Load() {
		if r.random.IntN(2) == 0 {
			up = r.random.IntN(2000)
		} else {
			down = r.random.IntN(4000)
		}
	}
	return up, down
}

// breakOne breaks a connection wherever it is.
func (r *relay) breakOne() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for conn := range r.open {
		_ = conn.Close()
		return
	}
}

func (r *relay) serve(conn net.Conn) {
	node, err := net.Dial("tcp", *r.target.Load())
	if err != nil {
		_ = conn.Close()
		return
	}
	ends := []net.Conn{conn, node}
	if !r.track(conn) || !r.track(node) {
		return
	}
	hangUp := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, end := range ends {
			_ = end.Close()
			delete(r.open, end)
		}
	}
	up, down := r.budgets()
	var wg sync.WaitGroup
	wg.Go(func() { defer hangUp(); carry(node, conn, up) })
	wg.Go(func() { defer hangUp(); carry(conn, node, down) })
	wg.Wait()
}

// carry copies until the budget is used up or an end fails.
func carry(to, from net.Conn, budget int) {
	buf := make([]byte, 4096)
	for budget != 0 {
		step := len(buf)
		if budget > 0 {
			step = min(step, budget)
		}
		n, err := from.Read(buf[:step])
		if budget > 0 {
			budget -= n
		}
		if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

// ordeal is a test in which things break while devices sync.
type ordeal struct {
	*cluster
	schema *schema.Schema
	relay  *relay
	node   *node
	random *rand.Rand

	answered atomic.Int64
	progress chan struct{} // has something when answered has moved
	failures atomic.Int64
	patience time.Duration // of a device with one request
}

const ordealConns = 4

// replaceNode starts a node and stops the one before it in the middle of its work:
// for a moment both serve.
func (o *ordeal) replaceNode() error {
	next, err := startNode(o.dsn, ordealConns, worldConfig(o.schema))
	if err != nil {
		return err
	}
	old := o.node
	o.node = next
	o.relay.target.Store(&next.addr)
	if old == nil {
		return nil
	}
	return old.stop()
}

// terminate ends the sessions of some busy backends of the node.
func (o *ordeal) terminate(ctx context.Context, db *pgx.Conn, n int) error {
	_, err := db.Exec(ctx, `
		select pg_catalog.pg_terminate_backend(s.pid)
		  from (select a.pid from pg_catalog.pg_stat_activity as a
		         where a.datname = current_database() and a.pid <> pg_catalog.pg_backend_pid() and a.backend_type = 'client backend'
		         order by a.state is distinct from 'active', pg_catalog.random() limit $1) as s`, n)
	return err
}

// run lets devices work until they have had a number of answers in all, and breaks
// things along the way: breakage is called again and again, each time some more
// answers have come.
func (o *ordeal) run(t *testing.T, devices []*device, answers int64, breakage func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	o.answered.Store(0)
	errs := make(chan error, len(devices)+1)
	var wg sync.WaitGroup
	for _, d := range devices {
		roll := rand.New(rand.NewPCG(o.random.Uint64(), 0)).IntN
		wg.Go(func() {
			for o.answered.Load() < answers {
				if err := o.work(ctx, d, roll); err != nil {
					cancel()
					errs <- err
					return
				}
			}
		})
	}
	for next := int64(2); next < answers; next += 1 + o.random.Int64N(6) {
		for o.answered.Load() < next && ctx.Err() == nil {
			select {
			case <-o.progress:
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			break
		}
		if err := breakage(ctx); err != nil && ctx.Err() == nil {
			errs <- err
			break
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if o.answered.Load() < answers {
		t.Fatalf("only %d of %d answers", o.answered.Load(), answers)
	}
}

// work does one thing that a device does. Its errors are not tolerable ones.
func (o *ordeal) work(ctx context.Context, d *device, roll dice) error {
	limited, cancel := context.WithTimeout(ctx, o.patience)
	defer cancel()
	err := o.step(limited, d, roll)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case !tolerable(err):
		return fmt.Errorf("device %s: %w", d.id, err)
	}
	o.failures.Add(1)
	// A device that is refused does not hammer.
	select {
	case <-time.After(time.Millisecond * time.Duration(5+roll(25))):
	case <-ctx.Done():
	}
	return nil
}

func (o *ordeal) step(ctx context.Context, d *device, roll dice) error {
	if d.wire > ssp2.WireV1 && d.Epoch() == "" {
		return d.Acquire(ctx)
	}
	if roll(4) == 0 {
		_, err := d.Pull(ctx)
		return err
	}
	batch := d.unanswered()
	for range 1 + roll(2) {
		if len(batch) > 3 {
			break // an outbox that waits for an answer
		}
		if len(d.sent) > 0 && roll(5) == 0 {
			batch = append(batch, one(roll, d.sent)) // perhaps answered long ago, perhaps in the batch already
			continue
		}
		c, err := d.newCommit(roll)
		if err != nil {
			return err
		}
		batch = append(batch, c)
	}
	if err := d.deliver(ctx, batch...); err != nil {
		return err
	}
	o.answered.Add(int64(len(batch)))
	select {
	case o.progress <- struct{}{}:
	default:
	}
	return nil
}

// settle lets every device finish what it has begun, now that nothing breaks any
// more, and checks all there is.
func (o *ordeal) settle(t *testing.T, devices []*device) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	patiently := func(do func() error) {
		require.NoError(t, await(func() error {
			if err := do(); err != nil && tolerable(err) {
				return err // of connections that broke before
			} else if err != nil {
				t.Fatal(err)
			}
			return nil
		}))
	}
	for _, d := range devices {
		patiently(func() error {
			if d.wire > ssp2.WireV1 && d.Epoch() == "" {
				return d.Acquire(ctx)
			}
			return nil
		})
		for len(d.unanswered()) > 0 {
			patiently(func() error { return d.deliver(ctx, d.unanswered()...) })
		}
		// A second delivery of everything changes nothing.
		for i := 0; i < len(d.sent); i += 50 {
			patiently(func() error { return d.deliver(ctx, d.sent[i:min(i+50, len(d.sent))]...) })
		}
	}
	for _, d := range devices {
		patiently(func() error { _, err := d.CatchUp(ctx); return err })
	}
	require.NoError(t, o.node.atRest())
	require.NoError(t, await(func() error {
		var n int
		err := o.node.pool.QueryRow(ctx, `select count(*) from pg_catalog.pg_stat_activity
			where datname = current_database() and pid <> pg_catalog.pg_backend_pid() and state <> 'idle'`).Scan(&n)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d sessions are busy or in a transaction although nobody asks for anything", n)
		}
		return err
	}))
	audits := map[string]*audit{}
	for _, d := range devices {
		a := audits[d.partition]
		if a == nil {
			var err error
			a, err = auditPartition(ctx, o.node.pool, o.schema, d.partition)
			require.NoError(t, err)
			audits[d.partition] = a
		}
		require.NoError(t, a.device(d))
		for _, table := range o.schema.Tables {
			require.NoError(t, a.replica(d, table.Name, nil))
		}
	}
	for partition, a := range audits {
		sent := 0
		ends := map[string]int{}
		for _, d := range devices {
			if d.partition == partition {
				sent += len(d.sent)
				for _, c := range d.sent {
					ends[c.answer.Results[0].Code]++
				}
			}
		}
		require.Len(t, a.outcomes, sent, "outcomes of partition %s", partition)
		t.Logf("partition %s: %d commits sent, %d in the log, %d rows; ends: %v", partition, sent, a.maxSeq, len(a.rows), ends)
	}
}

// Whatever breaks, a commit that a device was told is applied is in the log once,
// with the seq it was told; one that was not answered has one outcome when it is
// sent again; and everything the database says of a partition agrees.
func TestNothingIsLostWhateverBreaks(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	s := worldSchema(t)
	o := &ordeal{
		cluster: newCluster(t, s), schema: s, random: random, progress: make(chan struct{}, 1),
		relay: newRelay(t, rand.New(rand.NewPCG(seed, 2))),
	}
	require.NoError(t, o.replaceNode())
	t.Cleanup(func() { require.NoError(t, o.node.stop()) })

	terminate := func(ctx context.Context) error {
		db, err := pgx.Connect(ctx, o.dsn)
		if err != nil {
			return err
		}
		return errors.Join(o.terminate(ctx, db, 1+random.IntN(3)), db.Close(ctx))
	}
	breakSockets := func(context.Context) error {
		o.relay.breaks.Store(70)
		o.relay.breakOne()
		return nil
	}
	seldom := func(oneIn int, do func(context.Context) error) func(context.Context) error {
		times := 0
		return func(ctx context.Context) error {
			if times++; times%oneIn != 0 {
				return nil
			}
			return do(ctx)
		}
	}
	replaceNode := seldom(5, func(context.Context) error { return o.replaceNode() })
	crash := seldom(25, o.crash)
	hang := seldom(15, func(ctx context.Context) error {
		return o.hang(ctx, func() error {
			before := o.failures.Load()
			return await(func() error {
				if now := o.failures.Load(); now < before+10 && ctx.Err() == nil {
					return fmt.Errorf("only %d requests failed while the database hung", now-before)
				}
				return nil
			})
		})
	})

	for _, tc := range []struct { //nolint:paralleltest // one thing breaks after the other
		name     string
		answers  int64
		patience time.Duration
		breakage []func(context.Context) error
	}{
		{"backends are terminated", 200, patience, []func(context.Context) error{terminate}},
		{"sockets are cut", 200, patience, []func(context.Context) error{breakSockets}},
		{"the server is replaced", 200, patience, []func(context.Context) error{replaceNode}},
		{"the database hangs", 120, time.Second, []func(context.Context) error{hang}},
		{"the database crashes", 120, patience, []func(context.Context) error{crash}},
		{"all at once", 120, patience, []func(context.Context) error{terminate, breakSockets, replaceNode, crash}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transport := &http.Transport{MaxIdleConnsPerHost: 2}
			var devices []*device
			for i := range 8 {
				partition := fmt.Sprintf("%s %d", tc.name, i%2)
				d, err := newDevice(s, deviceConfig{
					url: o.relay.url(), partition: partition, actor: fmt.Sprint("actor ", i), id: fmt.Sprint(partition, "/", i),
					wire: ssp2.WireVersion(1 + i%3), transport: transport, limits: [3]int32{50, 7, 2},
				})
				require.NoError(t, err)
				require.NoError(t, d.subscribeAll())
				devices = append(devices, d)
			}
			o.failures.Store(0)
			o.patience = tc.patience
			start := time.Now()
			o.run(t, devices, tc.answers, func(ctx context.Context) error {
				for _, b := range tc.breakage {
					if err := b(ctx); err != nil {
						return err
					}
				}
				return nil
			})
			o.relay.breaks.Store(0)
			transport.CloseIdleConnections()
			t.Logf("%d answers and %d failures in %s", o.answered.Load(), o.failures.Load(), time.Since(start).Round(time.Millisecond))
			o.settle(t, devices)
			transport.CloseIdleConnections()
		})
	}
}
