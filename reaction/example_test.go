package reaction_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/syncpg/syncpg/reaction"
)

// A handler gives the idempotency key to the system that it calls, and says which
// failures no retry can help.
func ExampleHandler() {
	errBounced := errors.New("no such mailbox")
	send := func(_ context.Context, to, idempotencyKey string) error {
		fmt.Println("to", to, idempotencyKey)
		if to == "" {
			return errBounced
		}
		return nil
	}
	welcome := reaction.Handler{
		Versions: []int32{1},
		Handle: func(ctx context.Context, d *reaction.Delivery) error {
			var payload struct{ To string }
			if err := json.Unmarshal(d.Payload, &payload); err != nil {
				return &reaction.PermanentError{Code: "mail.payload", Err: err}
			}
			err := send(ctx, payload.To, d.IdempotencyKey)
			if errors.Is(err, errBounced) {
				return &reaction.PermanentError{Code: "mail.bounced", Err: err}
			}
			return err
		},
	}

	// A test of the handler needs no runner.
	fmt.Println(welcome.Handle(context.Background(), &reaction.Delivery{
		Payload: json.RawMessage(`{"to": "ada@example.org"}`), IdempotencyKey: `["shop","phone","commit-1","welcome"]`,
	}))
	// Output:
	// to ada@example.org ["shop","phone","commit-1","welcome"]
	// <nil>
}
