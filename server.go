package syncpg

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/httpsync"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
)

// Server is one sync server over one database. It is safe for concurrent use; any
// number of them, in any number of processes, may serve the same database. It has no
// goroutine of its own before [Server.Start] and after [Server.Stop], which a server that
// only answers requests does not need.
type Server struct {
	pool    *pgxpool.Pool
	schema  *Schema
	ddl     schemaddl.Options
	log     *slog.Logger
	push    *pushsvc.Service
	pull    *pullsvc.Service
	leases  *lease.Store // nil: off
	logs    *retention.Service
	hub     *realtime.Hub // nil: none
	handler http.Handler

	// listeners are told of commits, and may not be added to once requests are served.
	listeners []func(partition string, seq int64)

	newer sync.Once // the warning that the database is ahead

	// What Start starts, in this order.
	background []background
	lifecycle  sync.Mutex
	started    bool
}

// New makes a server over the host's pool, which stays the host's: nothing in it
// is configured or registered, and it is never closed. New does no I/O; whether
// the database fits is for [Server.Ready] to say.
func New(pool *pgxpool.Pool, cfg Config) (*Server, error) {
	s, err := newServer(pool, cfg)
	if err != nil {
		return nil, fmt.Errorf("syncpg: %w", err)
	}
	return s, nil
}

