package segment_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ttl = time.Hour

// testClock is a clock that stands still.
type testClock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *testClock { return &testClock{now: time.UnixMilli(1_800_000_000_000)} }

func (c *testClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *testClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// stores are the stores that keep the contract.
var stores = map[string]func(t *testing.T, clock *testClock) segment.Store{
	"s3": s3Store,
	"memory": func(t *testing.T, clock *testClock) segment.Store {
		s, err := segment.NewMemory(segment.MemoryConfig{TTL: ttl, Clock: clock.Now})
		require.NoError(t, err)
		return s
	},
	"postgres": func(t *testing.T, clock *testClock) segment.Store {
		s, err := segment.NewPostgres(pgtest.New(t, pgtest.Options{}).Pool, segment.PostgresConfig{TTL: ttl, Clock: clock.Now})
		require.NoError(t, err)
		return s
	},
}

// eachStore runs a rule of the contract against every store.
func eachStore(t *testing.T, rule func(t *testing.T, s segment.Store, clock *testClock)) {
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			rule(t, open(t, clock), clock)
		})
	}
}

// describe returns the description of a body as the only page of a table.
func describe(body, digest string) segment.Meta {
	return segment.Meta{
		Key: segment.Key{
			Partition: "p1", LogEpoch: "e1", Table: "items", MediaType: ssp2.MediaRows, SchemaVersion: 1, ScopeDigest: digest,
		},
		ID: segment.ID([]byte(body)), AsOfCommitSeq: 1, RowCount: 1, ByteLength: int64(len(body)),
	}
}

func ref(m segment.Meta) segment.Ref {
	return segment.Ref{Partition: m.Partition, LogEpoch: m.LogEpoch, ID: m.ID, ScopeDigest: m.ScopeDigest}
}

func put(t *testing.T, s segment.Store, m segment.Meta, body string) {
	t.Helper()
	require.NoError(t, s.Put(t.Context(), m, strings.NewReader(body)))
}

func open(ctx context.Context, s segment.Store, r segment.Ref) (m segment.Meta, body string, err error) {
	m, rc, err := s.Open(ctx, r)
	if err != nil {
		return m, "", err
	}
	b, err := io.ReadAll(rc)
	return m, string(b), errors.Join(err, rc.Close())
}

func opens(t *testing.T, s segment.Store, m segment.Meta, want string) {
	t.Helper()
	got, body, err := open(t.Context(), s, ref(m))
	require.NoError(t, err)
	require.Equal(t, segment.ID([]byte(want)), segment.ID([]byte(body)), "%d bytes instead of %d", len(body), len(want))
	require.Equal(t, m.Key, got.Key)
	require.Equal(t, m.ID, got.ID)
	require.Equal(t, m.ByteLength, got.ByteLength)
}

func refuses(t *testing.T, s segment.Store, r segment.Ref, want error) {
	t.Helper()
	_, _, err := open(t.Context(), s, r)
	require.ErrorIs(t, err, want)
}

func find(t *testing.T, s segment.Store, k segment.Key) []segment.Meta {
	t.Helper()
	found, err := s.Find(t.Context(), k)
	require.NoError(t, err)
	return found
}

// noise are bytes that do not repeat.
func noise(n int) string {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b)
	return string(b)
}

// TestStoreKeepsBytes: of every length around the size of a chunk, described as stored.
func TestStoreKeepsBytes(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		for _, n := range []int{0, 1, 1<<20 - 1, 1 << 20, 1<<20 + 1, 2 << 20, 5<<19 + 7} {
			body := noise(n)
			m := describe(body, "d")
			m.AsOfCommitSeq, m.RowCount, m.MediaType, m.SchemaVersion = 1<<53, 1<<40, ssp2.MediaSQLite, 7
			m.RowCursor, m.NextRowCursor = new("1:xа'\"\u2028"), new("2:é \n")
			m.Partition, m.LogEpoch, m.Table = "p/ä?#%", "e 1/2", "täble"
			require.NoError(t, s.Put(t.Context(), m, iotest.HalfReader(strings.NewReader(body))))
			opens(t, s, m, body)
			m.ExpiresAt = clock.Now().Add(ttl).UnixMilli()
			got, rc, err := s.Open(t.Context(), ref(m))
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(m, got))
			var b bytes.Buffer
			_, err = io.Copy(&b, rc)
			require.NoError(t, err)
			require.Equal(t, m.ID, segment.ID(b.Bytes()))
			require.NoError(t, rc.Close())
			require.Contains(t, find(t, s, m.Key), m)
		}
	})
}

