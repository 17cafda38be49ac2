package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
)

// makeLogs makes partitions, each with a log of n commits that are over 30 days old.
func makeLogs(t *testing.T, url string, n int, partitions ...string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	for _, p := range partitions {
		for _, sql := range []string{
			`select syncpg.sync_open_partition($1, 'epoch of ' || $1, 0) where $2::int > 0`,
			`insert into syncpg.sync_commits (partition, commit_seq, client_id, client_commit_id, actor_id, created_at_ms, change_count)
			 select $1, i, 'w', i::text, 'ada', 0, 0 from generate_series(1, $2::int) as i`,
			`update syncpg.sync_partitions set max_commit_seq = $2::int where partition = $1`,
			`insert into syncpg.sync_clients (partition, client_id, actor_id, cursor, created_at_ms, updated_at_ms)
			 values ($1, 'c', 'ada', $2::int, 0, 0)`,
		} {
			_, err := conn.Exec(t.Context(), sql, p, n)
			require.NoError(t, err)
		}
	}
	return conn
}

func TestPruneCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	conn := makeLogs(t, url, 1500, "acme", "globex", "odd\nname")
	makeLogs(t, url, 1000, "small")
	horizon := func(partition string) (seq int64) {
		require.NoError(t, conn.QueryRow(t.Context(), `select horizon_seq from syncpg.sync_partitions where partition = $1`, partition).Scan(&seq))
		return seq
	}
	prune := func(args ...string) result {
		return runCommand(t, append([]string{"prune", "--database-url", url}, args...)...)
	}

	r := prune("--all", "--dry-run")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, `"acme"`)
	require.Contains(t, r.stdout, `"odd\nname"`)
	require.NotContains(t, r.stdout, "small")
	require.Contains(t, r.stdout, "would delete 1500 commits in 3 partitions")
	require.Zero(t, horizon("acme"))

	r = prune("--partition", "acme", "--dry-run", "--json")
	require.Zero(t, r.code, r.stderr)
	require.JSONEq(t, `[{"partition": "acme", "newest": 1500, "horizon": 0, "target": 500, "commits": 500, "activeClients": 0, "leastCursor": null}]`, r.stdout)

	r = prune("--partition", "acme", "--json")
	require.Zero(t, r.code, r.stderr)
	require.JSONEq(t, `[{"partition": "acme", "previousHorizon": 0, "horizon": 500, "commits": 500, "changes": 0, "tombstones": 0, "compacted": 0}]`, r.stdout)
	require.Equal(t, int64(500), horizon("acme"))
	require.Zero(t, horizon("globex"))

	r = prune("--all", "--batch-rows", "100")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, "deleted 1000 commits in 2 partitions")
	require.Equal(t, int64(500), horizon("globex"))
	r = prune("--partition", "acme", "--compact-after", "24h")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, "deleted 0 commits and 0 superseded changes in 1 partition\n")
	for _, args := range [][]string{{"--all"}, {"--all", "--dry-run"}} {
		r = prune(args...)
		require.Zero(t, r.code, r.stderr)
		require.Equal(t, nothingToPrune, r.stdout)
	}

	r = prune("--partition", "acme", "--partition", "nope")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, `there is no partition "nope": the table syncpg.sync_partition_registry has`)
	require.Contains(t, r.stdout, `"acme"`, "what was done is shown")
	require.NotContains(t, r.stdout, "nope")
	for _, args := range [][]string{{"--partition", "nope"}, {"--partition", "nope", "--dry-run"}} {
		r = prune(args...)
		require.Equal(t, exitFailed, r.code)
		require.Empty(t, r.stdout)
		require.Contains(t, r.stderr, `there is no partition "nope"`)
	}

	r = runCommand(t, "prune", "--all", "--database-url", emptyDatabase(t))
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "syncpg migrate up")
}

