// Package pgtx holds the transaction control statements that travel inside a
// batch, and the way a connection is given back. pgx's own transactions cost a
// round trip to begin; here BEGIN rides in front of the first statements and
// COMMIT behind the last.
package pgtx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Transaction control statements.
var (
	// Begin opens a writing transaction in which every statement sees what was
	// committed before it, whatever the session's defaults are.
	Begin = NewStatement("begin isolation level read committed, read write")
	// BeginSnapshot opens a reading transaction of one snapshot.
	BeginSnapshot = NewStatement("begin isolation level repeatable read, read only")
	Commit        = NewStatement("commit")
	// HoldSchema keeps the installed schema what it is until the transaction ends. It takes
	// no snapshot, so that one taken behind it is not of before the lock was granted.
	HoldSchema = NewStatement("lock table syncpg.sync_schema_meta in access share mode")

	Savepoint  = NewStatement("savepoint syncpg_push")
	RollbackTo = NewStatement("rollback to savepoint syncpg_push")
	Release    = NewStatement("release savepoint syncpg_push")

	// Join sets the savepoint of a push in a transaction of the host, and Leave keeps
	// what was done since, for the host to commit.
	Join  = NewStatement("savepoint syncpg_join")
	Leave = NewStatement("release savepoint syncpg_join")

	// Characteristics tells what the transaction may do: its isolation level, and
	// whether it is read only, as "on" or "off".
	Characteristics = NewStatement("select current_setting('transaction_isolation'), current_setting('transaction_read_only')")

	ProbeSavepoint  = NewStatement("savepoint syncpg_probe")
	ProbeRollbackTo = NewStatement("rollback to savepoint syncpg_probe")
	ProbeRelease    = NewStatement("release savepoint syncpg_probe")

	// CheckConstraints runs every deferred check now. Between ProbeSavepoint and
	// ProbeRollbackTo it leaves the constraints as deferred as they were.
	CheckConstraints = NewStatement("set constraints all immediate")
)

// giveBack is how long a rollback may take before the connection is dropped.
const giveBack = 5 * time.Second

// Finish ends whatever transaction is open and gives the connection back. It
// works when ctx is done already; a connection that cannot roll back is dropped.
func Finish(ctx context.Context, conn *pgxpool.Conn) {
	defer conn.Release()
	pg := conn.Conn().PgConn()
	if pg.IsClosed() || pg.TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBack)
	defer cancel()
	if _, err := conn.Exec(ctx, "rollback", pgx.QueryExecModeSimpleProtocol); err != nil {
		_ = conn.Conn().Close(ctx)
	}
}

// TakeBack undoes what was done in a transaction of the host since Join. It works when
// ctx is done already, and does nothing on a connection that is closed.
func TakeBack(ctx context.Context, tx pgx.Tx) error {
	if tx.Conn().IsClosed() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBack)
	defer cancel()
	if _, err := tx.Exec(ctx, "rollback to savepoint syncpg_join; release savepoint syncpg_join", pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("taking back what a push did in the transaction: %w", err)
	}
	return nil
}

// SQLState returns the SQLSTATE of a database error, "" if it is none.
func SQLState(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code
	}
	return ""
}

// Retryable says that the same transaction may succeed when it is run again:
// serialization failure, deadlock, lock not available.
func Retryable(err error) bool {
	switch SQLState(err) {
	case "40001", "40P01", "55P03":
		return true
	}
	return false
}