// TestStoreOfTheLongestRowIDs: pages between rows whose ids and scope values are as long as the
// database takes them are stored and found as any other; that they are opened needs no cursors.
func TestStoreOfTheLongestRowIDs(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		m := describe("body", "d")
		m.Page, m.RowCount = 1, 5
		m.RowCursor, m.NextRowCursor = new("600:"+strings.Repeat("\x01<ä", 650)), new("600:"+strings.Repeat("\x02>ö", 650))
		put(t, s, m, "body")
		m.ExpiresAt = clock.Now().Add(ttl).UnixMilli()
		require.Equal(t, []segment.Meta{m}, find(t, s, m.Key))
		got, body, err := s.Open(t.Context(), ref(m))
		require.NoError(t, err)
		require.NoError(t, body.Close())
		got.RowCursor, got.NextRowCursor = m.RowCursor, m.NextRowCursor
		require.Equal(t, m, got)
	})
}

// TestStoreGrants: the same bytes are opened only with a digest they were stored under,
// in the partition and the log epoch they were stored for.
func TestStoreGrants(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, _ *testClock) {
		const body = "no rows"
		mine, yours := describe(body, "mine"), describe(body, "yours")
		put(t, s, mine, body)
		refuses(t, s, ref(yours), segment.ErrForbidden)
		put(t, s, yours, body)
		opens(t, s, mine, body)
		opens(t, s, yours, body)
		r := ref(mine)
		r.ScopeDigest = "min"
		refuses(t, s, r, segment.ErrForbidden)
		r.ScopeDigest = ""
		refuses(t, s, r, segment.ErrForbidden)
		r = ref(mine)
		r.Partition = "p2"
		refuses(t, s, r, segment.ErrNotFound)
		r = ref(mine)
		r.ID = segment.ID([]byte("other"))
		refuses(t, s, r, segment.ErrNotFound)
		r = ref(mine)
		r.LogEpoch = "e2"
		refuses(t, s, r, segment.ErrExpired)

		// After a rotation the same bytes serve the new epoch and no longer the old one's key.
		rotated := mine
		rotated.LogEpoch = "e2"
		put(t, s, rotated, body)
		opens(t, s, rotated, body)
		require.Len(t, find(t, s, rotated.Key), 1)
	})
}

// TestStoreExpiry: a segment lives for the TTL after it was last stored, each description
// for itself; an expired one is known as such until it is deleted, and then unknown.
func TestStoreExpiry(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		body := noise(1<<20 + 5)
		mine, yours := describe(body, "mine"), describe(body, "yours")
		put(t, s, mine, body)
		clock.advance(ttl / 2)
		put(t, s, yours, body)
		clock.advance(ttl/2 - time.Millisecond)
		opens(t, s, mine, body)
		clock.advance(time.Millisecond)
		refuses(t, s, ref(mine), segment.ErrExpired)
		require.Empty(t, find(t, s, mine.Key))
		opens(t, s, yours, body)

		require.Equal(t, 1, deleteAll(t, s, 10))
		opens(t, s, yours, body)
		refuses(t, s, ref(mine), segment.ErrForbidden)

		// Stored again before its end it lives on; its body need not be read.
		require.NoError(t, s.Put(t.Context(), yours, strings.NewReader(body)))
		clock.advance(ttl / 2)
		opens(t, s, yours, body)
		require.Len(t, find(t, s, yours.Key), 1)
		clock.advance(ttl / 2)
		refuses(t, s, ref(yours), segment.ErrExpired)
		require.Equal(t, 1, deleteAll(t, s, 10))
		refuses(t, s, ref(yours), segment.ErrNotFound)
		require.Equal(t, 0, deleteAll(t, s, 10))

		// And after it.
		put(t, s, yours, body)
		opens(t, s, yours, body)
		clock.advance(ttl)
		put(t, s, yours, body)
		opens(t, s, yours, body)
		require.Equal(t, 0, deleteAll(t, s, 10))
		opens(t, s, yours, body)
	})
}

// deleteAll deletes what has expired in passes of limit, and returns how much.
func deleteAll(t *testing.T, s segment.Store, limit int) (deleted int) {
	t.Helper()
	for range 1000 {
		n, more, err := s.DeleteExpired(t.Context(), limit)
		require.NoError(t, err)
		require.LessOrEqual(t, n, limit)
		deleted += n
		if !more {
			return deleted
		}
	}
	t.Fatal("deleting expired segments comes to no end")
	return 0
}

