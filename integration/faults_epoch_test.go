package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

// rotate gives a partition a new log epoch (§2.1). noted is told the newest commit of the
// old one, before anybody can commit again.
func rotate(ctx context.Context, pool *pgxpool.Pool, partition string, noted *atomic.Int64) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var last int64
		if err := tx.QueryRow(ctx, `select max_commit_seq from syncpg.sync_partitions where partition = $1 for update`, partition).Scan(&last); err != nil {
			return err
		}
		noted.Store(last)
		_, err := tx.Exec(ctx, `select syncpg.sync_rotate_epoch($1)`, partition)
		return err
	})
}

// A rotated epoch ends wire version 1 for good and takes everybody else through one
// reset each; nothing is applied for a client that has not been through it.
func TestEpochRotatedUnderRunningClients(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	var nodes []*node
	for range 2 { // each remembers the epoch by itself
		n, err := startNode(db.DSN, 3, worldConfig(s))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, n.stop()) })
		nodes = append(nodes, n)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	const partition = "rotated"
	var devices []*device
	for i := range 9 {
		d, err := newDevice(s, deviceConfig{
			url: "http://" + nodes[i/3%2].addr, partition: partition, actor: fmt.Sprint("actor ", i), id: fmt.Sprint("device ", i),
			wire: ssp2.WireVersion(1 + i%3), transport: transport, limits: [3]int32{10, 5, 2},
		})
		require.NoError(t, err)
		require.NoError(t, d.subscribeAll())
		require.NoError(t, d.Acquire(t.Context()))
		devices = append(devices, d)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)

	const rotations = 2
	var (
		wg      sync.WaitGroup
		answers atomic.Int64
		turn    = make(chan struct{}, 1)
		last    [rotations + 1]atomic.Int64 // newest commit of each epoch
	)
	last[rotations].Store(1 << 40)
	for i := range rotations {
		last[i].Store(1 << 40)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	errs := make(chan error, len(devices))
	for i, d := range devices {
		roll := rand.New(rand.NewPCG(seed, uint64(i))).IntN
		wg.Go(func() {
			for ctx.Err() == nil && d.resets < rotations || d.resets == rotations && len(d.unanswered()) > 0 {
				err := d.syncOnce(ctx, roll)
				switch code := serverCode(err); {
				case err == nil:
					answers.Add(1)
					select {
					case turn <- struct{}{}:
					default:
					}
				case errors.Is(err, client.ErrReset) && d.wire > ssp2.WireV1:
					// Commits after the end of an epoch belong to those that know the next one.
				case code == ssp2.CodeClientWireUnsupported && d.wire == ssp2.WireV1:
					return
				case code == ssp2.CodeStorageStaleRead:
				default:
					errs <- fmt.Errorf("device %s: %w", d.id, err)
					cancel()
					return
				}
				if seq, end := d.newest(), last[d.resets].Load(); seq > end {
					errs <- fmt.Errorf("device %s, after %d resets: commit %d is applied, behind the end %d of its epoch", d.id, d.resets, seq, end)
					cancel()
					return
				}
			}
		})
	}
	for i := range rotations {
		for enough := answers.Load() + 40; answers.Load() < enough && ctx.Err() == nil; {
			select {
			case <-turn:
			case <-ctx.Done():
			}
		}
		require.NoError(t, rotate(ctx, db.Pool, partition, &last[i]))
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	require.False(t, t.Failed())

	a, err := auditPartition(t.Context(), db.Pool, s, partition)
	require.NoError(t, err)
	for _, d := range devices {
		if d.wire == ssp2.WireV1 {
			_, err := d.Pull(t.Context())
			require.Equal(t, ssp2.CodeClientWireUnsupported, serverCode(err))
			continue
		}
		require.Equal(t, rotations, d.resets)
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		require.NoError(t, a.device(d))
		for _, table := range s.Tables {
			require.NoError(t, a.replica(d, table.Name, nil))
		}
	}
	t.Logf("epochs ended at %d and %d, the log at %d", last[0].Load(), last[1].Load(), a.maxSeq)
}

// syncOnce pushes what is not answered, and one commit more, or pulls.
func (d *device) syncOnce(ctx context.Context, roll dice) error {
	if roll(3) == 0 {
		_, err := d.Pull(ctx)
		if errors.Is(err, client.ErrReset) {
			d.resets++
		}
		return err
	}
	batch := d.unanswered()
	if len(batch) == 0 {
		c, err := d.newCommit(roll)
		if err != nil {
			return err
		}
		batch = append(batch, c)
	}
	return d.deliver(ctx, batch...)
}

// newest is the newest seq the device was told.
func (d *device) newest() (seq int64) {
	for _, c := range d.sent {
		if c.answer != nil && c.answer.CommitSeq != nil {
			seq = max(seq, *c.answer.CommitSeq)
		}
	}
	return seq
}

// serverCode is the code of an error that the server answered, "" for others.
func serverCode(err error) ssp2.Code {
	if e, ok := errors.AsType[*client.ServerError](err); ok {
		return e.Code
	}
	return ""
}

// Clocks jump, and two processes do not agree on the time; nothing of the protocol
// depends on it.
func TestClocksMayJump(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	var clocks [2]atomic.Int64 // milliseconds
	var devices []*device
	for i := range 6 {
		cfg := worldConfig(s)
		clock := &clocks[i%2]
		cfg.Clock = func() time.Time { return time.UnixMilli(clock.Load()) }
		n, err := startNode(db.DSN, 2, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, n.stop()) })
		d, err := newDevice(s, deviceConfig{
			url: "http://" + n.addr, partition: "jumps", actor: "ada", id: fmt.Sprint("device ", i), wire: ssp2.WireVersion(1 + i%3), transport: transport,
		})
		require.NoError(t, err)
		require.NoError(t, d.subscribeAll())
		devices = append(devices, d)
	}
	roll := rand.New(rand.NewPCG(1, 1)).IntN
	const now = 1_790_000_000_000
	const hour, year = 3_600_000, 365 * 24 * 3_600_000
	for _, times := range [][2]int64{
		{now, now}, {now + hour, now}, {now - 2*hour, now - 2*hour - 90_000}, {0, now}, {-1000, -hour}, {now + 200*year, now - 30*year},
	} {
		clocks[0].Store(times[0])
		clocks[1].Store(times[1])
		for _, d := range devices {
			require.NoError(t, d.Acquire(t.Context()))
			for range 3 {
				c, err := d.newCommit(roll)
				require.NoError(t, err)
				require.NoError(t, d.deliver(t.Context(), c))
				_, err = d.Pull(t.Context())
				require.True(t, err == nil || errors.Is(err, client.ErrReset), "%v", err)
			}
			require.NoError(t, d.deliver(t.Context(), d.sent...))
		}
	}
	a, err := auditPartition(t.Context(), db.Pool, s, "jumps")
	require.NoError(t, err)
	for _, d := range devices {
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		require.NoError(t, a.device(d))
		for _, table := range s.Tables {
			require.NoError(t, a.replica(d, table.Name, nil))
		}
	}
}
