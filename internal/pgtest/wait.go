package pgtest

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// waitLimit bounds a wait whose context has no deadline.
const waitLimit = 30 * time.Second

// Querier runs a query: a pool or a connection that is free.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// WaitBlocked returns when the session with the given process id waits for a lock, of a row, a table or an advisory one.
// It fails when ctx ends, or after 30 seconds.
func WaitBlocked(ctx context.Context, db Querier, pid uint32) error {
	return poll(ctx, db, fmt.Sprintf("session %d to wait for a lock", pid),
		`select cardinality(pg_catalog.pg_blocking_pids($1::int)) > 0`, int64(pid))
}

// WaitAnyBlocked returns when at least n sessions of the database of db wait for a lock. It fails when ctx ends, or after
// 30 seconds.
func WaitAnyBlocked(ctx context.Context, db Querier, n int) error {
	return poll(ctx, db, fmt.Sprintf("%d sessions to wait for locks", n),
		`select count(*) >= $1 from pg_catalog.pg_stat_activity
		  where datname = current_database() and cardinality(pg_catalog.pg_blocking_pids(pid)) > 0`, int64(n))
}

// WaitFor returns when a query of one boolean answers true. It fails when ctx ends, or after 30 seconds.
func WaitFor(ctx context.Context, db Querier, sql string, args ...any) error {
	return poll(ctx, db, "a query to answer true", sql, args...)
}

// poll asks until the answer is true. What it waits for has no event to wait on.
func poll(ctx context.Context, db Querier, what, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		var yes bool
		if err := db.QueryRow(ctx, sql, args...).Scan(&yes); err != nil {
			return fmt.Errorf("pgtest: wait for %s: %w", what, err)
		}
		if yes {
			return nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("pgtest: wait for %s: %w", what, ctx.Err())
		}
	}
}
