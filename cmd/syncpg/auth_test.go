package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

func sampleSchema(t *testing.T) *syncpg.Schema {
	t.Helper()
	s, err := syncpg.ParseSchema(sample.IR())
	require.NoError(t, err)
	return s
}

func TestDevAuthBelievesTokensOfItsForm(t *testing.T) {
	t.Parallel()
	a := devAuth(sampleSchema(t))
	for header, want := range map[string]syncpg.Identity{
		"Bearer dev:alice:home":       {Actor: "alice", Partition: "home"},
		"Bearer dev:alice:tenant:1":   {Actor: "alice", Partition: "tenant:1"},
		"Bearer dev:a b:p":            {Actor: "a b", Partition: "p"},
		"":                            {},
		"Bearer alice:home":           {},
		"Bearer dev:alice":            {},
		"Bearer dev::home":            {},
		"Bearer dev:alice:":           {},
		"dev:alice:home":              {},
		"Basic dev:alice:home":        {},
		"Bearer dev:al\x00ice:home":   {},
		"Bearer dev:\xff\xfe:home":    {},
		"Bearer DEV:alice:home":       {},
		"Bearer  dev:alice:home":      {Actor: "alice", Partition: "home"},
		"Bearer dev:alice:home ":      {Actor: "alice", Partition: "home"},
		"Bearer dev:alice:home\u00e9": {Actor: "alice", Partition: "home\u00e9"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/sync", nil)
		r.Header.Set("Authorization", header)
		got, err := a.authenticate(r)
		require.Equal(t, want, got, "%q", header)
		if want == (syncpg.Identity{}) {
			require.Equal(t, ssp2.CodeAuthRequired, ssp2.CodeOf(err), "%q", header)
		} else {
			require.NoError(t, err, "%q", header)
		}
	}
	allowed, err := a.resolveScopes(t.Context(), syncpg.ScopeRequest{})
	require.NoError(t, err)
	require.Equal(t, scope.Allowed{"team_id": {"*"}}, allowed)
}

func TestHeaderAuth(t *testing.T) {
	t.Parallel()
	const all = `{"team_id":["*"]}`
	trusted, err := parseTrusted([]string{"10.0.0.0/8", "192.0.2.7", "fd00::/8"})
	require.NoError(t, err)
	for _, tc := range []struct {
		name    string
		peer    string
		header  http.Header
		want    syncpg.Identity
		allowed scope.Allowed
		err     string
	}{
		{
			name: "whole", header: http.Header{"A": {"alice"}, "P": {"home"}, "S": {`{"team_id":["red","blue"]}`}},
			want: syncpg.Identity{Actor: "alice", Partition: "home"}, allowed: scope.Allowed{"team_id": {"red", "blue"}},
		},
		{
			name: "allowed nothing", header: http.Header{"A": {"alice"}, "P": {"home"}, "S": {`{}`}},
			want: syncpg.Identity{Actor: "alice", Partition: "home"}, allowed: scope.Allowed{},
		},
		{
			name: "a trusted address", peer: "192.0.2.7:1", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}},
			want: syncpg.Identity{Actor: "a", Partition: "p"}, allowed: scope.Allowed{"team_id": {"*"}},
		},
		{
			name: "a trusted address, mapped", peer: "[::ffff:10.1.2.3]:1", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}},
			want: syncpg.Identity{Actor: "a", Partition: "p"}, allowed: scope.Allowed{"team_id": {"*"}},
		},
		{
			name: "a trusted network of IPv6", peer: "[fd00::1%eth0]:1", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}},
			want: syncpg.Identity{Actor: "a", Partition: "p"}, allowed: scope.Allowed{"team_id": {"*"}},
		},
		{name: "another address", peer: "192.0.2.8:1", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}}, err: "not a trusted proxy"},
		{name: "loopback when proxies are named", peer: "127.0.0.1:1", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}}, err: "not a trusted proxy"},
		{name: "a peer without an address", peer: "@", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all}}, err: "cannot be read"},
		{name: "no actor", header: http.Header{"P": {"p"}, "S": {all}}, err: "the header A 0 times"},
		{name: "no partition", header: http.Header{"A": {"a"}, "S": {all}}, err: "the header P 0 times"},
		{name: "an actor of the client beside the proxy's", header: http.Header{"A": {"root", "a"}, "P": {"p"}, "S": {all}}, err: "the header A 2 times"},
		{name: "an empty actor", header: http.Header{"A": {""}, "P": {"p"}, "S": {all}}, err: "the header A is empty"},
		{name: "an actor that is no text", header: http.Header{"A": {"\xff"}, "P": {"p"}, "S": {all}}, err: "not UTF-8"},
		{name: "no scopes", header: http.Header{"A": {"a"}, "P": {"p"}}, err: "the header S 0 times"},
		{name: "scopes twice", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {all, all}}, err: "the header S 2 times"},
		{name: "scopes that are no JSON", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {"team_id=red"}}, err: "the header S is not a JSON object"},
		{name: "scopes of another shape", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {`{"team_id":"red"}`}}, err: "the header S is not a JSON object"},
		{name: "scopes null", header: http.Header{"A": {"a"}, "P": {"p"}, "S": {`null`}}, err: "the header S is not a JSON object"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			a := headerAuth{actor: "A", partition: "P", scopes: "S", trusted: trusted}.auth(sampleSchema(t))
			r := httptest.NewRequest(http.MethodPost, "/sync", nil)
			r.Header = tc.header
			r.RemoteAddr = "10.1.2.3:4567"
			if tc.peer != "" {
				r.RemoteAddr = tc.peer
			}
			var passed *http.Request
			a.wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { passed = r })).ServeHTTP(httptest.NewRecorder(), r)
			id, err := a.authenticate(passed)
			require.Equal(t, tc.want, id)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				return
			}
			require.NoError(t, err)
			allowed, err := a.resolveScopes(passed.Context(), syncpg.ScopeRequest{})
			require.NoError(t, err)
			require.Equal(t, tc.allowed, allowed)
		})
	}
}

