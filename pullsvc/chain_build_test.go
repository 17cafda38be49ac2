package pullsvc_test

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// gated is a store that holds every Put until it is let go, or given up.
type gated struct {
	*store
	arrived chan struct{} // one for each Put
	release chan struct{} // closed to let all go
	ended   chan error    // one for each Put
	gaveUp  atomic.Int32
}

func (g *gated) Put(ctx context.Context, m segment.Meta, body io.Reader) (err error) {
	defer func() { g.ended <- err }()
	g.arrived <- struct{}{}
	select {
	case <-g.release:
		return g.store.Put(ctx, m, body)
	case <-ctx.Done():
		g.gaveUp.Add(1)
		return ctx.Err()
	}
}

// builds is a bundle of 2500 rows in each of the scopes, with a gated store.
func builds(t *testing.T, change func(*pullsvc.Config), scopes ...string) (*bundle, *gated) {
	t.Helper()
	b, kept := shared(t)
	for _, scope := range scopes {
		b.fill(t, scope, 2500)
	}
	g := &gated{store: kept, arrived: make(chan struct{}, 100), release: make(chan struct{}), ended: make(chan error, 100)}
	cfg := pullsvc.Config{Schema: b.schema, Segments: g, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now }}
	if change != nil {
		change(&cfg)
	}
	s, err := pullsvc.New(b.db.Pool, cfg)
	require.NoError(t, err)
	b.Service = s
	return b, g
}

// client is one whose pull streams.
type client struct {
	leave  context.CancelFunc
	joined chan struct{} // what has been sent is sent before it waits
	ended  chan error
}

func (b *bundle) come(t *testing.T, req pullsvc.Request) client {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	t.Cleanup(leave)
	c := client{leave, make(chan struct{}, 100), make(chan error, 1)}
	p, err := b.Begin(ctx, req)
	require.NoError(t, err)
	go func() {
		err := p.Stream(ctx, func([]byte) error { c.joined <- struct{}{}; return nil })
		p.Close()
		c.ended <- err
	}()
	return c
}

// bootstrappingOf is a bootstrap of another scope than x.
func bootstrappingOf(scope, client string, accept ssp2.Accept) pullsvc.Request {
	req := bootstrapping(client, accept, 1000)
	req.Subscriptions[0].Scopes = project(scope)
	return req
}

func eachLane(t *testing.T, rule func(t *testing.T, accept ssp2.Accept)) {
	t.Helper()
	for name, accept := range map[string]ssp2.Accept{"rows": rowsLane, "image": imageLane} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rule(t, accept)
		})
	}
}

// TestTheFirstClientLeaves: what is built for several goes on when the one that came
// first has gone, and ends when all have, in a service that is not started.
func TestTheFirstClientLeaves(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		for _, allLeave := range []bool{false, true} {
			b, g := builds(t, nil, "x")
			first := b.come(t, bootstrapping("c1", accept, 1000))
			<-g.arrived
			second := b.come(t, bootstrapping("c2", accept, 1000))
			<-second.joined
			first.leave()
			require.ErrorIs(t, <-first.ended, context.Canceled)
			require.Zero(t, g.gaveUp.Load(), "the second client still waits for it")
			if allLeave {
				second.leave()
				require.ErrorIs(t, <-second.ended, context.Canceled)
				require.Equal(t, int32(1), g.gaveUp.Load())
				require.Zero(t, g.puts)
			}
			close(g.release)
			if !allLeave {
				require.NoError(t, <-second.ended)
			}
			got := b.pull(t, bootstrapping("c3", accept, 1000))[0]
			require.Len(t, got.rows(t, b, g, "items"), 2500)
		}
	})
}

// TestABuildOutlivesItsClients: in a started service what is being built when the last
// client leaves is finished: an image, or the pages that are being read. Who comes
// meanwhile waits for it, and who comes later finds it in the store; no row is read twice.
func TestABuildOutlivesItsClients(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		for _, comesBack := range []bool{false, true} {
			b, g := builds(t, nil, "x")
			require.NoError(t, b.Start(t.Context()))
			before := b.scans()
			first := b.come(t, bootstrapping("c1", accept, 1000))
			<-g.arrived
			first.leave()
			require.ErrorIs(t, <-first.ended, context.Canceled)
			require.Zero(t, g.gaveUp.Load())
			if comesBack {
				second := b.come(t, bootstrapping("c2", accept, 1000))
				<-second.joined
				close(g.release)
				require.NoError(t, <-second.ended)
			} else {
				close(g.release)
				require.NoError(t, <-g.ended)
			}
			got := b.pull(t, bootstrapping("c3", accept, 1000))[0]
			require.Len(t, got.rows(t, b, g, "items"), 2500)
			require.Zero(t, g.gaveUp.Load())
			require.Equal(t, 2, b.scans()-before, "a first page, and what is behind it")
			if accept == imageLane {
				require.Equal(t, 1, g.puts)
			} else {
				require.Equal(t, 3, g.puts)
			}
			require.NoError(t, b.Stop(t.Context()))
			require.Zero(t, b.Chains(), "nothing is left of it but the segments")
		}
	})
}

