// Command embed is an app that serves sync next to its own routes, to be copied. Who asks comes from the app's table of
// sessions, and what they may see from its table of memberships:
//
//	create table public.sessions (token text primary key, user_id text not null, tenant_id text not null);
//	create table public.memberships (tenant_id text, user_id text, team_id text, primary key (tenant_id, user_id, team_id));
//
// The schema of the argument has to be installed (`syncpg migrate up`, `syncpg schema apply`):
//
//	DATABASE_URL=postgres://… go run ./examples/embed schema/sample/sample.ir.json
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(args) != 1 {
		return errors.New("usage: embed SCHEMA")
	}
	ir, err := os.ReadFile(args[0])
	if err != nil {
		return fmt.Errorf("read the schema: %w", err)
	}
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return fmt.Errorf("open the pool: %w", err)
	}
	defer pool.Close()
	syncer, err := newServer(ctx, pool, ir)
	if err != nil {
		return err
	}
	if err := syncer.Start(ctx); err != nil {
		return fmt.Errorf("start the sync server: %w", err)
	}
	defer func() {
		deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if err := syncer.Stop(deadline); err != nil {
			slog.Warn("stopping", "error", err)
		}
	}()
	server := &http.Server{Addr: "127.0.0.1:8080", Handler: routes(syncer), ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		deadline, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		ended <- server.Shutdown(deadline)
	})
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return <-ended // requests under way are answered
}

// newServer makes the sync server.
func newServer(ctx context.Context, pool *pgxpool.Pool, ir []byte) (*syncpg.Server, error) {
	schema, err := syncpg.ParseSchema(ir) // what the code generator of the clients wrote
	if err != nil {
		return nil, fmt.Errorf("compile the schema: %w", err)
	}
	a := &app{pool: pool}
	server, err := syncpg.New(pool, syncpg.Config{
		Schema:        schema,
		Authenticate:  a.authenticate,
		ResolveScopes: a.resolveScopes,
		Logger:        slog.Default(),
	})
	if err != nil {
		return nil, fmt.Errorf("make the sync server: %w", err)
	}
	if err := server.Ready(ctx); err != nil {
		return nil, fmt.Errorf("before serving: %w", err) // names what is missing and the command that brings it
	}
	return server, nil
}

// routes are those of the app, the sync server among them.
func routes(syncer *syncpg.Server) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/sync-api/", http.StripPrefix("/sync-api", syncer.Handler()))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, "the app's own pages") })
	return mux
}

// app is what was there before.
type app struct{ pool *pgxpool.Pool }

func (a *app) authenticate(r *http.Request) (syncpg.Identity, error) {
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	var id syncpg.Identity
	err := a.pool.QueryRow(r.Context(), `select user_id, tenant_id from public.sessions where token = $1`, token).
		Scan(&id.Actor, &id.Partition)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return id, errors.New("no such session") // 401
	case err != nil:
		return id, fmt.Errorf("%w: %w", syncpg.ErrOutage, err) // 503: ask again
	}
	return id, nil
}

func (a *app) resolveScopes(ctx context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
	rows, err := a.pool.Query(ctx, `select team_id from public.memberships where tenant_id = $1 and user_id = $2`, req.Partition, req.Actor)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", syncpg.ErrOutage, err)
	}
	teams, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		// Any other error would revoke: devices would drop what they hold.
		return nil, fmt.Errorf("%w: %w", syncpg.ErrOutage, err)
	}
	return scope.Allowed{"team_id": teams}, nil
}
