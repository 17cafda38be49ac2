package fanout

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
)

// watching returns a Fanout without its goroutines that watches partitions, of which it
// has given everything up to 1.
func watching(names ...string) *Fanout {
	log := slog.New(slog.DiscardHandler)
	f := &Fanout{watched: newWatched(), log: log, cfg: Config{Sink: silent{}, Events: events.Safe(nil, log), MaxBehind: DefaultMaxBehind}}
	for _, name := range names {
		f.watched.byName[name] = &partition{name: name, refs: 1, ready: true, at: 1}
	}
	return f
}

// TestWhatIsLeftOfAQueueIsTaken: a reader takes no more than it can read at a time, and
// nobody need tell of the others again.
func TestWhatIsLeftOfAQueueIsTaken(t *testing.T) {
	t.Parallel()
	w := &watching("a", "b", "c").watched
	for name := range w.byName {
		w.news(name, 2)
	}
	require.Len(t, w.take(t.Context(), 2), 2)
	require.Len(t, w.ready, 1, "a reader is woken")
	require.Len(t, w.takeNow(2), 1)
	require.Empty(t, w.queue)
}

// TestWhoWatchesAPartitionThatNobodyDidIsGivenWhatWasRead: a read whose commits nobody
// wanted is made again for who wants them before it is over.
func TestWhoWatchesAPartitionThatNobodyDidIsGivenWhatWasRead(t *testing.T) {
	t.Parallel()
	f := watching("acme")
	f.watched.stale([]string{"acme"})
	held := f.watched.takeNow(1)
	require.Len(t, held, 1)
	f.Unwatch("acme")
	more := f.deliver(t.Context(), held[0], &news{seen: true, newest: 2, commits: []Commit{{Seq: 2}}})
	at, err := f.Watch(t.Context(), "acme")
	require.NoError(t, err)
	require.EqualValues(t, 1, at)
	f.watched.release(held[0], more)
	require.Equal(t, held, f.watched.takeNow(1))

	f.Unwatch("acme")
	f.watched.release(held[0], f.deliver(t.Context(), held[0], &news{seen: true, newest: 2}))
	require.Empty(t, f.watched.byName, "nothing is kept of what nobody watches")
	require.Empty(t, f.watched.takeNow(1))
}