// TestStopEndsBuilds: Stop gives up what no client waits for and waits for its end; what a
// client waits for goes on, and later builds end with their clients.
func TestStopEndsBuilds(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, g := builds(t, nil, "x", "y")
		require.NoError(t, b.Stop(t.Context()), "before Start")
		require.NoError(t, b.Start(t.Context()))
		gone := b.come(t, bootstrapping("c1", accept, 1000))
		<-g.arrived
		stays := b.come(t, bootstrappingOf("y", "c2", accept))
		<-g.arrived
		gone.leave()
		require.ErrorIs(t, <-gone.ended, context.Canceled)
		require.Zero(t, g.gaveUp.Load())
		require.NoError(t, b.Stop(t.Context()))
		require.Equal(t, int32(1), g.gaveUp.Load())
		require.NoError(t, b.Stop(t.Context()))

		again := b.come(t, bootstrapping("c3", accept, 1000))
		<-g.arrived
		again.leave()
		require.ErrorIs(t, <-again.ended, context.Canceled)
		require.Equal(t, int32(2), g.gaveUp.Load())
		close(g.release)
		require.NoError(t, <-stays.ended)
		require.Zero(t, b.Chains())
	})
}

// TestStopGivesUpWaiting: Stop ends with its context, and can be called again.
func TestStopGivesUpWaiting(t *testing.T) {
	t.Parallel()
	b, g := builds(t, nil, "x")
	deaf := &deafStore{gated: g}
	s, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: deaf, InlineSegmentMaxBytes: -1})
	require.NoError(t, err)
	b.Service = s
	require.NoError(t, b.Start(t.Context()))
	c := b.come(t, bootstrapping("c1", imageLane, 1000))
	<-g.arrived
	c.leave()
	require.ErrorIs(t, <-c.ended, context.Canceled)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, b.Stop(ctx), context.Canceled)
	close(g.release)
	require.NoError(t, b.Stop(t.Context()))
}

// deafStore does not look at the context of a Put.
type deafStore struct{ *gated }

func (d *deafStore) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	return d.gated.Put(context.WithoutCancel(ctx), m, body)
}

// TestABuildGoesOnForABoundedTime: after its last client has left.
func TestABuildGoesOnForABoundedTime(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, g := builds(t, func(c *pullsvc.Config) { c.BuildTime = time.Nanosecond }, "x")
		require.NoError(t, b.Start(t.Context()))
		c := b.come(t, bootstrapping("c1", accept, 1000))
		<-g.arrived
		c.leave()
		require.ErrorIs(t, <-c.ended, context.Canceled)
		require.ErrorIs(t, <-g.ended, context.Canceled)
		require.NoError(t, b.Stop(t.Context()))
		require.Zero(t, b.Chains())
		close(g.release)
		got := b.pull(t, bootstrapping("c2", accept, 1000))[0]
		require.Len(t, got.rows(t, b, g, "items"), 2500)
	})
}

