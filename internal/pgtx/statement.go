package pgtx

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Statement is SQL text that a connection keeps prepared under a name of ours.
//
// pgx's own cache forgets every statement of a batch when one of them fails, and
// prepares them again in front of the next batch. A push goes on after such a
// failure, in a transaction that refuses to prepare anything.
type Statement struct {
	SQL  string
	name string
}

// NewStatement names a statement by its text.
func NewStatement(sql string) Statement {
	sum := sha256.Sum256([]byte(sql))
	return Statement{SQL: sql, name: "syncpg_" + hex.EncodeToString(sum[:8])}
}

// Prepares says whether the connection keeps prepared statements. Behind a pooler
// in transaction mode it must not, and its owner configured it so.
func Prepares(conn *pgx.Conn) bool {
	return conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
}

// Prepare makes statements ready on a connection. It costs a round trip for each
// the connection has not seen yet, and nothing afterwards.
func Prepare(ctx context.Context, conn *pgx.Conn, statements ...Statement) error {
	if !Prepares(conn) {
		return nil
	}
	for _, s := range statements {
		if _, err := conn.Prepare(ctx, s.name, s.SQL); err != nil {
			return fmt.Errorf("preparing a statement: %w", err)
		}
	}
	return nil
}

// Queue adds a prepared statement to a batch for the connection.
func Queue(b *pgx.Batch, conn *pgx.Conn, s Statement, args ...any) {
	if Prepares(conn) {
		b.Queue(s.name, args...)
		return
	}
	b.Queue(s.SQL, args...)
}
