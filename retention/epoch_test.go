package retention_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
)

// registered is a partition in the registry.
type registered struct {
	Epoch    string
	Required bool
}

func (b *bundle) registered(t testing.TB, partition string) (r registered) {
	t.Helper()
	require.NoError(t, b.db.Pool.QueryRow(t.Context(), `select log_epoch, epoch_required from syncpg.sync_partition_registry where partition = $1`, partition).
		Scan(&r.Epoch, &r.Required))
	return r
}

// TestRotateEpoch: a new epoch that is required, and no cursor of a client left (§2.1);
// everything else stays.
func TestRotateEpoch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"p", "q"} {
		b.open(t, p)
		b.append(t, p, 5, 0)
		b.client(t, p, "c1", new(int64(3)), 0)
		b.client(t, p, "c2", nil, 0)
	}
	s := b.service(t, retention.Config{})
	before := b.left(t, "p")
	first, err := s.RotateEpoch(t.Context(), "p")
	require.NoError(t, err)
	require.Equal(t, epoch, first.PreviousEpoch)
	require.Len(t, first.LogEpoch, 32)
	require.Equal(t, int64(2), first.Clients)
	require.Equal(t, registered{first.LogEpoch, true}, b.registered(t, "p"))
	second, err := s.RotateEpoch(t.Context(), "p")
	require.NoError(t, err)
	require.Equal(t, first.LogEpoch, second.PreviousEpoch)
	require.NotEqual(t, first.LogEpoch, second.LogEpoch)
	require.Zero(t, second.Clients)

	require.Equal(t, before, b.left(t, "p"), "the log stays")
	require.Equal(t, int64(5), scan[int64](t, b, `select count(*) from syncpg.sync_push_results where partition = 'p'`), "outcomes stay")
	require.Equal(t, int64(2), scan[int64](t, b, `select count(*) from syncpg.sync_clients where partition = 'p' and actor_id = 'ada'
		and cursor is null and subscriptions is null and wire_version is null`), "clients keep their actor")
	require.Equal(t, registered{epoch, false}, b.registered(t, "q"))
	require.Equal(t, int64(1), scan[int64](t, b, `select count(*) from syncpg.sync_clients where partition = 'q' and cursor = 3`))
	b.open(t, "new")
	require.Equal(t, registered{epoch, false}, b.registered(t, "new"))
}

// TestRotateEpochs: every partition gets an epoch of its own, and those that the backup
// does not know require theirs from the beginning.
func TestRotateEpochs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 20 {
		b.open(t, fmt.Sprint("p", i))
		b.client(t, fmt.Sprint("p", i), "c", new(int64(3)), 0)
	}
	g := gate.New(b.db.Pool, nil)
	known, err := g.Enter(t.Context(), "p3")
	require.NoError(t, err)
	require.Equal(t, gate.Epoch{LogEpoch: epoch}, known)
	s := b.service(t, retention.Config{Gate: g})
	done, err := s.RotateEpochs(t.Context())
	require.NoError(t, err)
	require.Equal(t, retention.Rotations{Partitions: 20, Clients: 20}, done)
	epochs := map[string]bool{epoch: true}
	for i := range 20 {
		r := b.registered(t, fmt.Sprint("p", i))
		require.True(t, r.Required)
		require.False(t, epochs[r.Epoch])
		epochs[r.Epoch] = true
	}
	b.open(t, "new")
	require.Equal(t, registered{epoch, true}, b.registered(t, "new"))
	now, err := g.Enter(t.Context(), "p3")
	require.NoError(t, err)
	require.Equal(t, gate.Epoch{LogEpoch: b.registered(t, "p3").Epoch, Required: true}, now, "a gate that is shared learns of it at once")

	_, err = s.RotateEpochs(t.Context())
	require.NoError(t, err, "again")
}

// TestRotationWaitsForAPush: what is applied under the old epoch is applied before the
// rotation, which waits for the partition's lock.
func TestRotationWaitsForAPush(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, p := range []string{"p", "q"} {
		b.open(t, p)
	}
	s := b.service(t, retention.Config{})
	for name, rotate := range map[string]func() error{
		"one": func() error { _, err := s.RotateEpoch(t.Context(), "q"); return err },
		"all": func() error { _, err := s.RotateEpochs(t.Context()); return err },
	} {
		before := b.registered(t, "q")
		tx, err := b.connect(t).Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `select 1 from syncpg.sync_partitions where partition = 'q' for update`)
		require.NoError(t, err)
		done := make(chan error, 1)
		go func() { done <- rotate() }()
		require.NoError(t, pgtest.WaitAnyBlocked(t.Context(), b.db.Pool, 1))
		require.Equal(t, before, b.registered(t, "q"), name)
		require.NoError(t, tx.Rollback(t.Context()))
		require.NoError(t, <-done)
		require.NotEqual(t, before, b.registered(t, "q"), name)
	}
}