// TestBuildsAreBounded: images at once, beyond which clients are on the rows lane, and
// builds that no client waits for, beyond which they end with their clients.
func TestBuildsAreBounded(t *testing.T) {
	t.Parallel()
	one := func(c *pullsvc.Config) { c.MaxBuilds = 1 }
	t.Run("images", func(t *testing.T) {
		t.Parallel()
		b, g := builds(t, one, "x", "y")
		first := b.come(t, bootstrapping("c1", imageLane, 1000))
		<-g.arrived
		second := b.come(t, bootstrappingOf("y", "c2", imageLane))
		<-g.arrived // a page
		close(g.release)
		require.NoError(t, <-first.ended)
		require.NoError(t, <-second.ended)
		g.mu.Lock()
		lanes := map[ssp2.MediaType]int{}
		for _, m := range g.kept {
			lanes[m.MediaType]++
		}
		g.mu.Unlock()
		require.Equal(t, map[ssp2.MediaType]int{ssp2.MediaSQLite: 1, ssp2.MediaRows: 3}, lanes)
		got := b.pull(t, bootstrappingOf("y", "c3", imageLane))[0]
		require.Equal(t, ssp2.MediaSQLite, got.Refs[0].MediaType, "a later client has its image")
	})
	t.Run("without clients", func(t *testing.T) {
		t.Parallel()
		b, g := builds(t, one, "x", "y")
		require.NoError(t, b.Start(t.Context()))
		for i, scope := range []string{"x", "y"} {
			c := b.come(t, bootstrappingOf(scope, scope, rowsLane))
			<-g.arrived
			c.leave()
			require.ErrorIs(t, <-c.ended, context.Canceled)
			require.Equal(t, int32(i), g.gaveUp.Load())
		}
		// One that a client comes back to does not count.
		back := b.come(t, bootstrapping("back", rowsLane, 1000))
		<-back.joined
		close(g.release)
		require.NoError(t, <-back.ended)
		require.NoError(t, b.Stop(t.Context()))
	})
}

// TestAChainGrowsAsFarAsIsWaitedFor: by what one statement reads beyond, which is stored
// before the client that wanted less of it is done.
func TestAChainGrowsAsFarAsIsWaitedFor(t *testing.T) {
	t.Parallel()
	b, kept := shared(t, with(func(c *pullsvc.Config) { c.BufferBytes = 192 << 10 }))
	b.fill(t, "x", 10_000)
	req := bootstrapping("c1", rowsLane, 1000)
	req.Header.MaxSnapshotPages = 1
	puts := []int{1, 3, 3}
	for _, want := range puts {
		got := b.pull(t, req)[0]
		require.Len(t, got.Refs, 1)
		require.Equal(t, want, kept.puts)
		req.Subscriptions[0].Cursor, req.Subscriptions[0].BootstrapState = got.End.NextCursor, got.End.BootstrapState
	}
	require.Zero(t, b.Chains())
}

// patient is a store that takes the first page when something has happened.
type patient struct {
	*store
	until func() bool
	tired atomic.Bool
}

func (p *patient) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for m.Page == 0 && m.ScopeDigest == ssp2.ScopeDigest(project("x")) && !p.until() {
		if ctx.Err() != nil {
			p.tired.Store(true)
			return ctx.Err()
		}
		runtime.Gosched()
	}
	return p.store.Put(ctx, m, body)
}

// TestAPageIsReadWhileTheOneBeforeIsStored: for a client that takes both.
func TestAPageIsReadWhileTheOneBeforeIsStored(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	p := &patient{store: kept}
	s, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: p, InlineSegmentMaxBytes: -1, BufferBytes: 64 << 10})
	require.NoError(t, err)
	b.Service = s
	b.fill(t, "x", 2500)
	b.fill(t, "y", 2500)
	one := bootstrappingOf("y", "c1", rowsLane)
	one.Header.MaxSnapshotPages = 1
	before := b.scans()
	b.pull(t, one)
	alone := b.scans() - before
	before = b.scans()
	p.until = func() bool { return b.scans() > before+alone }
	got := b.pull(t, bootstrapping("c2", rowsLane, 1000))[0]
	require.Nil(t, got.End.BootstrapState)
	require.False(t, p.tired.Load())
	require.Greater(t, len(got.Refs), 3)
	require.Len(t, got.rows(t, b, kept, "items"), 2500)
}

