package fanout

import (
	"log/slog"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWhatWaitsToBeToldIsBounded: of commits and of presence alike, more than is remembered
// is told as a whole.
func TestWhatWaitsToBeToldIsBounded(t *testing.T) {
	t.Parallel()
	o := newOutbox("me", true)
	for i := range maxPendingCommits {
		o.committed(strconv.Itoa(i), 1)
	}
	require.Len(t, o.commits, maxPendingCommits)
	require.False(t, o.look)
	o.committed("one more", 1)
	o.committed("and another", 1)
	require.Empty(t, o.commits)
	next, more := o.take()
	require.True(t, next.look)
	require.False(t, more)
	payloads, err := next.payloads("me")
	require.NoError(t, err)
	require.Equal(t, []string{""}, payloads, "everybody looks")

	f := &Fanout{outbox: newOutbox("me", true), log: slog.New(slog.DiscardHandler)}
	key := func(i int) PresenceKey { return PresenceKey{Partition: "p", ScopeKey: strconv.Itoa(i)} }
	for i := range maxPendingPresence {
		f.PublishPresence(key(i), []byte("{}"))
	}
	require.Len(t, f.outbox.changed, maxPendingPresence)
	require.False(t, f.outbox.announce)
	f.PublishPresence(key(maxPendingPresence), []byte("{}"))
	f.PublishPresence(key(maxPendingPresence+1), []byte("{}"))
	require.Empty(t, f.outbox.changed)
	told := map[PresenceKey]struct{}{}
	for number := int64(1); ; number++ {
		next, more := f.outbox.take()
		require.Equal(t, number, next.number)
		require.Equal(t, number == 1, next.message.Begin, "one announcement")
		require.Equal(t, !more, next.message.End)
		for i := range next.message.Entries {
			told[next.message.Entries[i].key()] = struct{}{}
		}
		if !more {
			break
		}
	}
	require.Len(t, told, maxPendingPresence+2)
}

// TestTheNewestCommitIsTold: pushes of different requests are over in any order.
func TestTheNewestCommitIsTold(t *testing.T) {
	t.Parallel()
	o := newOutbox("me", true)
	for _, seq := range []int64{3, 5, 4} {
		o.committed("p", seq)
	}
	next, _ := o.take()
	require.Equal(t, map[string]int64{"p": 5}, next.commits)
}
