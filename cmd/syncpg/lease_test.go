package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// makeLeases gives each client a lease, named partition/actor/client.
func makeLeases(t *testing.T, url string, key []byte, names ...string) *lease.Store {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	store, err := lease.New(pool, lease.Config{Keys: [][]byte{key}})
	require.NoError(t, err)
	for _, name := range names {
		c := clientNamed(name)
		_, err := pool.Exec(t.Context(), `select syncpg.sync_open_partition($1, 'epoch', 0)`, c.Partition)
		require.NoError(t, err)
		_, err = db.New(pool).PullRecordClient(t.Context(), db.PullRecordClientParams{
			Partition: c.Partition, LogEpoch: "epoch", ClientID: c.ID, ActorID: c.Actor, WireVersion: 2, Now: time.Now().UnixMilli(),
		})
		require.NoError(t, err)
		require.NoError(t, store.Begin(c, scope.Allowed{"team_id": {"*"}}, time.Now()).Refresh(t.Context()))
	}
	return store
}

func clientNamed(name string) lease.Client {
	parts := strings.Split(name, "/")
	return lease.Client{Partition: parts[0], Actor: parts[1], ID: parts[2]}
}

func TestLeaseCommands(t *testing.T) {
	t.Parallel()
	key := bytes.Repeat([]byte{7}, 32)
	text := base64.StdEncoding.EncodeToString(key)
	names := []string{"acme/ada/laptop", "acme/ada/phone", "acme/bob/tablet", "acme/carol/desk", "globex/ada/phone"}
	url := pgtest.DSN(t)
	none := runCommand(t, "lease", "list", "--database-url", url)
	require.Zero(t, none.code, none.stderr)
	require.Equal(t, "no leases\n", none.stdout)
	store := makeLeases(t, url, key, names...)
	list := func(args ...string) (found []shownLease) {
		r := runCommand(t, append([]string{"lease", "list", "--json", "--database-url", url}, args...)...)
		require.Zero(t, r.code, r.stderr)
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &found))
		return found
	}
	outage := func(name string) ssp2.Code {
		_, err := store.Authorize(context.WithoutCancel(t.Context()), clientNamed(name))
		return ssp2.CodeOf(err)
	}
	revoke := func(args ...string) result {
		return runCommand(t, append([]string{"lease", "revoke", "--partition", "acme", "--database-url", url, "--lease-key", text}, args...)...)
	}
	require.Len(t, list(), 5)
	require.Len(t, list("--partition", "acme", "--actor", "ada"), 2)

	// The wrong key would leave a revocation that no server takes for one.
	wrong := runCommand(t, "lease", "revoke", "--partition", "acme", "--actor", "ada", "--database-url", url,
		"--lease-key", base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{8}, 32)))
	require.Equal(t, exitFailed, wrong.code)
	require.Contains(t, wrong.stderr, "is not signed with this key")
	require.Empty(t, outage(names[0]))

	r := revoke("--actor", "ada")
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, 2, strings.Count(r.stdout, "revoked "), r.stdout)
	require.Contains(t, r.stdout, `of client "phone", actor "ada"`)
	r = revoke("--client", "tablet", "--json")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, `"state": "revoked"`)
	for _, key := range []string{"partition", "actor", "client", "leaseId", "issuedAt", "expiresAt", "revokedAt"} {
		require.Contains(t, r.stdout, `"`+key+`": "`)
	}
	desk := list("--client", "desk")[0]
	r = revoke("--lease-id", desk.LeaseID)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, fmt.Sprintf("revoked %s of client \"desk\", actor \"carol\"\n", desk.LeaseID), r.stdout)
	for _, name := range names[:4] {
		require.Equal(t, ssp2.CodeAuthLeaseRevoked, outage(name), name)
	}
	require.Empty(t, outage(names[4]), "the other partition")

	again := revoke("--lease-id", desk.LeaseID)
	require.Zero(t, again.code, "revoking one again changes nothing")
	missing := revoke("--client", "nobody")
	require.Equal(t, exitFailed, missing.code)
	require.Contains(t, missing.stderr, `partition "acme" has no such lease`)

	lines := strings.Split(strings.TrimSpace(runCommand(t, "lease", "list", "--database-url", url).stdout), "\n")
	require.Len(t, lines, 6)
	at := strings.Index(lines[0], "STATE")
	for i, line := range lines[1:] {
		want := "revoked"
		if i == 4 {
			want = "valid"
		}
		require.True(t, strings.HasPrefix(line[at:], want), line)
	}
}
