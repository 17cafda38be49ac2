package realtime_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtest"
)

// TestRecordedAcknowledgements: a cursor moves forward within the log, and a pull that was
// recorded later stays what it is (§8.2).
func TestRecordedAcknowledgements(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `
		insert into syncpg.sync_partitions (partition, max_commit_seq) values ('p', 10), ('q', 3);
		insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		values ('p', 'ahead', 'ada', 2, 5, '[]', 0, 100), ('p', 'back', 'ada', 2, 5, '[]', 0, 100), ('p', 'past', 'ada', 2, 5, '[]', 0, 100),
		       ('p', 'later', 'ada', 2, 5, '[]', 0, 201), ('p', 'other', 'bob', 2, 5, '[]', 0, 100), ('p', 'none', 'ada', 2, null, '[]', 0, 100),
		       ('p', 'silent', 'ada', 2, 5, '[]', 0, 100), ('q', 'ahead', 'ada', 2, 1, '[]', 0, 200)`)
	require.NoError(t, err)
	var params db.RealtimeRecordAcksParams
	for _, ack := range []struct {
		partition, client string
		cursor            int64
	}{
		{"gone", "x", 1},
		{"p", "ahead", 7},
		{"p", "back", 4},
		{"p", "gone", 7},
		{"p", "later", 7},
		{"p", "none", 7},
		{"p", "other", 7},
		{"p", "past", 70},
		{"q", "ahead", 2},
	} {
		params.Partitions = append(params.Partitions, ack.partition)
		params.ClientIds = append(params.ClientIds, ack.client)
		params.ActorIds = append(params.ActorIds, "ada")
		params.Cursors = append(params.Cursors, ack.cursor)
		params.AtMs = append(params.AtMs, 200)
	}
	require.NoError(t, db.New(pool).RealtimeRecordAcks(t.Context(), params))
	rows, err := pool.Query(t.Context(), `select partition || '/' || client_id, coalesce(cursor, -1), updated_at_ms from syncpg.sync_clients`)
	require.NoError(t, err)
	got := map[string][2]int64{}
	for rows.Next() {
		var name string
		var at [2]int64
		require.NoError(t, rows.Scan(&name, &at[0], &at[1]))
		got[name] = at
	}
	require.NoError(t, rows.Err())
	require.Equal(t, map[string][2]int64{
		"p/ahead": {7, 200}, "p/back": {5, 100}, "p/past": {10, 200}, "p/later": {5, 201}, "p/other": {5, 100},
		"p/none": {-1, 100}, "p/silent": {5, 100}, "q/ahead": {2, 200},
	}, got)
}
