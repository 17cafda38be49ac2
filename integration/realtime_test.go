package integration_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// sameRows says that devices hold the same lists, as many as there are in the database.
func (h *harbour) sameRows(boats ...*boat) {
	h.t.Helper()
	var n int
	require.NoError(h.t, h.db.Pool.QueryRow(context.Background(), `select count(*) from public.lists where team_id = 'red'`).Scan(&n))
	for _, b := range boats {
		require.Len(h.t, b.Rows("lists"), n, b.name)
		require.Empty(h.t, cmp.Diff(boats[0].Rows("lists"), b.Rows("lists")), b.name)
	}
}

// TestRealtimeDeltasCrossServers: what is pushed to one server is a delta of the clients of
// all, each once and in order, also when nothing listens any more for a while.
func TestRealtimeDeltasCrossServers(t *testing.T) {
	t.Parallel()
	h := newHarbour(t, 2, nil)
	a, b := h.device(0, "a", "red").connect(0), h.device(1, "b", "red").connect(1)
	a.sync()
	b.sync()
	a.idle()
	b.idle()
	a.past, b.past = nil, nil
	a.push("l1", "l2", "l3")
	require.Equal(t, []string{"delta 1", "delta 2", "delta 3"}, b.until(3))

	dropListeners(t, h.db.Pool)
	a.push("l4", "l5")
	require.Equal(t, []string{"delta 1", "delta 2", "delta 3", "delta 4", "delta 5"}, b.calm())
	a.idle()
	h.sameRows(a, b)
	require.Equal(t, []string{"delta 1", "delta 2", "delta 3", "delta 4", "delta 5"}, b.calm())
}

// TestRealtimeReconnectCatchesUp is Appendix B 7.
func TestRealtimeReconnectCatchesUp(t *testing.T) {
	t.Parallel()
	h := newHarbour(t, 1, nil)
	a, b := h.device(0, "a", "red").connect(0), h.device(0, "b", "red").connect(0)
	a.sync()
	b.sync()
	require.False(t, b.connect(0).hello.RequiresSync)
	b.leave()
	for i := range 40 { // far past LimitCommits
		a.push(strconv.Itoa(i))
	}
	a.idle()
	b.connect(0)
	require.True(t, b.hello.RequiresSync)
	require.EqualValues(t, 40, b.hello.LatestCursor)
	b.past = nil
	a.push("during")
	require.Equal(t, []string{"wake catchup-required"}, b.calm(), "no delta over the gap")
	b.sync()
	a.idle()
	h.sameRows(a, b)
	b.past = nil
	a.push("after")
	require.Equal(t, []string{"delta 42"}, b.calm(), "deltas go on")
	a.idle()
	h.sameRows(a, b)
}

// TestRealtimeRounds is Appendix B 11.
func TestRealtimeRounds(t *testing.T) {
	t.Parallel()
	t.Run("equivalence", func(t *testing.T) {
		t.Parallel()
		h := newHarbour(t, 1, nil)
		a := h.device(0, "a", "red").connect(0)
		a.sync()
		a.push("l1", "l2")
		a.idle()
		control := h.control("control", "red")
		_, err := control.CatchUp(t.Context())
		require.NoError(t, err)
		require.Empty(t, cmp.Diff(control.Rows("lists"), a.Rows("lists")))
		left, _ := a.Cursor("lists")
		right, _ := control.Cursor("lists")
		require.Equal(t, right, left)
	})
	t.Run("a first round registers", func(t *testing.T) {
		t.Parallel()
		h := newHarbour(t, 1, nil)
		a, b := h.device(0, "a", "red").connect(0), h.device(0, "b", "red").connect(0)
		require.True(t, b.hello.RequiresSync)
		b.sync()
		b.past = nil
		a.push("l1")
		require.Equal(t, []string{"delta 1"}, b.calm(), "without another connection")
	})
	t.Run("one round in flight", func(t *testing.T) {
		t.Parallel()
		asked := make(chan struct{}, 2)
		h := newHarbour(t, 1, func(c *syncpg.Config) {
			c.ResolveScopes = func(ctx context.Context, _ syncpg.ScopeRequest) (scope.Allowed, error) {
				asked <- struct{}{}
				<-ctx.Done() // the round is in flight for as long as its connection is there
				return nil, ctx.Err()
			}
		})
		a := h.device(0, "a", "red").connect(0)
		require.NoError(t, a.Acquire(t.Context()))
		epoch := a.Epoch()
		request, err := ssp2.AppendMessage(nil, (&ssp2.Request{
			WireVersion: ssp2.WireV2, Header: ssp2.RequestHeader{ClientID: "a", SchemaVersion: h.schema.Version, LogEpoch: &epoch},
			Pull: &ssp2.PullHeader{Accept: 3},
		}).Message())
		require.NoError(t, err)
		round := append([]byte{byte(ssp2.TagRound)}, request...)
		require.NoError(t, a.ws.Write(t.Context(), websocket.MessageBinary, round))
		<-asked
		require.NoError(t, a.ws.Write(t.Context(), websocket.MessageBinary, round))
		for ended := false; !ended; {
			select {
			case got := <-a.arrive:
				if ended = got.err != nil; ended {
					require.Equal(t, websocket.StatusPolicyViolation, websocket.CloseStatus(got.err))
				}
			case <-time.After(patience):
				require.FailNow(t, "the second round did not end the connection")
			}
		}
		require.Empty(t, asked, "the second one was not processed")
	})
	t.Run("a commit during a round", func(t *testing.T) {
		t.Parallel()
		h := newHarbour(t, 1, nil)
		a, b := h.device(0, "a", "red").connect(0), h.device(0, "b", "red").connect(0)
		b.sync()
		b.idle()
		b.past = nil
		b.push("own")
		require.Equal(t, []string{"wake catchup-required"}, b.calm(), "never a delta")
		b.sync()
		b.past = nil
		a.push("next")
		require.Equal(t, []string{"delta 2"}, b.calm())
	})
}

