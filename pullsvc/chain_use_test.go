package pullsvc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// during pulls, and calls f once, when the first descriptor has been sent.
func (b *bundle) during(t *testing.T, req pullsvc.Request, f func()) section {
	t.Helper()
	p, err := b.Begin(t.Context(), req)
	require.NoError(t, err)
	defer p.Close()
	var frames []byte
	require.NoError(t, p.Stream(t.Context(), func(piece []byte) error {
		frames = append(frames, piece...)
		if f != nil && bytes.Contains(frames, []byte("sha256:")) {
			f()
			f = nil
		}
		return nil
	}))
	require.Nil(t, f)
	return decode(t, req, frames)[0]
}

// TestPagesOfAPinWithOtherEnds: another instance read the same pin in other pages, longer
// ones that end at other rows. A client that has begun with pages of one kind is not given
// those of the other: rows in between would be missing.
func TestPagesOfAPinWithOtherEnds(t *testing.T) {
	t.Parallel()
	b, kept := shared(t, with(func(c *pullsvc.Config) { c.BufferBytes = 32 << 10 }))
	b.fill(t, "x", 5000)
	var other section
	got := b.during(t, bootstrapping("c1", rowsLane, 1000), func() {
		kept.mu.Lock()
		var key segment.Key
		for _, m := range kept.kept {
			key = m.Key
		}
		kept.mu.Unlock()
		var from *string
		for i := range 50 {
			m := segment.Meta{Key: key, AsOfCommitSeq: b.seq, RowCursor: from, RowCount: 900, ByteLength: 10}
			if i < 49 {
				to := fmt.Sprintf("1:xx%07d", (i+1)*103)
				m.NextRowCursor = &to
				from = &to
			}
			raw := fmt.Appendf(nil, "page %05d", i)
			m.ID = segment.ID(raw)
			require.NoError(t, kept.Store.Put(t.Context(), m, bytes.NewReader(raw)))
		}
		other = b.pull(t, bootstrapping("c2", rowsLane, 1000))[0]
	})
	for _, s := range []section{got, other} {
		require.Nil(t, s.Refs[0].RowCursor)
		for i := range s.Refs[1:] {
			require.Equal(t, s.Refs[i].NextRowCursor, s.Refs[i+1].RowCursor, "page %d goes on where the one before ends", i+1)
		}
	}
	require.Len(t, got.rows(t, b, kept, "items"), 5000)
}

// TestAChainOfMorePagesThanAreFound: the first ones are shared, and who gets behind them
// reads on alone.
func TestAChainOfMorePagesThanAreFound(t *testing.T) {
	t.Parallel()
	const n = segment.MaxFound + 60
	b, kept := shared(t)
	b.fill(t, "x", n)
	var reads []int
	for i := range 2 {
		b.counter.Reset()
		req := bootstrapping(fmt.Sprint("c", i), rowsLane, 1)
		req.Header.MaxSnapshotPages = 50
		have := map[string]row{}
		for {
			got := b.pull(t, req)[0]
			require.Equal(t, b.seq, got.End.NextCursor)
			for id, r := range got.rows(t, b, kept, "items") {
				require.NotContains(t, have, id)
				have[id] = r
			}
			if req.Subscriptions[0].BootstrapState = got.End.BootstrapState; got.End.BootstrapState == nil {
				break
			}
			req.Subscriptions[0].Cursor = got.End.NextCursor
		}
		require.Len(t, have, n)
		reads = append(reads, b.scans())
	}
	table, _ := b.schema.Table("items")
	require.LessOrEqual(t, reads[1], 3, "the rows of 60 pages, over two pulls")
	found := map[bool]int{}
	for _, m := range kept.kept {
		require.Equal(t, table.Name, m.Table)
		found[m.Page >= 0]++
	}
	require.Equal(t, map[bool]int{true: segment.MaxFound, false: 60}, found)
}