func TestPruneReportsRateAndTimeLeft(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	now := time.UnixMilli(0)
	r := pruneReport{to: &out, now: func() time.Time { return now }}
	at := func(after time.Duration, commits, compacted int64) {
		now = time.UnixMilli(0).Add(after)
		r.progress(retention.Progress{Partition: "p", Target: 11000, Result: retention.Result{PreviousHorizon: 1000, Commits: commits, Compacted: compacted}})
	}
	at(0, 0, 0)
	at(time.Second, 1000, 0)
	at(2*time.Second, 2000, 0)
	at(3*time.Second, 3000, 0)
	at(5*time.Second, 10000, 0)
	at(8*time.Second, 10000, 7)
	require.Equal(t, "\"p\": 2000 of 10000 commits, 1000/s, 8.0 s left\n"+
		"\"p\": 10000 of 10000 commits, 2000/s\n"+
		"\"p\": 10000 of 10000 commits, 1250/s, 7 changes compacted\n", out.String())
}

func TestServePrunesOnItsSchedule(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	conn := makeLogs(t, url, 1500, "acme")
	s := startServe(t, "--dev-auth", "--schema", sampleFile, "--database-url", url)
	require.NoError(t, pgtest.WaitFor(t.Context(), conn, `select horizon_seq = 500 from syncpg.sync_partitions where partition = 'acme'`))
	require.Zero(t, s.stop().code)

	_, err := conn.Exec(t.Context(), `update syncpg.sync_partitions set horizon_seq = 0`)
	require.NoError(t, err)
	s = startServe(t, "--dev-auth", "--schema", sampleFile, "--database-url", url, "--prune-interval", "0")
	s.smoke(t)
	require.Zero(t, s.stop().code)
	var seq int64
	require.NoError(t, conn.QueryRow(t.Context(), `select horizon_seq from syncpg.sync_partitions where partition = 'acme'`).Scan(&seq))
	require.Zero(t, seq)
}

func TestEpochRotateCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	conn := makeLogs(t, url, 10, "acme", "globex")
	epoch := func(partition string) (epoch string) {
		require.NoError(t, conn.QueryRow(t.Context(), `select log_epoch from syncpg.sync_partition_registry where partition = $1`, partition).Scan(&epoch))
		return epoch
	}
	rotate := func(stdin string, args ...string) result {
		return invocation{args: append([]string{"epoch", "rotate", "--database-url", url}, args...), stdin: stdin}.run(t)
	}

	for _, answer := range []string{"", "no\n", "y\n", "yes please\n"} {
		r := rotate(answer, "--all")
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "EVERY partition")
		require.Contains(t, r.stderr, "nothing was changed")
		require.Equal(t, "epoch of acme", epoch("acme"))
	}

	r := rotate("yes\n", "--partition", "acme")
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stderr, `["acme"]`)
	require.Equal(t, "1 partition: new log epoch; 1 client will begin anew\n", r.stdout)
	require.NotEqual(t, "epoch of acme", epoch("acme"))
	require.Equal(t, "epoch of globex", epoch("globex"))

	var out map[string]any
	before := epoch("acme")
	r = rotate("", "--all", "--yes", "--json")
	require.Zero(t, r.code, r.stderr)
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &out))
	require.Equal(t, map[string]any{"partitions": 2.0, "clients": 1.0}, out)
	require.NotEqual(t, before, epoch("acme"))
	require.NotEqual(t, "epoch of globex", epoch("globex"))

	r = rotate("", "--partition", "nope", "--yes")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, `there is no partition "nope"`)
}

// While servers run, all of them tell their sockets (§2.1).
func TestEpochRotateReachesRunningServers(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	var devices []*client.Client
	var sockets []*client.Socket
	for _, id := range []string{"one", "two"} {
		s := startServe(t, "--dev-auth", "--schema", sampleFile, "--database-url", url)
		d := device(t, s.url, id)
		_, err := d.CatchUp(t.Context())
		require.NoError(t, err)
		socket, err := d.Dial(t.Context())
		require.NoError(t, err)
		t.Cleanup(socket.Close)
		devices, sockets = append(devices, d), append(sockets, socket)
	}
	before := devices[0].Epoch()
	r := runCommand(t, "epoch", "rotate", "--partition", "home", "--yes", "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	for i, socket := range sockets {
		_, _, err := socket.Follow(t.Context(), 1, "lists") // there is no commit, only a wake-up
		require.ErrorIs(t, err, client.ErrReset)
		require.NotEqual(t, before, devices[i].Epoch())
	}
}
