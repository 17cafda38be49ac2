package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// actorHeader names the authenticated actor of a protocol request.
const actorHeader = "X-Syncpg-Actor"

// instanceSpec is the body of a create request.
type instanceSpec struct {
	Schema     schemaSpec  `json:"schema"`
	Partition  string      `json:"partition"`
	NowMs      int64       `json:"nowMs"`
	Limits     limitsSpec  `json:"limits"`
	SignedURLs *signedSpec `json:"signedUrls"`
	Leases     *leaseSpec  `json:"leases"`
}

// limitsSpec holds the limits a scenario sets; nil leaves the server's default.
type limitsSpec struct {
	MaxOperationsPerRequest *int   `json:"maxOperationsPerRequest"`
	InlineSegmentMaxBytes   *int   `json:"inlineSegmentMaxBytes"`
	MaxDeltaBytes           *int   `json:"maxDeltaBytes"`
	SegmentTTLMs            *int64 `json:"segmentTtlMs"`
	MaxPresenceBytes        *int   `json:"maxPresenceBytes"`
}

type signedSpec struct {
	TTLSeconds *int64 `json:"ttlSeconds"`
}

type leaseSpec struct {
	TTLMs int64 `json:"ttlMs"`
}

// check refuses what the server cannot do, rather than leave it out silently.
func (s instanceSpec) check() error {
	switch {
	case s.Partition == "":
		return badRequest("partition is missing")
	case s.Limits.SegmentTTLMs != nil && *s.Limits.SegmentTTLMs <= 0:
		return badRequest("segmentTtlMs is %d", *s.Limits.SegmentTTLMs)
	case s.SignedURLs != nil && s.SignedURLs.TTLSeconds != nil && *s.SignedURLs.TTLSeconds < 0:
		return badRequest("ttlSeconds is %d", *s.SignedURLs.TTLSeconds)
	}
	return nil
}

// instance is one server under test with the database it works on.
type instance struct {
	id        string // also the name of its database
	partition string
	schema    *schema.Schema
	log       *slog.Logger
	clock     *clock
	authority *authority
	rules     rules
	urls      *segmentURLs // nil: none are issued
	pool      *pgxpool.Pool
	limits    limitsSpec
	leases    *leaseSpec

	// Another server takes over when a backup is restored.
	server   *syncpg.Server
	protocol http.Handler                 // that of the server
	handler  atomic.Pointer[http.Handler] // the protocol and what the host adds to it

	// unreadable makes the next stored outcome that is looked up unreadable.
	unreadable atomic.Bool
}

// path is the URL path under which the instance is served.
func (i *instance) path() string { return "/instances/" + i.id }

// open installs the schema in the instance's database and builds the server.
func (i *instance) open(ctx context.Context, config *pgxpool.Config) error {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("open the instance's database: %w", err)
	}
	i.pool = pool
	if err := i.start(ctx); err != nil {
		pool.Close()
		return err
	}
	return nil
}

// start installs the schema, unless it is there, and starts a server.
func (i *instance) start(ctx context.Context) error {
	if err := schemaddl.Install(ctx, i.pool, i.schema, schemaddl.Options{Now: i.clock.now()}); err != nil {
		return fmt.Errorf("install the schema: %w", err)
	}
	config := syncpg.Config{
		Schema: i.schema,
		Clock:  i.clock.now,
		Logger: i.log,
		Authenticate: func(r *http.Request) (syncpg.Identity, error) {
			return i.authenticate(r)
		},
		ResolveScopes: func(_ context.Context, request syncpg.ScopeRequest) (scope.Allowed, error) {
			return i.authority.resolve(request.Actor)
		},
	}
	config.ValidateCommit = i.rules.validateCommit
	config.Validators = map[string]syncpg.Validator{}
	for _, t := range i.schema.Tables {
		config.Validators[t.Name] = i.rules.validateRow
	}
	if i.leases != nil {
		config.Leases = &syncpg.Leases{
			TTL: time.Duration(i.leases.TTLMs) * time.Millisecond, Keys: [][]byte{[]byte("the one key of a conformance host")},
		}
	}
	config.PruneInterval = -1 // nothing happens on its own
	for _, limit := range []struct {
		set *int
		of  *int
	}{
		{i.limits.MaxOperationsPerRequest, &config.MaxOperations},
		{i.limits.MaxDeltaBytes, &config.Realtime.MaxDeltaBytes},
		{i.limits.MaxPresenceBytes, &config.Realtime.MaxPresenceBytes},
	} {
		if limit.set != nil {
			*limit.of = *limit.set
		}
	}
	limits := i.limits
	if n := limits.InlineSegmentMaxBytes; n != nil {
		config.InlineSegmentMaxBytes = *n
		if *n == 0 {
			config.InlineSegmentMaxBytes = -1 // the server's 0 is its default
		}
	}
	if limits.SegmentTTLMs != nil {
		config.SegmentTTL = time.Duration(*limits.SegmentTTLMs) * time.Millisecond
	}
	if i.urls != nil {
		config.SegmentURLs = i.urls
	}
	server, err := syncpg.New(i.pool, config)
	if err != nil {
		return fmt.Errorf("build the server: %w", err)
	}
	if err := server.Start(ctx); err != nil {
		return err
	}
	i.server, i.protocol = server, server.Handler()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /sync", i.serveSync)
	mux.Handle("/blobs/", notImplemented("blobs"))
	mux.Handle("/", i.protocol)
	var handler http.Handler = mux
	i.handler.Store(&handler)
	return nil
}

func (i *instance) authenticate(r *http.Request) (syncpg.Identity, error) {
	actor := r.Header.Get(actorHeader)
	if actor == "" {
		return syncpg.Identity{}, &ssp2.Error{
			Code: "sync.auth_required", Message: "the header " + actorHeader + " is missing",
		}
	}
	return syncpg.Identity{Actor: actor, Partition: i.partition}, nil
}

func notImplemented(what string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, notSupported(what))
	})
}

// quiesce returns when everything that was sent to the server is done, with all that
// follows from it, and at most that many sockets are left.
func (i *instance) quiesce(ctx context.Context, sockets int) error {
	ctx, cancel := context.WithTimeout(ctx, quiesceWithin)
	defer cancel()
	position, err := i.position(ctx)
	if err != nil {
		return err
	}
	return i.server.Realtime().Settle(ctx, sockets, map[string]int64{i.partition: position.maxCommitSeq})
}

// quiesceWithin is before the driver gives up, so that it is told why.
const quiesceWithin = 15 * time.Second

// position is where the log of the instance's partition stands.
type position struct {
	maxCommitSeq int64
	horizonSeq   int64
}

func (i *instance) position(ctx context.Context) (position, error) {
	var p position
	err := i.pool.QueryRow(ctx,
		`select max_commit_seq, horizon_seq from syncpg.sync_partitions where partition = $1`, i.partition,
	).Scan(&p.maxCommitSeq, &p.horizonSeq)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return position{}, fmt.Errorf("read the position of the log: %w", err)
	}
	return p, nil
}
