//go:build unix

package pgtest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// envUser makes the test binary use the shared server until it is killed. It prints how to connect to a database there.
const envUser = "SYNCPG_PGTEST_TEST_USER"

func TestMain(m *testing.M) {
	if os.Getenv(envUser) != "" {
		useUntilKilled()
		return
	}
	goleak.VerifyTestMain(m)
}

func useUntilKilled() {
	cluster, err := pgtest.Open(context.Background())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	dsn, err := cluster.DSN("postgres")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(dsn)
	var b [1]byte
	_, _ = os.Stdin.Read(b[:])
}

// user is a process that uses the shared server.
type user struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

func startUser(t *testing.T, tempDir string) *user {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), envUser+"=1", "TMPDIR="+tempDir, pgtest.EnvLinger+"=300ms", pgtest.EnvDatabaseURL+"=")
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	return &user{cmd: cmd, out: bufio.NewReader(out)}
}

func (u *user) dsn(t *testing.T) string {
	t.Helper()
	line, err := u.out.ReadString('\n')
	require.NoError(t, err, line)
	require.True(t, strings.HasPrefix(line, "postgres://"), line)
	return strings.TrimSpace(line)
}

func (u *user) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, u.cmd.Process.Kill())
	require.Error(t, u.cmd.Wait())
}

func connects(t *testing.T, dsn string) bool {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		return false
	}
	require.NoError(t, conn.Close(t.Context()))
	return true
}

// stateFile returns the state file of the only supervisor that ever had the directory.
func stateFile(t *testing.T, tempDir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(tempDir, "syncpg-pgtest-*", "users.lock"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	return filepath.Join(filepath.Dir(files[0]), "cluster.json")
}

func TestServerLivesAsLongAsItsUsers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o711))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))

	a, b := startUser(t, dir), startUser(t, dir)
	dsn := a.dsn(t)
	require.Equal(t, dsn, b.dsn(t), "one server for all")
	a.kill(t)
	c := startUser(t, dir)
	require.Equal(t, dsn, c.dsn(t))
	require.True(t, connects(t, dsn))
	state := stateFile(t, dir)
	require.FileExists(t, state)

	b.kill(t)
	c.kill(t)
	require.Eventually(t, func() bool { return !connects(t, dsn) }, time.Minute, 10*time.Millisecond)

	// The next run does not wait for the rest of the stop by itself.
	d := startUser(t, dir)
	dsn = d.dsn(t)
	require.True(t, connects(t, dsn))

	// A supervisor that is killed takes the server with it, at the latest when the next one starts.
	content, err := os.ReadFile(state)
	require.NoError(t, err)
	var supervisor struct {
		PID int `json:"pid"`
	}
	require.NoError(t, json.Unmarshal(content, &supervisor))
	require.NoError(t, syscall.Kill(supervisor.PID, syscall.SIGKILL))
	lock, err := os.Open(filepath.Join(filepath.Dir(state), "supervisor.lock"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil },
		time.Minute, 10*time.Millisecond, "the kernel takes a moment to end a process")
	require.NoError(t, lock.Close())
	e := startUser(t, dir)
	again := e.dsn(t)
	require.NotEqual(t, dsn, again)
	require.True(t, connects(t, again))
	require.Eventually(t, func() bool { return !connects(t, dsn) }, time.Minute, 10*time.Millisecond)

	d.kill(t)
	e.kill(t)
	require.Eventually(t, func() bool { return !connects(t, again) }, time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		_, err := os.Stat(state)
		return os.IsNotExist(err)
	}, time.Minute, 10*time.Millisecond)
}