// TestStoreDeletesInPasses: each of at most limit, in all partitions, and nothing that
// lives.
func TestStoreDeletesInPasses(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		var old []segment.Meta
		for i := range 7 {
			body := fmt.Sprint("old", i/2)
			m := describe(body, fmt.Sprint("d", i%2))
			m.Partition = fmt.Sprint("p", i%3)
			put(t, s, m, body)
			old = append(old, m)
		}
		clock.advance(ttl / 2)
		live := describe("live", "d")
		put(t, s, live, "live")
		clock.advance(ttl / 2)
		require.Equal(t, 7, deleteAll(t, s, 2))
		for _, m := range old {
			refuses(t, s, ref(m), segment.ErrNotFound)
		}
		opens(t, s, live, "live")
	})
}

// TestStoreFind: segments of exactly the key, in the order of Sort, with the same bytes at
// two pins as two.
func TestStoreFind(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		page := func(body string, pin int64, index int32, from, next *string) segment.Meta {
			m := describe(body, "d")
			m.AsOfCommitSeq, m.Page, m.RowCursor, m.NextRowCursor = pin, index, from, next
			put(t, s, m, body)
			m.ExpiresAt = clock.Now().Add(ttl).UnixMilli()
			return m
		}
		first := page("first", 9, 0, nil, new("1:b"))
		last := page("last", 9, 2, new("1:c"), nil)
		middle := page("middle", 9, 1, new("1:b"), new("1:c"))
		older := page("first", 7, 0, nil, new("1:b"))
		newer := page("first", 10, 0, nil, nil)
		page("nobody else's", 11, -1, nil, nil)
		base := describe("other", "d0")
		put(t, s, base, "other")
		other := func(change func(*segment.Meta)) {
			m := base
			change(&m)
			put(t, s, m, "other")
			require.Len(t, find(t, s, m.Key), 1)
			require.Len(t, find(t, s, base.Key), 1)
		}
		other(func(m *segment.Meta) { m.Partition = "p2" })
		other(func(m *segment.Meta) { m.LogEpoch = "e2" })
		other(func(m *segment.Meta) { m.Table = "docs" })
		other(func(m *segment.Meta) { m.MediaType = ssp2.MediaSQLite })
		other(func(m *segment.Meta) { m.SchemaVersion = 2 })
		other(func(m *segment.Meta) { m.ScopeDigest = "d2" })
		more := base
		more.NextRowCursor = new("1:x")
		put(t, s, more, "other")
		require.Len(t, find(t, s, base.Key), 2)
		more.RowCursor = new("1:w")
		put(t, s, more, "other")
		require.Len(t, find(t, s, base.Key), 3)
		require.Empty(t, cmp.Diff([]segment.Meta{newer, first, middle, last, older}, find(t, s, first.Key)))
		require.Empty(t, find(t, s, segment.Key{Partition: "p9"}))
	})
}

// TestStoreHides: what is stored for one client is opened and not found; who finds it is
// whoever it is stored for as a page, before or after.
func TestStoreHides(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		for _, pages := range [][]int32{{-1, 3}, {3, -1}} {
			body := fmt.Sprint(pages)
			m := describe(body, body)
			for i, page := range pages {
				m.Page = page
				put(t, s, m, body)
				opens(t, s, m, body)
				if i == 0 && page < 0 {
					require.Empty(t, find(t, s, m.Key))
				}
			}
			m.Page, m.ExpiresAt = 3, clock.Now().Add(ttl).UnixMilli()
			require.Equal(t, []segment.Meta{m}, find(t, s, m.Key))
		}
		hidden := describe("hidden", "d")
		hidden.Page = -1
		put(t, s, hidden, "hidden")
		clock.advance(ttl)
		deleteAll(t, s, 10)
		refuses(t, s, ref(hidden), segment.ErrNotFound)
	})
}

// TestStoreFindsTheFirstPages: of a pin that has more than Find returns, and before those
// of older pins.
func TestStoreFindsTheFirstPages(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, _ *testClock) {
		const n = segment.MaxFound + 300
		pages := make(chan segment.Meta, n)
		cursor := func(i int) *string { return new(fmt.Sprintf("1:x%05d", i*7919%n)) } // in no order
		for i := range n {
			m := describe("page", "d")
			m.AsOfCommitSeq, m.Page, m.RowCursor, m.NextRowCursor = 2, int32(i), cursor(i), cursor(i+1)
			switch i {
			case 0:
				m.RowCursor = nil
			case n - 1:
				m.AsOfCommitSeq = 1
			}
			pages <- m
		}
		close(pages)
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for m := range pages {
					if err := s.Put(t.Context(), m, strings.NewReader("page")); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		found := find(t, s, describe("", "d").Key)
		require.Len(t, found, segment.MaxFound)
		for i, m := range found {
			require.Equal(t, int32(i), m.Page)
		}
	})
}

