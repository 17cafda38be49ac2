package lease_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	partition = "acme"
	ttl       = 15 * time.Minute
	start     = 1_750_000_000_000
)

var (
	ada     = lease.Client{Partition: partition, ID: "device", Actor: "ada"}
	allowed = scope.Allowed{"project": {"p1", "p2"}, "org": {"*"}}
	key1    = bytes.Repeat([]byte{1}, 32)
	key2    = bytes.Repeat([]byte{2}, 32)
)

// world is a store over a database in which ada's device is known.
type world struct {
	*lease.Store
	db  *pgtest.DB
	now time.Time
	log bytes.Buffer

	mu       sync.Mutex
	outcomes []events.LeaseOutcome
}

func (w *world) Emit(_ context.Context, e events.Event) {
	if e, ok := e.(events.LeaseConsulted); ok {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.outcomes = append(w.outcomes, e.Outcome)
	}
}

func setup(t *testing.T, change ...func(*lease.Config)) *world {
	t.Helper()
	w := &world{now: time.UnixMilli(start)}
	w.db = pgtest.New(t, pgtest.Options{
		TemplateKey: "lease",
		Setup: func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `select syncpg.sync_open_partition('acme', 'epoch', 0)`)
			return err
		},
	})
	for _, c := range []lease.Client{ada, {Partition: partition, ID: "other device", Actor: "bob"}} {
		w.register(t, c)
	}
	w.Store = w.store(t, change...)
	return w
}

func (w *world) register(t *testing.T, c lease.Client) {
	t.Helper()
	_, err := db.New(w.db.Pool).PullRecordClient(t.Context(), db.PullRecordClientParams{
		Partition: c.Partition, LogEpoch: "epoch", ClientID: c.ID, ActorID: c.Actor, WireVersion: 2, Now: start,
	})
	require.NoError(t, err)
}

// store makes another server's store over the same database.
func (w *world) store(t *testing.T, change ...func(*lease.Config)) *lease.Store {
	t.Helper()
	cfg := lease.Config{
		TTL: ttl, Keys: [][]byte{key1}, Clock: func() time.Time { return w.now }, Events: w,
		Logger: slog.New(slog.NewTextHandler(&w.log, nil)),
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := lease.New(w.db.Pool, cfg)
	require.NoError(t, err)
	return s
}

// live is a round whose resolver answers at once.
func (w *world) live(t *testing.T, c lease.Client, a scope.Allowed) *ssp2.Lease {
	t.Helper()
	return refresh(t, w.Begin(c, a, w.now))
}

func refresh(t *testing.T, r *lease.Round) *ssp2.Lease {
	t.Helper()
	require.NoError(t, r.Refresh(t.Context()))
	return r.Frame()
}

// refused is an outage in which the client gets this code.
func (w *world) refused(t *testing.T, c lease.Client, code ssp2.Code) {
	t.Helper()
	_, err := w.Authorize(t.Context(), c)
	require.Equal(t, code, ssp2.CodeOf(err), "%v", err)
}

// granted is an outage in which the client is served.
func (w *world) granted(t *testing.T, c lease.Client, want scope.Allowed) {
	t.Helper()
	got, err := w.Authorize(t.Context(), c)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func (w *world) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	tag, err := w.db.Pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
	require.Equal(t, int64(1), tag.RowsAffected())
}
