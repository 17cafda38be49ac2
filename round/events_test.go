package round_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func TestARoundIsToldOnce(t *testing.T) {
	t.Parallel()
	secret := errors.New("the directory is down")
	about := events.RequestHandled{
		Partition: "acme", Actor: "ada", ClientID: "device", WireVersion: ssp2.WireV2, Commits: 2, Subscriptions: 1,
	}
	failed := func(code ssp2.Code) events.RequestHandled {
		e := about
		e.Code = code
		return e
	}
	resolver := func(outage bool, err error) events.ResolverFailed {
		return events.ResolverFailed{Partition: "acme", Actor: "ada", ClientID: "device", Phase: "request", Outage: outage, Err: err}
	}
	resolving := func(err error) func(*world) {
		return func(w *world) {
			w.resolve = func(context.Context, round.ScopeRequest) (scope.Allowed, error) { return nil, err }
		}
	}
	outage := fmt.Errorf("%w: %w", round.ErrOutage, secret)
	for _, tc := range []struct {
		name   string
		change func(*world)
		want   []events.Event
	}{
		{"served", func(*world) {}, []events.Event{about}},
		{
			"refused as a whole", func(w *world) { w.pullRule = ssp2.Errorf(ssp2.CodeUnknownTable, "no such table") },
			[]events.Event{failed(ssp2.CodeUnknownTable)},
		},
		{
			"failed before its first byte", func(w *world) { w.gateErr = secret },
			[]events.Event{failed(ssp2.CodeInternalError)},
		},
		{
			"failed after its first byte", func(w *world) {
				w.stream = func(_ context.Context, emit func([]byte) error) error {
					return errors.Join(emit(section("s1")), context.DeadlineExceeded)
				}
			},
			[]events.Event{failed(ssp2.CodeStorageUnavailable)},
		},
		{
			"the resolver fails", resolving(secret),
			[]events.Event{resolver(false, secret), about},
		},
		{
			"the resolver cannot say", resolving(outage),
			[]events.Event{resolver(true, outage), failed(ssp2.CodeAuthLeaseRequired)},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ring := events.NewRing(10)
			w.events = ring
			tc.change(w)
			_ = w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1", "c2"), "s1"))
			require.Empty(t, cmp.Diff(tc.want, told(t, ring), cmpopts.EquateErrors()))
		})
	}
}

// told returns the events in order, without the durations of requests.
func told(t *testing.T, ring *events.Ring) []events.Event {
	t.Helper()
	var all []events.Event
	for _, r := range ring.Query(events.Filter{}) {
		if e, ok := r.Event.(events.RequestHandled); ok {
			require.Positive(t, e.Duration)
			e.Duration = 0
			r.Event = e
		}
		all = append(all, r.Event)
	}
	slices.Reverse(all)
	return all
}

func TestAResolverThatPanicsOrReturnsNonsenseIsTold(t *testing.T) {
	t.Parallel()
	for name, resolve := range map[string]func(context.Context, round.ScopeRequest) (scope.Allowed, error){
		"panics": func(context.Context, round.ScopeRequest) (scope.Allowed, error) { panic("no") },
		"returns unknown variable": func(context.Context, round.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"?": {"x"}}, nil
		},
	} {
		w := newWorld(t)
		ring := events.NewRing(10)
		w.events, w.resolve = ring, resolve
		_ = w.run(t, pulling(w.request(ssp2.WireV2), "s1"))
		failed := ring.Query(events.Filter{Name: "scopes.resolve_failed"})
		require.Len(t, failed, 1, name)
		require.Error(t, failed[0].Event.(events.ResolverFailed).Err, name)
	}
}

func TestARequestThatEndsInTheResolverBlamesNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ring := events.NewRing(10)
	w.events = ring
	ctx, cancel := context.WithCancel(t.Context())
	w.resolve = func(ctx context.Context, _ round.ScopeRequest) (scope.Allowed, error) {
		cancel()
		return nil, ctx.Err()
	}
	require.Error(t, w.runContext(ctx, pulling(w.request(ssp2.WireV2), "s1")))
	require.Empty(t, ring.Query(events.Filter{Name: "scopes.resolve_failed"}))
	require.Len(t, ring.Query(events.Filter{Name: "request.handled"}), 1)
}

func TestARoundThatPanicsIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ring := events.NewRing(10)
	w.events = ring
	w.push = func(pushsvc.Request) (*pushsvc.Response, error) { panic("broken") }
	require.PanicsWithValue(t, "broken", func() { _ = w.run(t, pushing(w.request(ssp2.WireV2), "c1")) })
	got := told(t, ring)
	require.Len(t, got, 1)
	require.Equal(t, ssp2.CodeInternalError, got[0].(events.RequestHandled).Code)
}

// panicking is a sink that is broken.
type panicking struct{}

func (panicking) Emit(context.Context, events.Event) { panic("sink is broken") }

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	plain, broken := newWorld(t), newWorld(t)
	broken.events = panicking{}
	for _, w := range []*world{plain, broken} {
		w.resolve = func(context.Context, round.ScopeRequest) (scope.Allowed, error) { return nil, errors.New("no") }
		require.NoError(t, w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1")))
	}
	require.Equal(t, plain.out.bytes, broken.out.bytes)
	require.Equal(t, plain.trace, broken.trace)
	require.Contains(t, broken.logged.String(), "sink is broken")
}

// finisher is a writer that finishes later.
type finisher struct {
	writer
	report func(received, sent int64)
}

func (f *finisher) WhenFinished(report func(received, sent int64)) { f.report = report }

func TestAFinisherReportsTheRound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	out := &finisher{}
	require.NoError(t, w.runOn(t.Context(), pulling(w.request(ssp2.WireV2), "s1"), out))
	require.Nil(t, out.report, "nobody listens")

	ring := events.NewRing(10)
	w.events = ring
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, w.runOn(ctx, pulling(w.request(ssp2.WireV2), "s1"), out))
	cancel()
	require.Empty(t, ring.Query(events.Filter{}), "the response is not out")
	began := time.Now()
	out.report(11, 22)
	got := ring.Query(events.Filter{})
	require.Len(t, got, 1)
	handled := got[0].Event.(events.RequestHandled)
	require.Equal(t, []int64{11, 22}, []int64{handled.BytesReceived, handled.BytesSent})
	require.Less(t, handled.Duration, time.Minute)
	require.False(t, got[0].At.Before(began))
}

// It counts the allocations of the whole process, so it runs alone.
func TestNoSinkAllocatesNothing(t *testing.T) { //nolint:paralleltest // see above
	require.Zero(t, round.AllocsWithoutSink(t.Context()))
}