// TestAnOldChainThatIsStillInUse: others who read on do not keep a chain alive for those
// who come when its pin is too old for them.
func TestAnOldChainThatIsStillInUse(t *testing.T) {
	t.Parallel()
	for name, accept := range map[string]ssp2.Accept{"rows": rowsLane, "image": imageLane} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t)
			b.fill(t, "x", 5000)
			var second section
			b.during(t, bootstrapping("c1", accept, 1000), func() {
				for i := range 4 {
					b.commit(t, item(fmt.Sprint("new", i), "x", ""))
				}
				req := bootstrapping("c2", accept, 1000)
				req.Header.LimitCommits = 3
				second = b.pull(t, req)[0]
			})
			require.Equal(t, b.seq, second.End.NextCursor)
			require.Len(t, second.rows(t, b, kept, "items"), 5004)
		})
	}
}

// failing is a store that does not take one image.
type failing struct {
	*store
	once func() error
}

func (f *failing) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	if once := f.once; m.MediaType == ssp2.MediaSQLite && once != nil {
		f.once = nil
		return once()
	}
	return f.store.Put(ctx, m, body)
}

// TestAFailedImage: whoever waited for it is on the rows lane, and whoever comes then has it
// built anew.
func TestAFailedImage(t *testing.T) {
	t.Parallel()
	for name, once := range map[string]func() error{
		"error": func() error { return errors.New("the store is full") },
		"panic": func() error { panic("the store is broken") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, kept := shared(t)
			b.fill(t, "x", 2500)
			s, err := pullsvc.New(b.db.Pool, pullsvc.Config{
				Schema: b.schema, Segments: &failing{kept, once}, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now },
			})
			require.NoError(t, err)
			b.Service = s
			got := b.during(t, bootstrapping("c1", imageLane, 1000), func() {
				second := b.pull(t, bootstrapping("c2", imageLane, 1000))[0]
				require.Equal(t, ssp2.MediaSQLite, second.Refs[0].MediaType)
			})
			require.Len(t, got.Refs, 3)
			require.Len(t, got.rows(t, b, kept, "items"), 2500)
		})
	}
}

// TestAPullThatDoesNotBegin: leaves nothing behind of the first pages that it has read.
func TestAPullThatDoesNotBegin(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, _ := shared(t)
		b.fill(t, "x", 2500)
		b.exec(t, `create function public.refuse() returns trigger language plpgsql as $$ begin raise 'no'; end $$`)
		b.exec(t, `create trigger refuse before insert on syncpg.sync_clients for each row execute function public.refuse()`)
		_, err := b.Begin(t.Context(), bootstrapping("c1", accept, 1000))
		require.ErrorContains(t, err, "recording the client")
		require.Zero(t, b.Chains())
	})
}

// down is a store that fails from some call on.
type down struct {
	*store
	left atomic.Int32 // calls until then
}

var errDown = errors.New("the bucket is out of reach")

func (d *down) Put(ctx context.Context, m segment.Meta, body io.Reader) error {
	if d.left.Add(-1) < 0 {
		return errDown
	}
	return d.store.Put(ctx, m, body)
}

func (d *down) Find(ctx context.Context, k segment.Key) ([]segment.Meta, error) {
	if d.left.Add(-1) < 0 {
		return nil, errDown
	}
	return d.store.Find(ctx, k)
}

// TestAStoreThatGoesDown: whenever a store begins to fail, a client that takes inline
// segments has every row, of one pin.
func TestAStoreThatGoesDown(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b := setup(t)
		b.fill(t, "x", 2500)
		for calls := range int32(6) {
			kept := newStore(t, func() time.Time { return b.now })
			d := &down{store: kept}
			d.left.Store(calls)
			s, err := pullsvc.New(b.db.Pool, pullsvc.Config{Schema: b.schema, Segments: d, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now }})
			require.NoError(t, err)
			b.Service = s
			got := b.pull(t, bootstrapping("c1", accept, 1000))[0]
			require.Equal(t, b.seq, got.End.NextCursor)
			require.Nil(t, got.End.BootstrapState)
			require.Len(t, got.rows(t, b, kept, "items"), 2500, "after %d calls", calls)
		}
	})
}

