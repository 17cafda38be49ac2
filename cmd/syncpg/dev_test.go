//go:build unix

package main

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/devpg"
	"github.com/syncpg/syncpg/ssp2"
)

// dataDir returns a directory that the account of the database can reach.
func dataDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o711))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))
	return filepath.Join(dir, "data")
}

func TestDevServesAndKeepsItsData(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	dev := startDev(t, "--data-dir", dir)

	golden(t, "smoke.txt", withoutDurations(dev.smoke(t).stdout))

	first := device(t, dev.url, "first")
	lists, _ := sampleSchema(t).Table("lists")
	row := []ssp2.Value{
		{Bytes: []byte("l1")}, {Bytes: []byte("red")}, {Bytes: []byte("Groceries")}, {Null: true}, {Float: 1.5}, {Int: 0},
	}
	payload, err := ssp2.AppendRow(nil, lists.Wire, row)
	require.NoError(t, err)
	results, err := first.Push(t.Context(), ssp2.PushCommit{ClientCommitID: "1", Operations: []ssp2.Operation{
		{Table: "lists", RowID: "l1", Op: ssp2.OpUpsert, Payload: payload},
	}})
	require.NoError(t, err)
	require.Equal(t, ssp2.PushApplied, results[0].Status)

	other := runCommand(t, "dev", "--listen", "127.0.0.1:0", "--data-dir", dir)
	require.Equal(t, exitFailed, other.code)
	require.Contains(t, other.stderr, "already runs in")

	end := dev.stop()
	require.Zero(t, end.code, end.stderr)
	require.Contains(t, end.stdout, "smoke --url "+dev.url+"\n")
	require.Contains(t, end.stdout, "Authorization: Bearer dev:<actor>:<partition>")
	password, err := os.ReadFile(filepath.Join(dir, "postgres", passwordFile))
	require.NoError(t, err)
	require.NotContains(t, end.stdout+end.stderr, strings.TrimSpace(string(password)))
	require.Contains(t, end.stdout, "(password: "+filepath.Join(dir, "postgres", passwordFile)+")")
	require.NoFileExists(t, filepath.Join(dir, "postgres", "postmaster.pid"), "the database has stopped")
	refused := runCommand(t, "smoke", "--url", dev.url)
	require.Equal(t, exitFailed, refused.code)
	require.Contains(t, refused.stdout, "is the server running")

	again := startDev(t, "--data-dir", dir)
	second := device(t, again.url, "second")
	require.Equal(t, first.Epoch(), second.Epoch(), "the log goes on")
	_, err = second.CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]client.Row{"l1": {Version: 1, Values: row}}, second.Rows("lists"))
	require.Zero(t, again.stop().code)

	changed := invocation{args: []string{
		"dev", "--listen", "127.0.0.1:0", "--data-dir", dir, "--schema", writeFile(t, "small.json", smallSchema),
	}}.run(t)
	require.Equal(t, exitState, changed.code)
	require.Contains(t, changed.stderr, "give another --data-dir, or remove "+filepath.Join(dir, "postgres"))
}

func TestDevServesASchemaOfTheUser(t *testing.T) {
	t.Parallel()
	file := writeFile(t, "small.json", smallSchema)
	dev := startDev(t, "--data-dir", dataDir(t), "--schema", file, "--app-schema", "app")
	dev.smoke(t, "--schema", file)
	wrong := runCommand(t, "smoke", "--url", dev.url)
	require.Equal(t, exitFailed, wrong.code)
	require.Contains(t, wrong.stdout, "give the same with --schema FILE")
	require.Contains(t, dev.stop().stdout, "smoke --url "+dev.url+" --schema "+file)
}

// TestDevTakesSocketsOfOtherOrigins: pages of a frontend come from a server of their own in development.
func TestDevTakesSocketsOfOtherOrigins(t *testing.T) {
	t.Parallel()
	dev := startDev(t, "--data-dir", dataDir(t), "--realtime-origin", "http://localhost:5173")
	for origin, status := range map[string]int{"http://localhost:5173": http.StatusSwitchingProtocols, "http://localhost:5174": http.StatusForbidden} {
		require.Equal(t, status, upgrade(t, dev.url, http.Header{"Authorization": {"Bearer dev:alice:home"}, "Origin": {origin}}), origin)
	}
}

func TestDevServesOlderVersions(t *testing.T) {
	t.Parallel()
	first, second := smallSchemas(t)
	dev := startDev(t, "--data-dir", dataDir(t), "--schema", second, "--older-schema", first)
	dev.smoke(t, "--schema", second)
	dev.smoke(t, "--schema", first)
	require.Contains(t, dev.stop().stdout, "clients of older versions are served: 1\n")
}

func TestDevEndsWithItsDatabase(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	dev := startDev(t, "--data-dir", dir)
	pidFile, err := os.ReadFile(filepath.Join(dir, "postgres", "postmaster.pid"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.SplitN(string(pidFile), "\n", 2)[0])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGQUIT))
	end := dev.wait()
	require.Equal(t, exitFailed, end.code)
	require.Contains(t, end.stderr, errDatabaseEnded.Error())
}

func TestDevSaysWhenTheAddressIsTaken(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	l, err := listenFlags{Listen: "127.0.0.1:0"}.listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	r := runCommand(t, "dev", "--listen", l.Addr().String(), "--data-dir", dir)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "--listen takes another address")
	require.NoDirExists(t, dir)

	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	r = runCommand(t, "dev", "--listen", "127.0.0.1:0", "--data-dir", dir, "--pg-port", port)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "the port of the database is taken: "+port+"; --pg-port takes another port")
	require.NotContains(t, r.stderr, "FATAL")
}

// Not parallel: package devpg reads the environment of the process.
func TestDevSaysWhatToInstall(t *testing.T) {
	t.Setenv(devpg.EnvBinDir, t.TempDir())
	r := runCommand(t, "dev", "--listen", "127.0.0.1:0", "--data-dir", dataDir(t))
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, devpg.ErrNoBinaries.Error())
	require.Contains(t, r.stderr, "dev --allow-download")
	require.Contains(t, r.stderr, "use a database that is there with")
}
