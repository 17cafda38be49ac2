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

// Session is the use of statements on one connection.
type Session struct {
	// Named says that the connection keeps prepared statements. Behind a pooler in
	// transaction mode it must not, and its owner configured it so.
	Named bool

	conn *pgx.Conn
}

// On returns the session of a connection. It copies the connection's configuration
// to look at it: use one for many statements.
func On(conn *pgx.Conn) Session {
	return Session{Named: conn.Config().DefaultQueryExecMode == pgx.QueryExecModeCacheStatement, conn: conn}
}

// Prepare makes statements ready. It costs a round trip for each the connection has
// not seen yet, and nothing afterwards.
func (s Session) Prepare(ctx context.Context, statements ...Statement) error {
	if !s.Named {
		return nil
	}
	for _, st := range statements {
		if _, err := s.conn.Prepare(ctx, st.name, st.SQL); err != nil {
			return fmt.Errorf("preparing a statement: %w", err)
		}
	}
	return nil
}

// Queue adds a statement that was prepared to a batch for the connection.
func (s Session) Queue(b *pgx.Batch, st Statement, args ...any) {
	if s.Named {
		b.Queue(st.name, args...)
		return
	}
	b.Queue(st.SQL, args...)
}
