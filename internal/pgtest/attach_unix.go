//go:build unix

package pgtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Files in the state directory of a repository.
const (
	usersLock      = "users.lock"      // shared: a process that uses the server; exclusive: a supervisor that found none
	startLock      = "start.lock"      // exclusive: a process that looks for the server or starts it
	supervisorLock = "supervisor.lock" // exclusive: the supervisor
	stateFile      = "cluster.json"    // how to reach the server; written by the supervisor
	logFile        = "supervisor.log"  // what the supervisor and the server print

	lockPause = 5 * time.Millisecond
)

// clusterState is the content of the state file.
type clusterState struct {
	DSN string `json:"dsn"` // of the maintenance database
	PID int    `json:"pid"` // of the supervisor
}

// attach takes a place among the users of the shared server, and returns the connection string of the server's maintenance
// database. It starts the supervisor if there is none. The place is held for as long as the returned file is open.
func attach(ctx context.Context) (string, *os.File, error) {
	root, err := repositoryRoot()
	if err != nil {
		return "", nil, err
	}
	dir, err := stateDirectory(root)
	if err != nil {
		return "", nil, err
	}
	users, err := lockFile(ctx, filepath.Join(dir, usersLock), syscall.LOCK_SH)
	if err != nil {
		return "", nil, err
	}
	dsn, err := findOrStart(ctx, root, dir)
	if err != nil {
		return "", nil, errors.Join(err, users.Close())
	}
	return dsn, users, nil
}

func findOrStart(ctx context.Context, root, dir string) (string, error) {
	start, err := lockFile(ctx, filepath.Join(dir, startLock), syscall.LOCK_EX)
	if err != nil {
		return "", err
	}
	defer func() { _ = start.Close() }()
	if dsn, ok := running(ctx, dir); ok {
		return dsn, nil
	}
	if err := startSupervisor(ctx, root, dir); err != nil {
		return "", err
	}
	state, err := readState(dir)
	return state.DSN, err
}

// running returns the server of a living supervisor.
func running(ctx context.Context, dir string) (string, bool) {
	lock, err := tryLockFile(filepath.Join(dir, supervisorLock), syscall.LOCK_EX)
	if err == nil {
		_ = lock.Close()
		return "", false
	}
	state, err := readState(dir)
	if err != nil {
		return "", false
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := withConn(ctx, state.DSN, func(*pgx.Conn) error { return nil }); err != nil {
		return "", false
	}
	return state.DSN, true
}

// startSupervisor runs this program once more, as a supervisor, and returns when its server answers.
func startSupervisor(ctx context.Context, root, dir string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, logFile))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command(program) //nolint:noctx // it outlives this process
	cmd.Env = append(os.Environ(), envSupervise+"="+dir, envRoot+"="+root)
	cmd.Stdout, cmd.Stderr = w, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return fmt.Errorf("start the supervisor: %w", err)
	}
	unwatch := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	answer, err := io.ReadAll(r)
	if !unwatch() {
		_ = cmd.Wait()
		return fmt.Errorf("wait for the supervisor: %w", context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("hear from the supervisor: %w", err)
	}
	if text := strings.TrimSpace(string(answer)); text != supervisorReady {
		_ = cmd.Wait()
		return fmt.Errorf("the supervisor says: %s (its log is %s)", text, log.Name())
	}
	return cmd.Process.Release()
}

func readState(dir string) (clusterState, error) {
	var s clusterState
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("read the state of the server: %w", err)
	}
	return s, nil
}

// writeState replaces the state file as a whole.
func writeState(dir string, s clusterState) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, stateFile)
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// repositoryRoot is the directory of the go.mod above the working directory.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
}

// stateDirectory is the directory through which the processes of this user find the server of a repository. The account
// that runs the server may pass through it, and only this user may write to it.
func stateDirectory(root string) (string, error) {
	return privateDirectory(filepath.Join(os.TempDir(), directoryName(root)))
}

// directoryName is a name that belongs to this user and a path.
func directoryName(path string) string {
	digest := sha256.Sum256([]byte(path))
	return fmt.Sprintf("syncpg-pgtest-%d-%s", os.Getuid(), hex.EncodeToString(digest[:6]))
}

// privateDirectory makes a directory that belongs to this user.
func privateDirectory(dir string) (string, error) {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	// Somebody else may have made a directory of that name to get hold of what we write there.
	if st, ok := info.Sys().(*syscall.Stat_t); !info.IsDir() || ok && int(st.Uid) != os.Getuid() {
		return "", fmt.Errorf("%s is not a directory of this user", dir)
	}
	return dir, os.Chmod(dir, 0o711)
}

// lockFile opens a file and locks it. It polls, since a wait in the kernel would not end with ctx.
func lockFile(ctx context.Context, path string, how int) (*os.File, error) {
	tick := time.NewTicker(lockPause)
	defer tick.Stop()
	for {
		f, err := tryLockFile(path, how)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return f, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the lock on %s: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}

// tryLockFile opens a file and locks it, or fails with EWOULDBLOCK. Closing the file unlocks it.
func tryLockFile(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}
