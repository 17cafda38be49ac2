package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// errCut is the end of a response that was cut.
var errCut = fmt.Errorf("the response was cut: %w", io.ErrUnexpectedEOF)

// scissors is a transport that cuts the next response behind some bytes. Bodies are
// not compressed, so that the cut falls anywhere between and in frames.
type scissors struct {
	http.RoundTripper
	after int // negative: the response comes whole
}

func (s *scissors) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Accept-Encoding", "identity")
	res, err := s.RoundTripper.RoundTrip(r)
	if err == nil && s.after >= 0 {
		res.Body = &cutBody{ReadCloser: res.Body, left: s.after}
	}
	return res, err
}

type cutBody struct {
	io.ReadCloser
	left int
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errCut
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// Where devices think that they sync, and where they think that segments are.
const (
	anyPlace = "http://any.place"
	cdn      = "http://cdn.test"
)

// places are the servers of one database, with settings and pools of their own and one
// clock. What they share is in the database.
type places struct {
	all       []*place
	now       atomic.Int64
	segments  *segment.Postgres
	transport *http.Transport
}

// place is one of them, and may begin anew.
type place struct {
	pool   *pgxpool.Pool
	cfg    syncpg.Config
	server *syncpg.Server
	host   string

	handler http.Handler
}

func newPlaces(t *testing.T, dsn string, newest *schema.Schema, older ...*syncpg.Schema) *places {
	t.Helper()
	p := &places{transport: &http.Transport{}}
	t.Cleanup(p.transport.CloseIdleConnections)
	p.now.Store(1_800_000_000_000)
	signer, err := segment.NewSigner(segment.SignerConfig{BaseURL: cdn, Key: depositKey, Clock: p.clock})
	require.NoError(t, err)
	for _, change := range []func(*syncpg.Config){
		func(cfg *syncpg.Config) { cfg.InlineSegmentMaxBytes, cfg.CatchUpChanges = -1, -1 },
		func(cfg *syncpg.Config) { cfg.InlineSegmentMaxBytes, cfg.CatchUpChanges = 150, 5 },
		func(*syncpg.Config) {},
	} {
		cfg := worldConfig(newest)
		cfg.OlderSchemas, cfg.Clock, cfg.SegmentURLs = older, p.clock, signer
		change(&cfg)
		poolConfig, err := pgxpool.ParseConfig(dsn)
		require.NoError(t, err)
		poolConfig.MaxConns = 2
		pool, err := pgxpool.NewWithConfig(t.Context(), poolConfig)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		at := &place{pool: pool, cfg: cfg}
		p.all = append(p.all, at)
		p.restart(len(p.all) - 1)
		listener := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { at.handler.ServeHTTP(w, r) }))
		t.Cleanup(func() {
			listener.Close()
			at.server.Push().Wait()
		})
		at.host = strings.TrimPrefix(listener.URL, "http://")
	}
	p.segments, err = segment.NewPostgres(p.all[0].pool, segment.PostgresConfig{Clock: p.clock})
	require.NoError(t, err)
	return p
}

func (p *places) clock() time.Time { return time.UnixMilli(p.now.Load()) }

func (p *places) pass(d time.Duration) { p.now.Add(d.Milliseconds()) }

// restart replaces a server by one that remembers nothing. Nobody may be served meanwhile
// by another goroutine than the caller's.
func (p *places) restart(i int) {
	at := p.all[i]
	if at.server != nil {
		at.server.Push().Wait()
	}
	server, err := syncpg.New(at.pool, at.cfg)
	if err != nil {
		panic(err) // it was made of the same before
	}
	at.server, at.handler = server, withAllowed(server.Handler())
}

func (p *places) deleteExpired(t require.TestingT) {
	for more := true; more; {
		var err error
		_, more, err = p.segments.DeleteExpired(context.Background(), 100)
		require.NoError(t, err)
	}
}

// device is a device of an actor who may see everything, in pages of two rows, one at a time.
func (p *places) device(t *testing.T, partition, id string, accept ssp2.Accept) *historyDevice {
	t.Helper()
	d := &historyDevice{network: &network{places: p, t: t, path: "/segments/", after: -1}}
	d.cfg = deviceConfig{
		url: anyPlace, partition: partition, actor: "actor of " + id, id: id, wire: ssp2.WireV3,
		transport: d.network, limits: [3]int32{0, 2, 1}, accept: accept, clock: p.clock,
	}
	var err error
	d.device, err = newDevice(p.all[0].cfg.Schema, d.cfg)
	require.NoError(t, err)
	require.NoError(t, d.subscribeAll())
	require.NoError(t, d.Acquire(t.Context()))
	return d
}

// network carries the requests of a device to the places, and breaks where it is told to.
type network struct {
	places  *places
	t       require.TestingT
	to, cdn int    // the places that answer
	path    string // requests under which something happens
	skip    int    // how many of those nothing happens to
	after   int    // then one is cut behind that many bytes; negative: none is
	before  func() // or this happens before it; nil: nothing

	spoil bool // or a byte of it is another

	fired, rotated bool

	last  *http.Request // for a segment
	asked []string      // where segments were asked for: host and id
}

func (n *network) RoundTrip(r *http.Request) (*http.Response, error) {
	at := n.to
	if "http://"+r.URL.Host == cdn {
		at = n.cdn
		for _, name := range []string{headerActor, headerPartition, headerAllowed, "X-Syncular-Scopes"} {
			if r.Header.Get(name) != "" {
				return nil, errors.New("a signed URL is fetched with " + name)
			}
		}
	}
	if strings.HasPrefix(r.URL.Path, "/segments/") {
		n.last = r
		n.asked = append(n.asked, r.URL.Host+" "+path.Base(r.URL.Path))
	}
	happens := false
	if strings.HasPrefix(r.URL.Path, n.path) && (n.after >= 0 || n.before != nil || n.spoil) {
		happens = n.skip == 0
		n.skip--
	}
	after := -1
	n.fired = n.fired || happens && n.before != nil
	if happens && n.before != nil {
		n.before()
	} else if happens {
		after = n.after
	}
	r = r.Clone(r.Context())
	r.URL.Host = n.places.all[at].host
	if happens {
		r.Header.Set("Accept-Encoding", "identity")
	}
	res, err := n.places.transport.RoundTrip(r)
	if err == nil && happens && n.spoil {
		body, err := io.ReadAll(res.Body)
		if err = errors.Join(err, res.Body.Close()); err != nil {
			return nil, err
		}
		body[len(body)/2] ^= 1
		res.Body = io.NopCloser(bytes.NewReader(body))
	}
	if err == nil && after >= 0 {
		res.Body = &cutBody{ReadCloser: res.Body, left: after}
	}
	return res, err
}

var _ http.RoundTripper = (*network)(nil)
