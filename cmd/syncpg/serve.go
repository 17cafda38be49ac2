package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/config"
	"github.com/syncpg/syncpg/schemaddl"
)

// listenFlags say where a server listens and how it ends.
type listenFlags struct {
	Listen          string        `name:"listen" default:"127.0.0.1:8787" setting:"" help:"Address to listen on. Port 0 takes a free one."`
	ShutdownTimeout time.Duration `name:"shutdown-timeout" default:"10s" setting:"" help:"How long requests may go on after Ctrl-C or SIGTERM before they are cut off."`
}

// authFlags say how the server learns who asks.
type authFlags struct {
	DevAuth             bool     `name:"dev-auth" setting:"" group:"auth" help:"Believe every token of the form dev:<actor>:<partition> and allow every scope. Never for data that matters."`
	DevAuthRemote       bool     `name:"dev-auth-remote" setting:"" group:"auth" help:"Let --dev-auth listen on other addresses than loopback ones, where anybody who reaches them may read and write everything."`
	AuthHeaderActor     string   `name:"auth-header-actor" placeholder:"NAME" setting:"" group:"auth" help:"Header that holds the actor, such as X-Syncpg-Actor."`
	AuthHeaderPartition string   `name:"auth-header-partition" placeholder:"NAME" setting:"" group:"auth" help:"Header that holds the partition, such as X-Syncpg-Partition."`
	AuthHeaderScopes    string   `name:"auth-header-scopes" placeholder:"NAME" setting:"" group:"auth" help:"Header that holds the allowed scopes as JSON, variable to values: {\"team_id\": [\"red\", \"blue\"]}. The value * allows all. Requests without it are refused. The text outage instead says that the scopes cannot be found out now, see --lease-key."`
	AllowAllScopes      bool     `name:"allow-all-scopes" setting:"" group:"auth" help:"Instead of --auth-header-scopes: every actor may read and write all rows of its partition."`
	TrustedProxy        []string `name:"trusted-proxy" placeholder:"ADDRESS" setting:"" group:"auth" help:"Address or network (10.0.0.0/8) whose headers are believed; may be repeated. Default: loopback addresses only."`
}

type serveCmd struct {
	schemaFlags
	olderFlags
	listenFlags
	observeFlags
	authFlags
	leaseFlags
	realtimeFlags
	segmentFlags
	retentionFlags
	MaxCompressed int           `name:"max-compressed" placeholder:"N" setting:"" help:"How many responses may be compressed at a time, with about 1 MiB of memory each; further ones go out as they are. -1: any number. Default: 128."`
	PruneInterval time.Duration `name:"prune-interval" default:"1h" setting:"" group:"retention" help:"How often the logs are pruned, by one of the servers of a database. 0: never."`
}

// Help explains the command.
func (*serveCmd) Help() string {
	return `Serves POST /sync, GET /segments/{id}, GET /realtime, GET /healthz and GET /readyz. It checks first that the ` +
		`database has the migrations and the schema it needs, and otherwise names the command that brings them; it never ` +
		`changes them itself.

Authentication: the program has to be told how to tell who asks, and refuses to start without. For production put it ` +
		`behind a proxy that authenticates, and name the headers in which the proxy passes actor, partition and scopes ` +
		`(--auth-header-…). That is safe when two things hold: the proxy removes these headers from what clients send, and ` +
		`clients cannot reach this server past it. The second is checked: requests from other addresses than ` +
		`--trusted-proxy are refused. Why a request was refused is logged at --log-level debug. Programs that decide in Go embed ` +
		`the package instead. A socket has the headers of the request that opened it for as long as it is open.

TLS ends at the proxy. Sizes of the pool are part of the database URL: ?pool_max_conns=20. Behind a pooler in ` +
		`transaction mode add ?default_query_exec_mode=exec, and give --listen-url or --poll-only.

With --metrics-listen a second listener serves GET /metrics in the format of Prometheus. It asks nobody who they are and ` +
		`tells numbers only, no partition, actor or row; keep it where only the monitoring reaches it.`
}

