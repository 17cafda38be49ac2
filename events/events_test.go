package events_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/ssp2"
)

// every is one event of each type.
var every = []events.Event{
	events.RequestHandled{},
	events.PushApplied{},
	events.PushRejected{},
	events.PushConflicted{},
	events.PullServed{},
	events.SegmentServed{},
	events.ReactionQueued{},
	events.ReactionStarted{},
	events.ReactionRetried{},
	events.ReactionCompleted{},
	events.ReactionDeadLettered{},
	events.ReactionPruneCompleted{},
	events.Pruned{},
	events.ResolverFailed{},
	events.LeaseConsulted{},
	events.RealtimeConnected{},
	events.RealtimeDisconnected{},
	events.RealtimeDeltaSent{},
	events.RealtimeWakeSent{},
	events.RealtimeDropped{},
	events.FanoutListening{},
	events.FanoutDeaf{},
	events.FanoutNotified{},
	events.FanoutHeard{},
	events.FanoutRead{},
	events.FanoutPolled{},
	events.FanoutLost{},
}

// sink is a function as a sink.
type sink func(events.Event)

func (s sink) Emit(_ context.Context, e events.Event) { s(e) }

func pruned(horizon int64) events.Pruned { return events.Pruned{Horizon: horizon} }

func TestNamesOfEvents(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, e := range every {
		require.Regexp(t, `^[a-z]+\.[a-z_]+$`, e.EventName())
		require.False(t, seen[e.EventName()], e.EventName())
		seen[e.EventName()] = true
	}
	// Those that the protocol text names (§6.8, §6.9).
	for _, name := range []string{
		"push.rejected", "reaction.queued", "reaction.started", "reaction.retried", "reaction.completed",
		"reaction.dead_lettered", "reaction.prune_completed",
	} {
		require.True(t, seen[name], name)
	}
}

// It counts the allocations of the whole process, so it runs alone.
func TestNoSinkAllocatesNothing(t *testing.T) { //nolint:paralleltest // see above
	ctx := t.Context()
	for name, s := range map[string]events.Sink{
		"nil":               nil,
		"safe around nil":   events.Safe(nil, slog.Default()),
		"none of many":      events.Multi(nil, events.Safe(nil, nil), events.Slog(nil)),
		"safe around multi": events.Safe(events.Multi(), nil),
	} {
		require.Nil(t, s, name)
		id := name + "!"
		require.Zero(t, testing.AllocsPerRun(100, func() {
			events.Emit(ctx, s, events.PushApplied{Push: events.Push{ClientID: id, Operations: len(id)}, CommitSeq: int64(len(id))})
		}), name)
	}
}

func TestMultiGivesEverySinkEveryEventInOrder(t *testing.T) {
	t.Parallel()
	var got []string
	named := func(name string) events.Sink {
		return sink(func(e events.Event) { got = append(got, fmt.Sprint(name, e.(events.Pruned).Horizon)) })
	}
	m := events.Multi(named("a"), nil, named("b"), named("c"))
	m.Emit(t.Context(), pruned(1))
	events.Multi(nil, named("only")).Emit(t.Context(), pruned(2))
	require.Equal(t, []string{"a1", "b1", "c1", "only2"}, got)
}

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	var got []events.Event
	last := sink(func(e events.Event) { got = append(got, e) })
	bad := sink(func(events.Event) { panic("sink is broken") })
	s := events.Safe(events.Multi(bad, bad, last), slog.New(slog.NewTextHandler(&log, nil)))
	require.NotPanics(t, func() { events.Emit(t.Context(), s, pruned(1)) })
	require.Equal(t, []events.Event{pruned(1)}, got, "the sinks behind it")
	require.Contains(t, log.String(), "sink is broken")
	require.Contains(t, log.String(), "prune.completed")

	require.NotPanics(t, func() { events.Emit(t.Context(), events.Safe(bad, nil), pruned(1)) })
	require.NotPanics(t, func() { events.Emit(t.Context(), events.Safe(bad, slog.New(badHandler{})), pruned(1)) })
	require.NotPanics(t, func() { events.Emit(t.Context(), events.Safe((*events.Ring)(nil), nil), pruned(1)) })
	require.Equal(t, events.Safe(events.NewRing(1), nil), events.Safe(events.Safe(events.NewRing(1), nil), nil), "once is enough")
}

type badHandler struct{ slog.Handler }

func (badHandler) Enabled(context.Context, slog.Level) bool { panic("handler is broken") }

