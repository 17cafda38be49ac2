package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Config says where a client syncs and as what.
type Config struct {
	// URL is the mount of the server (§1.1), to which /sync is added. Required.
	URL string

	// Header goes with every request, such as Authorization.
	Header http.Header

	// ClientID is the device (§1.5). Required.
	ClientID string

	// Schema holds the tables and the schema version. Required.
	Schema *schema.Schema

	// Wire is the wire version to speak. Required.
	Wire ssp2.WireVersion

	// HTTP sends the requests. Nil: http.DefaultClient.
	HTTP *http.Client

	// Round runs a round over another binding than POST /sync (§8.7): it sends the request and returns the stream of
	// the response. Nil: POST /sync.
	Round func(ctx context.Context, request []byte) (io.ReadCloser, error)

	// Pull limits, in changes, rows and pages (§4.2). 0: the server's defaults.
	LimitCommits, LimitSnapshotRows, MaxSnapshotPages int32

	// Accept says which segments the client takes, and whether by URL (§4.2). 0: inline and external rows segments.
	// AcceptSQLite needs OpenImage.
	Accept ssp2.Accept

	// OpenImage reads a SQLite image (§5.3) of the table; this package brings no SQLite. What it cannot open is an error.
	OpenImage func(image []byte, table string) (*Image, error)

	// Clock tells whether the URL of a segment has ended (§5.4). Nil: time.Now.
	Clock func() time.Time
}

// Client is one device. It is not for concurrent use.
type Client struct {
	cfg     Config
	http    *http.Client
	epoch   string
	lease   *ssp2.Lease
	subs    []*subscription
	replica replica
}

// subscription is what a client keeps of one (§4.1).
type subscription struct {
	id             string
	table          *schema.Table
	requested      ssp2.ScopeMap
	cursor         int64
	bootstrapState *string
	effective      ssp2.ScopeMap // as last echoed while active
	revoked        bool
}

// New returns a client without rows, subscriptions and epoch. It sends nothing.
func New(cfg Config) (*Client, error) {
	switch {
	case cfg.URL == "":
		return nil, errors.New("client: no URL")
	case cfg.ClientID == "":
		return nil, errors.New("client: no client id")
	case cfg.Schema == nil:
		return nil, errors.New("client: no schema")
	case cfg.Wire < ssp2.WireV1 || cfg.Wire > ssp2.WireV3:
		return nil, fmt.Errorf("client: wire version %d is not supported", cfg.Wire)
	case cfg.Accept&ssp2.AcceptSQLite != 0 && cfg.OpenImage == nil:
		return nil, errors.New("client: images are accepted, and nothing opens them")
	}
	if cfg.Accept == 0 {
		cfg.Accept = ssp2.AcceptInlineRows | ssp2.AcceptExternalRows
	}
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	cfg.URL = strings.TrimRight(cfg.URL, "/")
	c := &Client{cfg: cfg, http: cfg.HTTP, replica: replica{}}
	if c.http == nil {
		c.http = http.DefaultClient
	}
	return c, nil
}

// Epoch returns the log epoch that the client has accepted, "" before [Client.Acquire] and in wire version 1.
func (c *Client) Epoch() string { return c.epoch }

// Lease returns the newest auth lease that the server has sent (§7.3), nil before the first. A client keeps it whatever
// becomes of its rows.
func (c *Client) Lease() *ssp2.Lease { return c.lease }

// Row is a row of the replica.
type Row struct {
	Version int64        // server_version (§2.2)
	Values  []ssp2.Value // one per column of the table
}

// Rows returns the rows of a table by row id. The map is the client's own: it changes with the next pull.
func (c *Client) Rows(table string) map[string]Row { return c.replica[table] }

// Cursor returns the cursor of a subscription (§4.3), and whether its bootstrap is complete.
func (c *Client) Cursor(id string) (cursor int64, complete bool) {
	for _, s := range c.subs {
		if s.id == id {
			return s.cursor, s.cursor >= 0 && s.bootstrapState == nil
		}
	}
	return -1, false
}

// Subscribe registers a subscription for the pulls to come. The id must be new.
func (c *Client) Subscribe(id, table string, scopes ssp2.ScopeMap) error {
	t, ok := c.cfg.Schema.Table(table)
	if !ok {
		return fmt.Errorf("subscribe: the schema has no table %q", table)
	}
	if slices.ContainsFunc(c.subs, func(s *subscription) bool { return s.id == id }) {
		return fmt.Errorf("subscribe: subscription %q exists", id)
	}
	c.subs = append(c.subs, &subscription{id: id, table: t, requested: scopes, cursor: -1})
	return nil
}

// Acquire asks for the log epoch (§2.1). It does nothing in wire version 1, which has none.
func (c *Client) Acquire(ctx context.Context) error {
	if c.cfg.Wire == ssp2.WireV1 {
		return nil
	}
	c.epoch = ""
	err := c.round(ctx, &ssp2.Request{Pull: c.pullHeader()}, &answer{})
	switch {
	case errors.Is(err, ErrReset):
		return nil
	case err != nil:
		return fmt.Errorf("acquire the log epoch: %w", err)
	}
	return fmt.Errorf("acquire the log epoch: %w", protocolError("no resetRequired in the answer to a request without an epoch (§2.1)"))
}

