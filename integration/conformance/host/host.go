package host

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/migrations"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/ssp2"
)

// Config says where a host keeps its databases.
type Config struct {
	// DatabaseURL names a database of a Postgres server in which the role may
	// create databases. The database itself is only connected to.
	DatabaseURL string
	// Logger receives failed control calls and what the servers under test log;
	// nil discards both.
	Logger *slog.Logger
}

// Host creates, serves and discards instances. It is safe for concurrent use.
type Host struct {
	admin    *pgxpool.Pool
	template string
	prefix   string // of all databases of this host
	log      *slog.Logger

	// creating is held while a database is cloned: Postgres refuses to clone
	// a template that somebody else is connected to.
	creating sync.Mutex

	mu        sync.Mutex
	last      int
	instances map[string]*instance
}

// New connects to the server and prepares the template database. The caller
// closes the host, which removes what it made.
func New(ctx context.Context, config Config) (*Host, error) {
	log := config.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	random := make([]byte, 4)
	if _, err := rand.Read(random); err != nil {
		return nil, fmt.Errorf("choose a database prefix: %w", err)
	}
	prefix := "syncpg_conformance_" + hex.EncodeToString(random)
	admin, err := pgxpool.New(ctx, config.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("connect to the database server: %w", err)
	}
	h := &Host{
		admin: admin, prefix: prefix, template: prefix + "_template", log: log,
		instances: map[string]*instance{},
	}
	if err := h.prepareTemplate(ctx); err != nil {
		return nil, errors.Join(err, h.Close(context.WithoutCancel(ctx)))
	}
	return h, nil
}

func (h *Host) prepareTemplate(ctx context.Context) error {
	if _, err := h.admin.Exec(ctx, "create database "+schemaddl.QuoteIdent(h.template)); err != nil {
		return fmt.Errorf("create the template database: %w", err)
	}
	config := h.admin.Config().ConnConfig.Copy()
	config.Database = h.template
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect to the template database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	migrator, err := migrations.New(conn, migrations.Options{})
	if err != nil {
		return fmt.Errorf("migrate the template database: %w", err)
	}
	if err := migrator.Up(ctx); err != nil {
		return fmt.Errorf("migrate the template database: %w", err)
	}
	return nil
}

// create starts a fresh, empty server.
func (h *Host) create(ctx context.Context, spec instanceSpec) (*instance, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	compiled, err := spec.Schema.compile()
	if err != nil {
		return nil, badRequest("%v", err)
	}
	h.mu.Lock()
	h.last++
	id := h.prefix + "_" + strconv.Itoa(h.last)
	h.mu.Unlock()

	i := &instance{
		id: id, partition: spec.Partition, schema: compiled, log: h.log.With("instance", id),
		clock: newClock(spec.NowMs), authority: newAuthority(), limits: spec.Limits, leases: spec.Leases,
	}
	if spec.SignedURLs != nil {
		if i.urls, err = newSegmentURLs(spec.SignedURLs.TTLSeconds, i.clock.now); err != nil {
			return nil, err
		}
	}
	if err := h.clone(ctx, id); err != nil {
		return nil, err
	}
	if err := i.open(ctx, h.poolConfig(id)); err != nil {
		return nil, errors.Join(err, h.drop(context.WithoutCancel(ctx), id))
	}
	h.mu.Lock()
	h.instances[id] = i
	h.mu.Unlock()
	return i, nil
}

func (h *Host) clone(ctx context.Context, database string) error {
	h.creating.Lock()
	defer h.creating.Unlock()
	sql := "create database " + schemaddl.QuoteIdent(database) + " template " + schemaddl.QuoteIdent(h.template)
	if _, err := h.admin.Exec(ctx, sql); err != nil {
		return fmt.Errorf("clone the template database: %w", err)
	}
	return nil
}

func (h *Host) drop(ctx context.Context, database string) error {
	if _, err := h.admin.Exec(ctx, "drop database if exists "+schemaddl.QuoteIdent(database)+" with (force)"); err != nil {
		return fmt.Errorf("drop database %s: %w", database, err)
	}
	return nil
}

// poolConfig is that of an instance: few connections, given back soon, since
// abandoned instances stay open until the host ends.
func (h *Host) poolConfig(database string) *pgxpool.Config {
	config := h.admin.Config()
	config.ConnConfig.Database = database
	config.MaxConns = 4
	config.MinConns = 0
	config.MaxConnIdleTime = 5 * time.Second
	config.HealthCheckPeriod = 5 * time.Second
	return config
}

func (h *Host) instance(id string) (*instance, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, exists := h.instances[id]
	if !exists {
		return nil, notFound("there is no instance %q", id)
	}
	return i, nil
}

// stopWithin bounds the end of a server, whose sockets may not be read any more.
const stopWithin = 2 * time.Second

// discard ends an instance and removes its database.
func (h *Host) discard(ctx context.Context, i *instance) error {
	h.mu.Lock()
	delete(h.instances, i.id)
	h.mu.Unlock()
	stopping, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	err := i.server.Stop(stopping)
	i.pool.Close()
	return errors.Join(err, h.drop(ctx, i.id))
}

// Close ends all instances and removes the databases of the host.
func (h *Host) Close(ctx context.Context) error {
	h.mu.Lock()
	open := make([]*instance, 0, len(h.instances))
	for _, i := range h.instances {
		open = append(open, i)
	}
	h.mu.Unlock()
	errs := make([]error, 0, len(open)+1)
	for _, i := range open {
		errs = append(errs, h.discard(ctx, i))
	}
	errs = append(errs, h.drop(ctx, h.template))
	h.admin.Close()
	return errors.Join(errs...)
}

func (h *Host) logFailure(r *http.Request, err error) {
	if ssp2.CodeOf(err) != "" {
		return // Refused, not failed.
	}
	h.log.ErrorContext(r.Context(), "control call failed", "path", r.URL.Path, "error", err)
}
