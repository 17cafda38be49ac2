package devpg

import (
	"errors"
	"fmt"
)

// ErrNoBinaries reports that the machine has no usable PostgreSQL server binaries. The error that wraps it says what to
// install on this platform.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found")

// ErrPortTaken reports that another process has the port that was asked for.
var ErrPortTaken = errors.New("the port of the database is taken")

// ErrUnsupported reports a platform on which devpg cannot run a server. Use an existing server there.
var ErrUnsupported = errors.New("running a private PostgreSQL server is not supported on this platform")

// VersionError reports a data directory that was initialized by another major version than any of the binaries found.
type VersionError struct {
	DataDir  string // the data directory
	Cluster  int    // major version that initialized it
	Binaries int    // newest major version found on the machine
	BinDir   string // where that version is
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("data directory %s was made by PostgreSQL %d, but the binaries in %s are of version %d: "+
		"install PostgreSQL %d, set %s to its bin directory, or use another data directory",
		e.DataDir, e.Cluster, e.BinDir, e.Binaries, e.Cluster, EnvBinDir)
}

// ForeignDirError reports a data directory that cannot be taken up: it holds something that devpg did not put there, or
// the rest of an initialization that was cut off.
type ForeignDirError struct {
	DataDir string
	Reason  string
}

func (e *ForeignDirError) Error() string {
	return fmt.Sprintf("data directory %s %s: remove it or use another one", e.DataDir, e.Reason)
}

// RunningError reports that a server already runs in the data directory, or is being started there.
type RunningError struct {
	DataDir string
	PID     int // process of the server; 0 if another process is starting it
	Port    int // its port; 0 if unknown
}

func (e *RunningError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("another process is starting a PostgreSQL server in %s: use that one, or another data directory", e.DataDir)
	}
	return fmt.Sprintf("a PostgreSQL server (process %d, port %d) already runs in %s: if it is not just ending, "+
		"end it with `kill -INT %d`, or use another data directory", e.PID, e.Port, e.DataDir, e.PID)
}

// PassageError reports a directory on the way to the data directory or to the binaries that the account of the server may
// not enter.
type PassageError struct {
	Path    string // what has to be reached
	Blocked string // the directory that cannot be entered
	Account string // the account that cannot enter it
}

func (e *PassageError) Error() string {
	return fmt.Sprintf("PostgreSQL does not run as root, and the account %q cannot reach %s because it may not enter %s: "+
		"use a directory elsewhere, or allow passage with `chmod o+x %s`", e.Account, e.Path, e.Blocked, e.Blocked)
}
