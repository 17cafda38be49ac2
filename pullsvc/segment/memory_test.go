package segment_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

// TestMemoryIsBounded: the segments used longest ago make room, and their bytes and
// descriptions are gone from everywhere; one that is larger than the store is refused.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s, err := segment.NewMemory(segment.MemoryConfig{MaxBytes: 100_000, TTL: time.Hour})
	require.NoError(t, err)
	put := func(body string) segment.Meta {
		m := describe(body, "d")
		require.NoError(t, s.Put(ctx, m, strings.NewReader(body)))
		return m
	}
	open := func(m segment.Meta) error {
		_, r, err := s.Open(ctx, ref(m))
		if err == nil {
			_, err = io.ReadAll(r)
		}
		return err
	}
	a, b := put(strings.Repeat("a", 40_000)), put(strings.Repeat("b", 40_000))
	require.NoError(t, open(a))
	c := put(strings.Repeat("c", 40_000))
	require.ErrorIs(t, open(b), segment.ErrNotFound)
	require.NoError(t, open(a))
	require.NoError(t, open(c))
	found, err := s.Find(ctx, a.Key)
	require.NoError(t, err)
	require.Len(t, found, 2)

	huge := strings.Repeat("x", 100_000)
	require.ErrorIs(t, s.Put(ctx, describe(huge, "d"), strings.NewReader(huge)), segment.ErrTooLarge)
	require.NoError(t, open(a))
	require.NoError(t, open(c))
}

// TestMemoryOrder: storing a segment again uses it, and lets it outlive others that are then
// deleted before it.
func TestMemoryOrder(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s, err := segment.NewMemory(segment.MemoryConfig{MaxBytes: 100_000, TTL: ttl, Clock: clock.Now})
	require.NoError(t, err)
	bodies := map[string]string{}
	for _, name := range []string{"a", "b", "c"} {
		bodies[name] = strings.Repeat(name, 40_000)
	}
	m := func(name string) segment.Meta { return describe(bodies[name], "d") }
	put(t, s, m("a"), bodies["a"])
	put(t, s, m("b"), bodies["b"])
	clock.advance(ttl / 2)
	put(t, s, m("a"), bodies["a"])
	clock.advance(ttl / 2)
	require.Equal(t, 1, deleteAll(t, s, 10))
	opens(t, s, m("a"), bodies["a"])

	put(t, s, m("b"), bodies["b"])
	put(t, s, m("a"), bodies["a"])
	put(t, s, m("c"), bodies["c"])
	opens(t, s, m("a"), bodies["a"])
	refuses(t, s, ref(m("b")), segment.ErrNotFound)
}

// TestMemoryOfDescriptions: they count, and those of one segment make room for each other
// when nothing else is left.
func TestMemoryOfDescriptions(t *testing.T) {
	t.Parallel()
	clock := newClock()
	s, err := segment.NewMemory(segment.MemoryConfig{MaxBytes: 100_000, TTL: ttl, Clock: clock.Now})
	require.NoError(t, err)
	body := strings.Repeat("x", 50_000)
	for range 3 {
		for i := range 200 {
			m := describe(body, "d")
			m.AsOfCommitSeq = int64(i)
			put(t, s, m, body)
			opens(t, s, m, body)
		}
		found := find(t, s, describe(body, "d").Key)
		require.Greater(t, len(found), 20, "what is deleted leaves room")
		require.Less(t, len(found), 100)
		require.Equal(t, int64(199), found[0].AsOfCommitSeq)
		clock.advance(ttl)
		require.Equal(t, len(found), deleteAll(t, s, 500))
	}
}

// TestValidID: a hash in lower case, and nothing else.
func TestValidID(t *testing.T) {
	t.Parallel()
	id := segment.ID(nil)
	require.True(t, segment.ValidID(id))
	for _, bad := range []string{"", "sha256:", id[:70], id + "0", id[7:], strings.ToUpper(id), "sha512:" + id[7:], id[:70] + "g", id[:70] + "/", id[:70] + ":", id[:70] + "`"} {
		require.False(t, segment.ValidID(bad), bad)
	}
}