// Result is the outcome of one pushed commit (§6.3).
type Result struct {
	ssp2.PushResult
	Details *ssp2.PushResultDetails // §6.3.1, nil for none
}

// Push sends commits in one request and returns their outcomes in the same order. Rejections are outcomes, not errors.
// It changes nothing in the replica: what was written arrives by the next pull.
func (c *Client) Push(ctx context.Context, commits ...ssp2.PushCommit) ([]Result, error) {
	a := &answer{commits: commits}
	if err := c.round(ctx, &ssp2.Request{Commits: commits}, a); err != nil {
		return nil, fmt.Errorf("push: %w", err)
	}
	return a.results, nil
}

// Progress is what pulls have brought.
type Progress struct {
	Rounds      int // requests
	Commits     int // COMMIT frames
	Changes     int // changes in them
	Segments    int // segments, images among them
	SegmentRows int // rows in them
	Images      int // SQLite images
	Downloads   int // segments that were fetched by id
	Fetches     int // segments that were fetched by URL
}

func (p *Progress) add(q Progress) {
	p.Rounds += q.Rounds
	p.Commits += q.Commits
	p.Changes += q.Changes
	p.Segments += q.Segments
	p.SegmentRows += q.SegmentRows
	p.Images += q.Images
	p.Downloads += q.Downloads
	p.Fetches += q.Fetches
}

// Pull runs one round that pulls all subscriptions. A revoked subscription is a [RevokedError] after the whole answer has
// been applied, and is left out of later pulls.
func (c *Client) Pull(ctx context.Context) (Progress, error) {
	a := &answer{}
	req := &ssp2.Request{Pull: c.pullHeader()}
	for _, s := range c.subs {
		if s.revoked {
			continue
		}
		a.subs = append(a.subs, s)
		req.Subscriptions = append(req.Subscriptions, ssp2.Subscription{
			ID: s.id, Table: s.table.Name, Scopes: s.requested, Cursor: s.cursor, BootstrapState: s.bootstrapState,
		})
	}
	a.progress.Rounds = 1
	if err := c.round(ctx, req, a); err != nil {
		return a.progress, fmt.Errorf("pull: %w", err)
	}
	if a.revoked != nil {
		return a.progress, fmt.Errorf("pull: %w", a.revoked)
	}
	return a.progress, nil
}

// Delta applies a delta (§8.2) and returns the cursor to acknowledge, false when nothing of it applies to this client.
func (c *Client) Delta(ctx context.Context, message []byte) (cursor int64, applied bool, err error) {
	m, err := ssp2.DecodeMessage(message)
	if err != nil {
		return 0, false, fmt.Errorf("delta: %w: %w", ErrProtocol, err)
	}
	a := &answer{}
	for _, f := range m.Frames {
		start, ok := f.(*ssp2.SubStart)
		if !ok {
			continue
		}
		i := slices.IndexFunc(c.subs, func(s *subscription) bool { return s.id == start.ID })
		if i < 0 || c.subs[i].revoked || c.subs[i].pending() {
			return 0, false, fmt.Errorf("delta: %w", protocolError("it is of subscription %q, which cannot apply it", start.ID))
		}
		a.subs = append(a.subs, c.subs[i])
	}
	if err := c.apply(ctx, ssp2.NewReader(bytes.NewReader(message), ssp2.Limits{MaxMessageBytes: -1}), a); err != nil {
		return 0, false, fmt.Errorf("delta: %w", err)
	}
	for _, s := range a.subs {
		cursor, applied = max(cursor, s.cursor), true
	}
	return cursor, applied, nil
}

// Floor returns the least cursor of the subscriptions that have synced, which is what a client acknowledges after a pull
// (§8.2), false when there is none.
func (c *Client) Floor() (cursor int64, ok bool) {
	for _, s := range c.subs {
		if s.revoked || s.pending() {
			continue
		}
		if !ok || s.cursor < cursor {
			cursor, ok = s.cursor, true
		}
	}
	return cursor, ok
}

// maxRounds ends a CatchUp that a faulty server would keep going for ever.
const maxRounds = 1000

// CatchUp pulls until every subscription is bootstrapped and a round has brought nothing new.
func (c *Client) CatchUp(ctx context.Context) (Progress, error) {
	var total Progress
	for range maxRounds {
		p, err := c.Pull(ctx)
		total.add(p)
		if err != nil {
			return total, err
		}
		if p.Commits == 0 && p.Segments == 0 && !slices.ContainsFunc(c.subs, (*subscription).pending) {
			return total, nil
		}
	}
	return total, protocolError("no end after %d pulls", maxRounds)
}

// pending reports whether the bootstrap is still to come or under way (§4.7).
func (s *subscription) pending() bool {
	return !s.revoked && (s.cursor < 0 || s.bootstrapState != nil)
}

func (c *Client) pullHeader() *ssp2.PullHeader {
	return &ssp2.PullHeader{
		LimitCommits:      c.cfg.LimitCommits,
		LimitSnapshotRows: c.cfg.LimitSnapshotRows,
		MaxSnapshotPages:  c.cfg.MaxSnapshotPages,
		Accept:            c.cfg.Accept,
	}
}

// reset is the client's half of a log reset (§2.1).
func (c *Client) reset(epoch string) {
	c.epoch = epoch
	c.replica = replica{}
	for _, s := range c.subs {
		s.cursor, s.bootstrapState, s.effective = -1, nil, nil
	}
}
