package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/devpg"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/schemaddl"
)

type devCmd struct {
	appSchemaFlag
	olderFlags
	listenFlags
	observeFlags
	originFlag
	DataDir       string `name:"data-dir" default:".syncpg" setting:"" help:"Directory of the database. It is made if it is not there, and kept."`
	Schema        string `name:"schema" placeholder:"FILE" setting:"" help:"Schema IR to install and serve. Default: the compiled-in sample."`
	PGPort        int    `name:"pg-port" default:"0" setting:"" help:"Port of the database on 127.0.0.1. 0 takes a free one at each start."`
	AllowDownload bool   `name:"allow-download" setting:"" help:"Download PostgreSQL when the machine has no server binaries."`
	AllowRemote   bool   `name:"allow-remote" setting:"" help:"Let --listen be another address than a loopback one, where anybody who reaches it may read and write everything."`
}

// Help explains the command.
func (*devCmd) Help() string {
	return `Starts PostgreSQL from the machine's own binaries on a directory that is kept between runs, migrates it, installs ` +
		`the schema and serves it. Whoever sends the header "Authorization: Bearer dev:<actor>:<partition>" is that actor in ` +
		`that partition, and may read and write everything in it. Ctrl-C stops all of it.

The binaries are looked for in $` + devpg.EnvBinDir + `, or else in PATH, where pg_config says, and where packages put them.`
}

// devDatabase is the database that `dev` works in.
const devDatabase = "syncpg"

// passwordFile is where package devpg keeps the password of the database, in its data directory.
const passwordFile = "syncpg.password"

// stopTimeout bounds the end of the database.
const stopTimeout = 30 * time.Second

// Run serves until ctx ends.
func (c *devCmd) Run(ctx context.Context, p *program) (err error) {
	s, name, err := loadSchema(c.Schema)
	if err != nil {
		return err
	}
	older, err := c.load(s, name)
	if err != nil {
		return err
	}
	if err := checkLoopback(c.Listen, c.AllowRemote, "--allow-remote"); err != nil {
		return err
	}
	// Before the database, whose start takes longer.
	l, err := c.listen(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	o, err := c.observe(ctx, p)
	if err != nil {
		return err
	}
	defer o.stop()
	pg, err := devpg.Start(ctx, devpg.Options{
		DataDir: filepath.Join(c.DataDir, "postgres"), Port: c.PGPort, Fsync: true, AllowDownload: c.AllowDownload, Logger: p.log,
	})
	if err != nil {
		return startError(err)
	}
	defer func() {
		deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		err = errors.Join(err, pg.Stop(deadline))
	}()
	pool, err := c.prepare(ctx, pg, s)
	if err != nil {
		return err
	}
	defer pool.Close()
	a := devAuth(s)
	server, err := syncpg.New(pool, syncpg.Config{
		Schema: s, OlderSchemas: older, AppSchema: string(c.AppSchema), Authenticate: a.authenticate, ResolveScopes: a.resolveScopes,
		Events: o.sink, Logger: p.log, Realtime: realtime.Options{Origins: c.RealtimeOrigin},
	})
	if err != nil {
		return fmt.Errorf("make the server: %w", err)
	}
	if err := c.announce(p, l, o, pg, s, name, older); err != nil {
		return err
	}
	// Without its database the server has no use.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-pg.Done():
			cancel(errDatabaseEnded)
		case <-ctx.Done():
		}
	}()
	if err := c.run(ctx, p, l, server, a.wrap(server.Handler())); err != nil {
		return err
	}
	if errors.Is(context.Cause(ctx), errDatabaseEnded) {
		return errDatabaseEnded
	}
	return nil
}

var errDatabaseEnded = errors.New("the database has ended by itself; --log-level debug shows its log")

// startError says what to do when the database does not start.
func startError(err error) error {
	if errors.Is(err, devpg.ErrPortTaken) {
		return fmt.Errorf("%w; --pg-port takes another port, and 0 a free one", err)
	}
	if errors.Is(err, devpg.ErrNoBinaries) {
		err = fmt.Errorf("%w; or run `%s dev --allow-download` to download PostgreSQL", err, self())
	}
	if errors.Is(err, devpg.ErrNoBinaries) || errors.Is(err, devpg.ErrUnsupported) {
		return fmt.Errorf("%w; or use a database that is there with `%s serve`", err, self())
	}
	return err
}

// prepare migrates the database and installs the schema, or moves it to the version of the file.
func (c *devCmd) prepare(ctx context.Context, pg *devpg.Server, s *syncpg.Schema) (*pgxpool.Pool, error) {
	if err := pg.EnsureDatabase(ctx, devDatabase); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, pg.SocketDSN(devDatabase))
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	defer closeConn(ctx, conn)
	m, err := migrations.New(conn, migrations.Options{})
	if err != nil {
		return nil, err
	}
	if err := m.Up(ctx); err != nil {
		return nil, c.fresh(err)
	}
	if _, err := schemaddl.Apply(ctx, conn, s, schemaddl.BumpOptions{Options: c.options()}); err != nil {
		return nil, c.fresh(err)
	}
	cfg, err := pgxpool.ParseConfig(pg.SocketDSN(devDatabase))
	if err != nil {
		return nil, fmt.Errorf("read the connection string: %w", err)
	}
	return openPool(ctx, cfg)
}

// fresh adds to an error about the state of the database that another one can be had.
func (c *devCmd) fresh(err error) error {
	if err = asState(err); errors.As(err, new(stateError)) {
		return stateError{fmt.Errorf("%w; to begin with an empty database give another --data-dir, or remove %s",
			err, filepath.Join(c.DataDir, "postgres"))}
	}
	return err
}

// announce says where everything is.
func (c *devCmd) announce(p *program, l net.Listener, o *observer, pg *devpg.Server, s *syncpg.Schema, name string, older []*syncpg.Schema) error {
	address := "http://" + l.Addr().String()
	names := make([]string, len(s.Tables))
	for i, t := range s.Tables {
		names[i] = t.Name
	}
	smoke := self() + " smoke --url " + address
	if c.Schema != "" {
		smoke += " --schema " + c.Schema
	}
	tcp, err := url.Parse(pg.DSN(devDatabase))
	if err != nil {
		return fmt.Errorf("read the connection string: %w", err)
	}
	tcp.User = url.User(tcp.User.Username())
	p.printf("syncpg dev is ready\n\n")
	places := [][]string{
		{"sync", "POST " + address + "/sync"},
		{"realtime", "GET ws://" + l.Addr().String() + "/realtime?clientId=<id>"},
		{"health", "GET " + address + "/readyz"},
	}
	if o.url != "" {
		places = append(places, []string{"metrics", "GET " + o.url})
	}
	places = append(
		places,
		[]string{"auth", "Authorization: Bearer dev:<actor>:<partition>"},
		[]string{"schema", fmt.Sprintf("%s, version %d: %s", name, s.Version, strings.Join(names, ", "))},
	)
	if len(older) > 0 {
		places = append(places, []string{"", "clients of older versions are served: " + describeOlder(older)})
	}
	err = table(p.stdout, "  ", append(places, [][]string{
		{"database", pg.SocketDSN(devDatabase)},
		{"", tcp.String() + " (password: " + filepath.Join(pg.DataDir(), passwordFile) + ")"},
		{"data", c.DataDir + " (kept)"},
	}...))
	p.printf("\nCheck it from another shell:\n\n  %s\n\nCtrl-C stops everything.\n", smoke)
	return err
}
