package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// auth is how a server tells who asks, and what they may see and write.
type auth struct {
	authenticate  func(*http.Request) (syncpg.Identity, error)
	resolveScopes func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error)
	// wrap goes around the handler of the server.
	wrap func(http.Handler) http.Handler
}

// devTokenPrefix begins a token of development auth: dev:<actor>:<partition>.
const devTokenPrefix = "dev:"

// devAuth believes every token of the form dev:<actor>:<partition> and allows every scope.
func devAuth(s *syncpg.Schema) auth {
	return auth{
		authenticate: func(r *http.Request) (syncpg.Identity, error) {
			token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			rest, isDev := strings.CutPrefix(strings.TrimSpace(token), devTokenPrefix)
			actor, partition, hasBoth := strings.Cut(rest, ":")
			if !ok || !isDev || !hasBoth || !usable(actor) || !usable(partition) {
				return syncpg.Identity{}, ssp2.Errorf(ssp2.CodeAuthRequired,
					"development auth wants the header Authorization: Bearer dev:<actor>:<partition>")
			}
			return syncpg.Identity{Actor: actor, Partition: partition}, nil
		},
		resolveScopes: allowAll(s),
		wrap:          func(h http.Handler) http.Handler { return h },
	}
}

// usable says whether a text can be an actor or a partition.
func usable(text string) bool {
	return text != "" && utf8.ValidString(text) && !strings.ContainsRune(text, 0)
}

// allowAll allows every value of every scope variable.
func allowAll(s *syncpg.Schema) func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
	all := scope.Allowed{}
	for _, t := range s.Tables {
		for _, sc := range t.Scopes {
			all[sc.Variable] = []string{"*"}
		}
	}
	return func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) { return all, nil }
}

// outage in place of scopes says that the proxy cannot find them out.
const outage = "outage"

// headerAuth believes headers that an authenticating proxy sets.
type headerAuth struct {
	actor, partition string
	scopes           string // "": every scope is allowed
	trusted          []netip.Prefix
}

// parseTrusted reads the addresses of proxies: single ones, and networks.
func parseTrusted(texts []string) ([]netip.Prefix, error) {
	var trusted []netip.Prefix
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			addr, addrErr := netip.ParseAddr(text)
			if addrErr != nil {
				return nil, usagef("--trusted-proxy %q is neither an address nor a network such as 10.0.0.0/8", text)
			}
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
		trusted = append(trusted, prefix.Masked())
	}
	return trusted, nil
}

// loopback is what is trusted by default.
var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

func (a headerAuth) auth(s *syncpg.Schema) auth {
	made := auth{authenticate: a.authenticate, resolveScopes: allowAll(s), wrap: func(h http.Handler) http.Handler { return h }}
	if a.scopes == "" {
		return made
	}
	made.resolveScopes = func(ctx context.Context, _ syncpg.ScopeRequest) (scope.Allowed, error) {
		claim, ok := ctx.Value(claimKey{}).(claim)
		if !ok {
			return nil, errors.New("the request has not gone through the handler that reads its scopes")
		}
		return claim.allowed, claim.err
	}
	// The resolver sees no headers, so what they say travels in the context.
	made.wrap = func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var c claim
			c.allowed, c.err = a.allowed(r)
			h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), claimKey{}, c)))
		})
	}
	return made
}

// claim is what a request says its actor is allowed.
type claim struct {
	allowed scope.Allowed
	err     error
}

type claimKey struct{}

func (a headerAuth) authenticate(r *http.Request) (syncpg.Identity, error) {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return syncpg.Identity{}, fmt.Errorf("the address %q of the peer cannot be read: %w", r.RemoteAddr, err)
	}
	address := peer.Addr().Unmap().WithZone("")
	if !slices.ContainsFunc(a.trusted, func(p netip.Prefix) bool { return p.Contains(address) }) {
		return syncpg.Identity{}, fmt.Errorf("the peer %s is not a trusted proxy", address)
	}
	actor, err := single(r, a.actor)
	if err != nil {
		return syncpg.Identity{}, err
	}
	partition, err := single(r, a.partition)
	if err != nil {
		return syncpg.Identity{}, err
	}
	// Scopes that cannot be read are no answer to what the actor may do. A resolver that failed would revoke what clients
	// hold, and they would drop it; a request that is not authenticated they repeat. An outage is for the resolver to tell,
	// since leases stand in for its answer only; but a socket keeps its headers, and with them the outage.
	c, _ := r.Context().Value(claimKey{}).(claim)
	if c.err != nil && (!errors.Is(c.err, syncpg.ErrOutage) || r.Header.Get("Upgrade") != "") {
		return syncpg.Identity{}, c.err
	}
	return syncpg.Identity{Actor: actor, Partition: partition}, nil
}

// single returns the value of a header that must be there once: one more could come from the client, through a proxy that
// adds its own instead of replacing.
func single(r *http.Request, name string) (string, error) {
	values := r.Header.Values(name)
	if len(values) != 1 {
		return "", fmt.Errorf("the request has the header %s %d times", name, len(values))
	}
	if !usable(values[0]) {
		return "", fmt.Errorf("the header %s is empty or not UTF-8", name)
	}
	return values[0], nil
}

func (a headerAuth) allowed(r *http.Request) (scope.Allowed, error) {
	text, err := single(r, a.scopes)
	if err != nil {
		return nil, err
	}
	if text == outage {
		return nil, fmt.Errorf("%w: the header %s says so", syncpg.ErrOutage, a.scopes)
	}
	var allowed scope.Allowed
	if err := json.Unmarshal([]byte(text), &allowed); err != nil || allowed == nil {
		return nil, fmt.Errorf(`the header %s is not a JSON object such as {"team_id": ["red", "blue"]}`, a.scopes)
	}
	return allowed, nil
}
