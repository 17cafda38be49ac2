package syncpg

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded is a part that writes down what happens to it.
func recorded(trace *[]string, name string, startErr, stopErr error) part {
	return part{
		name:  name,
		start: func(context.Context) error { *trace = append(*trace, "start "+name); return startErr },
		stop:  func(context.Context) error { *trace = append(*trace, "stop "+name); return stopErr },
	}
}

func TestPartsStopInReverse(t *testing.T) {
	t.Parallel()
	var trace []string
	s := &Server{life: lifecycle{parts: []part{recorded(&trace, "a", nil, nil), {name: "idle"}, recorded(&trace, "b", nil, nil)}}}
	require.NoError(t, s.Stop(t.Context()), "not started")
	require.NoError(t, s.Start(t.Context()))
	require.ErrorIs(t, s.Start(t.Context()), ErrStarted)
	require.NoError(t, s.Stop(t.Context()))
	require.NoError(t, s.Stop(t.Context()))
	require.ErrorIs(t, s.Start(t.Context()), ErrStarted)
	require.Equal(t, []string{"start a", "start b", "stop b", "stop a"}, trace)
}

func TestAPartThatDoesNotStartStopsTheOthers(t *testing.T) {
	t.Parallel()
	var trace []string
	broken := errors.New("broken")
	s := &Server{life: lifecycle{parts: []part{
		recorded(&trace, "a", nil, nil), recorded(&trace, "b", broken, nil), recorded(&trace, "c", nil, nil),
	}}}
	err := s.Start(t.Context())
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "start b")
	require.Equal(t, []string{"start a", "start b", "stop a"}, trace)
	require.NoError(t, s.Stop(t.Context()))
	require.Len(t, trace, 3)
}

func TestAPartThatDoesNotStopDoesNotKeepTheOthers(t *testing.T) {
	t.Parallel()
	var trace []string
	a, b := errors.New("a is broken"), errors.New("b is broken")
	s := &Server{life: lifecycle{parts: []part{recorded(&trace, "a", nil, a), recorded(&trace, "b", nil, b)}}}
	require.NoError(t, s.Start(t.Context()))
	err := s.Stop(t.Context())
	require.ErrorIs(t, err, a)
	require.ErrorIs(t, err, b)
	require.Equal(t, []string{"start a", "start b", "stop b", "stop a"}, trace)
}