// TestStoreRefuses: what is not as described is not stored, and nothing of it can be
// opened or found.
func TestStoreRefuses(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	eachStore(t, func(t *testing.T, s segment.Store, _ *testClock) {
		for _, n := range []int{10, 3 << 20} {
			body := noise(n)
			for name, r := range map[string]io.Reader{
				"short":  strings.NewReader(body[:n-1]),
				"long":   strings.NewReader(body + "x"),
				"broken": io.MultiReader(strings.NewReader(body[:n-1]), iotest.ErrReader(broken)),
				"empty":  strings.NewReader(""),
			} {
				m := describe(body, "d")
				require.Error(t, s.Put(t.Context(), m, r), name)
				refuses(t, s, ref(m), segment.ErrNotFound)
				require.Empty(t, find(t, s, m.Key), name)
			}
		}
		for name, change := range map[string]func(*segment.Meta){
			"id":           func(m *segment.Meta) { m.ID = "sha256:1" },
			"upper case":   func(m *segment.Meta) { m.ID = strings.ToUpper(m.ID) },
			"partition":    func(m *segment.Meta) { m.Partition = "" },
			"log epoch":    func(m *segment.Meta) { m.LogEpoch = "" },
			"table":        func(m *segment.Meta) { m.Table = "" },
			"scope digest": func(m *segment.Meta) { m.ScopeDigest = "" },
			"length":       func(m *segment.Meta) { m.ByteLength = -1 },
			"page":         func(m *segment.Meta) { m.Page = -2 },
			"rows":         func(m *segment.Meta) { m.RowCount = -1 },
			"cursor":       func(m *segment.Meta) { m.RowCursor = new("") },
		} {
			m := describe("x", "d")
			change(&m)
			require.Error(t, s.Put(t.Context(), m, strings.NewReader("x")), name)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		m := describe("cancelled", "d")
		require.Error(t, s.Put(ctx, m, strings.NewReader("cancelled")))
		refuses(t, s, ref(m), segment.ErrNotFound)
	})
}

// TestStoreIsNeverCutShortSilently: a segment that is deleted under its reader is read to
// its end or ends in an error.
func TestStoreIsNeverCutShortSilently(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		body := noise(4 << 20)
		m := describe(body, "d")
		put(t, s, m, body)
		_, rc, err := s.Open(t.Context(), ref(m))
		require.NoError(t, err)
		defer func() { require.NoError(t, rc.Close()) }()
		head := make([]byte, 1000)
		_, err = io.ReadFull(rc, head)
		require.NoError(t, err)
		clock.advance(ttl)
		require.Equal(t, 1, deleteAll(t, s, 10))
		rest, err := io.ReadAll(rc)
		if err == nil {
			require.Equal(t, m.ID, segment.ID(slices.Concat(head, rest)), "cut short without an error")
			return
		}
		require.ErrorIs(t, err, segment.ErrCutShort)
		_, again := rc.Read(head)
		require.ErrorIs(t, again, segment.ErrCutShort)
	})
}

// TestStoreIsConcurrent: puts of the same bytes, under the same description and others,
// with deletions and readers among them: whatever was stored is there, whole.
func TestStoreIsConcurrent(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s segment.Store, clock *testClock) {
		ctx := t.Context()
		bodies := []string{"small", noise(2<<20 + 1)}
		var wg sync.WaitGroup
		failures := make(chan error, 100)
		for worker := range 6 {
			wg.Go(func() {
				for i := range 8 {
					body := bodies[(worker+i)%2]
					m := describe(body, fmt.Sprint("d", worker%3))
					err := s.Put(ctx, m, strings.NewReader(body))
					if err == nil {
						// The clock may pass the TTL meanwhile, and then it may be gone.
						_, got, opened := open(ctx, s, ref(m))
						switch {
						case opened == nil && got != body:
							err = errors.New("other bytes")
						case !errors.Is(opened, segment.ErrExpired) && !errors.Is(opened, segment.ErrForbidden) &&
							!errors.Is(opened, segment.ErrNotFound) && !errors.Is(opened, segment.ErrCutShort):
							err = opened
						}
					}
					if err != nil {
						failures <- fmt.Errorf("worker %d: %w", worker, err)
					}
				}
			})
		}
		for range 2 {
			wg.Go(func() {
				for range 8 {
					clock.advance(ttl / 4)
					if _, _, err := s.DeleteExpired(ctx, 3); err != nil {
						failures <- err
					}
				}
			})
		}
		wg.Wait()
		close(failures)
		for err := range failures {
			require.NoError(t, err)
		}
		// Once nobody deletes, all that is stored is there, though much was deleted.
		for _, body := range bodies {
			for d := range 3 {
				m := describe(body, fmt.Sprint("d", d))
				put(t, s, m, body)
				opens(t, s, m, body)
			}
		}
		clock.advance(ttl)
		deleteAll(t, s, 100)
		for _, body := range bodies {
			refuses(t, s, ref(describe(body, "d0")), segment.ErrNotFound)
		}
	})
}

