package syncpg_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/reaction"
)

// TestACommitWakesTheReactionRunner: one that would look for itself only tomorrow.
func TestACommitWakesTheReactionRunner(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, installed)
	handled := make(chan string)
	runner, err := reaction.New(db.Pool, reaction.Config{
		Handlers: map[string]reaction.Handler{"mail": {Versions: []int32{1}, Handle: func(_ context.Context, d *reaction.Delivery) error {
			handled <- d.Key
			return nil
		}}},
		PollInterval: 24 * time.Hour,
	})
	require.NoError(t, err)
	cfg := config()
	cfg.PlanReactions = func(_ context.Context, c *pushsvc.Candidate) ([]reaction.Plan, error) {
		return []reaction.Plan{{Key: c.ClientCommitID, Type: "mail", Version: 1, Payload: json.RawMessage(`{}`)}}, nil
	}
	cfg.Committed = func(partition string, _ int64) { runner.Notify(partition) }
	server, err := syncpg.New(db.Pool, cfg)
	require.NoError(t, err)
	app := httptest.NewServer(server.Handler())
	t.Cleanup(app.Close)
	phone := device(app.URL, cfg.Schema, "ada")
	_, err = phone.Push(t.Context(), newList("l1", "team-1", "Before"))
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	require.Equal(t, "insert l1", <-handled)
	// Its first look is over, and it has nothing in its queue.
	_, err = phone.Push(t.Context(), newList("l2", "team-1", "After"))
	require.NoError(t, err)
	require.Equal(t, "insert l2", <-handled)

	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, note, err := server.Push().ApplyTx(t.Context(), tx, pushsvc.ApplyRequest{
		Partition: "acme", Actor: "system", ClientID: "host", ClientCommitID: "order", Operations: []pushsvc.Operation{pushsvc.Delete("lists", "l1")},
	})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	server.Push().Notify(t.Context(), note)
	require.Equal(t, "order", <-handled)
	cancel()
	require.NoError(t, <-ended)
}
