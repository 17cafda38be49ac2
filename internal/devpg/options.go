package devpg

import (
	"cmp"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"strconv"
	"time"
)

// PasswordFile is the file in the data directory that holds the password of the superuser. It is written last: its
// presence marks a finished initialization.
const PasswordFile = "syncpg.password"

// Superuser is the role that owns a cluster of devpg.
const Superuser = "postgres"

// Options says which cluster to run and how. The zero value of every field but DataDir is usable.
type Options struct {
	// DataDir is the directory of the cluster. It is made if it does not exist, and kept when the server stops. Where root
	// asks for a new one that the account of the server could not reach, as below root's home directory, it becomes a
	// link to a directory in /var/lib/syncpg. Required.
	DataDir string

	// BinDir is the directory of the server binaries. Empty: the newest installation of the machine, or the one that
	// fits the cluster in DataDir.
	BinDir string

	// Port is the TCP port on 127.0.0.1. 0: a free port. -1: no TCP, only the Unix socket.
	Port int

	// Fsync makes commits survive a crash of the operating system. False, for tests, sets fsync and full_page_writes
	// off; synchronous_commit keeps its default in both cases.
	Fsync bool

	// ExtraConfig holds server settings by name. They win over the ones that devpg sets.
	ExtraConfig map[string]string

	// AllowDownload allows a download of server binaries from the internet when the machine has none.
	AllowDownload bool

	// DownloadDir keeps downloaded binaries. Empty: a directory of syncpg in the cache directory of the user, or of the
	// system for root.
	DownloadDir string

	// StartTimeout bounds the wait for a started server to answer. 0: one minute. Recovery after a crash counts.
	StartTimeout time.Duration

	// Logger receives what devpg does at level Info and the server's own output at level Debug. Nil: nothing is logged.
	Logger *slog.Logger
}

func (o Options) withDefaults() (Options, error) {
	if o.DataDir == "" {
		return o, errors.New("no data directory given")
	}
	abs, err := filepath.Abs(o.DataDir)
	if err != nil {
		return o, err
	}
	o.DataDir = abs
	if o.Port < -1 || o.Port > 65535 {
		return o, errors.New("port must be between -1 and 65535")
	}
	o.StartTimeout = cmp.Or(o.StartTimeout, time.Minute)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// settings returns the server settings of a start.
func (o Options) settings(socketDir string, port int) map[string]string {
	s := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    "5432",
		"unix_socket_directories": socketDir,
		"unix_socket_permissions": "0777", // the directory is private
		"lc_messages":             "C",
		"logging_collector":       "off",
		"log_destination":         "stderr",
	}
	if port > 0 {
		s["port"] = strconv.Itoa(port)
	} else {
		s["listen_addresses"] = ""
	}
	if !o.Fsync {
		s["fsync"] = "off"
		s["full_page_writes"] = "off"
	}
	maps.Copy(s, o.ExtraConfig)
	return s
}
