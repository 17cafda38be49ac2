package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/migrations"
)

// The expected outputs follow the migrations there are, so that a new one does not change the tests.
func TestMigrateUpStatusDown(t *testing.T) {
	t.Parallel()
	url := emptyDatabase(t)
	m, err := migrations.New(nil, migrations.Options{})
	require.NoError(t, err)
	newest := len(m.List())
	var up, down strings.Builder
	status := func(state string) string {
		var b strings.Builder
		b.WriteString("VERSION  STATE    BREAKING  NAME\n")
		for _, one := range m.List() {
			fmt.Fprintf(&b, "%-7d  %s  %-8s  %s\n", one.Version, state, map[bool]string{false: "no", true: "yes"}[one.Breaking], one.Name)
		}
		return b.String()
	}
	for i, one := range m.List() {
		fmt.Fprintf(&up, "apply %s\n", one.Name)
		fmt.Fprintf(&down, "take back %s\n", m.List()[newest-1-i].Name)
	}
	fmt.Fprintf(&up, "the database is at version %d (was 0)\n", newest)
	fmt.Fprintf(&down, "the database is at version 0 (was %d)\n", newest)

	r := runCommand(t, "migrate", "status", "--database-url", url)
	require.Equal(t, exitState, r.code)
	require.Equal(t, status("pending"), r.stdout)
	require.Equal(t, fmt.Sprintf("syncpg: %d migrations pending: run `syncpg migrate up`\n", newest), r.stderr)

	r = runCommand(t, "migrate", "up", "--database-url", url)
	require.Equal(t, result{stdout: up.String()}, r)

	r = runCommand(t, "migrate", "status", "--database-url", url)
	require.Equal(t, result{stdout: status("applied")}, r)

	r = runCommand(t, "migrate", "up", "--database-url", url)
	require.Equal(t, result{stdout: fmt.Sprintf("nothing to do: the database is at version %d\n", newest)}, r)

	r = runCommand(t, "migrate", "down", "--to", "0", "--database-url", url)
	require.Equal(t, result{stdout: down.String()}, r)
}

func TestMigratePrintsJSON(t *testing.T) {
	t.Parallel()
	url := emptyDatabase(t)
	m, err := migrations.New(nil, migrations.Options{})
	require.NoError(t, err)
	newest := len(m.List())

	r := runCommand(t, "migrate", "up", "--json", "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	var up moved
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &up))
	require.Equal(t, 0, up.From)
	require.Equal(t, newest, up.To)
	require.Len(t, up.Steps, newest)

	r = runCommand(t, "migrate", "down", "--json", "--to=1", "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	var down moved
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &down))
	require.Equal(t, 1, down.To)

	r = runCommand(t, "migrate", "status", "--json", "--database-url", url)
	require.Equal(t, exitState, r.code)
	var status migrationStatus
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &status))
	require.Equal(t, 1, status.Current)
	require.Equal(t, newest, status.Target)
	require.True(t, status.Migrations[0].Applied)
	require.False(t, status.Migrations[1].Applied)
}

func TestMigrateDownWantsAVersionThereIs(t *testing.T) {
	t.Parallel()
	url := emptyDatabase(t)
	for _, to := range []string{"-1", "99"} {
		r := runCommand(t, "migrate", "down", "--to="+to, "--database-url", url)
		require.Equal(t, exitUsage, r.code)
		require.Contains(t, r.stderr, "the versions are 0 to")
	}
}
