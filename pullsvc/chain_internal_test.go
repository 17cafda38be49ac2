package pullsvc

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

// TestChainOf: pages of one pin that follow each other and live long enough, the longest
// of those that are not too long.
func TestChainOf(t *testing.T) {
	t.Parallel()
	page := func(id, from, to string, rows int64) segment.Meta {
		m := segment.Meta{ID: id, AsOfCommitSeq: 7, RowCount: rows, ExpiresAt: 100}
		if from != "" {
			m.RowCursor = &from
		}
		if to != "" {
			m.NextRowCursor = &to
		}
		return m
	}
	other := func(m segment.Meta, change func(*segment.Meta)) segment.Meta {
		change(&m)
		return m
	}
	first, second, last := page("1", "", "b", 10), page("2", "b", "c", 10), page("3", "c", "", 10)
	b := "b"
	for _, tc := range []struct {
		name     string
		found    []segment.Meta
		rows     int64
		from     *string
		want     []segment.Meta
		complete bool
	}{
		{"nothing", nil, 10, nil, nil, false},
		{"all", []segment.Meta{last, first, second}, 10, nil, []segment.Meta{first, second, last}, true},
		{"from a cursor on", []segment.Meta{last, first, second}, 10, &b, []segment.Meta{second, last}, true},
		{"no end", []segment.Meta{first, second}, 10, nil, []segment.Meta{first, second}, false},
		{"no begin", []segment.Meta{second, last}, 10, nil, nil, false},
		{"a gap", []segment.Meta{first, last}, 10, nil, []segment.Meta{first}, false},
		{"too long", []segment.Meta{first, second, last}, 9, nil, nil, false},
		{"an image has any length", []segment.Meta{page("i", "", "", 1000)}, 0, nil, []segment.Meta{page("i", "", "", 1000)}, true},
		{"the longest", []segment.Meta{page("s", "", "a", 5), first, page("l", "", "z", 11), second}, 10, nil, []segment.Meta{first, second}, false},
		{"the longest, in any order", []segment.Meta{first, page("s", "", "a", 5), second}, 10, nil, []segment.Meta{first, second}, false},
		{"a circle", []segment.Meta{first, page("2", "b", "b", 1)}, 10, nil, []segment.Meta{first, page("2", "b", "b", 1)}, false},
		{"another pin", []segment.Meta{first, other(second, func(m *segment.Meta) { m.AsOfCommitSeq = 8 })}, 10, nil, []segment.Meta{first}, false},
		{"about to expire", []segment.Meta{first, other(second, func(m *segment.Meta) { m.ExpiresAt = 99 })}, 10, nil, []segment.Meta{first}, false},
	} {
		got, complete := chainOf(tc.found, 7, tc.rows, tc.from, 100)
		require.Equal(t, tc.want, got, tc.name)
		require.Equal(t, tc.complete, complete, tc.name)
	}
}

// TestNobodyWaitsForPagesThatAreNotFound: a chain ends where the store would not find more,
// and so does what is waited for; whoever waited for more would never be done.
func TestNobodyWaitsForPagesThatAreNotFound(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for at, want := range map[int]int{0: readAhead, 10: 10 + readAhead, segment.MaxFound - 1: segment.MaxFound} {
		c := &chain{
			s: &Service{shared: newShared()}, pages: make([]segment.Meta, at),
			changed: make(chan struct{}), running: make(chan struct{}), // by somebody who takes his time
		}
		_, _, err := c.page(ctx, at, 50)
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, want, c.want)
	}
}
