package pushsvc

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

// TestAPartitionIsNotCreatedDuringABump: a bump may begin between the attempt that found no
// partition and its creation. A transaction of the host must not wait for it then: it may
// hold what the bump waits for.
func TestAPartitionIsNotCreatedDuringABump(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.Options{MaxConns: 4})
	bump, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = bump.Rollback(context.WithoutCancel(t.Context())) }()
	for _, sql := range []string{`select pg_advisory_xact_lock(1937337955, 2)`, `lock table syncpg.sync_partitions in exclusive mode`} {
		_, err = bump.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	host, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = host.Rollback(context.WithoutCancel(t.Context())) }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s := &Service{clock: time.Now}
	err = s.createPartition(ctx, host, "new")
	require.Equal(t, ssp2.CodeSchemaNotReady, ssp2.CodeOf(err), "%v", err)
	require.NoError(t, bump.Rollback(t.Context()))
	require.NoError(t, s.createPartition(t.Context(), host, "new"), "and nothing of the transaction was lost")
}
