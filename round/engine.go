package round

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// Config is what an engine is made of. Segments, URLs, Events and Logger may be left out;
// Push, Pull and Gate work on the same database and schema.
type Config struct {
	// Schema is the newest schema version served, the installed one.
	Schema *schema.Schema
	// Versions are the schema versions served, of which Schema is the newest; Push and
	// Pull have the same. nil: Schema alone.
	Versions *schema.Versions
	// Push and Pull do the two halves of a round.
	Push *pushsvc.Service
	Pull *pullsvc.Service
	// Gate is the one that Push and Pull use.
	Gate *gate.Gate
	// ResolveScopes says what an actor may read and write (§3.2 rule 3). It is
	// called once per round, not at all when the round ends before that, and from
	// several goroutines. An error that is [ErrOutage] fails the round, unless the
	// client has an auth lease; any other one, and a panic, revokes every subscription and refuses every operation of
	// this round (§3.2 rule 5, §3.4 rule 4).
	ResolveScopes func(context.Context, ScopeRequest) (scope.Allowed, error)
	// Leases issues auth leases and stands in for a resolver that is out of reach
	// (§7.3). nil: there are none.
	Leases *lease.Store
	// Segments is where Pull keeps its segments, to be downloaded from. nil: nowhere.
	Segments segment.Store
	// URLs verifies the URLs of segments. nil: none is taken.
	URLs segment.URLVerifier
	// Events gets events.RequestHandled once for every round, and
	// events.ResolverFailed. nil: nobody.
	Events events.Sink
	// Logger gets what clients are not told. nil: nothing is logged.
	Logger *slog.Logger
}

// Engine runs rounds. It is safe for concurrent use.
type Engine struct {
	schema        *schema.Schema
	versions      *schema.Versions
	push          pusher
	pull          puller
	gate          entry
	resolveScopes func(context.Context, ScopeRequest) (scope.Allowed, error)
	leases        *lease.Store
	segments      segment.Store
	urls          segment.URLVerifier
	events        events.Sink
	log           *slog.Logger
}

// What an engine uses of the services.
type (
	pusher interface {
		Validate(req pushsvc.Request) error
		Push(ctx context.Context, req pushsvc.Request) (*pushsvc.Response, error)
	}
	puller interface {
		Validate(req pullsvc.Request) error
		Begin(ctx context.Context, req pullsvc.Request) (reading, error)
	}
	entry interface {
		Enter(ctx context.Context, partition string) (gate.Epoch, error)
		Forget(partition string)
	}
)

// reading is a pull that has begun.
type reading struct {
	reset    bool
	logEpoch string
	stream   func(ctx context.Context, emit func(frames []byte) error) error
	close    func()
}

// pullService is pullsvc.Service as a puller.
type pullService struct{ *pullsvc.Service }

func (s pullService) Begin(ctx context.Context, req pullsvc.Request) (reading, error) {
	p, err := s.Service.Begin(ctx, req)
	if err != nil {
		return reading{}, err
	}
	return reading{reset: p.Reset, logEpoch: p.LogEpoch, stream: p.Stream, close: p.Close}, nil
}

// New returns an engine. It does no I/O, and fails when a required field is
// missing.
func New(cfg Config) (*Engine, error) {
	for _, required := range []struct {
		field   string
		missing bool
	}{
		{"Schema", cfg.Schema == nil},
		{"Push", cfg.Push == nil},
		{"Pull", cfg.Pull == nil},
		{"Gate", cfg.Gate == nil},
		{"ResolveScopes", cfg.ResolveScopes == nil},
	} {
		if required.missing {
			return nil, fmt.Errorf("round: Config.%s is nil", required.field)
		}
	}
	if _, err := schema.VersionsOf(cfg.Versions, cfg.Schema); err != nil {
		return nil, fmt.Errorf("round: Config.Versions: %w", err)
	}
	return newEngine(cfg, cfg.Push, pullService{cfg.Pull}, cfg.Gate), nil
}

func newEngine(cfg Config, push pusher, pull puller, gate entry) *Engine {
	e := &Engine{
		schema: cfg.Schema, push: push, pull: pull, gate: gate,
		resolveScopes: cfg.ResolveScopes, leases: cfg.Leases, segments: cfg.Segments, urls: cfg.URLs, log: cfg.Logger,
	}
	e.versions, _ = schema.VersionsOf(cfg.Versions, cfg.Schema) // checked by New
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	e.events = events.Safe(cfg.Events, e.log)
	return e
}

