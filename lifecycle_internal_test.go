package syncpg

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded is background work that notes what is asked of it.
type recorded struct {
	name            string
	startErr, close error
	log             *[]string
}

func (r *recorded) Start(context.Context) error {
	*r.log = append(*r.log, "start "+r.name)
	return r.startErr
}

func (r *recorded) Stop(context.Context) error {
	*r.log = append(*r.log, "stop "+r.name)
	return r.close
}

func TestStopEndsInReverseWhatStartBegan(t *testing.T) {
	t.Parallel()
	var log []string
	stuck := errors.New("stuck")
	s := &Server{life: lifecycle{work: []background{
		&recorded{name: "a", log: &log}, &recorded{name: "b", log: &log, close: stuck}, &recorded{name: "c", log: &log},
	}}}
	require.NoError(t, s.Stop(t.Context()), "nothing runs")
	require.NoError(t, s.Start(t.Context()))
	require.Error(t, s.Start(t.Context()))
	require.ErrorIs(t, s.Stop(t.Context()), stuck)
	require.NoError(t, s.Stop(t.Context()), "nothing runs any more")
	require.Equal(t, []string{"start a", "start b", "start c", "stop c", "stop b", "stop a"}, log)
}

func TestAStartThatFailsLeavesNothingRunning(t *testing.T) {
	t.Parallel()
	var log []string
	broken := errors.New("broken")
	s := &Server{life: lifecycle{work: []background{
		&recorded{name: "a", log: &log}, &recorded{name: "b", log: &log, startErr: broken}, &recorded{name: "c", log: &log},
	}}}
	require.ErrorIs(t, s.Start(t.Context()), broken)
	require.Equal(t, []string{"start a", "start b", "stop a"}, log)
	require.NoError(t, s.Stop(t.Context()))
}
