package fanout_test

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime/fanout"
)

func key(scope, client string) fanout.PresenceKey {
	return fanout.PresenceKey{Partition: "p1", ScopeKey: scope, ActorID: "ada", ClientID: client}
}

// peers returns what a sink was told of, as it is now: documents by scope key and client.
func (r *recorder) peers() map[string]string {
	now := map[string]string{}
	for _, p := range r.presence {
		name := p.ScopeKey + "/" + p.ClientID
		if p.Doc == nil {
			delete(now, name)
		} else {
			now[name] = string(p.Doc)
		}
	}
	return now
}

func (r *recorder) sees(t testing.TB, want map[string]string) {
	t.Helper()
	r.until(t, fmt.Sprintf("presence %.200v", want), func() bool { return maps.Equal(r.peers(), want) })
}

func (r *recorder) told() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.presence)
}

func TestPresenceReachesOtherProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	a.PublishPresence(key("team:red", "phone"), []byte(`{"x":1}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{"x":1}`})
	a.PublishPresence(key("team:red", "phone"), []byte(`{"x":2}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{"x":2}`})
	c.PublishPresence(key("team:red", "tablet"), []byte(`{"y":1}`))
	a.sink.sees(t, map[string]string{"team:red/tablet": `{"y":1}`})
	a.PublishPresence(key("team:red", "phone"), nil)
	c.sink.sees(t, map[string]string{})
	require.Equal(t, []fanout.Presence{
		{PresenceKey: key("team:red", "phone"), Instance: a.Instance(), Doc: []byte(`{"x":1}`)},
		{PresenceKey: key("team:red", "phone"), Instance: a.Instance(), Doc: []byte(`{"x":2}`)},
		{PresenceKey: key("team:red", "phone"), Instance: a.Instance()},
	}, soFar(c.sink, &c.sink.presence))
	require.Len(t, soFar(a.sink, &a.sink.presence), 1, "nobody hears of itself")
}

func TestADocumentIsLargerThanANotification(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	want := map[string]string{}
	for i := range 100 {
		doc := `{"text":"` + strings.Repeat("日本語 \\u0000 \\ud800 \U0001f600", 300) + `","n":` + strconv.Itoa(i) + `}`
		client := strconv.Itoa(i)
		want["team:red/"+client] = doc
		a.PublishPresence(key("team:red", client), []byte(doc))
	}
	c.sink.sees(t, want)
}

func TestOfDocumentsThatFollowQuicklyTheLastIsTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	for i := range 1000 {
		a.PublishPresence(key("team:red", "phone"), fmt.Appendf(nil, `{"n":%d}`, i))
	}
	c.sink.sees(t, map[string]string{"team:red/phone": `{"n":999}`})
	require.Less(t, c.sink.told(), 1000)
}

func TestAProcessThatStartsLaterAsks(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t)
	b.listening(t, 1)
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	a.PublishPresence(key("team:blue", "phone"), []byte(`{}`))
	c := b.start(t)
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`, "team:blue/phone": `{}`})
}

func TestPresenceIsRebuiltAfterAReconnect(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.start(t)
	c, mayConnect, connected := b.startGated(t)
	b.listening(t, 2)
	for _, client := range []string{"stays", "changes", "leaves"} {
		a.PublishPresence(key("team:red", client), []byte(`{"n":1}`))
	}
	c.sink.sees(t, map[string]string{"team:red/stays": `{"n":1}`, "team:red/changes": `{"n":1}`, "team:red/leaves": `{"n":1}`})
	told := c.sink.told()
	b.exec(t, `select pg_terminate_backend($1)`, <-connected)
	b.listening(t, 1)
	// Nobody listens for c, so it has to ask.
	a.PublishPresence(key("team:red", "changes"), []byte(`{"n":2}`))
	a.PublishPresence(key("team:red", "leaves"), nil)
	a.PublishPresence(key("team:red", "comes"), []byte(`{"n":1}`))
	mayConnect <- struct{}{}
	c.sink.sees(t, map[string]string{"team:red/stays": `{"n":1}`, "team:red/changes": `{"n":2}`, "team:red/comes": `{"n":1}`})
	require.Equal(t, told+3, c.sink.told(), "what did not change is not told again")
}

// startTwo starts two instances, the second of which knows of a client of the first.
func startTwo(t *testing.T) (a, c *instance) {
	t.Helper()
	b := setup(t)
	a, c = b.start(t), b.start(t)
	b.listening(t, 2)
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`})
	return a, c
}

func TestAProcessThatStopsTakesItsClientsAlong(t *testing.T) {
	t.Parallel()
	a, c := startTwo(t)
	a.stop(t)
	c.sink.sees(t, map[string]string{})
}

func TestAProcessThatStartsAgainIsToldAnew(t *testing.T) {
	t.Parallel()
	_, c := startTwo(t)
	c.stop(t)
	require.NoError(t, c.Start(t.Context()))
	c.sink.until(t, "presence once more", func() bool { return len(c.sink.presence) == 2 })
	require.Equal(t, map[string]string{"team:red/phone": `{}`}, c.sink.now())
}

func TestTheClientsOfAProcessThatIsSilentLeave(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`})
	for range 4 {
		tick(t, c.beat)
	}
	// c has taken the fourth tick when it takes the fifth.
	require.Equal(t, map[string]string{"team:red/phone": `{}`}, c.sink.now())
	tick(t, c.beat)
	c.sink.sees(t, map[string]string{})
	// It was only slow: when it is heard of again, it is asked.
	tick(t, a.beat)
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`})
}

func TestABeatKeepsClientsPresent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	c.watch(t, "p1")
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	c.sink.sees(t, map[string]string{"team:red/phone": `{}`})
	for i := range int64(20) {
		tick(t, a.beat)
		tick(t, a.beat) // the first beat is sent, or waits to be
		// What a sends now arrives after the beat.
		a.Committed("p1", b.commit(t, "p1", one("x")))
		c.sink.reaches(t, "p1", i+1)
		tick(t, c.beat)
	}
	require.Equal(t, map[string]string{"team:red/phone": `{}`}, c.sink.now())
	require.Equal(t, 1, c.sink.told())
}

// now is what a sink sees, with the lock.
func (r *recorder) now() map[string]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.peers()
}

func TestADocumentThatCannotBeToldStopsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t), b.start(t)
	b.listening(t, 2)
	c.watch(t, "p1")
	a.PublishPresence(key("team:red", "nul"), []byte("{\"a\":\"\x00\"}"))
	a.PublishPresence(key("team:red", "bytes"), []byte("{\"a\":\"\xff\"}"))
	a.PublishPresence(key("team:red", "huge"), []byte(`{"a":"`+strings.Repeat("x", 2<<20)+`"}`))
	a.PublishPresence(key("team:red", "good"), []byte(`{}`))
	a.Committed("p1", b.commit(t, "p1", one("x")))
	c.sink.reaches(t, "p1", 1)
	c.sink.sees(t, map[string]string{"team:red/good": `{}`})
}

func TestWithoutAListenerPresenceStays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a, c := b.start(t, pollOnly), b.start(t)
	b.listening(t, 1)
	c.watch(t, "p1")
	a.PublishPresence(key("team:red", "phone"), []byte(`{}`))
	a.Committed("p1", b.commit(t, "p1", one("x")))
	c.sink.reaches(t, "p1", 1)
	require.Empty(t, c.sink.now())
}
