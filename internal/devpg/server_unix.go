//go:build unix

package devpg

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// socketPathMax is the longest directory for sockets that every supported system accepts; the path of a socket may
	// have 103 bytes on the strictest of them.
	socketPathMax = 103 - len("/.s.PGSQL.65535.lock")
	bindAttempts  = 5
	stopGrace     = 5 * time.Second
)

// Server is a running PostgreSQL server.
type Server struct {
	bin       Binaries
	dataDir   string
	socketDir string
	port      int // as in the name of the socket
	tcp       bool
	password  string
	log       *slog.Logger

	proc    *os.Process
	out     *output
	done    chan struct{}
	exitErr error // valid once done is closed

	stopOnce sync.Once
}

// Start runs a server in opts.DataDir and returns when it answers. ctx bounds the start, not the life of the server.
//
// It fails with an error that wraps [ErrNoBinaries] or [ErrPortTaken], or with a [VersionError], [ForeignDirError], [RunningError] or
// [PassageError].
func Start(ctx context.Context, opts Options) (*Server, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	s, err := start(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	return s, nil
}

func start(ctx context.Context, opts Options) (*Server, error) {
	var lock dirLock
	defer lock.release()
	if err := lock.take(opts.DataDir); err != nil {
		return nil, err
	}
	major, err := clusterVersion(opts.DataDir)
	if err != nil {
		return nil, err
	}
	bin, err := findFor(ctx, opts, major)
	if err != nil {
		return nil, err
	}
	acct, err := serverAccount(opts.DataDir)
	if err != nil {
		return nil, err
	}
	if err := makeDir(&opts, acct); err != nil {
		return nil, err
	}
	if err := lock.take(opts.DataDir); err != nil {
		return nil, err
	}
	// Another start may have filled the directory before it was locked.
	if major, err = clusterVersion(opts.DataDir); err != nil {
		return nil, err
	}
	if f, running, err := findRunning(opts.DataDir); err != nil {
		return nil, err
	} else if running {
		return nil, &RunningError{DataDir: opts.DataDir, PID: f.pid, Port: f.port}
	}
	if err := handOver(opts.DataDir, acct); err != nil {
		return nil, err
	}
	if err := acct.checkPassage(bin.Program("postgres")); err != nil {
		return nil, err
	}
	socketDir, err := makeSocketDir(acct)
	if err != nil {
		return nil, err
	}
	s := &Server{bin: bin, dataDir: opts.DataDir, socketDir: socketDir, log: opts.Logger}
	if err := s.open(ctx, opts, acct, major == 0); err != nil {
		return nil, errors.Join(err, os.RemoveAll(socketDir))
	}
	return s, nil
}

// open initializes the cluster if it is new, and starts the server.
func (s *Server) open(ctx context.Context, opts Options, acct account, isNew bool) error {
	if isNew {
		opts.Logger.InfoContext(ctx, "initializing a PostgreSQL cluster", "dir", s.dataDir, "version", s.bin.Version)
		if err := s.initialize(ctx, acct, opts.Fsync); err != nil {
			return errors.Join(err, emptyDir(s.dataDir))
		}
	}
	password, err := os.ReadFile(filepath.Join(s.dataDir, PasswordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return &ForeignDirError{DataDir: s.dataDir, Reason: "holds a cluster that syncpg did not make, or not to its end"}
	}
	if err != nil {
		return fmt.Errorf("read the password of the cluster: %w", err)
	}
	s.password = strings.TrimSpace(string(password))

	for attempt := 1; ; attempt++ {
		err = s.launch(ctx, opts, acct)
		if opts.Port != 0 || attempt == bindAttempts || !errors.Is(err, ErrPortTaken) {
			return err
		}
	}
}

// findFor chooses the binaries for a cluster of the given major version; 0: for a new one.
func findFor(ctx context.Context, opts Options, major int) (Binaries, error) {
	var all []Binaries
	var err error
	if opts.BinDir != "" {
		var b Binaries
		b, err = inspect(ctx, opts.BinDir)
		if err != nil {
			return Binaries{}, fmt.Errorf("%w in %s: %w", ErrNoBinaries, opts.BinDir, err)
		}
		all = []Binaries{b}
	} else {
		all, err = FindAll(ctx)
		if isNoBinaries(err) && opts.AllowDownload {
			var b Binaries
			b, err = download(ctx, opts)
			all = []Binaries{b}
		}
		if err != nil {
			return Binaries{}, err
		}
	}
	b, ok := choose(all, major)
	if !ok {
		return Binaries{}, &VersionError{DataDir: opts.DataDir, Cluster: major, Binaries: all[0].Major, BinDir: all[0].Dir}
	}
	return b, nil
}

// clusterVersion returns the major version of the cluster in dir, and 0 if there is none yet.
func clusterVersion(dir string) (int, error) {
	b, err := os.ReadFile(filepath.Join(dir, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, fmt.Errorf("look into the data directory: %w", err)
		}
		if len(entries) > 0 {
			return 0, &ForeignDirError{DataDir: dir, Reason: "holds other files and no PostgreSQL cluster"}
		}
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the version of the cluster: %w", err)
	}
	text := strings.TrimSpace(string(b))
	major, err := strconv.Atoi(text)
	if err != nil {
		return 0, &ForeignDirError{DataDir: dir, Reason: fmt.Sprintf("holds a cluster of version %q", text)}
	}
	return major, nil
}

// makeDir makes the data directory and resolves its links.
func makeDir(opts *Options, acct account) error {
	parent := filepath.Dir(opts.DataDir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return fmt.Errorf("make the parent of the data directory: %w", err)
	}
	if err := linkElsewhere(opts, acct); err != nil {
		return err
	}
	if err := os.Mkdir(opts.DataDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the data directory: %w", err)
	}
	dir, err := filepath.EvalSymlinks(opts.DataDir)
	if err != nil {
		return fmt.Errorf("resolve the data directory: %w", err)
	}
	opts.DataDir = dir
	return nil
}

// handOver gives the data directory to the account. No server may run in it, since its files come and go.
func handOver(dir string, acct account) error {
	if err := errors.Join(os.Chmod(dir, 0o700), acct.ownTree(dir)); err != nil {
		return fmt.Errorf("hand over the data directory: %w", err)
	}
	return acct.checkPassage(dir)
}

// elsewhere are the directories for the clusters of root that cannot be where they are asked for.
var elsewhere = []string{"/var/lib/syncpg", "/var/tmp"}

// linkElsewhere makes the data directory a link to a new directory elsewhere if it does not exist and the account could not
// reach it, as below the home directory of root.
func linkElsewhere(opts *Options, acct account) error {
	path, err := filepath.EvalSymlinks(filepath.Dir(opts.DataDir))
	if err != nil {
		return fmt.Errorf("resolve the data directory: %w", err)
	}
	blocked := acct.checkPassage(filepath.Join(path, filepath.Base(opts.DataDir)))
	if _, err := os.Lstat(opts.DataDir); blocked == nil || !errors.Is(err, fs.ErrNotExist) {
		return nil // fine as it is, or there and to be judged where it leads
	}
	problem := blocked
	for _, base := range elsewhere {
		if err := os.MkdirAll(base, 0o755); err != nil {
			problem = errors.Join(problem, err)
			continue
		}
		dir, err := os.MkdirTemp(base, "syncpg-cluster-")
		if err != nil {
			problem = errors.Join(problem, err)
			continue
		}
		if err := errors.Join(acct.checkPassage(dir), os.Symlink(dir, opts.DataDir)); err != nil {
			problem = errors.Join(problem, err, os.Remove(dir))
			continue
		}
		opts.Logger.Info("the cluster goes elsewhere, since its account cannot reach the data directory",
			"dir", opts.DataDir, "elsewhere", dir, "account", acct.name)
		return nil
	}
	return problem
}

// makeSocketDir makes the private directory of the socket. Its path has to be short, and the account must reach it.
func makeSocketDir(acct account) (string, error) {
	var problem error
	for _, base := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		dir, err := os.MkdirTemp(base, "syncpg-")
		if err != nil {
			problem = errors.Join(problem, err)
			continue
		}
		path, err := filepath.EvalSymlinks(dir)
		if err == nil {
			err = errors.Join(acct.own(path), acct.checkPassage(path))
		}
		if err == nil && len(path) > socketPathMax {
			err = fmt.Errorf("path %s is too long for a socket", path)
		}
		if err == nil {
			return path, nil
		}
		problem = errors.Join(problem, err, os.Remove(dir))
	}
	return "", fmt.Errorf("make a directory for the server's socket: %w", problem)
}

// initialize makes the cluster.
func (s *Server) initialize(ctx context.Context, acct account, sync bool) error {
	var random [16]byte
	if _, err := rand.Read(random[:]); err != nil {
		return fmt.Errorf("make a password: %w", err)
	}
	password := []byte(hex.EncodeToString(random[:]) + "\n")
	pwfile := filepath.Join(s.socketDir, "password")
	if err := errors.Join(os.WriteFile(pwfile, password, 0o600), acct.own(pwfile)); err != nil {
		return fmt.Errorf("hand the password to initdb: %w", err)
	}
	args := []string{
		"-D", s.dataDir, "-U", Superuser, "--pwfile", pwfile,
		"--auth-local=trust", "--auth-host=scram-sha-256",
		"--encoding=UTF8", "--locale=C", "--no-instructions",
	}
	if !sync {
		args = append(args, "--no-sync")
	}
	out := &output{log: s.log}
	cmd := exec.CommandContext(ctx, s.bin.Program("initdb"), args...)
	cmd.SysProcAttr = acct.procAttr()
	cmd.Dir, cmd.Env = "/", environ()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = stopGrace
	if err := cmd.Run(); ctx.Err() != nil {
		return fmt.Errorf("initialize the cluster: %w", ctx.Err())
	} else if err != nil {
		return fmt.Errorf("initialize the cluster: %w\n%s", err, out)
	}
	if err := os.Remove(pwfile); err != nil {
		return fmt.Errorf("remove the password file: %w", err)
	}
	keep := filepath.Join(s.dataDir, PasswordFile)
	if err := errors.Join(os.WriteFile(keep, password, 0o600), acct.own(keep)); err != nil {
		return fmt.Errorf("keep the password of the cluster: %w", err)
	}
	return nil
}

// emptyDir removes what a failed initialization left, so that the next one starts afresh.
func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// environ is the environment of the server programs: ours without what would redirect them.
func environ() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	})
	return append(env, "LC_ALL=C")
}