// TestImageOfTwoReads: an image begins with what told that its scope is large. A row that
// moves from what was read to what was not comes once, and the log brings what the image
// does not have.
func TestImageOfTwoReads(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		meddle func(t *testing.T, b *bundle)
	}{
		{"nothing happens", func(*testing.T, *bundle) {}},
		{"a row that was read moves on", func(t *testing.T, b *bundle) { b.commit(t, item("a1", "z", "moved")) }},
		{"a row that was not moves back", func(t *testing.T, b *bundle) { b.commit(t, item("z1", "a", "moved")) }},
		{"a row that was read is deleted", func(t *testing.T, b *bundle) { b.commit(t, remove("items", "a1")) }},
		{"a row that was not is", func(t *testing.T, b *bundle) { b.commit(t, remove("items", "z3")) }},
		{"rows come", func(t *testing.T, b *bundle) { b.commit(t, item("a0", "a", ""), item("z9", "z", "")) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t)
			for i := range 5 {
				b.commit(t, item(fmt.Sprint("a", i+1), "a", ""), item(fmt.Sprint("z", i+1), "z", ""))
			}
			req := bootstrapping("c1", imageLane, 3)
			req.Subscriptions[0].Scopes = project("a", "z")
			p, err := b.Begin(t.Context(), req)
			require.NoError(t, err)
			defer p.Close()
			tc.meddle(t, b)
			got := decode(t, req, collect(t, p))[0]
			require.Len(t, got.Refs, 1)
			require.Equal(t, ssp2.MediaSQLite, got.Refs[0].MediaType)
			require.Equal(t, int64(5), got.Refs[0].AsOfCommitSeq)
			have := got.rows(t, b, kept, "items")
			require.Len(t, have, int(got.Refs[0].RowCount))

			sub := sub("s", "items", got.End.NextCursor, project("a", "z"))
			table, _ := b.schema.Table("items")
			for _, c := range b.one(t, sub).Commits {
				for _, ch := range c.Changes {
					if ch.Op == ssp2.OpDelete {
						delete(have, ch.RowID)
					} else {
						have[rowID(t, table, ch.Row)] = row{version: *ch.RowVersion, payload: ch.Row}
					}
				}
			}
			want := map[string]row{}
			for id, r := range b.rows["items"] {
				want[id] = row{version: r.version, payload: r.payload}
			}
			require.Equal(t, want, have)
		})
	}
}

// TestImagesOfOtherPageSizes: clients of other page sizes, who learn by pages of their own
// that the scope is large, get the same image.
func TestImagesOfOtherPageSizes(t *testing.T) {
	t.Parallel()
	b, g := builds(t, nil, "x")
	first := b.come(t, bootstrapping("c1", imageLane, 1000))
	<-g.arrived
	second := b.come(t, bootstrapping("c2", imageLane, 900))
	<-second.joined
	close(g.release)
	require.NoError(t, <-first.ended)
	require.NoError(t, <-second.ended)
	require.Equal(t, 1, g.puts)
	require.Equal(t, 3, b.scans(), "two pages, and the rest once")
}

// slow is a store whose Find tells what it found when it is let go.
type slow struct {
	*gated
	found chan struct{} // one for each Find that waits
	tell  chan struct{}
	hold  atomic.Bool
}

func (s *slow) Find(ctx context.Context, k segment.Key) ([]segment.Meta, error) {
	found, err := s.gated.Find(ctx, k)
	if s.hold.CompareAndSwap(true, false) {
		s.found <- struct{}{}
		<-s.tell
	}
	return found, err
}

// TestAChainThatIsFinishedMeanwhile: who looked into the store before a segment was there,
// and for its build when that had ended, looks again instead of building it anew.
func TestAChainThatIsFinishedMeanwhile(t *testing.T) {
	t.Parallel()
	b, g := builds(t, nil, "x")
	s := &slow{gated: g, found: make(chan struct{}), tell: make(chan struct{})}
	service, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: s, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now }})
	require.NoError(t, err)
	b.Service = service
	sent, goOn := make(chan struct{}), make(chan struct{})
	p, err := b.Begin(t.Context(), bootstrapping("c1", imageLane, 1000))
	require.NoError(t, err)
	ended := make(chan error)
	go func() {
		frames := 0
		err := p.Stream(t.Context(), func([]byte) error {
			if frames++; frames == 2 { // the descriptor; the image is in use until the pull ends
				sent <- struct{}{}
				<-goOn
			}
			return nil
		})
		p.Close()
		ended <- err
	}()
	<-g.arrived
	s.hold.Store(true)
	second := b.come(t, bootstrapping("c2", imageLane, 1000))
	<-s.found
	scans := b.scans()
	close(g.release)
	<-sent
	close(s.tell)
	require.NoError(t, <-second.ended)
	close(goOn)
	require.NoError(t, <-ended)
	require.Equal(t, scans, b.scans())
	require.Equal(t, 1, g.puts)
}

// late is a store that an instance finds nothing in until it has built what it looks for.
type late struct {
	segment.Store
	finds       atomic.Int32
	built, goOn chan struct{}
}

func (l *late) Find(ctx context.Context, k segment.Key) ([]segment.Meta, error) {
	if l.finds.Add(1) == 2 { // before it stores something; the first time was before it built
		l.built <- struct{}{}
		<-l.goOn
	}
	return l.Store.Find(ctx, k)
}