// TestStoreAgainstAModel: over random histories a store says of every segment what a list
// of what was stored and when says.
func TestStoreAgainstAModel(t *testing.T) {
	t.Parallel()
	for name, open := range stores {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := newClock()
			s := open(t, clock)
			run := 0
			rapid.Check(t, func(rt *rapid.T) {
				run++
				checkModel(rt, t.Context(), s, clock, fmt.Sprint("p", run))
			})
		})
	}
}

func checkModel(t *rapid.T, ctx context.Context, s segment.Store, clock *testClock, partition string) { //nolint:revive // rapid's t
	type stored struct {
		m    segment.Meta
		body string
	}
	bodies := []string{"", "a", "b"}
	model := map[string]stored{} // by description
	draw := func() (segment.Meta, string) {
		body := rapid.SampledFrom(bodies).Draw(t, "body")
		m := describe(body, rapid.SampledFrom([]string{"d1", "d2"}).Draw(t, "digest"))
		m.Partition = partition
		m.LogEpoch = rapid.SampledFrom([]string{"e1", "e2"}).Draw(t, "epoch")
		m.AsOfCommitSeq = rapid.Int64Range(1, 2).Draw(t, "pin")
		if rapid.Bool().Draw(t, "paged") {
			m.NextRowCursor = new("x")
		}
		return m, body
	}
	name := func(m segment.Meta) string {
		m.ExpiresAt = 0
		return fmt.Sprint(m.Key, m.ID, m.AsOfCommitSeq, m.NextRowCursor == nil)
	}
	t.Repeat(map[string]func(*rapid.T){
		"put": func(*rapid.T) {
			m, body := draw()
			require.NoError(t, s.Put(ctx, m, strings.NewReader(body)))
			m.ExpiresAt = clock.Now().Add(ttl).UnixMilli()
			model[name(m)] = stored{m, body}
		},
		"advance": func(*rapid.T) { clock.advance(time.Duration(rapid.IntRange(1, 50).Draw(t, "minutes")) * time.Minute) },
		"delete": func(*rapid.T) {
			for more := true; more; {
				var err error
				_, more, err = s.DeleteExpired(ctx, 100)
				require.NoError(t, err)
			}
			for k, e := range model {
				if e.m.ExpiresAt <= clock.Now().UnixMilli() {
					delete(model, k)
				}
			}
		},
		"open": func(*rapid.T) {
			m, _ := draw()
			want := segment.ErrNotFound
			var body *string
			for _, e := range model {
				switch {
				case e.m.ID != m.ID || body != nil:
				case e.m.ScopeDigest == m.ScopeDigest && e.m.LogEpoch == m.LogEpoch && e.m.ExpiresAt > clock.Now().UnixMilli():
					body = &e.body
				case e.m.ScopeDigest == m.ScopeDigest:
					want = segment.ErrExpired
				case errors.Is(want, segment.ErrNotFound):
					want = segment.ErrForbidden
				}
			}
			_, got, err := open(ctx, s, ref(m))
			if body == nil {
				require.ErrorIs(t, err, want)
				return
			}
			require.NoError(t, err)
			require.Equal(t, *body, got)
		},
		"find": func(*rapid.T) {
			m, _ := draw()
			var want []segment.Meta
			for _, e := range model {
				if e.m.Key == m.Key && e.m.ExpiresAt > clock.Now().UnixMilli() {
					want = append(want, e.m)
				}
			}
			segment.Sort(want)
			got, err := s.Find(ctx, m.Key)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(want, got, cmpopts.EquateEmpty()))
		},
	})
}
