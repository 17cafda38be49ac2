package pushsvc_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/ssp2"
)

const lockMove = `select pg_advisory_xact_lock(1937337955, 2)`

// TestAPushDoesNotWaitForAMove: while the schema is being moved to another version, and
// while that still waits for pushes under way, a push is refused at once instead of
// holding a connection; a replay is answered. With a pool of one connection.
func TestAPushDoesNotWaitForAMove(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 1 })
	c := b.client(t, ssp2.WireV2)
	known := c.commit(b.upsert(t, "notes", note("n", "a")))
	requireApplied(t, c.send(t, known)...)
	before := c.contents(t)
	mover, underway := b.session(t), b.session(t)
	refused := func() {
		t.Helper()
		for _, k := range []ssp2.PushCommit{c.commit(b.upsert(t, "notes", note("m", "x"))), c.commit(remove("notes", "n"))} {
			perr := c.failure(t, k)
			require.Equal(t, ssp2.CodeSchemaNotReady, perr.Code)
			require.True(t, perr.Retryable())
			require.JSONEq(t, `{"moving":true}`, perr.Details)
		}
		require.Equal(t, ssp2.PushCached, c.send(t, known)[0].Status)
		require.Equal(t, before, c.contents(t))
	}

	tx, err := underway.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `select pg_advisory_xact_lock_shared(1937337955, 2)`) // as a push has it
	require.NoError(t, err)
	moving, err := mover.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = moving.Rollback(context.WithoutCancel(t.Context())) }()
	locked := make(chan error, 1)
	go func() {
		_, err := moving.Exec(context.WithoutCancel(t.Context()), lockMove)
		locked <- err
	}()
	require.NoError(t, pgtest.WaitBlocked(t.Context(), b.db.Pool, mover.PgConn().PID()))
	refused()
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-locked)
	refused()
	// Also when nobody may read the stored version.
	_, err = moving.Exec(t.Context(), `lock table syncpg.sync_schema_meta in access exclusive mode`)
	require.NoError(t, err)
	perr := c.failure(t, c.commit(b.upsert(t, "notes", note("m", "x"))))
	require.Equal(t, ssp2.CodeSchemaNotReady, perr.Code)

	require.NoError(t, moving.Rollback(t.Context()))
	requireApplied(t, c.push(t, b.upsert(t, "notes", note("m", "x"))))
}

// A move waits for pushes that have begun, those in transactions of the host included.
func TestAMoveWaitsForPushesUnderWay(t *testing.T) {
	t.Parallel()
	b := setup(t, func(o *pgtest.Options, _ *pushsvc.Config) { o.MaxConns = 3 })
	c := b.client(t, ssp2.WireV2)
	c.apply(t, b.upsert(t, "notes", note("n", "a")))
	tx, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, _, err = b.ApplyTx(t.Context(), tx, pushsvc.ApplyRequest{
		Partition: c.req.Partition, Actor: "host", ClientID: "host", ClientCommitID: "1",
		Operations: []pushsvc.Operation{pushsvc.Delete("notes", "n")},
	})
	require.NoError(t, err)
	mover := b.session(t)
	locked := make(chan error, 1)
	go func() {
		_, err := mover.Exec(context.WithoutCancel(t.Context()), lockMove)
		locked <- err
	}()
	require.NoError(t, pgtest.WaitBlocked(t.Context(), b.db.Pool, mover.PgConn().PID()))
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-locked)
	require.Nil(t, c.stored(t, "notes", "n"))
}

// TestAFunctionThatIsGone: a process of an earlier version finds no function for a table
// that was removed since.
func TestAFunctionThatIsGone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `update syncpg.sync_schema_meta set schema_version = 2`, `drop function syncpg.sync_write_rows_notes(text, text[], text[], bigint[], bytea[], text[], text[], bigint[], double precision[], boolean[], bytea[])`)
	c := b.client(t, ssp2.WireV2)
	perr := c.failure(t, c.commit(b.upsert(t, "notes", note("n", "a"))))
	require.Equal(t, ssp2.CodeSchemaNotReady, perr.Code)
	require.NotContains(t, perr.Message+perr.Details, "sync_write_rows")
}
