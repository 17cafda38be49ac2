package segment_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc/segment"
)

// passes is a store whose passes are scripted.
type passes struct {
	segment.Store
	script chan pass
	limits chan int
}

type pass struct {
	more bool
	err  error
}

func (s *passes) DeleteExpired(ctx context.Context, limit int) (int, bool, error) {
	select {
	case s.limits <- limit:
	case <-ctx.Done():
		return 0, false, ctx.Err()
	}
	p := <-s.script
	return limit, p.more, p.err
}

// TestJanitor: every time it is due it makes passes until nothing is left; one that fails
// ends the sweep and not the janitor; the waits differ and are never longer than asked.
func TestJanitor(t *testing.T) {
	t.Parallel()
	s := &passes{script: make(chan pass), limits: make(chan int)}
	j, err := segment.NewJanitor(segment.JanitorConfig{Store: s, Every: time.Hour})
	require.NoError(t, err)
	due, waits := make(chan time.Time), make(chan time.Duration)
	j.WaitWith(func(d time.Duration) (<-chan time.Time, func() bool) {
		waits <- d
		return due, func() bool { return true }
	})
	require.NoError(t, j.Stop(t.Context()), "before it started")
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, j.Start(ctx))
	cancel()
	require.Error(t, j.Start(t.Context()))

	seen := map[time.Duration]bool{}
	sweep := func(script ...pass) {
		d := <-waits
		require.LessOrEqual(t, d, time.Hour)
		require.GreaterOrEqual(t, d, 45*time.Minute)
		seen[d] = true
		due <- time.Time{}
		for _, p := range script {
			require.Positive(t, <-s.limits)
			s.script <- p
		}
	}
	sweep(pass{})
	sweep(pass{more: true}, pass{more: true}, pass{})
	sweep(pass{more: true, err: errors.New("the database is away")})
	sweep(pass{})
	require.Greater(t, len(seen), 1)
	<-waits
	require.NoError(t, j.Stop(t.Context()))
	require.NoError(t, j.Stop(t.Context()))

	// It starts again, and ends in the middle of a sweep.
	require.NoError(t, j.Start(t.Context()))
	<-waits
	due <- time.Time{}
	require.NoError(t, j.Stop(t.Context()))
}
