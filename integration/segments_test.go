package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// deposit is a site that issues external segments and URLs of them, on a clock of its own.
// What an actor may read is what grants says.
type deposit struct {
	*site
	server atomic.Pointer[http.Handler] // the one that answers
	cfg    syncpg.Config
	now    atomic.Int64

	mu     sync.Mutex
	grants map[string]scope.Allowed
}

var depositKey = bytes.Repeat([]byte("k"), 32)

func newDeposit(t *testing.T) *deposit {
	t.Helper()
	d := &deposit{grants: map[string]scope.Allowed{}}
	d.now.Store(1_800_000_000_000)
	clock := func() time.Time { return time.UnixMilli(d.now.Load()) }
	var swap http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*d.server.Load()).ServeHTTP(w, r) })
	front := httptest.NewServer(http.StripPrefix("/api", swap))
	t.Cleanup(front.Close)
	d.site = newSite(t, func(cfg *syncpg.Config) {
		signer, err := segment.NewSigner(segment.SignerConfig{BaseURL: front.URL + "/api", Key: depositKey, Clock: clock})
		require.NoError(t, err)
		cfg.Clock, cfg.SegmentURLs, cfg.InlineSegmentMaxBytes = clock, signer, -1
		authenticate := cfg.Authenticate
		cfg.Authenticate = func(r *http.Request) (syncpg.Identity, error) {
			id, err := authenticate(r)
			if p := r.Header.Get("X-Partition"); p != "" {
				id.Partition = p
			}
			return id, err
		}
		cfg.ResolveScopes = func(_ context.Context, req syncpg.ScopeRequest) (scope.Allowed, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			return d.grants[req.Actor], nil
		}
		d.cfg = *cfg
	})
	d.url = front.URL + "/api"
	d.restart(t)
	for _, actor := range []string{"ada", "bob"} {
		d.grant(actor, scope.Allowed{"team_id": {"team-1", "team-2"}})
	}
	return d
}

// restart replaces the server by another one of the same database.
func (d *deposit) restart(t *testing.T) {
	t.Helper()
	server, err := syncpg.New(d.db.Pool, d.cfg)
	require.NoError(t, err)
	t.Cleanup(server.Push().Wait)
	h := server.Handler()
	d.server.Store(&h)
}

func (d *deposit) grant(actor string, allowed scope.Allowed) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.grants[actor] = allowed
}

// bootstrap pulls the lists of a team and returns its descriptors.
func (d *deposit) bootstrap(t *testing.T, epoch *string, team string) []*ssp2.SegmentRef {
	t.Helper()
	req := d.request(epoch)
	req.Header.ClientID = t.Name() + team
	req.Pull = &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows | ssp2.AcceptSignedURLs}
	sub := fresh("s", "lists")
	sub.Scopes = ssp2.ScopeMap{"team_id": {team}}
	req.Subscriptions = []ssp2.Subscription{sub}
	var refs []*ssp2.SegmentRef
	for _, f := range d.sync(t, req) {
		if ref, ok := f.(*ssp2.SegmentRef); ok {
			refs = append(refs, ref)
		}
	}
	return refs
}

// get fetches a URL with a header.
func (d *deposit) get(t *testing.T, target string, header http.Header) reply {
	t.Helper()
	return d.ask(t, http.MethodGet, target, header)
}

// download asks for a segment as an actor, for a team.
func (d *deposit) download(t *testing.T, id, actor, team string) reply {
	t.Helper()
	return d.get(t, d.url+"/segments/"+url.PathEscape(id), as(actor, team))
}

func as(actor, team string) http.Header {
	return http.Header{"X-Actor": {actor}, "X-Syncular-Scopes": {fmt.Sprintf(`{"team_id":[%q]}`, team)}}
}

func (d *deposit) fill(t *testing.T) *string {
	t.Helper()
	epoch := d.epoch(t)
	req := d.request(epoch)
	req.Commits = []ssp2.PushCommit{d.putLists(t, "c1", "title", "a", "b", "c")}
	d.sync(t, req)
	return epoch
}

