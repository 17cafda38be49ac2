package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/internal/config"
)

const databaseFlag = "database-url"

// databaseFlags name the database of a command.
type databaseFlags struct {
	DatabaseURL string `name:"database-url" placeholder:"URL" setting:"DATABASE_URL" help:"The database, as postgres://user:password@host:port/database or as \"host=… dbname=…\". What it leaves out comes from PGHOST, PGUSER, PGPASSWORD and the other PG variables."`
}

func (f databaseFlags) config(p *program) (*pgxpool.Config, error) {
	cfg, err := p.settings.Database(databaseFlag, f.DatabaseURL)
	if err != nil {
		return nil, usageError{err}
	}
	return cfg, nil
}

// connect opens one connection.
func (f databaseFlags) connect(ctx context.Context, p *program) (*pgx.Conn, error) {
	cfg, err := f.config(p)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return nil, connectError(cfg.ConnConfig, err)
	}
	return conn, nil
}

// pool opens a pool and its first connection.
func (f databaseFlags) pool(ctx context.Context, p *program) (*pgxpool.Pool, error) {
	cfg, err := f.config(p)
	if err != nil {
		return nil, err
	}
	return openPool(ctx, cfg)
}

func openPool(ctx context.Context, cfg *pgxpool.Config) (*pgxpool.Pool, error) {
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("open a pool of connections: %w", err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, connectError(cfg.ConnConfig, err)
	}
	return pool, nil
}

// unreachableError is a database that cannot be reached. Its text is one line and says what to do.
type unreachableError struct {
	target string
	help   string
	err    error
}

func (e *unreachableError) Error() string {
	return fmt.Sprintf("cannot connect to %s: %s; %s", e.target, oneLine(e.err), e.help)
}

func (e *unreachableError) Unwrap() error { return e.err }

// oneLine is the text of an error of the driver without the settings that it repeats, each attempt once.
func oneLine(err error) string {
	var connect *pgconn.ConnectError
	if errors.As(err, &connect) && connect.Unwrap() != nil {
		err = connect.Unwrap()
	}
	var parts []string
	seen := map[string]bool{}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		// The attempts of a name that stands for several addresses.
		if line = strings.TrimPrefix(strings.TrimSpace(line), "hostname resolving error: "); line != "" && !seen[line] {
			seen[line] = true
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, ", ")
}

func connectError(cfg *pgx.ConnConfig, err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	help := "is the server running there, and does it accept connections from here?"
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		help = "is the name of the host spelt right?"
	}
	if strings.Contains(err.Error(), "server refused TLS connection") {
		help = "the server has no TLS: sslmode=disable in the URL goes without, where the way to it is safe"
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pg.Code {
		case "28P01", "28000":
			help = "check user and password"
		case "3D000":
			help = fmt.Sprintf("create it with `createdb %s`, or name another one", cfg.Database)
		case "53300":
			help = "all connections of the server are taken: raise max_connections or use fewer"
		}
	}
	return &unreachableError{target: config.Target(&cfg.Config), help: help, err: err}
}

// explain adds to an error of the database what to do about it.
func explain(err error) error {
	var pg *pgconn.PgError
	var unreachable *unreachableError
	if !errors.As(err, &pg) || errors.As(err, &unreachable) {
		return err
	}
	switch pg.Code {
	case "42501":
		return fmt.Errorf("%w; the user of the database may not do this: use the owner, or grant it as the chapter Rights of OPERATING.md says", err)
	case "26000", "42P05": // a prepared statement that is not there, or is there already
		return fmt.Errorf("%w; behind a pooler in transaction mode add default_query_exec_mode=exec to the URL of the database", err)
	}
	return err
}