// TestTwoInstancesThatBuild: who has built what another instance has stored meanwhile throws
// its own away and serves that.
func TestTwoInstancesThatBuild(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, kept := shared(t)
		b.fill(t, "x", 5000)
		store := &late{Store: kept, built: make(chan struct{}), goOn: make(chan struct{})}
		service, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: store, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now }})
		require.NoError(t, err)
		other := *b
		other.Service = service
		loser := other.come(t, bootstrapping("c1", accept, 1000))
		<-store.built
		won := b.pull(t, bootstrapping("c2", accept, 1000))[0]
		puts := kept.puts
		close(store.goOn)
		require.NoError(t, <-loser.ended)
		require.Equal(t, puts, kept.puts)
		require.Equal(t, won.Refs, other.pull(t, bootstrapping("c3", accept, 1000))[0].Refs)
	})
}

// TestAChainWhoseSegmentsAreGone: others who still use it do not make it serve anybody.
func TestAChainWhoseSegmentsAreGone(t *testing.T) {
	t.Parallel()
	for _, rows := range []int32{900, 1000} { // by a probe of its own, and without
		b, kept := shared(t)
		b.fill(t, "x", 2500)
		b.during(t, bootstrapping("c1", imageLane, 1000), func() {
			b.now = b.now.Add(25 * time.Hour)
			got := b.pull(t, bootstrapping("c2", imageLane, rows))[0]
			require.Len(t, got.rows(t, b, kept, "items"), 2500)
		})
	}
}

// TestABuildThatIsTooOld: a client that needs a newer pin gets an image of its own, also
// when it learns by pages of its own that the scope is large.
func TestABuildThatIsTooOld(t *testing.T) {
	t.Parallel()
	for _, rows := range []int32{900, 1000} {
		b, g := builds(t, nil, "x")
		first := b.come(t, bootstrapping("c1", imageLane, 1000))
		<-g.arrived
		req := bootstrapping("c2", imageLane, rows)
		req.AfterSeq = b.commit(t, item("own", "x", ""))
		second := b.come(t, req)
		<-second.joined
		close(g.release)
		require.NoError(t, <-first.ended)
		require.NoError(t, <-second.ended)
		g.mu.Lock()
		pins := map[int64]ssp2.MediaType{}
		for _, m := range g.kept {
			pins[m.AsOfCommitSeq] = m.MediaType
		}
		g.mu.Unlock()
		require.Equal(t, map[int64]ssp2.MediaType{1: ssp2.MediaSQLite, 2: ssp2.MediaSQLite}, pins)
	}
}

// dying is a store whose Put, once given up, ends when it is told to.
type dying struct {
	*gated
	givenUp, end chan struct{}
}

func (d *dying) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	err := d.gated.Put(ctx, m, body)
	if ctx.Err() != nil {
		d.givenUp <- struct{}{}
		<-d.end
	}
	return err
}

// TestABuildThatIsGivenUpGoesOn: who comes while a build that nobody waited for is being
// given up has it go on, from the last page that was stored: none is left out.
func TestABuildThatIsGivenUpGoesOn(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, g := builds(t, nil, "x")
		d := &dying{gated: g, givenUp: make(chan struct{}), end: make(chan struct{})}
		service, err := pullsvc.New(b.db.Pool, pullsvc.Config{
			Schema: b.schema, Segments: d, InlineSegmentMaxBytes: -1, BuildTime: time.Nanosecond,
			Clock: func() time.Time { return b.now },
		})
		require.NoError(t, err)
		b.Service = service
		require.NoError(t, b.Start(t.Context()))
		first := b.come(t, bootstrapping("c1", accept, 1000))
		<-g.arrived
		first.leave()
		require.ErrorIs(t, <-first.ended, context.Canceled)
		<-d.givenUp
		second := b.come(t, bootstrapping("c2", accept, 1000))
		<-second.joined
		for !b.Used() {
			runtime.Gosched()
		}
		close(g.release)
		close(d.end)
		require.NoError(t, <-second.ended)
		scans := b.scans()
		got := b.pull(t, bootstrapping("c3", accept, 1000))[0]
		require.Len(t, got.rows(t, b, g, "items"), 2500)
		require.Equal(t, scans, b.scans(), "what the second client was sent serves the third")
		require.NoError(t, b.Stop(t.Context()))
		require.Zero(t, b.Chains())
	})
}