// TestSegmentsOutliveServers: segments in the database are served by whichever server is
// asked, the one that stored them or one that began later; what it serves is the segment.
func TestSegmentsOutliveServers(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	refs := d.bootstrap(t, d.fill(t), "team-1")
	require.Len(t, refs, 1)
	ref := refs[0]
	for range 2 {
		for _, r := range []reply{d.download(t, ref.SegmentID, "ada", "team-1"), d.get(t, *ref.URL, nil)} {
			require.Equal(t, http.StatusOK, r.status, "%s", r.body)
			require.Equal(t, ref.SegmentID, segment.ID(r.body))
			require.Len(t, r.body, int(ref.ByteLength))
			require.NoError(t, ssp2.CheckSegment(r.body))
		}
		d.restart(t)
	}
	// 304 is an answer to those who may have it.
	header := as("ada", "team-1")
	header.Set("If-None-Match", `"`+ref.SegmentID+`"`)
	require.Equal(t, http.StatusNotModified, d.get(t, d.url+"/segments/"+ref.SegmentID, header).status)
	d.grant("ada", nil)
	d.get(t, d.url+"/segments/"+ref.SegmentID, header).requireError(t, http.StatusForbidden, ssp2.CodeForbidden)
}

// TestSegmentProbes: whatever is tried with the id of a segment, its URL or its token, no
// byte goes to somebody who does not hold its scopes now, or held them when the URL was
// issued a quarter of an hour ago at most.
func TestSegmentProbes(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	epoch := d.fill(t)
	mine, empty := d.bootstrap(t, epoch, "team-1"), d.bootstrap(t, epoch, "team-2")
	require.Len(t, mine, 1)
	require.Len(t, empty, 1)
	id := mine[0].SegmentID
	forbidden := func(r reply) {
		t.Helper()
		r.requireError(t, http.StatusForbidden, ssp2.CodeForbidden)
		require.NotContains(t, string(r.body), "title")
	}

	// Another scope, which the actor holds; one that nobody holds; the wildcard.
	forbidden(d.download(t, id, "ada", "team-2"))
	forbidden(d.download(t, id, "ada", "team-9"))
	d.download(t, id, "ada", "*").requireError(t, http.StatusBadRequest, ssp2.CodeInvalidSubscription)
	// The bytes of the empty table are the same for all, and each grant is its own.
	d.grant("bob", scope.Allowed{"team_id": {"team-3"}})
	forbidden(d.download(t, empty[0].SegmentID, "bob", "team-3"))
	// An actor who lost the scopes, or never held any, learns nothing of what there is.
	d.grant("bob", scope.Allowed{})
	unknown := segment.ID([]byte("unknown"))
	known, guess := d.download(t, id, "bob", "team-1"), d.download(t, unknown, "bob", "team-1")
	forbidden(known)
	require.Equal(t, guess.body, known.body)
	d.download(t, unknown, "ada", "team-1").requireError(t, http.StatusNotFound, ssp2.CodeNotFound)
	// Another partition does not know it.
	header := as("ada", "team-1")
	header.Set("X-Partition", "other")
	d.get(t, d.url+"/segments/"+id, header).requireError(t, http.StatusNotFound, ssp2.CodeNotFound)
	// Nobody at all.
	header = as("", "team-1")
	header.Del("X-Actor")
	d.get(t, d.url+"/segments/"+id, header).requireError(t, http.StatusUnauthorized, ssp2.CodeAuthRequired)

	// A token for another segment, a tampered one, one of another key, none.
	signed, _, _ := strings.Cut(*mine[0].URL, "?")
	_, other, _ := strings.Cut(*empty[0].URL, "st=")
	_, token, _ := strings.Cut(*mine[0].URL, "st=")
	forbidden(d.get(t, signed+"?st="+other, nil))
	forbidden(d.get(t, signed+"?st="+token[:10]+"A"+token[11:], nil))
	forbidden(d.get(t, signed+"?st="+token[:len(token)-1], nil))
	forbidden(d.get(t, signed+"?st=", nil))
	forbidden(d.get(t, signed+"?st=", as("ada", "team-1"))) // an empty token is no way back to the headers
	// The token does not name the partition, and is the whole grant: of whoever it was, nothing is asked.
	require.NotContains(t, *mine[0].URL, "acme")
	d.grant("ada", nil)
	require.Equal(t, http.StatusOK, d.get(t, *mine[0].URL, nil).status)
	// An old URL ends with its life, though the segment lives.
	d.now.Add((16*time.Minute + time.Second).Milliseconds())
	forbidden(d.get(t, *mine[0].URL, nil))
	d.grant("ada", scope.Allowed{"team_id": {"team-1"}})
	require.Equal(t, http.StatusOK, d.download(t, id, "ada", "team-1").status)

	// After a rotation of the log epoch nothing of before is served.
	fresh := d.bootstrap(t, epoch, "team-1")
	require.Len(t, fresh, 1)
	_, err := d.db.Pool.Exec(t.Context(), `update syncpg.sync_partition_registry set log_epoch = 'rotated' where partition = 'acme'`)
	require.NoError(t, err)
	d.restart(t)
	d.download(t, id, "ada", "team-1").requireError(t, http.StatusNotFound, ssp2.CodeSegmentExpired)
	d.get(t, *fresh[0].URL, nil).requireError(t, http.StatusNotFound, ssp2.CodeSegmentExpired)
}

