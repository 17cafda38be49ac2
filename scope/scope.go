// Package scope decides what an actor may read and write: which requested scopes
// are effective (§3.2) and which rows may be written (§3.4). The digest of
// effective scopes (§3.5) is ssp2.ScopeDigest.
//
// A request asks the host's resolver once, checks the answer with
// [ValidateAllowed], compiles it with [Compile] and keeps it as a [Resolution];
// every subscription and every pushed row is then judged by the same [Grants].
package scope

import (
	"maps"
	"slices"
	"strings"

	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// Requested is the scope map of a subscription (§3.2).
type Requested = map[string][]string

// Allowed is what a host's resolver grants an actor: variable to values, where
// the value "*" means any value (§3.2 rule 3).
type Allowed map[string][]string

// Any stands for any value of a variable in [Allowed].
const Any = wildcard

// wildcard stands for any value in Allowed, and for nothing in Requested.
const wildcard = "*"

// Resolution is the outcome of a request's one call of the host's resolver
// (§3.2 rule 3, §3.4 rule 1).
type Resolution struct {
	// Grants is what the actor holds; nil, which grants nothing, when the
	// resolver failed or was out of reach.
	Grants *Grants
	// Err is the resolver's failure: every subscription is revoked and every
	// operation is denied. It is for logs only.
	Err error
	// Outage says that live authorization is unavailable, which is no failure:
	// leases decide (§7.3.3).
	Outage bool
}

// ValidateRequested checks the scopes a subscription requests (§3.2 rules 1 and
// 2). Its error is an *ssp2.Error with sync.invalid_subscription that names the
// offending variable.
func ValidateRequested(t *schema.Table, req Requested) error {
	for _, variable := range sortedKeys(req) {
		if _, ok := t.Scope(variable); !ok {
			return ssp2.Errorf(ssp2.CodeInvalidSubscription,
				"the table %q has no scope variable %q", t.Name, shorten(variable))
		}
		if slices.Contains(req[variable], wildcard) {
			return errWildcard(variable)
		}
	}
	return nil
}

// ValidateAnyRequested is ValidateRequested where the table is not known: a variable must
// be one of some table.
func ValidateAnyRequested(s *schema.Schema, req Requested) error {
	for _, variable := range sortedKeys(req) {
		if !s.HasVariable(variable) {
			return ssp2.Errorf(ssp2.CodeInvalidSubscription,
				"no table has the scope variable %q", shorten(variable))
		}
		if slices.Contains(req[variable], wildcard) {
			return errWildcard(variable)
		}
	}
	return nil
}

func errWildcard(variable string) error {
	return ssp2.Errorf(ssp2.CodeInvalidSubscription,
		"the scope variable %q cannot be requested with the value *", variable)
}

// ValidateAllowed checks a resolver's answer against the variables of all tables
// (§3.2 rule 3). Its error is an *ssp2.Error with sync.invalid_subscription that
// names the offending variable; it tells of a bug in the host.
func ValidateAllowed(s *schema.Schema, a Allowed) error {
	for _, variable := range sortedKeys(a) {
		if !s.HasVariable(variable) {
			return ssp2.Errorf(ssp2.CodeInvalidSubscription,
				"the resolved scopes name the variable %q, which no table declares", shorten(variable))
		}
	}
	return nil
}

// Grants answers what an Allowed permits, in constant time per value however
// long its lists are. A nil *Grants permits nothing. Grants never change and may
// be shared between goroutines.
type Grants struct {
	byVariable map[string]grant
}

type grant struct {
	any    bool
	values map[string]struct{} // nil when any
}

func (g grant) holds(value string) bool {
	if g.any {
		return true
	}
	_, ok := g.values[value]
	return ok
}

// Compile prepares a for many questions. The result does not alias a.
func Compile(a Allowed) *Grants {
	g := &Grants{byVariable: make(map[string]grant, len(a))}
	for variable, values := range a {
		if slices.Contains(values, wildcard) {
			g.byVariable[variable] = grant{any: true}
			continue
		}
		set := make(map[string]struct{}, len(values))
		for _, value := range values {
			set[value] = struct{}{}
		}
		g.byVariable[variable] = grant{values: set}
	}
	return g
}

// Permits says whether a row whose scope variable has this value is within the
// grants. An empty value is a missing one and is never permitted (§3.4 rule 2).
func (g *Grants) Permits(variable, value string) bool {
	if g == nil || value == "" {
		return false
	}
	return g.byVariable[variable].holds(value)
}

// Holds says whether the actor holds any value of the variable.
func (g *Grants) Holds(variable string) bool {
	if g == nil {
		return false
	}
	held, ok := g.byVariable[variable]
	return ok && (held.any || len(held.values) > 0)
}

// Effective intersects requested scopes, which must have passed
// ValidateRequested, with the grants (§3.2 rules 4 to 6). Values keep the
// requested order, each once. When a requested variable is left without a value,
// or nothing was requested, the subscription is revoked: eff is nil and active
// is false.
func (g *Grants) Effective(req Requested) (eff Requested, active bool) {
	if g == nil || len(req) == 0 {
		return nil, false
	}
	eff = make(Requested, len(req))
	for variable, values := range req {
		held, ok := g.byVariable[variable]
		if !ok {
			return nil, false
		}
		kept := intersect(held, values)
		if len(kept) == 0 {
			return nil, false
		}
		eff[variable] = kept
	}
	return eff, true
}

func intersect(held grant, values []string) []string {
	kept := make([]string, 0, len(values))
	seen := make(map[string]struct{}, len(values))
	for _, value := range values {
		if _, twice := seen[value]; twice || !held.holds(value) {
			continue
		}
		seen[value] = struct{}{}
		kept = append(kept, value)
	}
	return kept
}

// AuthorizeRow says whether a row may be written (§3.4 rule 3). scopes is what
// Table.RowScopes gives: one "variable=value" for every variable the table
// declares, all of which must be permitted. A row without scopes is denied.
func (g *Grants) AuthorizeRow(scopes []string) bool {
	for _, entry := range scopes {
		variable, value, ok := strings.Cut(entry, "=")
		if !ok || !g.Permits(variable, value) {
			return false
		}
	}
	return len(scopes) > 0
}

func sortedKeys(m map[string][]string) []string {
	return slices.Sorted(maps.Keys(m))
}

// shorten keeps what a client sent from filling a message.
func shorten(s string) string {
	const limit = 64
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
