package syncpg_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// leased is a server with auth leases whose resolver does as it is told.
type leased struct {
	*syncpg.Server
	now      time.Time
	allowed  scope.Allowed
	failure  error // of the resolver
	logEpoch string
	commits  int
}

func newLeased(t *testing.T, change ...func(*syncpg.Config)) *leased {
	t.Helper()
	l := &leased{now: time.UnixMilli(1_750_000_000_000), allowed: scope.Allowed{"team_id": {"team-1"}}}
	cfg := config()
	cfg.Clock = func() time.Time { return l.now }
	cfg.Leases = &syncpg.Leases{Keys: [][]byte{bytes.Repeat([]byte{7}, 32)}}
	cfg.ResolveScopes = func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) { return l.allowed, l.failure }
	for _, f := range change {
		f(&cfg)
	}
	var err error
	l.Server, err = syncpg.New(pgtest.New(t, installed).Pool, cfg)
	require.NoError(t, err)
	header := l.ok(t, func(r *ssp2.RequestHeader) { r.LogEpoch = nil }, pull("team-1")...)[0].(*ssp2.ResponseHeader)
	require.True(t, header.ResetRequired)
	l.logEpoch = header.LogEpoch
	return l
}

// round sends a request with the frames.
func (l *leased) round(t *testing.T, change func(*ssp2.RequestHeader), frames ...ssp2.Frame) *httptest.ResponseRecorder {
	t.Helper()
	header := &ssp2.RequestHeader{ClientID: "device", SchemaVersion: sampleSchema().Version, LogEpoch: &l.logEpoch}
	if change != nil {
		change(header)
	}
	body, err := ssp2.AppendMessage(nil, &ssp2.Message{
		WireVersion: ssp2.WireV2, Kind: ssp2.KindRequest, Frames: append([]ssp2.Frame{header}, frames...),
	})
	require.NoError(t, err)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/sync", bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/vnd.syncular.sync.v2")
	w := httptest.NewRecorder()
	l.Handler().ServeHTTP(w, r)
	return w
}

// ok is a round that is served; it returns the frames of the response.
func (l *leased) ok(t *testing.T, change func(*ssp2.RequestHeader), frames ...ssp2.Frame) []ssp2.Frame {
	t.Helper()
	w := l.round(t, change, frames...)
	require.Equal(t, http.StatusOK, w.Code, w.Body.String())
	m, err := ssp2.DecodeMessage(w.Body.Bytes())
	require.NoError(t, err)
	return m.Frames
}

func (l *leased) push(team string) ssp2.Frame {
	l.commits++
	c := newList(fmt.Sprint("l", l.commits), team, "a list")
	return &c
}

func pull(team string) []ssp2.Frame {
	return []ssp2.Frame{
		&ssp2.PullHeader{Accept: ssp2.AcceptInlineRows},
		&ssp2.Subscription{ID: "s", Table: "lists", Cursor: -1, Scopes: ssp2.ScopeMap{"team_id": {team}}},
	}
}

// leaseOf returns the LEASE frame, which stands behind the header or nowhere.
func leaseOf(t *testing.T, frames []ssp2.Frame) *ssp2.Lease {
	t.Helper()
	var found *ssp2.Lease
	for i, f := range frames {
		if l, ok := f.(*ssp2.Lease); ok {
			require.Equal(t, 1, i, "behind RESP_HEADER and before everything else")
			found = l
		}
	}
	return found
}

func TestEveryRoundThatResolvesHasALease(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	pulled := leaseOf(t, l.ok(t, nil, pull("team-1")...))
	require.NotNil(t, pulled)
	require.Equal(t, l.now.Add(15*time.Minute).UnixMilli(), pulled.ExpiresAtMs)
	require.Equal(t, pulled, leaseOf(t, l.ok(t, nil, l.push("team-1"))), "a round that only pushes")
	require.Equal(t, pulled, leaseOf(t, l.ok(t, nil, append([]ssp2.Frame{l.push("team-1")}, pull("team-1")...)...)))
	l.now = l.now.Add(time.Minute)
	require.Equal(t, pulled.ExpiresAtMs+60_000, leaseOf(t, l.ok(t, nil, l.push("team-1"))).ExpiresAtMs)

	require.Nil(t, leaseOf(t, l.ok(t, func(h *ssp2.RequestHeader) { h.LogEpoch = nil }, pull("team-1")...)), "a reset")
	require.Nil(t, leaseOf(t, l.ok(t, func(h *ssp2.RequestHeader) { h.SchemaVersion++ }, pull("team-1")...)), "the schema floor")
	l.failure = errors.New("a failing resolver")
	require.Nil(t, leaseOf(t, l.ok(t, nil, pull("team-1")...)), "a failing resolver revokes, as ever")

	off := newLeased(t, func(c *syncpg.Config) { c.Leases = nil })
	require.Nil(t, leaseOf(t, off.ok(t, nil, pull("team-1")...)))
	require.Error(t, off.RevokeLease(t.Context(), "acme", "x"))
	require.Error(t, off.ClearLease(t.Context(), "acme", "x"))
}

// TestAnOutageIsServedFromTheLease: as if the resolver had answered what it did last.
func TestAnOutageIsServedFromTheLease(t *testing.T) {
	t.Parallel()
	l := newLeased(t)
	refused := func(code ssp2.Code) {
		t.Helper()
		w := l.round(t, nil, append([]ssp2.Frame{l.push("team-1")}, pull("team-1")...)...)
		require.Equal(t, http.StatusUnauthorized, w.Code)
		require.Contains(t, w.Body.String(), `"`+string(code)+`"`)
	}
	l.failure = fmt.Errorf("%w: no directory", syncpg.ErrOutage)
	refused(ssp2.CodeAuthLeaseRequired) // never issued

	l.failure = nil
	issued := leaseOf(t, l.ok(t, nil, pull("team-1")...))
	l.failure = fmt.Errorf("%w: no directory", syncpg.ErrOutage)
	l.now = l.now.Add(10 * time.Minute)
	frames := l.ok(t, nil, append([]ssp2.Frame{l.push("team-1"), l.push("team-2")}, pull("team-1")...)...)
	require.Nil(t, leaseOf(t, frames), "it is not refreshed")
	require.Equal(t, ssp2.PushApplied, frames[1].(*ssp2.PushResult).Status)
	require.Equal(t, ssp2.PushRejected, frames[2].(*ssp2.PushResult).Status, "the lease grants no other team")
	require.Equal(t, ssp2.SubActive, frames[len(frames)-3].(*ssp2.SubStart).Status)
	for _, f := range l.ok(t, nil, pull("team-2")...) {
		if start, ok := f.(*ssp2.SubStart); ok {
			require.Equal(t, ssp2.SubRevoked, start.Status)
		}
	}

	require.ErrorIs(t, l.RevokeLease(t.Context(), "acme", "another"), syncpg.ErrLeaseNotFound)
	require.NoError(t, l.RevokeLease(t.Context(), "acme", issued.LeaseID))
	refused(ssp2.CodeAuthLeaseRevoked)
	require.NoError(t, l.ClearLease(t.Context(), "acme", issued.LeaseID))
	refused(ssp2.CodeAuthLeaseRequired)

	l.failure = nil
	fresh := leaseOf(t, l.ok(t, nil, pull("team-1")...))
	require.NotEqual(t, issued.LeaseID, fresh.LeaseID)
	l.failure = syncpg.ErrOutage
	l.now = time.UnixMilli(fresh.ExpiresAtMs)
	refused(ssp2.CodeAuthLeaseRequired) // expired
}