// Run serves until ctx ends.
func (c *serveCmd) Run(ctx context.Context, p *program) error {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	older, err := c.load(s, name)
	if err != nil {
		return err
	}
	a, err := c.auth(s)
	if err != nil {
		return err
	}
	policy, err := c.policy()
	if err != nil {
		return err
	}
	interval := c.PruneInterval
	switch {
	case interval <= 0:
		interval = -1
	case interval < time.Second:
		return usagef("--prune-interval is %v; it must be at least a second, or 0 for never", interval)
	}
	pool, err := c.pool(ctx, p)
	if err != nil {
		return err
	}
	defer pool.Close()
	o, err := c.observe(ctx, p)
	if err != nil {
		return err
	}
	defer o.stop()
	conf := syncpg.Config{
		Schema: s, OlderSchemas: older, AppSchema: string(c.AppSchema), Authenticate: a.authenticate, ResolveScopes: a.resolveScopes,
		Events: o.sink, Logger: p.log, Retention: policy, PruneInterval: interval, MaxCompressed: c.MaxCompressed,
	}
	if err := c.apply(&conf); err != nil {
		return err
	}
	if err := c.configure(ctx, &conf); err != nil {
		return err
	}
	if err := c.leases(c.AuthHeaderScopes != "", &conf); err != nil {
		return err
	}
	server, err := syncpg.New(pool, conf)
	if err != nil {
		return fmt.Errorf("make the server: %w", err)
	}
	if err := server.Ready(ctx); err != nil {
		return notReady(err, c.Schema)
	}
	l, err := c.listen(ctx)
	if err != nil {
		return err
	}
	serving := []any{
		"url", "http://" + l.Addr().String(), "schema", name, "version", s.Version,
		"database", config.Target(&pool.Config().ConnConfig.Config),
	}
	if len(older) > 0 {
		serving = append(serving, "older_versions", describeOlder(older))
	}
	if o.url != "" {
		serving = append(serving, "metrics", o.url)
	}
	p.log.Info("serving", serving...)
	return c.run(ctx, p, l, server, a.wrap(server.Handler()))
}

func (c *serveCmd) auth(s *syncpg.Schema) (auth, error) {
	byHeader := c.AuthHeaderActor != "" || c.AuthHeaderPartition != "" || c.AuthHeaderScopes != ""
	switch {
	case c.DevAuth && (byHeader || c.AllowAllScopes || len(c.TrustedProxy) > 0):
		return auth{}, usagef("--dev-auth goes with no other flag of authentication")
	case c.DevAuth:
		return devAuth(s), c.checkDevAuth()
	case !byHeader:
		return auth{}, usagef("it is not said how to tell who asks: behind an authenticating proxy give --auth-header-actor " +
			"and --auth-header-partition, or give --dev-auth for development, where everybody may do everything")
	case c.AuthHeaderActor == "" || c.AuthHeaderPartition == "":
		return auth{}, usagef("--auth-header-actor and --auth-header-partition are needed both")
	case c.AuthHeaderScopes == "" && !c.AllowAllScopes:
		return auth{}, usagef("it is not said what an actor may read and write: give --auth-header-scopes, or " +
			"--allow-all-scopes if every actor may have all rows of its partition")
	case c.AuthHeaderScopes != "" && c.AllowAllScopes:
		return auth{}, usagef("--auth-header-scopes and --allow-all-scopes exclude each other")
	}
	for flag, name := range map[string]string{
		"--auth-header-actor": c.AuthHeaderActor, "--auth-header-partition": c.AuthHeaderPartition, "--auth-header-scopes": c.AuthHeaderScopes,
	} {
		if name != "" && !headerName.MatchString(name) {
			return auth{}, usagef("%s: %q is no name of a header", flag, name)
		}
	}
	h := headerAuth{actor: c.AuthHeaderActor, partition: c.AuthHeaderPartition, scopes: c.AuthHeaderScopes, trusted: loopback}
	if len(c.TrustedProxy) > 0 {
		var err error
		if h.trusted, err = parseTrusted(c.TrustedProxy); err != nil {
			return auth{}, err
		}
	}
	return h.auth(s), nil
}

// headerName is the grammar of a header's name.
var headerName = regexp.MustCompile("^[0-9A-Za-z!#$%&'*+.^_`|~-]+$")

func (c *serveCmd) checkDevAuth() error {
	return checkLoopback(c.Listen, c.DevAuthRemote, "--dev-auth-remote")
}

// checkLoopback refuses an address that others can reach, since development auth allows everything.
func checkLoopback(listen string, remote bool, flag string) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return usagef("--listen: %w", err)
	}
	if remote || isLoopback(host) {
		return nil
	}
	return usagef("development auth allows everybody everything, so it listens on loopback addresses only, and %q is none; "+
		"give %s if whoever reaches it may read and write everything", listen, flag)
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

