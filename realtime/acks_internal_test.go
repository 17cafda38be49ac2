package realtime

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/db"
)

// failingStore fails to write acknowledgements, when the test says so.
type failingStore struct {
	store
	began, fail chan struct{}
}

func (s *failingStore) RealtimeRecordAcks(context.Context, db.RealtimeRecordAcksParams) error {
	s.began <- struct{}{}
	<-s.fail
	return errors.New("away")
}

// TestAWriteThatFailsBringsNothingBack: what was given up while it was being written is not
// tried again.
func TestAWriteThatFailsBringsNothingBack(t *testing.T) {
	t.Parallel()
	ann, bob, other := client{"acme", "ann"}, client{"acme", "bob"}, client{"other", "ann"}
	for name, test := range map[string]struct {
		giveUp func(a *acks) (wait func())
		kept   []client
	}{
		"a pull records where the client is": {func(a *acks) func() {
			settled := make(chan error, 1)
			waits := make(chan struct{})
			ctx := waitedFor{t.Context(), waits}
			go func() { settled <- a.settle(ctx, ann) }()
			<-waits
			return func() { require.NoError(t, <-settled) }
		}, []client{bob, other}},
		"the log became another one": {func(a *acks) func() {
			a.forget("acme")
			return func() {}
		}, []client{other}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &failingStore{began: make(chan struct{}), fail: make(chan struct{})}
			a := newAcks(s, time.Now, slog.New(slog.DiscardHandler))
			for _, of := range []client{ann, bob, other} {
				a.note(of, "actor", 8)
			}
			flushed := make(chan error, 1)
			go func() { flushed <- a.flush(t.Context()) }()
			<-s.began
			a.note(other, "actor", 9)
			wait := test.giveUp(a)
			s.fail <- struct{}{}
			require.Error(t, <-flushed)
			wait()
			var kept []client
			for _, of := range []client{ann, bob, other} {
				if _, ok := a.newest(of, "actor"); ok {
					kept = append(kept, of)
				}
			}
			require.Equal(t, test.kept, kept)
			newest, _ := a.newest(other, "actor")
			require.EqualValues(t, 9, newest)
		})
	}
}

// waitedFor is a context that says when somebody waits for it.
type waitedFor struct {
	context.Context //nolint:containedctx // it is one
	waits           chan struct{}
}

func (c waitedFor) Done() <-chan struct{} {
	closeOnce(c.waits)
	return c.Context.Done()
}