func TestRing(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1000)
	ring := events.NewRing(4)
	ring.Clock = func() time.Time { return now }
	require.Empty(t, ring.Query(events.Filter{}))
	for i := range int64(7) {
		now = time.UnixMilli(1000 + i)
		if i%2 == 0 {
			ring.Emit(t.Context(), pruned(i))
		} else {
			ring.Emit(t.Context(), events.PushApplied{CommitSeq: i})
		}
	}
	for _, c := range []struct {
		name   string
		filter events.Filter
		want   []int64 // milliseconds after 1000, which are the numbers of the events
	}{
		{"all that are kept, newest first", events.Filter{}, []int64{6, 5, 4, 3}},
		{"by name", events.Filter{Name: "push.applied"}, []int64{5, 3}},
		{"of a name that is not there", events.Filter{Name: "push.rejected"}, nil},
		{"since a time, itself included", events.Filter{Since: time.UnixMilli(1005)}, []int64{6, 5}},
		{"since the future", events.Filter{Since: time.UnixMilli(1007)}, nil},
		{"limited to the newest", events.Filter{Limit: 3}, []int64{6, 5, 4}},
		{"limited after the name", events.Filter{Name: "push.applied", Limit: 1}, []int64{5}},
		{"by everything", events.Filter{Name: "prune.completed", Since: time.UnixMilli(1003), Limit: 5}, []int64{6, 4}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var got []int64
			for _, r := range ring.Query(c.filter) {
				got = append(got, r.At.UnixMilli()-1000)
			}
			require.Empty(t, cmp.Diff(c.want, got))
		})
	}
	one := events.NewRing(-3)
	one.Emit(t.Context(), pruned(1))
	one.Emit(t.Context(), pruned(2))
	kept := one.Query(events.Filter{})
	require.Len(t, kept, 1)
	require.Equal(t, pruned(2), kept[0].Event)
	require.WithinDuration(t, time.Now(), kept[0].At, time.Minute)
}

func TestRingIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(64)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 500 {
				events.Emit(t.Context(), ring, pruned(int64(i)))
				if i%50 == 0 {
					kept := ring.Query(events.Filter{})
					newestFirst := slices.IsSortedFunc(kept, func(a, b events.Recorded) int { return b.At.Compare(a.At) })
					if len(kept) > 64 || !newestFirst {
						t.Errorf("%d events are kept, newest first: %v", len(kept), newestFirst)
					}
				}
			}
		})
	}
	wg.Wait()
	require.Len(t, ring.Query(events.Filter{}), 64)
}

func TestSlogWritesEveryField(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		event events.Event
		want  string
	}{
		{
			events.PushRejected{
				Push: events.Push{
					Partition: "p", Actor: "a", ClientID: "c", ClientCommitID: "k", Operations: 3, Replay: true,
					RecordedAt: time.UnixMilli(1).UTC(), OutcomeID: [16]byte{0xab, 15: 1},
				},
				Code: ssp2.CodeForbidden, OpIndex: 2,
			},
			`{"level":"INFO","msg":"push.rejected","partition":"p","actor":"a","client_id":"c","client_commit_id":"k","operations":3,
			  "replay":true,"recorded_at":"1970-01-01T00:00:00.001Z","outcome_id":"ab000000-0000-0000-0000-000000000001",
			  "code":"sync.forbidden","op_index":2}`,
		},
		{
			events.ReactionDeadLettered{Delivery: events.Delivery{Type: "mail", Attempt: 2}, Duration: time.Second, Code: "x"},
			`{"level":"WARN","msg":"reaction.dead_lettered","partition":"","idempotency_key":"","type":"mail","version":0,"attempt":2,
			  "lease_owner":"","duration":1000000000,"code":"x"}`,
		},
		{
			events.ResolverFailed{Partition: "p", Err: errors.New("no")},
			`{"level":"WARN","msg":"scopes.resolve_failed","partition":"p","actor":"","client_id":"","phase":"","outage":false,"err":"no"}`,
		},
		{events.FanoutHeard{Bytes: 3}, `{"level":"DEBUG","msg":"fanout.heard","bytes":3}`},
		{new(hostEvent(5)), `{"level":"INFO","msg":"host.event","event":5}`},
	} {
		var log bytes.Buffer
		s := events.Slog(slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})))
		s.Emit(t.Context(), c.event)
		require.JSONEq(t, c.want, log.String())
	}
}

// hostEvent is an event of a host that is no struct.
type hostEvent int

func (*hostEvent) EventName() string { return "host.event" }

func TestSlogTakesEveryEvent(t *testing.T) {
	t.Parallel()
	for _, e := range every {
		var log bytes.Buffer
		events.Slog(slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))).Emit(t.Context(), e)
		var line map[string]any
		require.NoError(t, json.Unmarshal(log.Bytes(), &line))
		require.Equal(t, e.EventName(), line["msg"])
		require.NotContains(t, line, "event", "fields are attributes of their own")

		log.Reset()
		events.Slog(slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))).Emit(t.Context(), e)
		require.Empty(t, log.String())
	}
}
