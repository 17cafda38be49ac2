//go:build unix

package devpg_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/devpg"
)

// envOrphan makes the test binary start a server in the named directory, print its process id and wait to be killed.
const envOrphan = "SYNCPG_DEVPG_TEST_ORPHAN"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envOrphan); dir != "" {
		s, err := devpg.Start(context.Background(), devpg.Options{DataDir: dir, Port: -1})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(s.PID())
		<-s.Done()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// dataDir returns a path for a new cluster that the account of the server can reach.
func dataDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o711))
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o711))
	return filepath.Join(dir, "cluster")
}

func start(t *testing.T, opts devpg.Options) *devpg.Server {
	t.Helper()
	s, err := devpg.Start(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { stop(t, s) })
	return s
}

func stop(t *testing.T, s *devpg.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	require.NoError(t, s.Stop(ctx))
}

func query[T any](t *testing.T, dsn, sql string) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	var v T
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&v))
	return v
}

func TestClusterIsKeptBetweenStarts(t *testing.T) {
	t.Parallel()
	opts := devpg.Options{DataDir: dataDir(t), Fsync: true, ExtraConfig: map[string]string{"work_mem": "5MB"}}
	s := start(t, opts)
	require.NoError(t, s.EnsureDatabase(t.Context(), `an "app"`))
	require.NoError(t, s.EnsureDatabase(t.Context(), `an "app"`))
	dsn := s.DSN(`an "app"`)
	require.Equal(t, 7, query[int](t, dsn, `with t as materialized (select 7 as v) select v from t`))
	require.Equal(t, "5MB", query[string](t, dsn, `show work_mem`))
	require.Equal(t, "on", query[string](t, dsn, `show fsync`))
	require.Equal(t, "UTF8", query[string](t, dsn, `show server_encoding`))
	stop(t, s)
	select {
	case <-s.Done():
	default:
		t.Fatal("stopped, but not done")
	}
	stop(t, s)

	s = start(t, devpg.Options{DataDir: opts.DataDir})
	require.Equal(t, `an "app"`, query[string](t, s.DSN(`an "app"`), `select current_database()::text`))
	require.Equal(t, "off", query[string](t, s.DSN("postgres"), `show fsync`))
	require.Equal(t, "on", query[string](t, s.DSN("postgres"), `show synchronous_commit`))
}

func TestTCPAsksForThePassword(t *testing.T) {
	t.Parallel()
	s := start(t, devpg.Options{DataDir: dataDir(t)})
	cfg, err := pgx.ParseConfig(s.DSN("postgres"))
	require.NoError(t, err)
	cfg.Password = "guess"
	_, err = pgx.ConnectConfig(t.Context(), cfg)
	require.ErrorContains(t, err, "28P01")
}

func TestSocketOnly(t *testing.T) {
	t.Parallel()
	s := start(t, devpg.Options{DataDir: dataDir(t), Port: -1})
	require.Equal(t, s.SocketDSN("postgres"), s.DSN("postgres"))
	require.Empty(t, query[string](t, s.DSN("postgres"), `show listen_addresses`))
}

func TestSecondServerInOneDirectoryIsRefused(t *testing.T) {
	t.Parallel()
	opts := devpg.Options{DataDir: dataDir(t)}
	s := start(t, opts)
	_, err := devpg.Start(t.Context(), opts)
	var running *devpg.RunningError
	require.ErrorAs(t, err, &running)
	require.Equal(t, s.PID(), running.PID)
	require.ErrorContains(t, err, "kill -INT "+strconv.Itoa(s.PID()))

	require.NoError(t, devpg.StopLeftover(t.Context(), opts.DataDir))
	<-s.Done()
	require.NoError(t, devpg.StopLeftover(t.Context(), opts.DataDir))
	start(t, opts)
}

func TestLockFileOfADeadServerIsNoObstacle(t *testing.T) {
	t.Parallel()
	opts := devpg.Options{DataDir: dataDir(t), Port: -1}
	stop(t, start(t, opts))

	gone := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	require.NoError(t, gone.Run())
	pids := []int{gone.Process.Pid}
	if runtime.GOOS == "linux" {
		pids = append(pids, os.Getpid()) // the number was given to another process since
	}
	for _, pid := range pids {
		lock := fmt.Sprintf("%d\n%s\n0\n5432\n", pid, opts.DataDir)
		require.NoError(t, os.WriteFile(filepath.Join(opts.DataDir, "postmaster.pid"), []byte(lock), 0o600))
		stop(t, start(t, opts))
	}
}