// launch starts the server process and waits until it answers.
func (s *Server) launch(ctx context.Context, opts Options, acct account) error {
	s.port, s.tcp = opts.Port, true
	switch opts.Port {
	case -1:
		s.port, s.tcp = 0, false
	case 0:
		port, err := freePort(ctx)
		if err != nil {
			return err
		}
		s.port = port
	}
	args := []string{"-D", s.dataDir}
	settings := opts.settings(s.socketDir, s.port)
	for name, value := range settings {
		args = append(args, "-c", name+"="+value)
	}
	if s.port, _ = strconv.Atoi(settings["port"]); s.port == 0 {
		return fmt.Errorf("bad port %q", settings["port"])
	}
	s.out = &output{log: s.log}
	s.done = make(chan struct{})
	cmd := exec.Command(s.bin.Program("postgres"), args...) //nolint:noctx // the server outlives the start
	cmd.SysProcAttr = acct.procAttr()
	endWithParent(cmd.SysProcAttr)
	cmd.Dir, cmd.Env = "/", environ()
	cmd.Stdout, cmd.Stderr = s.out, s.out
	cmd.WaitDelay = stopGrace

	started := make(chan error, 1)
	go func() {
		// The kernel's notice of a dead parent is bound to the thread that started the child, so that thread waits.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			s.exitErr = cmd.Wait()
			close(s.done)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	s.proc = cmd.Process
	if err := s.awaitReady(ctx, opts.StartTimeout); err != nil {
		_ = s.proc.Signal(syscall.SIGQUIT)
		<-s.done
		if text := s.out.String(); strings.Contains(text, "could not bind") || strings.Contains(text, "could not create any TCP/IP sockets") {
			return fmt.Errorf("%w: %d", ErrPortTaken, s.port)
		}
		return fmt.Errorf("%w\n%s", err, s.out)
	}
	s.log.InfoContext(ctx, "PostgreSQL is running", "version", s.bin.Version, "dir", s.dataDir, "port", s.port)
	return nil
}

// awaitReady polls until the server accepts a connection.
func (s *Server) awaitReady(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s", timeout))
	defer cancel()
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		lastErr := s.ping(ctx)
		if lastErr == nil {
			return nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-s.done:
			timer.Stop()
			return fmt.Errorf("the server ended while starting: %w", s.exitErr)
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("wait for the server: %w (last answer: %w)", context.Cause(ctx), lastErr)
		}
	}
}

