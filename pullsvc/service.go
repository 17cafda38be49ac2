package pullsvc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/internal/pgtx"
	"github.com/syncpg/syncpg/internal/trace"
	"github.com/syncpg/syncpg/lease"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/pullsvc/segment/image"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// Defaults of Config.
const (
	// DefaultMaxSubscriptions is far above what a client of sensible design sends,
	// and still costs one round trip and a few milliseconds.
	DefaultMaxSubscriptions = 1000
	// DefaultMaxScopeValues is what takes the database some tenths of a second to look
	// for: each value is at least a probe of an index, and a byte of a request can name
	// a fifth of one.
	DefaultMaxScopeValues = 20_000
	// DefaultInlineSegmentMaxBytes is the guidance of §5.7.
	DefaultInlineSegmentMaxBytes = 256 << 10
	// DefaultCatchUpChanges is what one response brings at most (§4.2).
	DefaultCatchUpChanges = maxChanges
	// DefaultBufferBytes holds a few thousand ordinary rows.
	DefaultBufferBytes = 2 << 20
	// DefaultMaxBuilds keeps images from taking a pool's connections.
	DefaultMaxBuilds = 4
	// DefaultBuildTime is far above what the largest image takes.
	DefaultBuildTime = 10 * time.Minute
)

// Config configures a Service. Only Schema is required.
type Config struct {
	// Schema is the newest schema version served, the installed one.
	Schema *schema.Schema
	// Versions are the schema versions served, of which Schema is the newest. Default:
	// Schema alone.
	Versions *schema.Versions
	// Clock gives the time of client records. Default time.Now.
	Clock func() time.Time
	// Gate is shared with the other services of a server. Default one of its own.
	Gate *gate.Gate
	// MaxSubscriptions caps the subscriptions of one request. Default 1000.
	MaxSubscriptions int
	// MaxScopeValues caps the scope values that all subscriptions of one request ask
	// for. Default 20,000.
	MaxScopeValues int
	// Segments takes the segments that are not delivered inline. Default none: then
	// every segment is inline, and a client that takes no inline segments (§4.2)
	// cannot bootstrap.
	Segments segment.Store
	// InlineSegmentMaxBytes is the size up to which a segment is delivered inline
	// although the client takes both kinds (§5.7). Default 256 KiB; negative: no
	// segment.
	InlineSegmentMaxBytes int
	// URLs issues the URLs of segments for clients that fetch URLs (§5.4). Default none.
	URLs segment.URLSigner
	// ImageDir is where SQLite images (§5.3) are built, each as a temporary file. Default
	// os.TempDir.
	ImageDir string
	// MaxBuilds is how many images are built at once, each with a connection, about 20 MiB
	// of memory and up to twice its size on disk, of 1 GiB at most. A client for which no
	// more may be built gets rows segments. It is also how many builds of both kinds go on
	// at once after their clients have left, see [Service.Start]. Default 4.
	MaxBuilds int
	// BuildTime is how long a build goes on after its last client has left. Default 10 min.
	BuildTime time.Duration
	// CatchUpChanges is how many changes a subscription may be behind and still be sent
	// every one of them, although its scope has no more rows than that: beyond, it is told
	// to begin anew (§8.4), which is the shorter way and served from stored segments.
	// Default 1000; negative: any number.
	CatchUpChanges int
	// BufferBytes bounds what a response holds in memory: a window and a page end
	// once their payloads reach it, and no further subscription is read ahead. A
	// response holds about four times as much, and one commit or row. Default 2 MiB.
	BufferBytes int
	// Listed is told when a pull has recorded another subscription list for a client (§8.1),
	// before anything of the response is sent, with the schema version that the list is in.
	// It must not block. Default: nobody.
	Listed func(partition, clientID string, schemaVersion int32)
	// Events receives events.PullServed for each subscription that was answered, when
	// the stream ends. Default: nobody.
	Events events.Sink
	// Logger receives what clients are not told. Default: nothing is logged.
	Logger *slog.Logger
}

// Service answers pulls. It is safe for concurrent use.
type Service struct {
	pool             *pgxpool.Pool
	schema           *schema.Schema
	versions         *schema.Versions
	clock            func() time.Time
	gate             *gate.Gate
	maxSubscriptions int
	maxScopeValues   int
	segments         segment.Store
	urls             segment.URLSigner
	shared           *shared
	catchUp          int32                  // negative: off
	images           map[*schema.Table]bool // of each version: there are images of it
	imageDir         string
	maxBuilds        int
	buildTime        time.Duration
	inlineMax        int
	bufferBytes      int64
	listed           func(partition, clientID string, schemaVersion int32)
	events           events.Sink
	log              *slog.Logger
	streams          [][]pgtx.Statement // by table and scope: schemaddl.StreamRowsSQL
}

