package pullsvc_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/ssp2"
)

// emit is a function as a sink.
type emit func(context.Context, events.Event)

func (f emit) Emit(ctx context.Context, e events.Event) { f(ctx, e) }

// told returns the events so far, in order.
func told(ring *events.Ring) []events.Event {
	var all []events.Event
	for _, r := range ring.Query(events.Filter{}) {
		all = append(all, r.Event)
	}
	slices.Reverse(all)
	return all
}

func TestEveryAnsweredSubscriptionIsTold(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, with(func(c *pullsvc.Config) {
		c.Events, c.Segments, c.InlineSegmentMaxBytes = ring, newStore(t, nil), 1000
	}))
	b.commit(t, item("a", "x", strings.Repeat("x", 2000)), item("b", "x", ""))
	b.commit(t, item("c", "x", ""), item("d", "y", ""))
	b.commit(t, item("c", "x", "again"), item("b", "x", ""))
	b.commit(t, item("e", "y", ""))
	b.prune(t, 1)

	req := request(
		sub("window", "items", 1, project("x")),
		sub("cut window", "items", 1, project("y", "x")),
		sub("quiet", "items", 4, project("x")),
		sub("too old", "items", 0, project("x")),
		sub("revoked", "items", 4, project("z")),
		sub("first pages", "items", -1, project("x")),
		sub("nothing there", "items", -1, project("x0")),
		sub("other table", "docs", 1, docScopes([]string{"o"}, []string{"1"})),
	)
	grants := map[string][]string{"project": {"x", "y", "x0"}, "org": {"*"}, "folderId": {"*"}}
	req.Scopes = granted(grants)
	req.Header.LimitCommits = 3 // changes
	req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = 1, 2
	sections := b.pull(t, req)

	about := func(id, table string) events.PullServed {
		return events.PullServed{
			Partition: partition, Actor: "alice", ClientID: "c1", SubscriptionID: id, Table: table, Status: ssp2.SubActive, NextCursor: 4,
		}
	}
	window, cut, quiet := about("window", "items"), about("cut window", "items"), about("quiet", "items")
	window.Commits, window.Changes = 2, 3
	cut.Commits, cut.Changes, cut.NextCursor = 1, 2, 2
	old, revoked := about("too old", "items"), about("revoked", "items")
	old.Status, old.NextCursor = ssp2.SubReset, 0
	revoked.Status = ssp2.SubRevoked
	pages, nothing := about("first pages", "items"), about("nothing there", "items")
	pages.Bootstrap, pages.SegmentsExternal, pages.SegmentsInline, pages.Rows = true, 1, 1, 2
	nothing.Bootstrap, nothing.SegmentsInline = true, 1
	want := []events.Event{window, cut, quiet, old, revoked, pages, nothing, about("other table", "docs")}

	got := told(ring)
	require.Len(t, got, len(want))
	for i, e := range got {
		served := e.(events.PullServed)
		require.Len(t, sections[i].Commits, served.Commits, served.SubscriptionID)
		require.Equal(t, served.Commits+served.SegmentsInline > 0, served.Bytes > 0, served.SubscriptionID)
		require.Equal(t, served.NextCursor, sections[i].End.NextCursor, served.SubscriptionID)
		served.Bytes = 0
		got[i] = served
	}
	require.Empty(t, cmp.Diff(want, got))
}

func TestBytesAreThoseOfCommitsAndInlineSegments(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, with(func(c *pullsvc.Config) { c.Events = ring }))
	b.commit(t, item("a", "x", strings.Repeat("x", 2000)))
	for i, cursor := range []int64{0, -1, 1} {
		p, err := b.Begin(t.Context(), request(sub("s", "items", cursor, project("x"))))
		require.NoError(t, err)
		size := int64(len(collect(t, p)))
		p.Close()
		served := told(ring)[i].(events.PullServed)
		require.LessOrEqual(t, served.Bytes, size)
		require.Greater(t, served.Bytes, size-200, "SUB_START and SUB_END are all the rest")
		require.Equal(t, cursor == 1, served.Bytes == 0)
	}
}

// TestWhatDidNotGoOutIsNotTold: a subscription is told once its section is out.
func TestWhatDidNotGoOutIsNotTold(t *testing.T) {
	t.Parallel()
	ring := events.NewRing(100)
	b := setup(t, with(func(c *pullsvc.Config) { c.Events = ring }))
	b.commit(t, item("a", "x", strings.Repeat("x", 20_000)))
	gone := errors.New("gone")
	subs := []ssp2.Subscription{
		sub("1", "items", 0, project("x")), sub("2", "items", 1, project("x")), sub("3", "items", 1, project("x")), sub("4", "items", 0, project("x")),
	}
	for emits, want := range []int{0, 1, 3, 4} {
		p, err := b.Begin(t.Context(), request(subs...))
		require.NoError(t, err)
		before := len(told(ring))
		calls := 0
		err = p.Stream(t.Context(), func([]byte) error {
			if calls++; calls > emits {
				return gone
			}
			return nil
		})
		require.Equal(t, emits < 3, errors.Is(err, gone))
		p.Close()
		require.Len(t, told(ring)[before:], want, "after %d pieces", emits)
	}
}

func TestAPanickingSinkChangesNothing(t *testing.T) {
	t.Parallel()
	plain := setup(t)
	plain.commit(t, item("a", "x", ""), item("b", "x", ""))
	req := request(sub("window", "items", 0, project("x")), sub("pages", "items", -1, project("x")))
	want := plain.pull(t, req)
	for _, sink := range []events.Sink{
		emit(func(context.Context, events.Event) { panic("sink is broken") }),
		emit(func(context.Context, events.Event) { require.Zero(t, plain.db.Pool.Stat().AcquiredConns()) }),
	} {
		s, err := pullsvc.New(plain.db.Pool, pullsvc.Config{Schema: plain.schema, Events: sink, Clock: func() time.Time { return plain.now }})
		require.NoError(t, err)
		plain.counter.Reset()
		require.Empty(t, cmp.Diff(want, (&bundle{Service: s}).pull(t, req)))
		require.Equal(t, 1, plain.counter.RoundTrips())
	}
}