func (s *Server) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.SocketDSN("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// EnsureDatabase makes a database unless it exists.
func (s *Server) EnsureDatabase(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, s.SocketDSN("postgres"))
	if err != nil {
		return fmt.Errorf("devpg: connect: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var exists bool
	if err := conn.QueryRow(ctx, `select exists (select from pg_catalog.pg_database where datname = $1)`, name).Scan(&exists); err != nil {
		return fmt.Errorf("devpg: look for database %s: %w", name, err)
	}
	if exists {
		return nil
	}
	if _, err := conn.Exec(ctx, `create database `+pgx.Identifier{name}.Sanitize()); err != nil {
		return fmt.Errorf("devpg: create database %s: %w", name, err)
	}
	return nil
}

// DSN returns the URL of a database of the server over TCP, password included; over the socket if the server has no TCP.
func (s *Server) DSN(database string) string {
	if !s.tcp {
		return s.SocketDSN(database)
	}
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(Superuser, s.password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// SocketDSN returns the URL of a database of the server over the Unix socket. Only root and the account of the server can
// use it.
func (s *Server) SocketDSN(database string) string {
	q := url.Values{"host": {s.socketDir}, "port": {strconv.Itoa(s.port)}}
	u := url.URL{Scheme: "postgres", User: url.User(Superuser), Path: "/" + database, RawQuery: q.Encode()}
	return u.String()
}

// DataDir returns the directory of the cluster.
func (s *Server) DataDir() string { return s.dataDir }

// PID returns the process id of the server.
func (s *Server) PID() int { return s.proc.Pid }

// Binaries returns the installation that the server runs from.
func (s *Server) Binaries() Binaries { return s.bin }

// Done returns a channel that is closed when the server has ended, by Stop or by itself.
func (s *Server) Done() <-chan struct{} { return s.done }

// Stop ends the server in the orderly way that disconnects its clients, and returns when it is gone. When ctx ends first
// the server is told to quit at once, which costs it a recovery at the next start, and Stop returns an error. A further
// call waits for the same end.
func (s *Server) Stop(ctx context.Context) error {
	s.stopOnce.Do(func() { _ = s.proc.Signal(syscall.SIGINT) })
	var err error
	select {
	case <-s.done:
		if s.exitErr != nil {
			err = fmt.Errorf("devpg: the server ended badly: %w\n%s", s.exitErr, s.out)
		}
	case <-ctx.Done():
		_ = s.proc.Signal(syscall.SIGQUIT)
		<-s.done
		err = fmt.Errorf("devpg: the server did not stop in time and was told to quit: %w", context.Cause(ctx))
	}
	return errors.Join(err, os.RemoveAll(s.socketDir))
}

func freePort(ctx context.Context) (int, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer func() { _ = l.Close() }()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return 0, fmt.Errorf("find a free port: unexpected address %s", l.Addr())
	}
	return addr.Port, nil
}
