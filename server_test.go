package syncpg_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
)

// config is complete.
func config() syncpg.Config {
	return syncpg.Config{
		Schema: sampleSchema(),
		Authenticate: func(*http.Request) (syncpg.Identity, error) {
			return syncpg.Identity{Actor: "ada", Partition: "acme"}, nil
		},
		ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team_id": {"*"}}, nil
		},
	}
}

// nowhere is a pool that cannot connect.
func nowhere(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://secret-user@127.0.0.1:1/secret-database?connect_timeout=1")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestNewSaysWhatToDo(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(*syncpg.Config)
		want   string
	}{
		{"no schema", func(c *syncpg.Config) { c.Schema = nil }, "syncpg: Config.Schema is nil: compile one with syncpg.ParseSchema"},
		{"no authentication", func(c *syncpg.Config) { c.Authenticate = nil }, "syncpg: Config.Authenticate is nil"},
		{"no resolver", func(c *syncpg.Config) { c.ResolveScopes = nil }, "syncpg: Config.ResolveScopes is nil"},
		{"our schema for app tables", func(c *syncpg.Config) { c.AppSchema = "syncpg" }, "not for app tables"},
		{"a schema of Postgres for app tables", func(c *syncpg.Config) { c.AppSchema = "pg_app" }, "not for app tables"},
		{"a name that Postgres cuts", func(c *syncpg.Config) { c.AppSchema = strings.Repeat("x", 64) }, "at most 63 bytes"},
		{"a rule for no table", func(c *syncpg.Config) {
			c.Validators = map[string]syncpg.Validator{"nope": func(context.Context, *pushsvc.RowValidation) error { return nil }}
		}, `the schema has no table "nope"`},
		{"a negative wait", func(c *syncpg.Config) { c.MaxWait = -1 }, "Config.MaxWait"},
		{"a negative bound of cascades", func(c *syncpg.Config) { c.MaxCascade = -1 }, "Config.MaxCascade is -1"},
		{"a negative cap", func(c *syncpg.Config) { c.MaxOperations = -1 }, "Config.MaxOperations is -1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			cfg := config()
			tc.change(&cfg)
			_, err := syncpg.New(nowhere(t), cfg)
			require.ErrorContains(t, err, tc.want)
		})
	}
	_, err := syncpg.New(nil, config())
	require.ErrorContains(t, err, "the pool is nil")
}

func TestNewDoesNoIOAndKeepsTheConfig(t *testing.T) {
	t.Parallel()
	cfg := config()
	pool := nowhere(t)
	server, err := syncpg.New(pool, cfg)
	require.NoError(t, err)
	require.NotNil(t, server.Push())
	require.NotNil(t, server.Pull())
	require.Zero(t, pool.Stat().NewConnsCount())
	require.Equal(t, []any{"", 0, 0, 0, int64(0)}, []any{cfg.AppSchema, cfg.MaxOperations, cfg.MaxSubscriptions, cfg.InlineSegmentMaxBytes, cfg.MaxRequestBytes})
	require.Nil(t, cfg.Logger)
	require.Nil(t, cfg.Clock)
}

// requireFailing checks which check fails and returns why.
func requireFailing(t *testing.T, server *syncpg.Server, name, help string) error {
	t.Helper()
	err := server.Ready(t.Context())
	var e *syncpg.NotReadyError
	require.ErrorAs(t, err, &e)
	require.Len(t, e.Failing, 1)
	require.Equal(t, name, e.Failing[0].Name)
	require.Contains(t, e.Failing[0].Help, help)
	require.ErrorContains(t, err, name)
	require.ErrorContains(t, err, help)

	w := httptest.NewRecorder()
	server.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), `"name":"`+name+`","status":"failed"`)
	require.NotContains(t, w.Body.String(), "secret")
	w = httptest.NewRecorder()
	server.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
	require.Equal(t, http.StatusOK, w.Code)
	return err
}

func TestReadyNamesTheFailingCheck(t *testing.T) {
	t.Parallel()
	t.Run("no database", func(t *testing.T) {
		t.Parallel()
		server, err := syncpg.New(nowhere(t), config())
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckDatabase, "connection settings")
		var connect *pgconn.ConnectError
		require.ErrorAs(t, err, &connect)
	})
	t.Run("no migrations", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, pgtest.Options{Empty: true, MaxConns: 1})
		server, err := syncpg.New(db.Pool, config())
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckMigrations, "syncpg migrate up")
		require.ErrorIs(t, err, migrations.ErrTooOld)
	})
	t.Run("migrations of a breaking newer build", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, installed)
		ahead(t, db.Pool, true)
		server, err := syncpg.New(db.Pool, config())
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckMigrations, "newer version of syncpg")
		require.ErrorIs(t, err, migrations.ErrTooNew)
	})
	t.Run("no schema", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, pgtest.Options{MaxConns: 1})
		server, err := syncpg.New(db.Pool, config())
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckSchema, "syncpg schema apply")
		require.ErrorIs(t, err, schemaddl.ErrNotInstalled)
	})
	t.Run("another app schema", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, installed)
		cfg := config()
		cfg.AppSchema = "elsewhere"
		server, err := syncpg.New(db.Pool, cfg)
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckSchema, "syncpg schema check")
		var layout *schemaddl.LayoutError
		require.ErrorAs(t, err, &layout)
	})
	t.Run("a version that cannot be read", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, installed)
		_, err := db.Pool.Exec(t.Context(), `alter table syncpg.schema_version rename version to other`)
		require.NoError(t, err)
		server, err := syncpg.New(db.Pool, config())
		require.NoError(t, err)
		err = requireFailing(t, server, syncpg.CheckMigrations, "the log of the server")
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused)
	})
	t.Run("a cancelled context", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, installed)
		server, err := syncpg.New(db.Pool, config())
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, server.Ready(ctx), context.Canceled)
	})
}

// ahead makes a database look migrated by the build after this one.
func ahead(t *testing.T, pool *pgxpool.Pool, breaking bool) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `update syncpg.schema_version set version = version + 1`)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `insert into syncpg.sync_migrations (version, breaking)
		select version, $1 from syncpg.schema_version`, breaking)
	require.NoError(t, err)
}

func TestReady(t *testing.T) {
	t.Parallel()
	options := installed
	options.MaxConns = 1
	db := pgtest.New(t, options)
	var logged bytes.Buffer
	cfg := config()
	cfg.Logger = slog.New(slog.NewTextHandler(&logged, nil))
	server, err := syncpg.New(db.Pool, cfg)
	require.NoError(t, err)
	require.NoError(t, server.Ready(t.Context()))
	w := httptest.NewRecorder()
	server.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	require.Equal(t, http.StatusOK, w.Code)
	require.JSONEq(t, `{"status":"ready","checks":[
		{"name":"database","status":"ok"},{"name":"migrations","status":"ok"},{"name":"schema","status":"ok"}]}`, w.Body.String())
	require.Empty(t, logged.String())

	ahead(t, db.Pool, false)
	for range 3 {
		require.NoError(t, server.Ready(t.Context()))
	}
	require.Equal(t, 1, strings.Count(logged.String(), "newer version of syncpg"), "said once")
}
