//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package devpg

import (
	"errors"
	"os"
	"syscall"
)

// heldByAnother locks an open file, or says that another has locked it.
func heldByAnother(f *os.File) bool {
	return errors.Is(syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// unlock frees the lock also where a process that is just being started has the open file too.
func unlock(f *os.File) { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }
