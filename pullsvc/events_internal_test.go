package pullsvc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// It counts the allocations of the whole process, so it runs alone.
func TestNoSinkAllocatesNothing(t *testing.T) { //nolint:paralleltest // see above
	p, out, sub := &Pull{s: &Service{}}, &pieces{}, &subscription{}
	ctx := t.Context()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		p.note(out, sub)
		p.tell(ctx, out)
	}))
}
