//go:build unix

package pgtest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/syncpg/syncpg/internal/devpg"
)

const (
	envSupervise = "SYNCPG_PGTEST_SUPERVISE" // state directory; makes any program that imports this package a supervisor
	envRoot      = "SYNCPG_PGTEST_ROOT"      // root of the repository

	supervisorReady = "ready"
	defaultLinger   = 10 * time.Second
	lookPeriod      = 100 * time.Millisecond
	stopTimeout     = 30 * time.Second

	memoryDirectory = "/dev/shm"
	memoryNeeded    = 4 << 30 // bytes
)

// A supervisor has no main function of its own: it has to be a copy of whatever program needs a server first.
func init() {
	dir := os.Getenv(envSupervise)
	if dir == "" {
		return
	}
	linger, err := time.ParseDuration(cmp.Or(os.Getenv(EnvLinger), defaultLinger.String()))
	if err == nil {
		err = supervise(dir, os.Getenv(envRoot), linger)
	}
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// testSettings are the server settings that differ from the defaults.
var testSettings = map[string]string{
	"autovacuum":                "off", // plans depend on what a test does, not on when it runs
	"max_connections":           "200",
	"max_locks_per_transaction": "128",
	"wal_level":                 "minimal",
	"max_wal_senders":           "0",
	"max_wal_size":              "512MB",
	"checkpoint_timeout":        "1h",
	"log_checkpoints":           "off",
	"timezone":                  "Asia/Kathmandu", // not UTC, and not a whole hour from it: an assumption shows
}

// supervise runs the server until it has had no user for a while. It prints one line: that the server is ready, or why
// there is none.
func supervise(dir, root string, linger time.Duration) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	signal.Ignore(syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)

	startCtx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	// A predecessor may still be stopping its server.
	lock, err := lockFile(startCtx, filepath.Join(dir, supervisorLock), syscall.LOCK_EX)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	data, err := dataDirectory(dir)
	if err != nil {
		return err
	}
	if err := removeRemains(startCtx, dir, data); err != nil {
		return err
	}
	if data, err = dataDirectory(dir); err != nil {
		return err
	}
	server, err := startServer(startCtx, data, root)
	if err != nil {
		return err
	}
	if err := writeState(dir, clusterState{DSN: server.dsn, PID: os.Getpid()}); err != nil {
		return errors.Join(err, server.stop())
	}
	fmt.Fprintln(os.Stdout, supervisorReady)
	if err := os.Stdout.Close(); err != nil {
		return errors.Join(err, server.stop())
	}
	users := awaitUnused(ctx, dir, linger, server.done)
	// From here to the end of this process nobody becomes a user.
	defer func() { _ = users.Close() }()
	return errors.Join(server.stop(), removeRemains(context.WithoutCancel(ctx), dir, data))
}

// dataDirectory is where the cluster goes: into memory if there is room. Making a database is making some hundred small
// files, which costs six times as much on a disk's file system.
func dataDirectory(dir string) (string, error) {
	if available(memoryDirectory) >= memoryNeeded {
		var err error
		if dir, err = privateDirectory(filepath.Join(memoryDirectory, directoryName(dir))); err != nil {
			return "", err
		}
	}
	return filepath.Join(dir, "data"), nil
}

// available returns the free bytes of a file system; 0 if there is no such directory.
func available(dir string) uint64 {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return 0
	}
	return uint64(fs.Bavail) * uint64(fs.Bsize) //nolint:unconvert // the types differ between systems
}

// awaitUnused returns with the users file locked when the server has had no user for the time of linger. It returns at
// once when ctx ends or the server does.
func awaitUnused(ctx context.Context, dir string, linger time.Duration, done <-chan struct{}) *os.File {
	tick := time.NewTicker(lookPeriod)
	defer tick.Stop()
	idleSince := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-done:
			return nil
		case now := <-tick.C:
			users, err := tryLockFile(filepath.Join(dir, usersLock), syscall.LOCK_EX)
			switch {
			case err != nil:
				idleSince = now
			case now.Sub(idleSince) >= linger:
				return users
			default:
				_ = users.Close()
			}
		}
	}
}

// removeRemains removes the state file and the data, of this supervisor or of one that was killed, and ends the server that such a
// one left.
func removeRemains(ctx context.Context, dir, data string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := os.Remove(filepath.Join(dir, stateFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	err := errors.Join(devpg.StopLeftover(ctx, data), os.RemoveAll(data))
	if parent := filepath.Dir(data); parent != dir {
		err = errors.Join(err, os.Remove(parent))
	}
	return err
}

// server is a server that the supervisor runs.
type server struct {
	dsn  string
	done <-chan struct{}
	stop func() error
}

// startServer starts a server from the machine's binaries, or else in a container.
func startServer(ctx context.Context, data, root string) (server, error) {
	s, err := devpg.Start(ctx, devpg.Options{
		DataDir:     data,
		Port:        -1,
		ExtraConfig: testSettings,
		Logger:      slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err == nil {
		return server{
			dsn:  s.SocketDSN(devpg.Superuser),
			done: s.Done(),
			stop: func() error {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
				defer cancel()
				return s.Stop(ctx)
			},
		}, nil
	}
	if !errors.Is(err, devpg.ErrNoBinaries) {
		return server{}, err
	}
	c, dockerErr := startContainer(root)
	if dockerErr != nil {
		return server{}, fmt.Errorf("%w; or set %s to the URL of a server, or start Docker, where this failed: %w",
			err, EnvDatabaseURL, dockerErr)
	}
	return c, nil
}

// startContainer runs the command that keeps a server in a container for as long as its standard input is open. The
// command is in the module of the tools, with the libraries that it needs.
func startContainer(root string) (server, error) {
	cmd := exec.Command("go", "run", "./pgdocker") //nolint:noctx // it lives as long as the supervisor
	cmd.Dir = filepath.Join(root, "tools")
	var complaint bytes.Buffer
	cmd.Stderr = io.MultiWriter(os.Stderr, &complaint)
	in, err := cmd.StdinPipe()
	if err != nil {
		return server{}, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return server{}, err
	}
	if err := cmd.Start(); err != nil {
		return server{}, err
	}
	dsn, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		if !errors.Is(err, io.EOF) {
			_ = cmd.Process.Kill()
		}
		waitErr := cmd.Wait()
		return server{}, errors.Join(fmt.Errorf("%s: %s", cmd, strings.TrimSpace(complaint.String())), waitErr)
	}
	done := make(chan struct{})
	var waitErr error
	go func() {
		waitErr = cmd.Wait()
		close(done)
	}()
	return server{
		dsn:  strings.TrimSpace(dsn),
		done: done,
		stop: func() error {
			err := in.Close()
			<-done
			return errors.Join(err, waitErr)
		},
	}, nil
}
