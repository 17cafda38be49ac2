package events_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/syncpg/syncpg/events"
)

// A host keeps the newest events for its operators and logs all of them.
func ExampleMulti() {
	ring := events.NewRing(1000)
	sink := events.Multi(ring, events.Slog(slog.New(slog.DiscardHandler)))

	// What a server does with the sink of its configuration:
	events.Emit(context.Background(), sink, events.PushApplied{Push: events.Push{Partition: "shop"}, CommitSeq: 41})
	events.Emit(context.Background(), sink, events.PushRejected{Push: events.Push{Partition: "shop"}, Code: "shop.closed"})

	for _, r := range ring.Query(events.Filter{Name: "push.rejected", Limit: 10}) {
		fmt.Printf("%+v\n", r.Event.(events.PushRejected).Code)
	}
	// Output: shop.closed
}
