package pushsvc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// It counts the allocations of the whole process, so it runs alone.
func TestNoSinkAllocatesNothing(t *testing.T) { //nolint:paralleltest // see above
	r := new(Service).newRequest(t.Context(), Request{Commits: []ssp2.PushCommit{{ClientCommitID: "k", Operations: make([]ssp2.Operation, 1)}}})
	r.begin()
	r.commits[0].outcome = appliedOutcome(1, 1)
	r.resp = &Response{}
	x := &transaction{s: &Service{}, requests: []*request{r}}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		x.note()
		x.s.tell(x.requests)
	}))
}