// TestAnImageThatIsTooLarge: is not built again for everybody who comes.
func TestAnImageThatIsTooLarge(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	b.fill(t, "x", 2500)
	f := &failing{store: kept}
	f.once = func() error { return fmt.Errorf("an image: %w", segment.ErrTooLarge) }
	s, err := pullsvc.New(b.db.Pool, pullsvc.Config{
		Schema: b.schema, Segments: f, InlineSegmentMaxBytes: -1, Clock: func() time.Time { return b.now },
	})
	require.NoError(t, err)
	b.Service = s
	for i := range 2 {
		got := b.pull(t, bootstrapping(fmt.Sprint("c", i), imageLane, 1000))[0]
		require.Len(t, got.Refs, 3)
		require.Len(t, got.rows(t, b, kept, "items"), 2500)
		if i == 0 {
			b.counter.Reset()
		}
	}
	require.Zero(t, b.scans())
}

// TestShorterPagesLater: a client that goes on with shorter pages than it began with gets no
// longer ones, though others have stored them.
func TestShorterPagesLater(t *testing.T) {
	t.Parallel()
	b, kept := shared(t)
	b.fill(t, "x", 3500)
	b.pull(t, bootstrapping("c1", rowsLane, 1000))
	req := bootstrapping("c2", rowsLane, 1000)
	req.Header.MaxSnapshotPages = 1
	first := b.pull(t, req)[0]
	req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = 700, 50
	req.Subscriptions[0].Cursor, req.Subscriptions[0].BootstrapState = first.End.NextCursor, first.End.BootstrapState
	second := b.pull(t, req)[0]
	for _, ref := range second.Refs {
		require.LessOrEqual(t, ref.RowCount, int64(700))
	}
	require.Len(t, second.rows(t, b, kept, "items"), 2500)
}

// TestSegmentsAreOfWhatIsHeld: who asks for the same and holds less shares nothing with who
// holds more (§3.5), in the order in which they come.
func TestSegmentsAreOfWhatIsHeld(t *testing.T) {
	t.Parallel()
	eachLane(t, func(t *testing.T, accept ssp2.Accept) {
		b, kept := shared(t)
		b.fill(t, "x", 1500)
		b.fill(t, "y", 1500)
		for i, held := range [][]string{{"x", "y"}, {"x"}, {"y"}, {"x", "y", "z"}, {"y", "z"}} {
			req := bootstrapping(fmt.Sprint("c", i), accept, 1000)
			req.Subscriptions[0].Scopes = project("x", "y")
			req.Scopes = granted(scope.Allowed{"project": held})
			got := b.pull(t, req)[0]
			holds := slices.DeleteFunc(slices.Clone(held), func(v string) bool { return v == "z" })
			digest := ssp2.ScopeDigest(map[string][]string{"project": holds})
			have := got.rows(t, b, kept, "items")
			require.Len(t, have, 1500*len(holds))
			for id := range have {
				require.Contains(t, holds, id[:1])
			}
			for _, ref := range got.Refs {
				require.Equal(t, digest, ref.ScopeDigest)
			}
		}
	})
}

// TestABootstrapIsNotAnsweredWithTheNextReset: stored segments do not answer where the pull
// that follows would tell the client to begin anew (§8.4), which would go on for ever.
func TestABootstrapIsNotAnsweredWithTheNextReset(t *testing.T) {
	t.Parallel()
	b, _ := shared(t, with(func(c *pullsvc.Config) { c.CatchUpChanges, c.BufferBytes = 10, 4<<10 }))
	for i := range 5 {
		b.commit(t, item(fmt.Sprint("i", i), "x", ""))
	}
	require.Len(t, b.pull(t, bootstrapping("c1", rowsLane, 2))[0].Refs, 3)
	for i := range 11 {
		b.commit(t, item(fmt.Sprint("i", i%5), "x", strings.Repeat("y", 1000)))
	}
	req := bootstrapping("c2", rowsLane, 2)
	require.NotEmpty(t, b.pull(t, req)[0].Refs)
	req.Subscriptions[0].Cursor = b.pull(t, req)[0].End.NextCursor
	require.Equal(t, ssp2.SubActive, b.pull(t, req)[0].Start.Status)
}
