//go:build unix

package devpg

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// dirLock keeps other starts out of a data directory. The zero value holds nothing.
type dirLock struct{ dir *os.File }

// take locks a directory, once; one that is not there yet is left alone. It fails with a [RunningError] when another start
// holds the lock. Where the file system knows no locks, nothing is kept out.
func (l *dirLock) take(path string) error {
	if l.dir != nil {
		return nil
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the data directory: %w", err)
	}
	if heldByAnother(f) {
		_ = f.Close()
		return &RunningError{DataDir: path}
	}
	l.dir = f
	return nil
}

func (l *dirLock) release() {
	if l.dir != nil {
		unlock(l.dir)
		_ = l.dir.Close()
	}
}
