package lease_test

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/lease"
)

// listed are the clients whose leases a filter means, with their state.
func (w *world) listed(t *testing.T, f lease.Filter) []string {
	t.Helper()
	found := []string{}
	require.NoError(t, lease.List(t.Context(), w.db.Pool, f, func(i lease.Info) error {
		found = append(found, fmt.Sprint(i.Partition, "/", i.ID, "/", i.Actor, " ", i.State(w.now)))
		return nil
	}))
	return found
}

func TestList(t *testing.T) {
	t.Parallel()
	w := setup(t)
	require.Empty(t, w.listed(t, lease.Filter{}))
	other := lease.Client{Partition: partition, ID: "other device", Actor: "bob"}
	w.live(t, ada, allowed)
	w.now = w.now.Add(time.Minute)
	revoked := w.live(t, other, allowed)
	require.NoError(t, w.Revoke(t.Context(), partition, revoked.LeaseID))
	w.exec(t, `insert into syncpg.sync_leases select 'zeta', 'x', 'l', 'ada', allowed_scopes, issued_at_ms, expires_at_ms, null, signature
		from syncpg.sync_leases where actor_id = $1`, "ada")
	w.now = w.now.Add(ttl - time.Minute)
	for name, tc := range map[string]struct {
		filter lease.Filter
		want   []string
	}{
		"all":         {lease.Filter{}, []string{"acme/device/ada expired", "acme/other device/bob revoked", "zeta/x/ada expired"}},
		"a partition": {lease.Filter{Partition: "zeta"}, []string{"zeta/x/ada expired"}},
		"an actor":    {lease.Filter{Actor: "ada"}, []string{"acme/device/ada expired", "zeta/x/ada expired"}},
		"a client":    {lease.Filter{Partition: partition, ClientID: ada.ID}, []string{"acme/device/ada expired"}},
		"a lease":     {lease.Filter{LeaseID: revoked.LeaseID}, []string{"acme/other device/bob revoked"}},
		"none":        {lease.Filter{Partition: "acm"}, []string{}},
	} {
		require.Equal(t, tc.want, w.listed(t, tc.filter), name)
	}
	w.now = w.now.Add(-time.Millisecond)
	require.Equal(t, []string{"acme/device/ada valid"}, w.listed(t, lease.Filter{Partition: partition, Actor: "ada"}))

	genuine := map[string]bool{}
	require.NoError(t, lease.List(t.Context(), w.db.Pool, lease.Filter{}, func(i lease.Info) error {
		genuine[i.Partition+i.ID] = w.Genuine(i)
		return nil
	}))
	require.Equal(t, map[string]bool{"acmedevice": true, "acmeother device": true, "zetax": false}, genuine, "one was copied to another client")
}

// TestListPages: what does not fit in a page follows, and a partition's leases are read from
// the index, however many others there are.
func TestListPages(t *testing.T) {
	t.Parallel()
	w := setup(t)
	for _, p := range []string{"a", "m", "z"} {
		_, err := w.db.Pool.Exec(t.Context(), `insert into syncpg.sync_leases
			select $1, 'c' || lpad(i::text, 6, '0'), 'l' || i, 'ada', '{}', 0, 0, null, '' from generate_series(1, 10000) as i`, p)
		require.NoError(t, err)
	}
	require.Len(t, w.listed(t, lease.Filter{Partition: "m"}), 10_000)
	require.Len(t, w.listed(t, lease.Filter{}), 30_000)

	// A command for people, so statistics may be expected.
	_, err := w.db.Pool.Exec(t.Context(), `analyze syncpg.sync_leases`)
	require.NoError(t, err)
	conn, err := w.db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	var text []byte
	require.NoError(t, conn.QueryRow(t.Context(), "explain (analyze, buffers, timing off, format json) "+db.LeaseList,
		pgx.QueryExecModeExec, "m", "c009900", "m", "d", nil, nil, nil, 500).Scan(&text))
	var plan []struct {
		Plan struct {
			Rows int `json:"Actual Rows"`
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, json.Unmarshal(text, &plan))
	require.Equal(t, 100, plan[0].Plan.Rows)
	require.Less(t, plan[0].Plan.Hit+plan[0].Plan.Read, 120, "%s", text)
}
