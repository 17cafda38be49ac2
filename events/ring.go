package events

import (
	"context"
	"sync"
	"time"
)

// Ring is a sink that keeps the newest events in memory. It is safe for concurrent use.
type Ring struct {
	// Clock gives the time of events. Nil: time.Now. Set it before the first event.
	Clock func() time.Time

	mu   sync.Mutex
	kept []Recorded // once full, the oldest is at next
	next int
	size int
}

// Recorded is an event in a [Ring].
type Recorded struct {
	At    time.Time // when it was recorded
	Event Event
}

// Filter says which events of a [Ring] are wanted. The zero value means all.
type Filter struct {
	Name  string    // event name, such as "push.applied"; "": any
	Since time.Time // recorded at this time or later; zero: any
	Limit int       // how many at most, the newest ones; 0: any number
}

// NewRing returns a ring that keeps the newest n events. Less than 1 counts as 1.
func NewRing(n int) *Ring {
	return &Ring{size: max(n, 1)}
}

// Emit keeps an event, in place of the oldest when the ring is full.
func (r *Ring) Emit(_ context.Context, e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Now
	if r.Clock != nil {
		at = r.Clock
	}
	// The time is taken under the lock, so that it grows with the position.
	recorded := Recorded{At: at(), Event: e}
	if len(r.kept) < r.size {
		r.kept = append(r.kept, recorded)
		return
	}
	r.kept[r.next] = recorded
	r.next = (r.next + 1) % r.size
}

// Query returns the kept events that match, newest first.
func (r *Ring) Query(f Filter) []Recorded {
	r.mu.Lock()
	defer r.mu.Unlock()
	var found []Recorded
	n := len(r.kept)
	for i := range n {
		recorded := r.kept[(r.next+n-1-i)%n]
		if f.Limit > 0 && len(found) == f.Limit {
			break
		}
		if (f.Name == "" || f.Name == recorded.Event.EventName()) && !recorded.At.Before(f.Since) {
			found = append(found, recorded)
		}
	}
	return found
}
