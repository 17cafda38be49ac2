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
