package syncpg

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// part is background work that notes what is asked of it.
type part struct {
	name              string
	calls             *[]string
	startErr, stopErr error
}

func (p *part) Start(context.Context) error {
	*p.calls = append(*p.calls, "start "+p.name)
	return p.startErr
}

func (p *part) Stop(ctx context.Context) error {
	*p.calls = append(*p.calls, "stop "+p.name)
	return errors.Join(p.stopErr, ctx.Err())
}

func TestStartAndStop(t *testing.T) {
	t.Parallel()
	failed := errors.New("failed")
	var calls []string
	took := func() []string {
		taken := calls
		calls = nil
		return taken
	}
	a, b := &part{name: "a", calls: &calls}, &part{name: "b", calls: &calls}
	s := &Server{background: []background{a, b}}

	require.NoError(t, s.Stop(t.Context()), "before Start")
	require.Empty(t, took())
	require.NoError(t, s.Start(t.Context()))
	require.Equal(t, []string{"start a", "start b"}, took())
	require.ErrorIs(t, s.Start(t.Context()), ErrStarted)
	require.Empty(t, took())
	require.NoError(t, s.Stop(t.Context()))
	require.Equal(t, []string{"stop b", "stop a"}, took())
	require.NoError(t, s.Stop(t.Context()), "twice")
	require.Empty(t, took())

	b.startErr = failed
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.Start(ctx), failed)
	require.Equal(t, []string{"start a", "start b", "stop a"}, took(), "those that did start are stopped")
	b.startErr = nil
	require.NoError(t, s.Start(t.Context()), "again")
	took()

	b.stopErr = failed
	require.ErrorIs(t, s.Stop(t.Context()), failed)
	require.Equal(t, []string{"stop b", "stop a"}, took(), "one that does not stop keeps none of the others")
	b.stopErr = nil
	require.NoError(t, s.Stop(t.Context()), "tried again")
}