func (f listenFlags) listen(ctx context.Context) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", f.Listen)
	if err != nil {
		return nil, listenError(err, "--listen")
	}
	return l, nil
}

// listenError adds to an error what to do about it; flag is the one that says where to listen.
func listenError(err error, flag string) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%w; is another server running there? %s takes another address", err, flag)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%w; no network interface here has this address, %s takes another", err, flag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%w; this port needs more rights, %s takes another", err, flag)
	case errors.As(err, new(*net.AddrError)), errors.As(err, new(*net.DNSError)):
		return usagef("%s: %w", flag, err)
	}
	return err
}

// Bounds of the HTTP server. The time for a response has bounds of its own in package httpsync.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	bodyTimeout       = 30 * time.Second // for the next bytes of a request
)

// boundBodies closes the connection of a request when the next bytes of its body do not come in time. A timeout of the whole request
// would cut off long ones, and their responses with them.
func boundBodies(h http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != nil && r.Body != http.NoBody {
			b := &boundBody{ReadCloser: r.Body, conn: http.NewResponseController(w), timeout: timeout}
			// Also for a body that nobody reads: the server reads it to its end.
			if err := b.conn.SetReadDeadline(time.Now().Add(timeout)); err == nil {
				r.Body = b
			}
		}
		h.ServeHTTP(w, r)
	})
}

type boundBody struct {
	io.ReadCloser
	conn    *http.ResponseController
	timeout time.Duration
}

func (b *boundBody) Read(p []byte) (int, error) {
	_ = b.conn.SetReadDeadline(time.Now().Add(b.timeout)) // it worked once
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		panic(http.ErrAbortHandler) // an answer would say that the request is wrong, and must not be sent again
	case errors.Is(err, io.EOF):
		_ = b.conn.SetReadDeadline(time.Time{}) // from here on the connection is watched for the client's going away
	}
	return n, err //nolint:wrapcheck // a reader's errors are compared
}

// run serves with what the server does besides answering requests. It closes l.
func (f listenFlags) run(ctx context.Context, p *program, l net.Listener, server *syncpg.Server, h http.Handler) error {
	if err := server.Start(ctx); err != nil {
		return errors.Join(err, l.Close())
	}
	err := f.serve(ctx, p, l, h)
	deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.ShutdownTimeout)
	defer cancel()
	return errors.Join(err, server.Stop(deadline))
}

// serve answers requests until ctx ends, then lets those under way finish. It closes l.
func (f listenFlags) serve(ctx context.Context, p *program, l net.Listener, h http.Handler) error {
	// Requests outlive ctx, up to the deadline of the shutdown.
	requests, cancelRequests := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelRequests()
	server := &http.Server{
		Handler:           boundBodies(h, bodyTimeout),
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		ErrorLog:          slog.NewLogLogger(p.log.Handler(), slog.LevelWarn),
		BaseContext:       func(net.Listener) context.Context { return requests },
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	p.log.Info("stopping", "timeout", f.ShutdownTimeout)
	deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), f.ShutdownTimeout)
	defer cancel()
	err := server.Shutdown(deadline)
	if errors.Is(err, context.DeadlineExceeded) {
		p.log.Warn("requests were cut off", "timeout", f.ShutdownTimeout)
		cancelRequests()
		err = server.Close()
	}
	if serveErr := <-ended; !errors.Is(serveErr, http.ErrServerClosed) {
		err = errors.Join(err, serveErr)
	}
	if err != nil {
		return fmt.Errorf("stop serving: %w", err)
	}
	return nil
}

// notReady tells why a server does not start, and what to run.
func notReady(err error, schemaFile string) error {
	var e *syncpg.NotReadyError
	if !errors.As(err, &e) {
		return err
	}
	var b strings.Builder
	b.WriteString("the database cannot be served")
	for _, c := range e.Failing {
		fmt.Fprintf(&b, "\n  %s: %v", c.Name, c.Err)
		switch {
		case errors.Is(c.Err, schemaddl.ErrNotInstalled), errors.Is(c.Err, schemaddl.ErrFunctionsStale):
			fmt.Fprintf(&b, "\n  run: syncpg schema apply --schema %s", schemaFile)
		case c.Help != "" && !strings.Contains(c.Err.Error(), "`syncpg "): // which would be the command that helps
			fmt.Fprintf(&b, "\n  %s", c.Help)
		}
	}
	return stateError{&described{b.String(), err}}
}
