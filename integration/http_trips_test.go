package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// A request pays for its push and its pull and nothing else, once the partition is
// known to the process and the statements are to the connection.
func TestRoundTripsOfARequest(t *testing.T) {
	t.Parallel()
	var counter pgtest.Counter
	// One connection: the next request may come before the last one has given its back.
	s := newSiteOn(t, pgtest.Options{Counter: &counter, MaxConns: 1}, nil)
	epoch := s.epoch(t)
	cursor, commits := int64(-1), 0
	push := func(req *ssp2.Request) *ssp2.Request {
		commits++
		req.Commits = []ssp2.PushCommit{s.putLists(t, fmt.Sprint("c", commits), "Groceries", fmt.Sprint("l", commits))}
		return req
	}
	pull := func(req *ssp2.Request) *ssp2.Request {
		sub := fresh("s1", "lists")
		sub.Cursor = cursor
		req.Pull, req.Subscriptions = rowsPull(), []ssp2.Subscription{sub}
		return req
	}
	run := func(req *ssp2.Request) {
		r := s.post(t, bytes.NewReader(encode(t, req)), nil)
		if m, err := ssp2.DecodeMessage(r.body); err == nil {
			for _, f := range m.Frames {
				if end, ok := f.(*ssp2.SubEnd); ok {
					cursor = end.NextCursor
				}
			}
		}
	}
	another := "another"
	old := s.request(epoch)
	old.Header.SchemaVersion++
	invalid := fresh("s1", "nope")

	steps := []struct {
		name  string
		make  func() *ssp2.Request
		trips int
	}{
		{"push", func() *ssp2.Request { return push(s.request(epoch)) }, 2},
		{"pull of something", func() *ssp2.Request { return pull(s.request(epoch)) }, 2},
		{"pull of nothing", func() *ssp2.Request { return pull(s.request(epoch)) }, 1},
		{"push and pull", func() *ssp2.Request { return pull(push(s.request(epoch))) }, 4},
		{"acquiring the epoch", func() *ssp2.Request { return pull(s.request(nil)) }, 1},
		{"another epoch", func() *ssp2.Request { return pull(s.request(&another)) }, 1},
		{"another schema version", func() *ssp2.Request { return pull(old) }, 0},
		{"an invalid request", func() *ssp2.Request {
			req := pull(push(s.request(epoch)))
			req.Subscriptions = []ssp2.Subscription{invalid}
			return req
		}, 0},
	}
	for range 2 { // prepares the statements
		for _, step := range steps {
			run(step.make())
		}
	}
	for _, step := range steps {
		counter.Reset()
		run(step.make())
		require.Equal(t, step.trips, counter.RoundTrips(), "%s: %q", step.name, counter.Statements())
	}
}

// The host's callbacks may use the pool, even when it has one connection.
func TestOneConnectionIsEnough(t *testing.T) {
	t.Parallel()
	var s *site
	ask := func(ctx context.Context) (answer string) {
		require.NoError(t, s.db.Pool.QueryRow(ctx, `select 'team-1'`).Scan(&answer))
		return answer
	}
	s = newSiteOn(t, pgtest.Options{MaxConns: 1}, func(c *syncpg.Config) {
		c.Authenticate = func(r *http.Request) (syncpg.Identity, error) {
			return syncpg.Identity{Actor: ask(r.Context()), Partition: "acme"}, nil
		}
		c.ResolveScopes = func(ctx context.Context, _ syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team_id": {ask(ctx)}}, nil
		}
	})
	req := s.request(s.epoch(t))
	req.Commits = []ssp2.PushCommit{s.putLists(t, "c1", "Groceries", "l1")}
	req.Pull, req.Subscriptions = rowsPull(), []ssp2.Subscription{fresh("s1", "lists")}
	for _, status := range []ssp2.PushStatus{ssp2.PushApplied, ssp2.PushCached} {
		frames := s.sync(t, req)
		result, ok := frames[1].(*ssp2.PushResult)
		require.True(t, ok)
		require.Equal(t, status, result.Status)
		require.Equal(t, ssp2.FrameSubEnd, frames[len(frames)-1].FrameType())
	}
}