func TestUnusableDataDirectories(t *testing.T) {
	t.Parallel()
	with := func(files ...string) string {
		dir := dataDir(t)
		require.NoError(t, os.Mkdir(dir, 0o700))
		for i := 0; i < len(files); i += 2 {
			require.NoError(t, os.WriteFile(filepath.Join(dir, files[i]), []byte(files[i+1]), 0o600))
		}
		return dir
	}
	b, err := devpg.Find(t.Context())
	require.NoError(t, err)

	_, err = devpg.Start(t.Context(), devpg.Options{DataDir: with("PG_VERSION", "9\n")})
	var version *devpg.VersionError
	require.ErrorAs(t, err, &version)
	require.Equal(t, 9, version.Cluster)
	require.ErrorContains(t, err, "install PostgreSQL 9")

	for name, dir := range map[string]string{
		"other files":        with("notes.txt", "mine"),
		"old numbering":      with("PG_VERSION", "9.6\n"),
		"unfinished cluster": with("PG_VERSION", strconv.Itoa(b.Major)+"\n"),
	} {
		_, err := devpg.Start(t.Context(), devpg.Options{DataDir: dir})
		var foreign *devpg.ForeignDirError
		require.ErrorAs(t, err, &foreign, name)
		require.ErrorContains(t, err, dir, name)
	}
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]devpg.Options{
		"no directory": {},
		"bad port":     {DataDir: "x", Port: 70000},
		"bad binaries": {DataDir: "x", BinDir: t.TempDir()},
	} {
		_, err := devpg.Start(t.Context(), opts)
		require.Error(t, err, name)
	}
	require.NoDirExists(t, "x")
}

func TestFailedStartShowsTheServersWords(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	_, err := devpg.Start(t.Context(), devpg.Options{DataDir: dir, ExtraConfig: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "no_such_setting")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	addr, ok := l.Addr().(*net.TCPAddr)
	require.True(t, ok)
	_, err = devpg.Start(t.Context(), devpg.Options{DataDir: dir, Port: addr.Port})
	require.ErrorIs(t, err, devpg.ErrPortTaken)
	require.ErrorContains(t, err, strconv.Itoa(addr.Port))

	start(t, devpg.Options{DataDir: dir})
}

func TestCancelledInitializationLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := devpg.Start(ctx, devpg.Options{DataDir: dir})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, devpg.ErrNoBinaries)
	start(t, devpg.Options{DataDir: dir})
}

func TestCancelledSearchIsNoMissingInstallation(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := devpg.Start(ctx, devpg.Options{DataDir: dataDir(t)})
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, devpg.ErrNoBinaries)
}

// Every start but one is refused; none empties what another has begun.
func TestStartsAtOnceInOneDirectory(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	type started struct {
		server *devpg.Server
		err    error
	}
	results := make(chan started)
	const starts = 4
	for range starts {
		go func() {
			s, err := devpg.Start(t.Context(), devpg.Options{DataDir: dir, Port: -1})
			results <- started{s, err}
		}()
	}
	var servers []*devpg.Server
	for range starts {
		r := <-results
		if r.err == nil {
			servers = append(servers, r.server)
			continue
		}
		var running *devpg.RunningError
		require.ErrorAs(t, r.err, &running)
	}
	require.Len(t, servers, 1)
	require.Equal(t, 1, query[int](t, servers[0].DSN("postgres"), `select 1`))
	stop(t, servers[0])
}

func TestStopDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	s := start(t, devpg.Options{DataDir: dataDir(t)})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	// Either answer is right: it may be gone by the time Stop looks.
	if err := s.Stop(ctx); err != nil {
		require.ErrorIs(t, err, context.Canceled)
	}
	<-s.Done()
}

// TestRootNeedsAWayForTheServersAccount: root hands the server to another account, for
// anybody else it stays where it is and theirs.
func TestRootNeedsAWayForTheServersAccount(t *testing.T) { //nolint:paralleltest // it moves where such clusters go
	devpg.SetElsewhere(t, filepath.Dir(dataDir(t)))
	dir := dataDir(t)
	closed := filepath.Dir(dir)
	require.NoError(t, os.Chmod(closed, 0o700))
	owner := func(path string) uint32 {
		info, err := os.Stat(path)
		require.NoError(t, err)
		st, ok := info.Sys().(*syscall.Stat_t)
		require.True(t, ok)
		return st.Uid
	}

	s := start(t, devpg.Options{DataDir: dir})
	if me := os.Geteuid(); me != 0 {
		require.Equal(t, dir, s.DataDir())
		require.Equal(t, uint32(me), owner(dir))
		return
	}
	link, err := os.Readlink(dir)
	require.NoError(t, err)
	require.Equal(t, link, s.DataDir())
	require.NotZero(t, owner(dir))
	require.NoError(t, s.EnsureDatabase(t.Context(), "kept"))
	stop(t, s)
	s = start(t, devpg.Options{DataDir: dir})
	require.Equal(t, "kept", query[string](t, s.DSN("kept"), `select current_database()::text`))

	// A directory that exists stays where it is.
	dir = filepath.Join(closed, "another")
	require.NoError(t, os.Mkdir(dir, 0o700))
	_, err = devpg.Start(t.Context(), devpg.Options{DataDir: dir})
	var passage *devpg.PassageError
	require.ErrorAs(t, err, &passage)
	require.Equal(t, closed, passage.Blocked)
	require.ErrorContains(t, err, "chmod o+x "+closed)

	require.NoError(t, os.Chmod(closed, 0o711))
	s = start(t, devpg.Options{DataDir: dir})
	require.Equal(t, dir, s.DataDir())
	require.NotZero(t, owner(dir))
}