// Run runs one round: it applies the commits of a request, answers its
// subscriptions, and writes the response to w, without a last flush.
//
// A request that the protocol refuses as a whole (§1.7) fails before any commit
// is attempted. An error before the first byte is returned as it is, see
// [Failure], and w is untouched; after it Run writes ERROR and END and returns a
// *[StreamError]. nil means that w has a whole response without ERROR.
//
// The order is: rules that need no database; the log epoch (§2.1); the schema
// floor (§1.6); a reset (§2.1); the host's resolver; the push; the first read of
// the pull; the response.
func (e *Engine) Run(ctx context.Context, id Identity, req *ssp2.Request, w Writer) (err error) {
	ctx, span := trace.Start(ctx, "syncpg.request")
	defer span.End(&err)
	defer e.handled(ctx, id, req, w, time.Now(), &err)
	err = errPanicked // unless run returns
	out := &response{w: w, wire: req.WireVersion}
	err = e.run(ctx, id, req, out)
	if err == nil {
		return nil
	}
	e.report(ctx, id, req, out, err)
	if !out.begun {
		return err
	}
	return &StreamError{Reported: out.fail(Failure(err)) == nil, Err: err}
}

func (e *Engine) run(ctx context.Context, id Identity, req *ssp2.Request, out *response) error {
	if err := gate.CheckIdentity(id.Partition, id.Actor); err != nil {
		return err
	}
	push := pushsvc.Request{
		Partition: id.Partition, Actor: id.Actor, ClientID: req.Header.ClientID,
		WireVersion: req.WireVersion, SchemaVersion: req.Header.SchemaVersion, LogEpoch: req.Header.LogEpoch, Commits: req.Commits,
	}
	pull := pullsvc.Request{
		Partition: id.Partition, Actor: id.Actor, ClientID: req.Header.ClientID,
		WireVersion: req.WireVersion, SchemaVersion: req.Header.SchemaVersion, LogEpoch: req.Header.LogEpoch, Subscriptions: req.Subscriptions,
	}
	if req.Pull != nil {
		pull.Header = *req.Pull
	}
	// A schema version that is not served has other tables: what the rules say of them
	// would be said about the wrong schema.
	_, served := e.versions.Schema(req.Header.SchemaVersion)
	if err := e.validate(req, push, pull, served); err != nil {
		return err
	}
	epoch, reset, err := e.enter(ctx, id.Partition, req)
	if err != nil {
		return err
	}
	header := &ssp2.ResponseHeader{
		LatestSchemaVersion: &e.schema.Version, LogEpoch: epoch.LogEpoch, ResetRequired: reset,
	}
	if !served {
		required := e.versions.Required(req.Header.SchemaVersion)
		header.RequiredSchemaVersion = &required
		return out.only(header)
	}
	if reset {
		return out.only(header)
	}
	scopes, issue, err := e.resolve(ctx, ScopeRequest{Identity: id, ClientID: req.Header.ClientID})
	if err != nil {
		return err
	}
	push.Scopes, pull.Scopes, pull.Lease = scopes, scopes, issue

	var results *pushsvc.Response
	if len(req.Commits) > 0 {
		results, err = e.push.Push(ctx, push)
		switch {
		case err != nil:
			return err
		case results.Reset:
			return e.rotated(req, results.LogEpoch, out)
		}
		pull.AfterSeq = results.LastSeq
	}
	if req.Pull == nil {
		if issue != nil {
			if err := issue.Refresh(ctx); err != nil {
				// The push stands, and it needed no lease.
				e.log.WarnContext(ctx, "the auth lease could not be refreshed",
					"partition", id.Partition, "client", req.Header.ClientID, "error", err)
			}
		}
		if err := out.open(header, issue.Frame(), results); err != nil {
			return err
		}
		return out.end()
	}
	read, err := e.pull.Begin(ctx, pull)
	if err != nil {
		return err
	}
	defer read.close()
	if read.reset {
		return e.rotated(req, read.logEpoch, out)
	}
	if err := out.open(header, issue.Frame(), results); err != nil {
		return err
	}
	if err := read.stream(ctx, out.emit); err != nil {
		return err
	}
	return out.end()
}

// validate applies every rule about a request as a whole that needs no database.
func (e *Engine) validate(req *ssp2.Request, push pushsvc.Request, pull pullsvc.Request, served bool) error {
	if req.WireVersion >= ssp2.WireV2 && req.Header.LogEpoch == nil && len(req.Commits) > 0 {
		return ssp2.Errorf(ssp2.CodeInvalidRequest, "a request that asks for the log epoch must not carry commits")
	}
	if !served {
		return nil
	}
	if err := e.push.Validate(push); err != nil {
		return err
	}
	if req.Pull == nil {
		return nil
	}
	return e.pull.Validate(pull)
}