func newServer(pool *pgxpool.Pool, cfg Config) (*Server, error) {
	if pool == nil {
		return nil, errors.New("the pool is nil: pass the one of your program, or pgxpool.New")
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg.AppSchema == "" {
		cfg.AppSchema = schemaddl.DefaultAppSchema
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	sink := events.Safe(cfg.Events, cfg.Logger)
	s := &Server{
		pool: pool, schema: cfg.Schema, log: cfg.Logger,
		ddl: schemaddl.Options{AppSchema: cfg.AppSchema, Older: slices.Clone(cfg.OlderSchemas)},
	}
	epochs := gate.New(pool, cfg.Clock)
	versions, err := schema.NewVersions(cfg.Schema, cfg.OlderSchemas...)
	if err != nil {
		return nil, fmt.Errorf("Config.OlderSchemas: %w", err)
	}
	if s.push, err = pushsvc.New(pool, pushsvc.Config{
		Schema: cfg.Schema, Versions: versions, Clock: cfg.Clock, Gate: epochs, Events: sink, Logger: cfg.Logger,
		MaxOperations: cfg.MaxOperations, MaxBatchOperations: cfg.MaxBatchOperations,
		MaxWaiting: cfg.MaxWaiting, MaxWait: cfg.MaxWait, MaxCascade: cfg.MaxCascade,
		Validators: cfg.Validators, ValidateCommit: cfg.ValidateCommit, PlanReactions: cfg.PlanReactions,
		Committed: s.committed,
	}); err != nil {
		return nil, err
	}
	segments, err := s.segments(&cfg)
	if err != nil {
		return nil, err
	}
	urls, _ := cfg.SegmentURLs.(segment.URLVerifier)
	if s.pull, err = pullsvc.New(pool, pullsvc.Config{
		Schema: cfg.Schema, Versions: versions, Clock: cfg.Clock, Gate: epochs, Events: sink, Logger: cfg.Logger,
		InlineSegmentMaxBytes: cfg.InlineSegmentMaxBytes, Segments: segments, URLs: cfg.SegmentURLs,
		MaxSubscriptions: cfg.MaxSubscriptions, MaxScopeValues: cfg.MaxScopeValues,
		Listed:         s.listed,
		CatchUpChanges: cfg.CatchUpChanges, ImageDir: cfg.ImageDir, MaxBuilds: cfg.MaxBuilds,
	}); err != nil {
		return nil, err
	}
	s.background = append(s.background, s.pull)
	if s.logs, err = retention.New(pool, retention.Config{
		Policy: cfg.Retention, Interval: cfg.PruneInterval, Clock: cfg.Clock, Gate: epochs, Events: sink, Logger: cfg.Logger,
	}); err != nil {
		return nil, err
	}
	s.background = append(s.background, s.logs)
	if cfg.Leases != nil {
		if s.leases, err = lease.New(pool, lease.Config{
			TTL: cfg.Leases.TTL, Keys: cfg.Leases.Keys, HoldRevoked: cfg.Leases.HoldRevoked,
			Clock: cfg.Clock, Events: sink, Logger: cfg.Logger,
		}); err != nil {
			return nil, err
		}
	}
	rounds, err := round.New(round.Config{
		Schema: cfg.Schema, Versions: versions, Push: s.push, Pull: s.pull, Gate: epochs, Leases: s.leases, Events: sink, Logger: cfg.Logger,
		ResolveScopes: cfg.ResolveScopes, Segments: segments, URLs: urls,
	})
	if err != nil {
		return nil, err
	}
	requests, err := httpsync.New(httpsync.Config{
		Rounds: rounds, Segments: rounds, Authenticate: cfg.Authenticate, Ready: s.checks, Logger: cfg.Logger,
		MaxRequestBytes: cfg.MaxRequestBytes, WriteTimeout: cfg.WriteTimeout, MaxCompressed: cfg.MaxCompressed, Events: sink,
	})
	if err != nil {
		return nil, err
	}
	routes := http.NewServeMux()
	routes.Handle("/", requests)
	if !cfg.DisableRealtime {
		if s.hub, err = realtime.New(pool, realtime.Config{
			Options: cfg.Realtime, Schema: cfg.Schema, Versions: versions, Rounds: rounds, Gate: epochs, Authenticate: cfg.Authenticate,
			MaxRequestBytes: cfg.MaxRequestBytes, Events: sink, Clock: cfg.Clock, Logger: cfg.Logger,
		}); err != nil {
			return nil, err
		}
		routes.Handle("/realtime", s.hub)
		s.background = append(s.background, s.hub)
		s.listeners = append(s.listeners, s.hub.Committed)
	}
	s.handler = routes
	if cfg.Committed != nil {
		s.listeners = append(s.listeners, cfg.Committed) // last: it may panic
	}
	return s, nil
}

// segments returns the store of a configuration, nil for none, and has its janitor started
// with the server.
func (s *Server) segments(cfg *Config) (segment.Store, error) {
	store := cfg.Segments
	if store == nil {
		if cfg.SegmentTTL < 0 {
			return nil, nil //nolint:nilnil // none is an answer
		}
		var err error
		if store, err = segment.NewPostgres(s.pool, segment.PostgresConfig{TTL: cfg.SegmentTTL, Clock: cfg.Clock}); err != nil {
			return nil, err
		}
	}
	janitor, err := segment.NewJanitor(segment.JanitorConfig{Store: store, Logger: cfg.Logger})
	if err != nil {
		return nil, err
	}
	s.background = append(s.background, janitor)
	return store, nil
}

// committed passes on that a transaction committed.
func (s *Server) committed(partition string, seq int64) {
	for _, tell := range s.listeners {
		tell(partition, seq)
	}
}

// listed passes on that a client has another subscription list.
func (s *Server) listed(partition, clientID string, schemaVersion int32) {
	if s.hub != nil {
		s.hub.Listed(partition, clientID, schemaVersion)
	}
}

// Disconnect ends the sockets of an actor in all processes that serve the database, and
// returns how many there were in this one: call it when an actor lost a scope, after
// ResolveScopes knows, since what a socket may get was resolved before. See
// [realtime.Hub.Disconnect] for what other processes hear and when. Between Start and Stop.
func (s *Server) Disconnect(partition, actor string) int {
	if s.hub == nil {
		return 0
	}
	return s.hub.Disconnect(partition, actor)
}

// Handler returns the HTTP side: POST /sync, GET /segments/{id}, GET /realtime, GET /healthz,
// GET /readyz. Its paths begin at the root; under a prefix, mount it with http.StripPrefix. See package
// httpsync for what it leaves to the host, and package realtime for sockets, which are
// served between [Server.Start] and [Server.Stop].
func (s *Server) Handler() http.Handler { return s.handler }

// Push returns the service behind the push half of a round, for hosts that bring
// commits in on their own ways. It asks neither Authenticate nor ResolveScopes.
func (s *Server) Push() *pushsvc.Service { return s.push }

// Pull returns the service behind the pull half of a round. It asks neither
// Authenticate nor ResolveScopes.
func (s *Server) Pull() *pullsvc.Service { return s.pull }

// Realtime returns the realtime channel, nil when Config.DisableRealtime is set.
func (s *Server) Realtime() *realtime.Hub { return s.hub }

// Retention returns the service that looks after the logs: pruning now, and rotating
// log epochs after a backup was restored.
func (s *Server) Retention() *retention.Service { return s.logs }
