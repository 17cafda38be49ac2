package fanout

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// heard is a sink that only looks at notices.
type heard struct {
	Sink
	actors []string
}

func (h *heard) Notice(n Notice) { h.actors = append(h.actors, n.Actor) }
func (*heard) Presence(Presence) {}

// TestNoticesAreBounded: of those that cannot be told, one remains, about everybody; and
// they are remembered for some beats.
func TestNoticesAreBounded(t *testing.T) {
	t.Parallel()
	f := &Fanout{outbox: newOutbox("a", true)}
	for i := range maxNotices + 10 {
		f.Notify(Notice{Partition: "acme", Actor: strconv.Itoa(i), At: time.Now()})
	}
	require.Len(t, f.outbox.tell, 10, "everybody, and nine more")
	require.Equal(t, Notice{At: f.outbox.tell[0].At}, f.outbox.tell[0].Notice)
	for len(f.outbox.tell) < maxNotices {
		f.Notify(Notice{Partition: "acme", Client: "c"})
	}
	f.Notify(Notice{Partition: "acme", Client: "c"})
	require.Len(t, f.outbox.tell, maxNotices)
	require.Len(t, f.outbox.remembered, 10, "those, and not what is about clients")

	for more := true; more; {
		_, more = f.outbox.take()
	}
	for i := range maxNotices {
		f.Notify(Notice{Partition: "acme", Actor: strconv.Itoa(i)})
	}
	require.Len(t, f.outbox.remembered, maxNotices, "the newest")
	require.Equal(t, "0", f.outbox.remembered[0].Actor)

	for range rememberBeats - 1 {
		f.outbox.beat()
	}
	require.Len(t, f.outbox.remembered, maxNotices)
	f.outbox.beat()
	require.Empty(t, f.outbox.remembered)
}

// TestNoticesAreToldOnceAndAgainToWhoAsks, in the order in which they came, whatever else
// the messages carry.
func TestNoticesAreToldOnceAndAgainToWhoAsks(t *testing.T) {
	t.Parallel()
	a, h := newNode(t, "a"), &heard{}
	listener := newPeers("b", h, func(string) {})
	send := func(lost bool) {
		for _, payload := range a.sent(t) {
			if payload[0] == kindPiece && !lost {
				require.NoError(t, listener.onPiece(payload[1:]))
			}
		}
	}
	a.out.outbox.asked()
	a.out.Notify(Notice{Partition: "acme", Actor: "1"})
	a.out.outbox.asked()
	a.out.PublishPresence(PresenceKey{Partition: "acme", ScopeKey: "k", ClientID: "c"}, []byte(`{}`))
	send(false)
	a.out.outbox.asked()
	send(false)
	require.Equal(t, []string{"1", "1"}, h.actors, "nobody knew the process, which tells everything once more")
	a.out.Notify(Notice{Partition: "acme", Actor: "2"})
	send(true)
	a.out.Notify(Notice{Partition: "acme", Actor: "3"})
	send(false)
	require.Equal(t, []string{"1", "1", "3"}, h.actors, "a message is missing")
	a.out.Notify(Notice{Partition: "acme", Actor: "4"})
	a.out.outbox.asked()
	send(false)
	require.Equal(t, []string{"1", "1", "3", "2", "3", "4"}, h.actors, "what came out of order comes again in order")
	a.out.Notify(Notice{Partition: "acme", Actor: "5"})
	a.out.Notify(Notice{Partition: "acme", Client: "c"}) // of no actor, and not remembered
	a.out.outbox.asked()
	send(false)
	require.Equal(t, []string{"5", ""}, h.actors[6:], "in order, whatever is remembered of it")
}

// TestWhatDoesNotFitIntoAMessageComesWithTheNext, without anything that would lead to one.
func TestWhatDoesNotFitIntoAMessageComesWithTheNext(t *testing.T) {
	t.Parallel()
	const many = 3 * maxMessageBytes / 10_000
	long := strings.Repeat("x", 10_000)
	h := &heard{}
	for what, tell := range map[string]func(f *Fanout, i int){
		"notices": func(f *Fanout, i int) { f.Notify(Notice{Partition: "acme", Actor: long + strconv.Itoa(i)}) },
		"presence": func(f *Fanout, i int) {
			f.PublishPresence(PresenceKey{Partition: "acme", ScopeKey: "k", ClientID: strconv.Itoa(i)}, []byte(`{"x":"`+long+`"}`))
		},
	} {
		a, b := newNode(t, "a"), newNode(t, "b")
		b.view.Sink = h
		a.out.PublishPresence(PresenceKey{Partition: "acme", ScopeKey: "k", ClientID: "first"}, []byte(`{}`))
		a.out.outbox.asked()
		for _, payload := range a.sent(t) {
			b.receives(t, payload)
		}
		for i := range many {
			tell(a.out, i)
		}
		for _, payload := range a.sent(t) {
			b.receives(t, payload)
		}
		require.Equal(t, many, len(h.actors)+len(b.view.docs)-1, what)
		h.actors = nil
	}
}

// TestAnOlderProcessToleratesNotices: it knows the field of a message as little as it knows
// those of any later version.
func TestAnOlderProcessToleratesNotices(t *testing.T) {
	t.Parallel()
	n := newNode(t, "b")
	body := `{"begin":true,"end":true,"entries":null,"notices":[{"p":"acme","a":"ada","v":1}],"later":[1]}`
	n.view.Sink = &heard{}
	n.receives(t, "pa 1 1 1 "+body)
	n.receives(t, "pa 2 1 1 "+strings.Replace(body, `null`, `[{"p":"acme","s":"k","a":"ada","c":"c","v":1,"d":{}}]`, 1))
	require.Equal(t, map[string]string{"a/c": "{}"}, n.view.docs)
}