// enter compares the request's log epoch with the partition's.
func (e *Engine) enter(ctx context.Context, partition string, req *ssp2.Request) (gate.Epoch, bool, error) {
	epoch, err := e.gate.Enter(ctx, partition)
	if err != nil {
		return gate.Epoch{}, false, err
	}
	reset, err := gate.Decide(req.WireVersion, req.Header.LogEpoch, epoch)
	if err != nil || !reset {
		return epoch, reset, err
	}
	// A reset makes a client throw its rows away. What this process remembers may
	// be the epoch from before a rotation, and the client's the one after it.
	e.gate.Forget(partition)
	if epoch, err = e.gate.Enter(ctx, partition); err != nil {
		return gate.Epoch{}, false, err
	}
	reset, err = gate.Decide(req.WireVersion, req.Header.LogEpoch, epoch)
	return epoch, reset, err
}

// rotated answers a request that met another log epoch than the one it came in
// with.
func (e *Engine) rotated(req *ssp2.Request, logEpoch string, out *response) error {
	_, err := gate.Decide(req.WireVersion, req.Header.LogEpoch, gate.Epoch{LogEpoch: logEpoch, Required: true})
	if err != nil {
		return err
	}
	return out.only(&ssp2.ResponseHeader{
		LatestSchemaVersion: &e.schema.Version, LogEpoch: logEpoch, ResetRequired: true,
	})
}

// Resolve asks the host what an actor may read, for what is no round: a connection that
// registers what its client pulled before (§8.1). As in a round, a failing resolver grants
// nothing and is no error, and an authority out of reach is one unless the client has an
// auth lease.
func (e *Engine) Resolve(ctx context.Context, req ScopeRequest) (scope.Resolution, error) {
	scopes, _, err := e.resolve(ctx, req)
	return scopes, err
}

// resolve asks the host, once, what the actor may read and write. When the host is out of
// reach, the client's auth lease says it. issue is the lease to be issued, nil for none.
func (e *Engine) resolve(ctx context.Context, req ScopeRequest) (_ scope.Resolution, issue *lease.Round, _ error) {
	holder := lease.Client{Partition: req.Partition, ID: req.ClientID, Actor: req.Actor}
	var askedAt time.Time
	if e.leases != nil {
		askedAt = e.leases.Now()
	}
	allowed, err := e.askHost(ctx, req)
	if err != nil {
		if over := context.Cause(ctx); over != nil {
			// A request that ended meanwhile says nothing about the actor.
			return scope.Resolution{}, nil, fmt.Errorf("resolving scopes: %w", over)
		}
		if errors.Is(err, ErrOutage) {
			e.resolverFailed(ctx, req, true, err)
			if e.leases != nil {
				leased, err := e.leases.Authorize(ctx, holder)
				if err != nil {
					return scope.Resolution{}, nil, err
				}
				return scope.Resolution{Grants: scope.Compile(leased)}, nil, nil
			}
			return scope.Resolution{}, nil, &ssp2.Error{
				Code:    ssp2.CodeAuthLeaseRequired,
				Message: "live authorization is unavailable and there is no auth lease to stand in for it",
				Err:     err,
			}
		}
		e.hostFailed(ctx, req, err)
		return scope.Resolution{Err: err}, nil, nil
	}
	if err := scope.ValidateAllowed(e.schema, allowed); err != nil {
		e.hostFailed(ctx, req, err)
		return scope.Resolution{}, nil, err
	}
	if e.leases != nil {
		issue = e.leases.Begin(holder, allowed, askedAt)
	}
	return scope.Resolution{Grants: scope.Compile(allowed)}, issue, nil
}

func (e *Engine) askHost(ctx context.Context, req ScopeRequest) (_ scope.Allowed, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	return e.resolveScopes(ctx, req)
}

func (e *Engine) hostFailed(ctx context.Context, req ScopeRequest, err error) {
	e.log.ErrorContext(ctx, "host callback failed", "callback", "ResolveScopes",
		"partition", req.Partition, "actor", req.Actor, "client", req.ClientID, "error", err)
	e.resolverFailed(ctx, req, false, err)
}

// report logs a failure that the client is told little about.
func (e *Engine) report(ctx context.Context, id Identity, req *ssp2.Request, out *response, err error) {
	f := Failure(err)
	level := slog.LevelDebug
	switch info, _ := ssp2.Lookup(f.Code); {
	case ctx.Err() != nil || out.gone:
		// The client left; there is nothing to look into.
	case info.Category == ssp2.CategoryInternal && info.Action == ssp2.ActionRetryLater:
		level = slog.LevelWarn
	case info.Category == ssp2.CategoryInternal:
		level = slog.LevelError
	}
	e.log.Log(ctx, level, "round failed", "code", string(f.Code), "begun", out.begun,
		"partition", id.Partition, "actor", id.Actor, "client", req.Header.ClientID, "error", err)
}
