package host

import (
	"errors"
	"fmt"
	"maps"
	"sync"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/scope"
)

// errResolverFailing is what resolving returns while a scenario makes it fail.
var errResolverFailing = errors.New("the resolver fails on request of the scenario")

// authority holds what the actors of one instance may see and write. It is the
// host side of §3.2: scenarios change it between requests.
type authority struct {
	mu      sync.Mutex
	allowed map[string]scope.Allowed
	failing bool
	outage  bool
}

func newAuthority() *authority {
	return &authority{allowed: map[string]scope.Allowed{}}
}

// setAllowed replaces all scopes of the actor.
func (a *authority) setAllowed(actor string, allowed scope.Allowed) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.allowed[actor] = maps.Clone(allowed)
}

func (a *authority) setFailing(failing bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failing = failing
}

func (a *authority) setOutage(outage bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.outage = outage
}

// resolve returns the actor's scopes; an actor never set holds none.
func (a *authority) resolve(actor string) (scope.Allowed, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failing {
		return nil, errResolverFailing
	}
	if a.outage {
		return nil, fmt.Errorf("%w on request of the scenario", syncpg.ErrOutage)
	}
	allowed := a.allowed[actor]
	if allowed == nil {
		allowed = scope.Allowed{}
	}
	return maps.Clone(allowed), nil
}
