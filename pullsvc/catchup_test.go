package pullsvc_test

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// TestCatchUp: a subscription that is far behind is told to begin anew where that is the
// shorter way, and sent the log where it is not (§8.4).
func TestCatchUp(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name          string
		rows, changes int   // of the scope: rows, and changes since the cursor
		others        int   // changes of other scopes since
		limit         int32 // limitCommits
		catchUp       int
		want          ssp2.SubStatus
	}{
		{"many changes of few rows", 5, 11, 0, 4, 10, ssp2.SubReset},
		{"one change less", 5, 10, 0, 4, 10, ssp2.SubActive},
		{"as many rows", 10, 11, 0, 4, 10, ssp2.SubReset},
		{"one row more", 11, 12, 0, 4, 10, ssp2.SubActive},
		{"all fit in a window", 5, 20, 0, 100, 10, ssp2.SubActive},
		{"many changes of others", 5, 5, 30, 4, 10, ssp2.SubActive},
		{"switched off", 5, 30, 0, 4, -1, ssp2.SubActive},
		{"the default is a thousand", 5, 30, 0, 4, 0, ssp2.SubActive},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, with(func(c *pullsvc.Config) { c.CatchUpChanges = tc.catchUp }))
			for i := range tc.rows {
				b.commit(t, item(fmt.Sprint("i", i), "x", ""))
			}
			cursor := b.seq
			for i := range tc.others {
				b.commit(t, item(fmt.Sprint("other", i), "y", ""))
			}
			for i := range tc.changes {
				b.commit(t, item(fmt.Sprint("i", i%tc.rows), "x", strconv.Itoa(i)))
			}
			req := request(sub("s", "items", cursor, project("x")))
			req.Header.LimitCommits = tc.limit
			got := b.pull(t, req)[0]
			require.Equal(t, tc.want, got.Start.Status)
			if tc.want == ssp2.SubReset {
				require.Empty(t, cmp.Diff(section{
					Start: ssp2.SubStart{ID: "s", Status: ssp2.SubReset, ReasonCode: string(ssp2.CodeCursorExpired), EffectiveScopes: got.Start.EffectiveScopes},
					End:   ssp2.SubEnd{NextCursor: cursor},
				}, got))
				require.Empty(t, got.Start.EffectiveScopes)
			} else {
				require.NotEmpty(t, got.Commits)
			}
		})
	}
}
