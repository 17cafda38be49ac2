package pgtest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// cleanupTimeout bounds what happens after a test, when its own context has ended.
const cleanupTimeout = 30 * time.Second

// New makes a database for t and drops it when t ends. It fails t when it cannot, or when a connection of the pool is
// still in use at the end.
func New(t testing.TB, opts Options) *DB {
	t.Helper()
	cluster, err := Open(t.Context())
	require.NoError(t, err)
	db, err := cluster.Create(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupTimeout)
		defer cancel()
		if err := db.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return db
}

// Copy makes a database with what db holds now, see [DB.Copy], and drops it when t ends.
func Copy(t testing.TB, db *DB, opts Options) *DB {
	t.Helper()
	made, err := db.Copy(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupTimeout)
		defer cancel()
		if err := made.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return made
}

// Pool returns a pool on a migrated database of t's own.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return New(t, Options{}).Pool
}

// DSN returns the connection string of a migrated database of t's own.
func DSN(t testing.TB) string {
	t.Helper()
	return New(t, Options{}).DSN
}

// sharedDatabase is the database of all transactions of [Tx] in this process. It goes with the server, or, on one that
// outlives the run, with the leftovers.
var sharedDatabase struct {
	sync.Mutex
	dsn string
}

// Tx returns a transaction in a migrated database that the tests of the package share. It is rolled back when t ends.
// The connection is t's own.
func Tx(t testing.TB) pgx.Tx {
	t.Helper()
	dsn, err := sharedDSN(t.Context())
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() {
		// Closing rolls back, whatever state the test left the transaction in.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), cleanupTimeout)
		defer cancel()
		if err := conn.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	return tx
}

func sharedDSN(ctx context.Context) (string, error) {
	sharedDatabase.Lock()
	defer sharedDatabase.Unlock()
	if sharedDatabase.dsn != "" {
		return sharedDatabase.dsn, nil
	}
	cluster, err := Open(ctx)
	if err != nil {
		return "", err
	}
	name, err := cluster.clone(ctx, Options{})
	if err != nil {
		return "", err
	}
	sharedDatabase.dsn, err = cluster.DSN(name)
	return sharedDatabase.dsn, err
}
