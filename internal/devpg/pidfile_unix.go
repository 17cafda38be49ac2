//go:build unix

package devpg

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// pidFile is what a server wrote into its postmaster.pid.
type pidFile struct {
	pid  int
	port int // 0 while the server is starting
}

func readPIDFile(dataDir string) (pidFile, bool, error) {
	b, err := os.ReadFile(filepath.Join(dataDir, "postmaster.pid"))
	if errors.Is(err, fs.ErrNotExist) {
		return pidFile{}, false, nil
	}
	if err != nil {
		return pidFile{}, false, fmt.Errorf("read postmaster.pid: %w", err)
	}
	lines := strings.Split(string(b), "\n")
	var f pidFile
	// A standalone backend writes its process id as a negative number.
	f.pid, _ = strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(lines[0]), "-")) // 0 if it is no number
	if len(lines) > 3 {
		f.port, _ = strconv.Atoi(strings.TrimSpace(lines[3]))
	}
	return f, true, nil
}

// findRunning returns the server that runs in dataDir. A lock file left by a server that is gone is removed, since the
// server itself would take a later process with the same number for its owner.
func findRunning(dataDir string) (pidFile, bool, error) {
	f, ok, err := readPIDFile(dataDir)
	if err != nil || !ok {
		return pidFile{}, false, err
	}
	if f.pid > 0 && alive(f.pid) && worksIn(f.pid, dataDir) {
		return f, true, nil
	}
	if err := os.Remove(filepath.Join(dataDir, "postmaster.pid")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return pidFile{}, false, fmt.Errorf("remove the lock file of a server that is gone: %w", err)
	}
	return pidFile{}, false, nil
}

func alive(pid int) bool {
	err := syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// StopLeftover ends a server that an earlier process left running in dataDir, and waits until it is gone. It does nothing
// if none runs there. When ctx ends first the server is told to quit at once, without flushing.
func StopLeftover(ctx context.Context, dataDir string) error {
	f, ok, err := findRunning(dataDir)
	if err != nil || !ok {
		return err
	}
	if err := syscall.Kill(f.pid, syscall.SIGINT); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stop server %d in %s: %w", f.pid, dataDir, err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for alive(f.pid) {
		select {
		case <-ctx.Done():
			_ = syscall.Kill(f.pid, syscall.SIGQUIT)
			return fmt.Errorf("stop server %d in %s: %w", f.pid, dataDir, context.Cause(ctx))
		case <-tick.C:
		}
	}
	return nil
}
