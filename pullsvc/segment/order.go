package segment

import (
	"cmp"
	"slices"
	"strings"
)

// Sort orders the segments of one key as [Store.Find] returns them: by pin, newest first,
// and those of a pin by following the cursors of their pages from the first page on.
// Pages that no chain reaches come behind those that one does.
func Sort(found []Meta) {
	slices.SortFunc(found, func(a, b Meta) int {
		return cmp.Or(
			cmp.Compare(b.AsOfCommitSeq, a.AsOfCommitSeq),
			compareCursors(a.RowCursor, b.RowCursor),
			compareCursors(a.NextRowCursor, b.NextRowCursor),
			strings.Compare(a.ID, b.ID))
	})
	for from := 0; from < len(found); {
		to := from + 1
		for to < len(found) && found[to].AsOfCommitSeq == found[from].AsOfCommitSeq {
			to++
		}
		chain(found[from:to])
		from = to
	}
}

// chain brings the pages of one pin, sorted by cursor, into the order of their table.
func chain(pages []Meta) {
	byStart := make(map[string][]int, len(pages)) // of the pages behind a cursor
	for i := range pages {
		if c := pages[i].RowCursor; c != nil {
			byStart[*c] = append(byStart[*c], i)
		}
	}
	ordered := make([]Meta, 0, len(pages))
	taken := make([]bool, len(pages))
	// A page that is there twice has two ends, and both go on; the second one behind
	// everything that follows the first.
	var next []int // the one to take first last
	for i, page := range slices.Backward(pages) {
		if page.RowCursor == nil {
			next = append(next, i)
		}
	}
	for len(next) > 0 {
		i := next[len(next)-1]
		next = next[:len(next)-1]
		if taken[i] {
			continue
		}
		taken[i] = true
		ordered = append(ordered, pages[i])
		if end := pages[i].NextRowCursor; end != nil {
			for _, i := range slices.Backward(byStart[*end]) {
				next = append(next, i)
			}
		}
	}
	for i := range pages {
		if !taken[i] {
			ordered = append(ordered, pages[i])
		}
	}
	copy(pages, ordered)
}

func compareCursors(a, b *string) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return strings.Compare(*a, *b)
}