func TestHeaderAuthMayAllowAllScopes(t *testing.T) {
	t.Parallel()
	a := headerAuth{actor: "A", partition: "P", trusted: loopback}.auth(sampleSchema(t))
	for _, peer := range []string{"127.0.0.1:1", "127.9.9.9:1", "[::1]:1"} {
		r := httptest.NewRequest(http.MethodPost, "/sync", nil)
		r.Header = http.Header{"A": {"a"}, "P": {"p"}}
		r.RemoteAddr = peer
		id, err := a.authenticate(r)
		require.NoError(t, err)
		require.Equal(t, syncpg.Identity{Actor: "a", Partition: "p"}, id)
	}
	allowed, err := a.resolveScopes(t.Context(), syncpg.ScopeRequest{})
	require.NoError(t, err)
	require.Equal(t, scope.Allowed{"team_id": {"*"}}, allowed)
}

// TestAProxyCanTellOfAnOutage: it is no answer, so it neither grants nor takes away, and leaves it to the resolver to say so.
func TestAProxyCanTellOfAnOutage(t *testing.T) {
	t.Parallel()
	a := headerAuth{actor: "A", partition: "P", scopes: "S", trusted: loopback}.auth(sampleSchema(t))
	for text, want := range map[string]bool{"outage": true, "Outage": false, `"outage"`: false, "{}": false} {
		r := httptest.NewRequest(http.MethodPost, "/sync", nil)
		r.RemoteAddr = "127.0.0.1:1"
		r.Header = http.Header{"A": {"a"}, "P": {"p"}, "S": {text}}
		var who, err error
		a.wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, who = a.authenticate(r)
			_, err = a.resolveScopes(r.Context(), syncpg.ScopeRequest{})
		})).ServeHTTP(httptest.NewRecorder(), r)
		require.Equal(t, want, errors.Is(err, syncpg.ErrOutage), text)
		require.Equal(t, want || text == "{}", who == nil, "%s: %v", text, who)
	}
}

func TestScopesWithoutTheirHandlerAreAFault(t *testing.T) {
	t.Parallel()
	a := headerAuth{actor: "A", partition: "P", scopes: "S", trusted: loopback}.auth(sampleSchema(t))
	_, err := a.resolveScopes(t.Context(), syncpg.ScopeRequest{})
	require.Error(t, err)
}