// probe is a request for a segment by somebody who may not have it.
type probe struct {
	name    string
	segment func(id string) string // what is asked for
	header  http.Header
	code    ssp2.Code
}

// TestSegmentProbesTellNothing: whoever may not have a segment, or is in another partition,
// gets the same answer whether there is one of that id or not, down to the last byte and
// header, by GET and HEAD, with whatever conditions. Only a holder of other scopes of the
// partition learns from the code what §5.5 says that it must: 403 for what is there, 404
// for what is not; the id, a hash of the rows, is what it has to know for that.
func TestSegmentProbesTellNothing(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	epoch := d.fill(t)
	mine, empty := d.bootstrap(t, epoch, "team-1"), d.bootstrap(t, epoch, "team-2")
	known, unknown := mine[0].SegmentID, segment.ID([]byte("unknown"))
	sign := func(change func(*segment.SignerConfig), id, partition, digest string) string {
		cfg := segment.SignerConfig{BaseURL: "https://x", Key: depositKey, Clock: d.cfg.Clock}
		change(&cfg)
		signer, err := segment.NewSigner(cfg)
		require.NoError(t, err)
		signed, _, err := signer.SignURL(t.Context(), segment.Meta{
			Key: segment.Key{Partition: partition, LogEpoch: *epoch, Table: "lists", ScopeDigest: digest}, ID: id,
		})
		require.NoError(t, err)
		_, token, _ := strings.Cut(signed, "?st=")
		return token
	}
	same := func(*segment.SignerConfig) {}
	direct := url.PathEscape
	by := func(token func(id string) string) func(id string) string {
		return func(id string) string { return url.PathEscape(id) + "?st=" + token(id) }
	}
	partition := as("ada", "team-1")
	partition.Set("X-Partition", "other")
	d.grant("eve", scope.Allowed{})
	d.grant("mallory", scope.Allowed{"team_id": {"team-3"}})
	digest := mine[0].ScopeDigest
	for _, tc := range []probe{
		{name: "nobody", segment: direct, header: http.Header{"X-Syncular-Scopes": {`{"team_id":["team-1"]}`}}, code: ssp2.CodeAuthRequired},
		{name: "an actor of no scopes", segment: direct, header: as("eve", "team-1"), code: ssp2.CodeForbidden},
		{name: "an actor of other scopes, asking for those of the segment", segment: direct, header: as("mallory", "team-1"), code: ssp2.CodeForbidden},
		{name: "an actor whom the resolver does not know", segment: direct, header: as("stranger", "team-1"), code: ssp2.CodeForbidden},
		{name: "another partition", segment: direct, header: partition, code: ssp2.CodeNotFound},
		{name: "no scopes", segment: direct, header: http.Header{"X-Actor": {"ada"}}, code: ssp2.CodeInvalidRequest},
		{name: "scopes that are none", segment: direct, header: http.Header{"X-Actor": {"ada"}, "X-Syncular-Scopes": {`{"nothing":["x"]}`}}, code: ssp2.CodeInvalidSubscription},
		{name: "no token", segment: by(func(string) string { return "" }), code: ssp2.CodeForbidden},
		{name: "a token that is none", segment: by(func(string) string { return "x.y" }), code: ssp2.CodeForbidden},
		{name: "a token for another segment", segment: by(func(string) string { return sign(same, empty[0].SegmentID, "acme", digest) }), code: ssp2.CodeForbidden},
		{name: "a tampered token", segment: by(func(id string) string {
			token := sign(same, id, "acme", digest)
			return token[:len(token)-2] + "AA"
		}), code: ssp2.CodeForbidden},
		{name: "a token of another key", segment: by(func(id string) string {
			return sign(func(c *segment.SignerConfig) { c.Key = bytes.Repeat([]byte("z"), 32) }, id, "acme", digest)
		}), code: ssp2.CodeForbidden},
		{name: "a token that has ended", segment: by(func(id string) string {
			return sign(func(c *segment.SignerConfig) {
				c.Clock = func() time.Time { return time.UnixMilli(d.now.Load()).Add(-16*time.Minute - time.Second) }
			}, id, "acme", digest)
		}), code: ssp2.CodeForbidden},
		{name: "a token of another partition", segment: by(func(id string) string { return sign(same, id, "other", digest) }), code: ssp2.CodeNotFound},
		{name: "an id that is none", segment: func(string) string { return "sha256:0" }, header: as("eve", "team-1"), code: ssp2.CodeForbidden},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for _, method := range []string{http.MethodGet, http.MethodHead} {
				for _, condition := range []http.Header{
					nil,
					{"If-None-Match": {"*"}},
					{"If-None-Match": {`"` + known + `"`}},
					{"If-None-Match": {`W/"` + unknown + `"`}},
					{"Range": {"bytes=0-1"}},
					{"Accept-Encoding": {"zstd"}},
					{"If-Modified-Since": {"Wed, 21 Oct 2015 07:28:00 GMT"}},
				} {
					header := tc.header.Clone()
					if header == nil {
						header = http.Header{}
					}
					maps.Copy(header, condition)
					there := d.ask(t, method, d.url+"/segments/"+tc.segment(known), header)
					not := d.ask(t, method, d.url+"/segments/"+tc.segment(unknown), header)
					info, _ := ssp2.Lookup(tc.code)
					require.Equal(t, info.HTTPStatus, there.status)
					require.Equal(t, not, there)
					require.Empty(t, there.header.Values("ETag"))
					if method == http.MethodGet {
						there.requireError(t, info.HTTPStatus, tc.code)
					} else {
						require.Empty(t, there.body)
					}
				}
			}
		})
	}
	// What a holder of other scopes is told is the code, and nothing of the segment.
	for id, code := range map[string]ssp2.Code{known: ssp2.CodeForbidden, unknown: ssp2.CodeNotFound} {
		header := as("mallory", "team-3")
		header.Set("If-None-Match", `"`+id+`", *`)
		r := d.ask(t, http.MethodGet, d.url+"/segments/"+id, header)
		info, _ := ssp2.Lookup(code)
		r.requireError(t, info.HTTPStatus, code)
		require.Empty(t, r.header.Values("ETag"))
	}
}

