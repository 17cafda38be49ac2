package fanout

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// view is a sink that only looks at presence. It fails a test that tells it nothing new.
type view struct {
	Sink
	t    require.TestingT
	docs map[string]string
}

func (v *view) Presence(p Presence) {
	name := p.Instance + "/" + p.ClientID
	old, known := v.docs[name]
	if p.Doc == nil {
		require.True(v.t, known, "%s leaves and was not there", name)
		delete(v.docs, name)
		return
	}
	require.NotEqual(v.t, old, string(p.Doc), name)
	v.docs[name] = string(p.Doc)
}

// node is a process without its goroutines: notifications are moved by hand.
type node struct {
	out  *Fanout
	view *view
}

func newNode(t require.TestingT, name string) *node {
	n := &node{view: &view{t: t, docs: map[string]string{}}}
	n.out = &Fanout{outbox: newOutbox(name, true)}
	n.out.presence = newPeers(name, n.view, n.out.outbox.ask)
	n.out.presence.connected()
	return n
}

// sent returns what a node has to send.
func (n *node) sent(t require.TestingT) []string {
	var all []string
	for more := true; more; {
		var p parcel
		p, more = n.out.outbox.take()
		payloads, err := p.payloads(n.out.outbox.instance)
		require.NoError(t, err)
		all = append(all, payloads...)
	}
	return all
}

func (n *node) receives(t require.TestingT, payload string) {
	var err error
	switch kind, rest := payload[0], payload[1:]; kind {
	case kindAsk:
		if rest == "" || rest == n.out.outbox.instance {
			n.out.outbox.asked()
		}
	case kindBeat:
		err = n.out.presence.onBeat(rest)
	case kindPiece:
		err = n.out.presence.onPiece(rest)
	}
	require.NoError(t, err)
}

// TestPresenceConverges: whatever is lost, sent twice or cut off, after beats that arrive
// everybody knows what the others have, and was told nothing twice.
func TestPresenceConverges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		nodes := make([]*node, 3)
		for i := range nodes {
			nodes[i] = newNode(t, fmt.Sprint("n", i))
		}
		// exchange delivers everything that is sent; loses is asked for each receiver.
		exchange := func(from *node, loses func() bool, twice func() bool) {
			for _, payload := range from.sent(t) {
				for _, to := range nodes {
					if loses() {
						continue
					}
					to.receives(t, payload)
					if twice() {
						to.receives(t, payload)
					}
				}
			}
		}
		dice := func(name string, sides int) func() bool {
			return func() bool { return rapid.IntRange(1, sides).Draw(t, name) == 1 }
		}
		never := func() bool { return false }
		published := 0
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			n := nodes[rapid.IntRange(0, 2).Draw(t, "node")]
			key := PresenceKey{Partition: "p", ScopeKey: "s:1", ActorID: "a", ClientID: fmt.Sprint("c", rapid.IntRange(0, 4).Draw(t, "client"))}
			switch rapid.IntRange(0, 6).Draw(t, "step") {
			case 0, 1:
				published++
				doc := fmt.Sprintf(`{"n":%d,"text":"%s"}`, published,
					strings.Repeat("ü", rapid.SampledFrom([]int{0, 5000, 10_000}).Draw(t, "size")))
				n.out.PublishPresence(key, []byte(doc))
			case 2:
				n.out.PublishPresence(key, nil)
			case 3:
				exchange(n, dice("lose", 4), dice("twice", 4))
			case 4:
				exchange(n, never, never)
			case 5:
				n.out.outbox.beat()
				n.out.presence.beat()
			case 6:
				n.out.presence.disconnected()
				n.out.presence.connected()
			}
		}
		for range maxMissed + 1 {
			for _, n := range nodes {
				n.out.outbox.beat()
				n.out.presence.beat()
			}
			for range 3 {
				for _, n := range nodes {
					exchange(n, never, never)
				}
			}
		}
		for _, n := range nodes {
			want := map[string]string{}
			for _, other := range nodes {
				if other == n {
					continue
				}
				for key, d := range other.out.outbox.documents {
					want[other.out.outbox.instance+"/"+key.ClientID] = string(d.doc)
				}
			}
			require.True(t, maps.Equal(want, n.view.docs), "%s sees %.500v, not %.500v", n.out.outbox.instance, n.view.docs, want)
		}
	})
}

