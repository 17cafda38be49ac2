package realtime_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
)

// becomes makes the log another one, whose newest commit is seq.
func (w *world) becomes(seq int64) {
	w.fan.mu.Lock()
	w.fan.seqs["acme"] = seq
	w.fan.mu.Unlock()
	w.hub.Reset("acme", seq)
}

// TestAResetWhileAClientIsBeingConnected: what was read of the log of before says nothing of
// the one there is, so the client is told to pull, and gets no delta before it did.
func TestAResetWhileAClientIsBeingConnected(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cursor int64
		subs   []sub
	}{
		"registered":               {50, []sub{orgSub("o1")}},
		"not registered":           {50, nil},
		"a log of the same length": {2, []sub{orgSub("o1")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.fan.seqs["acme"] = tc.cursor
			w.record("a", "ada", tc.cursor, tc.subs...)
			once := sync.OnceFunc(func() { w.becomes(2) })
			w.store.onRead = func(context.Context) { once() }
			a := w.connect("a", "ada")
			require.True(t, a.hello.RequiresSync)
			require.EqualValues(t, 2, a.hello.LatestCursor)
			a.expect("wake reset-required 2")
			a.ack(50)
			w.commit(change("d", "o1", "f"))
			if tc.subs != nil {
				a.expect("wake catchup-required 3")
			}
			w.engine.run = pulls(3)
			a.chunk(pullRequest("a", orgSub("o1")))
			a.response()
			a.ack(3)
			w.commit(change("d", "o1", "f"))
			a.expect("delta s:4[d]>4")
		})
	}
}

// TestAResetDuringARound: the round may have read the log of before. Its client is told, even
// if it was not registered when the reset came; and what it pushed there is no commit of the
// log there is.
func TestAResetDuringARound(t *testing.T) {
	t.Parallel()
	for name, subs := range map[string][]sub{"registered": {orgSub("o1")}, "not registered": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.fan.seqs["acme"] = 50
			w.record("a", "ada", 50, subs...)
			round, run := hold(pushes(50))
			w.engine.run = run
			a := w.connect("a", "ada")
			a.chunk(pullRequest("a", orgSub("o1")))
			<-round.began
			w.becomes(2)
			close(round.goOn)
			_, others := a.response()
			for len(others) == 0 {
				others = append(others, a.next().String())
			}
			require.Equal(t, []string{"wake reset-required 2"}, others)
			a.ack(50)
			w.commit(change("d", "o1", "f"))
			a.expect("wake catchup-required 3")
			w.engine.mu.Lock()
			w.engine.run = pulls(3)
			w.engine.mu.Unlock()
			a.chunk(pullRequest("a", orgSub("o1")))
			a.response()
			a.ack(3)
			w.commit(change("d", "o1", "f"))
			a.expect("delta s:4[d]>4")
		})
	}
}

// TestWhatWasAcknowledgedOfAnotherLog and is not written yet, never is.
func TestWhatWasAcknowledgedOfAnotherLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:1[d]>1")
	a.ack(1)
	w.becomes(4)
	a.expect("wake reset-required 4")
	a.ack(4) // nor what comes late
	w.settle()
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	require.Empty(t, w.store.writes)
}
