package segment_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

// TestSort: newest pin first, pages in the order of their table whatever their cursors
// compare like, pages that nothing leads to at the end.
func TestSort(t *testing.T) {
	t.Parallel()
	page := func(id string, pin int64, from, next *string) segment.Meta {
		return segment.Meta{ID: id, AsOfCommitSeq: pin, RowCursor: from, NextRowCursor: next}
	}
	for _, tc := range []struct {
		name string
		in   []segment.Meta
		want string
	}{
		{"nothing", nil, ""},
		{"pins", []segment.Meta{page("a", 1, nil, nil), page("b", 3, nil, nil), page("c", 2, nil, nil)}, "bca"},
		{"a chain whose cursors do not ascend", []segment.Meta{
			page("c", 1, new("m"), nil), page("b", 1, new("z"), new("m")), page("a", 1, nil, new("z")),
		}, "abc"},
		{"a page that is there twice", []segment.Meta{
			page("c", 1, new("z"), nil), page("d", 1, new("y"), nil), page("a", 1, nil, new("y")), page("b", 1, nil, new("z")),
		}, "adbc"},
		{"a page that is missing", []segment.Meta{page("c", 1, new("z"), nil), page("a", 1, nil, new("y"))}, "ac"},
		{"a circle", []segment.Meta{
			page("c", 1, new("z"), new("y")), page("b", 1, new("y"), new("z")), page("a", 1, nil, new("y")),
		}, "abc"},
		{"no first page", []segment.Meta{page("b", 1, new("z"), nil), page("a", 1, new("y"), new("z"))}, "ab"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			segment.Sort(tc.in)
			var got strings.Builder
			for _, m := range tc.in {
				got.WriteString(m.ID)
			}
			require.Equal(t, tc.want, got.String())
		})
	}
}
