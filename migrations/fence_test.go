package migrations_test

import (
	"errors"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// TestWriterFence: while a partition has a fence, its log takes no commit of an older
// writer, nor of one that does not say how old it is.
func TestWriterFence(t *testing.T) {
	t.Parallel()
	tx := pgtest.Tx(t)
	_, err := tx.Exec(t.Context(), `insert into syncpg.sync_writer_fence values ('fenced', 2)`)
	require.NoError(t, err)
	version := func(v int32) *int32 { return &v }
	for i, tc := range []struct {
		partition string
		version   *int32
		refused   bool
	}{
		{"free", nil, false},
		{"free", version(1), false},
		{"fenced", nil, true},
		{"fenced", version(1), true},
		{"fenced", version(2), false},
		{"fenced", version(3), false},
	} {
		nested, err := tx.Begin(t.Context())
		require.NoError(t, err)
		_, err = nested.Exec(t.Context(), `
			insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, writer_version, change_count)
			values ($1, $2, 'c', $3, 'a', 1, $4, 0)`, tc.partition, i+1, strconv.Itoa(i), tc.version)
		if tc.refused {
			var refused *pgconn.PgError
			require.True(t, errors.As(err, &refused) && refused.Code == "SY001", "%+v: %v", tc, err)
		} else {
			require.NoError(t, err, "%+v", tc)
		}
		require.NoError(t, nested.Rollback(t.Context()))
	}
}