// TestWhatAProcessMissesItAsksFor, once per beat until it is answered.
func TestWhatAProcessMissesItAsksFor(t *testing.T) {
	t.Parallel()
	v := &view{t: t, docs: map[string]string{}, Sink: silent{}}
	asked := 0
	ps := newPeers("me", v, func(string) { asked++ })
	asks := func(want int, what string, notification func() error) {
		t.Helper()
		asked = 0
		require.NoError(t, notification())
		require.Equal(t, want, asked, what)
	}
	piece := func(text string) func() error { return func() error { return ps.onPiece(text) } }
	beat := func(text string) func() error { return func() error { return ps.onBeat(text) } }
	asks(1, "it connects", func() error { ps.connected(); return nil })
	asks(0, "half of what there is", piece(`x 1 1 2 {"begin":true,"end":true,"entries":[`))
	asks(1, "the other half of something else", piece(`x 2 2 2 {"p":"p","s":"k","a":"a","c":"c","v":1,"d":{}}]}`))
	require.Empty(t, v.docs)
	asks(0, "it has asked", beat("x 2"))
	ps.beat()
	asks(1, "nobody answered", beat("x 2"))
	asks(0, "the answer", piece(`x 3 1 1 {"begin":true,"end":true,"entries":[{"p":"p","s":"k","a":"a","c":"c","v":1,"d":{}}]}`))
	require.Equal(t, map[string]string{"x/c": "{}"}, v.docs)
	asks(0, "all is known", beat("x 3"))
	asks(0, "it was sent twice", piece(`x 3 1 1 {"entries":[]}`))
	asks(1, "a message is missing", beat("x 4"))

	ps.disconnected()
	for range 2 * maxMissed {
		ps.beat()
	}
	require.NotEmpty(t, v.docs, "who does not listen does not miss beats")
	asks(1, "it connects again", func() error { ps.connected(); return nil })
	ps.beat()
	asks(1, "nobody answered", beat("x 3"))
	require.Error(t, ps.onPiece("x 5 1 1025 {"), "too many pieces")
}

func TestCommitPayloadsAreBounded(t *testing.T) {
	t.Parallel()
	var pairs []pair
	for i := range 1000 {
		pairs = append(pairs, pair{fmt.Sprintf("partition \"%d\" ü", i), int64(i)})
	}
	payloads := commitPayloads(pairs, 100)
	require.Greater(t, len(payloads), 1)
	var got []pair
	for _, p := range payloads {
		require.Less(t, len(p), 8000)
		require.EqualValues(t, kindCommits, p[0])
		var some []pair
		require.NoError(t, json.Unmarshal([]byte(p[1:]), &some))
		got = append(got, some...)
	}
	require.Equal(t, pairs, got)
	require.Equal(t, []string{""}, commitPayloads(pairs, 2), "too many: everybody looks")
	require.Equal(t, []string{""}, commitPayloads([]pair{{strings.Repeat("x", 8000), 1}}, 100))
	require.Empty(t, commitPayloads(nil, 1))
}

// FuzzNotification: whatever somebody sends, a process goes on.
func FuzzNotification(f *testing.F) {
	for _, seed := range []string{"", "c[[\"p\",1]]", "c[[]]", "e", "e[\"p\"]", "e[1]", "e{", "e[\"\"]", "a", "ax", "bx 1", "px 1 1 1 {}", "px 1 1 2 {\"begin\":true,", "px 1 2 2 \"entries\":[{}]}", "?"} {
		f.Add(seed, seed)
	}
	const document = `px 1 1 1 {"begin":true,"end":true,"entries":[{"p":"p","s":"org:o","a":"ada","c":"c","v":1,"d":{}}]}`
	for _, next := range []string{
		`px 2 1 1 {"entries":[{"p":"p","s":"org:o","a":"ada","c":"c","v":1}]}`,  // it leaves
		`px 3 1 1 {"entries":[],"notices":[{"p":"p","a":"ada","v":1,"ago":5}]}`, // one is missing before
		`px 2 1 1 {"entries":[],"notices":[{"p":"p","c":"c","s":2,"v":1},{"v":2},{"v":-1,"ago":-9223372036854775808}]}`,
		`bx 1`, `bx 2`, `pme 1 1 1 {}`, `px 2 2 2 {}`, `px 2 1 1025 {`, `px 9223372036854775807 1 1 {"begin":true}`,
		`c[["p",9007199254740992],["q"]]`, `c[["p",-1],[null,null]]`, `e["p","","q"]`, `ame`,
	} {
		f.Add(document, next)
	}
	f.Fuzz(func(_ *testing.T, one, two string) {
		fan := &Fanout{
			outbox: newOutbox("me", true), watched: newWatched(), looks: make(chan struct{}, 1),
			log: slog.New(slog.DiscardHandler), cfg: Config{Sink: silent{}},
		}
		fan.presence = newPeers("me", silent{}, fan.outbox.ask)
		for _, payload := range []string{one, two, one} {
			fan.onNotification(context.Background(), payload)
		}
	})
}

type silent struct{ Sink }

func (silent) Presence(Presence) {}
func (silent) Rotated(string)    {}
func (silent) Notice(Notice)     {}