// ask is any request, without the time that its answer tells.
func (d *deposit) ask(t *testing.T, method, target string, header http.Header) reply {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, target, nil)
	require.NoError(t, err)
	maps.Copy(r.Header, header)
	res, err := d.client.Do(r)
	require.NoError(t, err)
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	res.Header.Del("Date")
	return reply{res.StatusCode, res.Header, body}
}

// TestSegmentsExpire: known as expired, then, once deleted, unknown.
func TestSegmentsExpire(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	ref := d.bootstrap(t, d.fill(t), "team-1")[0]
	d.now.Add((24 * time.Hour).Milliseconds())
	d.download(t, ref.SegmentID, "ada", "team-1").requireError(t, http.StatusNotFound, ssp2.CodeSegmentExpired)
	store, err := segment.NewPostgres(d.db.Pool, segment.PostgresConfig{Clock: d.cfg.Clock})
	require.NoError(t, err)
	for more := true; more; {
		_, more, err = store.DeleteExpired(t.Context(), 100)
		require.NoError(t, err)
	}
	d.download(t, ref.SegmentID, "ada", "team-1").requireError(t, http.StatusNotFound, ssp2.CodeNotFound)
	require.Zero(t, d.count(t, `select count(*) from syncpg.sync_segment_chunks`))
}
