package segment_test

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

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