// TestRealtimePresence is Appendix B 16, with the clients on two servers.
func TestRealtimePresence(t *testing.T) {
	t.Parallel()
	h := newHarbour(t, 2, nil)
	on := func(server int, name string, teams ...string) *boat {
		b := h.device(server, name, teams...).connect(server)
		b.sync()
		return b
	}
	a, b, d := on(0, "a", "red"), on(1, "b", "red"), on(1, "d", "blue")
	a.presence("team:red", `{"n":1}`)
	require.Equal(t, `join team:red a {"n":1}`, b.until(1)[0])
	a.presence("team:red", `{"n":2}`)
	require.Equal(t, `update team:red a {"n":2}`, b.until(2)[1])
	a.presence("team:red", "")
	require.Equal(t, "leave team:red a ", b.until(3)[2])
	a.presence("team:red", `{"n":3}`)
	require.Equal(t, `join team:red a {"n":3}`, b.until(4)[3])

	// Somebody who comes late sees who is there, on either server.
	c := on(1, "c", "red")
	require.Equal(t, `join team:red a {"n":3}`, c.until(1)[0])

	// A round changes nothing of it.
	b.presence("team:red", `{"b":1}`)
	require.Equal(t, `join team:red b {"b":1}`, a.until(1)[0])
	a.push("l1")
	a.idle()
	a.presence("team:red", `{"n":4}`)
	for !slices.Contains(b.past, `update team:red a {"n":4}`) {
		b.until(len(b.past) + 1)
	}

	// Nobody sees what is not theirs, or publishes there.
	d.presence("team:red", `{"evil":1}`)
	require.Equal(t, []string{"presence.forbidden team:red"}, d.until(1))
	d.presence("team:blue", `{}`)
	require.Equal(t, []string{"presence.forbidden team:red"}, d.calm())
	for _, other := range []*boat{a, b, c} {
		for _, s := range other.calm() {
			require.NotContains(t, s, "evil")
			require.NotContains(t, s, "blue")
		}
	}

	before := len(b.past)
	a.leave()
	for !slices.Contains(b.past, "leave team:red a ") || len(b.past) == before {
		b.until(len(b.past) + 1)
	}
	require.Equal(t, "leave team:red a ", b.past[len(b.past)-1])
}

// TestRealtimeReconnectStorm is Appendix B 17.
func TestRealtimeReconnectStorm(t *testing.T) {
	t.Parallel()
	h := newHarbour(t, 1, nil)
	writer := h.control("writer", "red")
	commit := func(id string) {
		_, err := writer.Push(t.Context(), newListCommit(t, h.schema, id, "red"))
		require.NoError(t, err)
	}
	require.NoError(t, writer.Acquire(t.Context()))
	commit("seed")
	var boats []*boat
	for i := range 20 {
		b := h.device(0, fmt.Sprintf("client-%d", i), "red").connect(0)
		b.sync()
		b.idle()
		b.past = nil
		boats = append(boats, b)
	}
	for i := range 5 {
		commit(fmt.Sprintf("burst-%d", i))
	}
	for _, b := range boats {
		require.Equal(t, []string{"delta 2", "delta 3", "delta 4", "delta 5", "delta 6"}, b.calm())
	}
	for i, b := range boats {
		b.leave()
		if i%4 == 0 {
			commit(fmt.Sprintf("storm-%d", i))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, h.servers[0].Realtime().Settle(ctx, 0, nil), "no session is left")
	for _, b := range boats {
		b.connect(0)
		require.True(t, b.hello.RequiresSync)
		b.past = nil
	}
	require.NoError(t, h.servers[0].Realtime().Settle(ctx, len(boats), nil))
	commit("behind")
	for _, b := range boats {
		require.Equal(t, []string{"wake catchup-required"}, b.calm())
		b.sync()
		b.past = nil
	}
	commit("resumed")
	for _, b := range boats {
		require.Equal(t, []string{"delta 13"}, b.calm())
	}
	h.sameRows(boats...)
}

// TestDisconnectCrossesServers: who lost a scope is cut off where it is connected, whichever
// server the host tells, and sees what it may see now when it is back (§3.3, §8.1).
func TestDisconnectCrossesServers(t *testing.T) {
	t.Parallel()
	var revoked atomic.Bool
	h := newHarbour(t, 2, func(c *syncpg.Config) {
		c.ResolveScopes = func(_ context.Context, r syncpg.ScopeRequest) (scope.Allowed, error) {
			if r.Actor == "a" && revoked.Load() {
				return scope.Allowed{"team_id": {"blue"}}, nil
			}
			return scope.Allowed{"team_id": {"*"}}, nil
		}
	})
	a, b := h.device(1, "a", "red").connect(1), h.device(1, "b", "red").connect(1)
	a.sync()
	b.sync()
	revoked.Store(true)
	require.Zero(t, h.servers[0].Disconnect("acme", "a"), "it is connected to the other one")
	for ended := false; !ended; {
		select {
		case arrived := <-a.arrive:
			require.Nil(t, arrived.delta)
			ended = arrived.err != nil
		case <-time.After(patience):
			require.FailNow(t, "it is still connected")
		}
	}
	b.push("x")
	require.Equal(t, []string{"wake catchup-required"}, b.calm(), "it is connected as before")
	a.connect(1)
	require.True(t, a.hello.RequiresSync, "it is to learn what it lost")
	b.push("y")
	require.Empty(t, a.calm())
	require.Equal(t, 1, h.servers[1].Disconnect("acme", "b"))
}