// New returns a service over the caller's pool, which it never closes. It does no
// I/O.
func New(pool *pgxpool.Pool, cfg Config) (*Service, error) {
	switch {
	case pool == nil:
		return nil, errors.New("pullsvc: a pool is required")
	case cfg.Schema == nil:
		return nil, errors.New("pullsvc: Config.Schema is required")
	case cfg.MaxSubscriptions < 0:
		return nil, fmt.Errorf("pullsvc: Config.MaxSubscriptions is %d; it must be positive, or 0 for the default of %d", cfg.MaxSubscriptions, DefaultMaxSubscriptions)
	case cfg.MaxScopeValues < 0:
		return nil, fmt.Errorf("pullsvc: Config.MaxScopeValues is %d; it must be positive, or 0 for the default of %d", cfg.MaxScopeValues, DefaultMaxScopeValues)
	case cfg.CatchUpChanges > math.MaxInt32/2:
		return nil, fmt.Errorf("pullsvc: Config.CatchUpChanges is %d; at most %d can be counted", cfg.CatchUpChanges, math.MaxInt32/2)
	case cfg.MaxBuilds < 0:
		return nil, fmt.Errorf("pullsvc: Config.MaxBuilds is %d; it must be positive, or 0 for the default of %d", cfg.MaxBuilds, DefaultMaxBuilds)
	case cfg.BuildTime < 0:
		return nil, fmt.Errorf("pullsvc: Config.BuildTime is %v; it must be positive, or 0 for the default of %v", cfg.BuildTime, DefaultBuildTime)
	case cfg.BufferBytes < 0:
		return nil, fmt.Errorf("pullsvc: Config.BufferBytes is %d; it must be positive, or 0 for the default of %d", cfg.BufferBytes, DefaultBufferBytes)
	}
	versions, err := schema.VersionsOf(cfg.Versions, cfg.Schema)
	if err != nil {
		return nil, fmt.Errorf("pullsvc: Config.Versions: %w", err)
	}
	s := &Service{
		pool: pool, schema: cfg.Schema, versions: versions, clock: cfg.Clock, gate: cfg.Gate,
		maxSubscriptions: cfg.MaxSubscriptions, maxScopeValues: cfg.MaxScopeValues, segments: cfg.Segments,
		inlineMax: cfg.InlineSegmentMaxBytes, bufferBytes: int64(cfg.BufferBytes), log: cfg.Logger,
	}
	for _, t := range cfg.Schema.Tables {
		streams := make([]pgtx.Statement, len(t.Scopes))
		for i := range t.Scopes {
			streams[i] = pgtx.NewStatement(schemaddl.StreamRowsSQL(t, i))
		}
		s.streams = append(s.streams, streams)
	}
	s.urls, s.shared = cfg.URLs, newShared()
	s.catchUp, s.imageDir = int32(max(cfg.CatchUpChanges, -1)), cfg.ImageDir
	s.maxBuilds, s.buildTime = cmp.Or(cfg.MaxBuilds, DefaultMaxBuilds), cmp.Or(cfg.BuildTime, DefaultBuildTime)
	s.images = map[*schema.Table]bool{}
	for v := range versions.All() {
		for _, t := range v.Tables {
			s.images[t] = image.Check(t) == nil
		}
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.gate == nil {
		s.gate = gate.New(pool, s.clock)
	}
	if s.maxSubscriptions == 0 {
		s.maxSubscriptions = DefaultMaxSubscriptions
	}
	if s.maxScopeValues == 0 {
		s.maxScopeValues = DefaultMaxScopeValues
	}
	if s.catchUp == 0 {
		s.catchUp = DefaultCatchUpChanges
	}
	if s.inlineMax == 0 {
		s.inlineMax = DefaultInlineSegmentMaxBytes
	}
	if s.bufferBytes == 0 {
		s.bufferBytes = DefaultBufferBytes
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.events, s.listed = events.Safe(cfg.Events, s.log), cfg.Listed
	return s, nil
}

// Start lets builds of segments go on when the clients that waited for them have left,
// until [Service.Stop]: an image to its end, pages as far as they are being read, what
// comes later being found in the store anyway. So clients who stay for a short time only
// still get a large scope ready for each other. A service that is not started answers all
// the same; it gives such work up. The end of ctx changes nothing.
func (s *Service) Start(context.Context) error {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	s.shared.lingers = true
	return nil
}

// Stop gives up what no client waits for and returns when that has ended, or with an error
// when ctx ends first. It may be called more than once, and before Start. Pulls go on.
func (s *Service) Stop(ctx context.Context) error {
	sh := s.shared
	sh.mu.Lock()
	sh.lingers = false
	ends := make([]<-chan struct{}, 0, len(sh.orphans))
	for c := range sh.orphans {
		c.cancel()
		ends = append(ends, c.running)
	}
	sh.mu.Unlock()
	for _, end := range ends {
		select {
		case <-end:
		case <-ctx.Done():
			return fmt.Errorf("pullsvc: segments are still being built: %w", ctx.Err())
		}
	}
	return nil
}

// Request is the pull half of a request (§1.5).
type Request struct {
	Partition   string
	Actor       string
	ClientID    string
	WireVersion ssp2.WireVersion
	// SchemaVersion is that of the rows in the answer. 0: the newest.
	SchemaVersion int32
	LogEpoch      *string
	// Scopes is what the host's resolver said, once for the whole request (§3.2).
	Scopes        scope.Resolution
	Header        ssp2.PullHeader
	Subscriptions []ssp2.Subscription
	// AfterSeq is the newest seq that the push of the same request was given, 0 for
	// none. A database that does not have it yet is sync.storage_stale_read.
	AfterSeq int64
	// Lease is the client's auth lease in this round (§7.3), nil when the server issues
	// none. It is read with the first statements and written, when due, with the client's
	// record; when Begin has returned it knows its frame.
	Lease *lease.Round
}

// Validate checks what a request must satisfy before anything else is done with
// it (§1.7): a schema version that is served, accept bits, number and ids of subscriptions, their tables, scope keys
// and number of scope values. Errors are *ssp2.Error.
func (s *Service) Validate(req Request) error {
	if err := gate.CheckClientID(req.ClientID); err != nil {
		return err
	}
	if req.Header.Accept&(ssp2.AcceptInlineRows|ssp2.AcceptExternalRows) == 0 {
		return ssp2.Errorf(ssp2.CodeInvalidRequest, "the accept bits take neither inline nor external rows segments; one of the two is required")
	}
	if n := len(req.Subscriptions); n > s.maxSubscriptions {
		return ssp2.Errorf(ssp2.CodeInvalidSubscription, "the request has %d subscriptions and this server takes %d at a time", n, s.maxSubscriptions)
	}
	served, ok := s.versions.Schema(cmp.Or(req.SchemaVersion, s.schema.Version))
	if !ok {
		return ssp2.Errorf(ssp2.CodeClientSchemaUnsupported, "the schema version %d is not served", req.SchemaVersion)
	}
	ids := make(map[string]struct{}, len(req.Subscriptions))
	values := 0
	for i := range req.Subscriptions {
		sub := &req.Subscriptions[i]
		if _, twice := ids[sub.ID]; twice {
			return ssp2.Errorf(ssp2.CodeInvalidSubscription, "the subscription id %.64q occurs twice", sub.ID)
		}
		ids[sub.ID] = struct{}{}
		table, ok := served.Table(sub.Table)
		if !ok {
			return ssp2.Errorf(ssp2.CodeUnknownTable, "the subscription %.64q names the table %.64q, which the schema does not have", sub.ID, sub.Table)
		}
		if err := scope.ValidateRequested(table, sub.Scopes); err != nil {
			return err
		}
		for _, list := range sub.Scopes {
			values += len(list)
		}
	}
	if values > s.maxScopeValues {
		return ssp2.Errorf(ssp2.CodeInvalidSubscription, "the subscriptions ask for %d scope values and this server takes %d at a time", values, s.maxScopeValues)
	}
	return nil
}

// Begin reads what the request's subscriptions are to be answered with, as far as
// it fits in memory, and records the client. Nothing is sent yet, so every error
// can still be the answer to the whole request: an *ssp2.Error names its reason,
// any other error means that the same request may be sent again. The caller closes
// the pull.
func (s *Service) Begin(ctx context.Context, req Request) (_ *Pull, err error) {
	ctx, span := trace.Start(ctx, "syncpg.pull.begin")
	defer span.End(&err)
	if err := gate.CheckIdentity(req.Partition, req.Actor); err != nil {
		return nil, fmt.Errorf("pulling: %w", err)
	}
	if err := s.Validate(req); err != nil {
		return nil, err
	}
	p := s.newPull(req)
	begun := false
	defer func() {
		if !begun {
			p.Close() // it may use chains by now
		}
	}()
	err = p.read(ctx, p.subs)
	if errors.Is(err, errPartitionUnknown) {
		s.gate.Forget(req.Partition)
		if _, err = s.gate.Enter(ctx, req.Partition); err == nil {
			err = p.read(ctx, p.subs)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pulling: %w", err)
	}
	if p.Reset {
		p.subs, begun = nil, true
		return p, nil
	}
	if err := p.record(ctx); err != nil {
		return nil, fmt.Errorf("pulling: %w", err)
	}
	begun = true
	return p, nil
}
