package realtime_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

func TestACommitReachesExactlyThoseItMatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, sub{"org", "docs", ssp2.ScopeMap{"org": {"o1"}}}, sub{"folder", "docs", ssp2.ScopeMap{"folder": {"f1", "f2"}}})
	w.record("b", "bob", 0, sub{"both", "docs", ssp2.ScopeMap{"org": {"o1", "o2"}, "folder": {"f1"}}})
	w.record("c", "cyd", 0, sub{"notes", "notes", ssp2.ScopeMap{"org": {"o1"}}})
	a, b, c := w.connect("a", "ada"), w.connect("b", "bob"), w.connect("c", "cyd")

	w.commit(change("d1", "o1", "f1"), change("d2", "o3", "f2"), change("d3", "o3", "f3"))
	a.expect("delta org:1[d1]>1 folder:1[d1 d2]>1")
	b.expect("delta both:1[d1]>1")
	w.commit(change("d4", "o9", "f9"))
	w.commit(fanout.Change{Table: "notes", RowID: "n", Op: ssp2.OpDelete, Scopes: []string{"org=o1"}}, change("d5", "o2", "f1"))
	a.expect("delta folder:3[d5]>3")
	b.expect("delta both:3[d5]>3")
	c.expect("delta notes:3[n]>3")
	a.nothing(w)
	b.nothing(w)
	c.nothing(w)
}

// TestADeltaIsAResponse: its bytes are those of a response to a pull (§8.1).
func TestADeltaIsAResponse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	for wire := ssp2.WireV1; wire <= ssp2.WireV3; wire++ {
		name := fmt.Sprintf("v%d", wire)
		w.record(name, "ada", 0, orgSub("o1"))
		row := w.store.clients[name]
		row.WireVersion = int16(wire)
		w.store.clients[name] = row
	}
	v1, v2, v3 := w.connect("v1", "ada"), w.connect("v2", "ada"), w.connect("v3", "ada")
	w.commit(change("d1", "o1", "f1"))
	version, rowVersion := int32(3), int64(1)
	for wire, c := range map[ssp2.WireVersion]*client{1: v1, 2: v2, 3: v3} {
		want, err := ssp2.AppendMessage(nil, &ssp2.Message{WireVersion: wire, Kind: ssp2.KindResponse, Frames: []ssp2.Frame{
			&ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: "epoch-1"},
			&ssp2.SubStart{ID: "s", Status: ssp2.SubActive, EffectiveScopes: ssp2.ScopeMap{"org": {"o1"}}},
			&ssp2.Commit{CommitSeq: 1, CreatedAtMs: 77, ActorID: "writer", Tables: []string{"docs"}, Changes: []ssp2.Change{{
				RowID: "d1", Op: ssp2.OpUpsert, RowVersion: &rowVersion,
				Scopes: map[string]string{"org": "o1", "folder": "f1"}, Row: []byte("row of d1"),
			}}},
			&ssp2.SubEnd{NextCursor: 1},
		}})
		require.NoError(t, err)
		require.Equal(t, want, c.next().delta, "wire version %d", wire)
	}
	require.EqualValues(t, 1, w.hub.Encodes(), "the commit is encoded once")
}

// TestOneEncodePerSetOfChanges: whoever gets the same changes shares their frame.
func TestOneEncodePerSetOfChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	var clients []*client
	for i := range 6 {
		name := fmt.Sprintf("c%d", i)
		w.record(name, "ada", 0, sub{name, "docs", ssp2.ScopeMap{"org": {"o1", strconv.Itoa(i % 2)}}})
		clients = append(clients, w.connect(name, "ada"))
	}
	w.commit(change("d1", "o1", "f1"))
	require.EqualValues(t, 1, w.hub.Encodes(), "different scopes, the same changes")
	w.commit(change("d1", "o1", "f1"), change("d2", "0", "f1"))
	require.EqualValues(t, 3, w.hub.Encodes(), "two sets")
	w.commit(change("d1", "elsewhere", "f1"))
	require.EqualValues(t, 3, w.hub.Encodes(), "nobody is interested")
	for i, c := range clients {
		want := fmt.Sprintf("delta c%d:2[d1]>2", i)
		if i%2 == 0 {
			want = fmt.Sprintf("delta c%d:2[d1 d2]>2", i)
		}
		c.expect(fmt.Sprintf("delta c%d:1[d1]>1", i), want)
	}
}

// TestADeltaIsOfItsClientAlone: messages are shared by those who would get the same one, byte
// for byte.
func TestADeltaIsOfItsClientAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = func(_ context.Context, _ round.Identity, req *ssp2.Request, out round.Writer) error {
		version := int32(3)
		header := &ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: "epoch-2"}
		b, err := ssp2.AppendMessage(nil, &ssp2.Message{
			WireVersion: req.WireVersion, Kind: ssp2.KindResponse, Frames: append([]ssp2.Frame{header}, pulled(req, 0)...),
		})
		if err == nil {
			_, err = out.Write(b)
		}
		return err
	}
	type device struct {
		wire  ssp2.WireVersion
		epoch string
		id    string
		org   string // besides o1
	}
	plain := device{ssp2.WireV2, "epoch-1", "s", "o2"}
	devices := []device{plain, plain, plain, plain, plain}
	devices[1].wire, devices[2].epoch, devices[3].id, devices[4].org = ssp2.WireV3, "epoch-2", "t", "o3"
	var clients []*client
	for i, d := range devices {
		name, of := strconv.Itoa(i), sub{d.id, "docs", ssp2.ScopeMap{"org": {"o1", d.org}}}
		w.record(name, "ada", 0, of)
		row := w.store.clients[name]
		row.WireVersion = int16(d.wire)
		w.store.clients[name] = row
		c := w.connect(name, "ada")
		if d.epoch == "epoch-2" {
			c.chunk(pullRequest(name, of))
			c.response()
		}
		clients = append(clients, c)
	}
	w.commit(change("d", "o1", "f"))
	for i, c := range clients {
		m, err := ssp2.DecodeMessage(c.next().delta)
		require.NoError(t, err)
		header, _ := m.Frames[0].(*ssp2.ResponseHeader)
		start, _ := m.Frames[1].(*ssp2.SubStart)
		require.Equal(t, device{m.WireVersion, header.LogEpoch, start.ID, start.EffectiveScopes["org"][1]}, devices[i])
	}
}

// TestASectionIsOfASubscriptionThatLacksIt: one whose pull has brought the commit, or that
// bootstraps, has none (§8.2).
func TestASectionIsOfASubscriptionThatLacksIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = func(_ context.Context, _ round.Identity, req *ssp2.Request, out round.Writer) error {
		frames, more := pulled(req, 0), `{"asOfCommitSeq":0}`
		frames[3] = &ssp2.SubEnd{NextCursor: 1}
		frames[5] = &ssp2.SubEnd{NextCursor: 0, BootstrapState: &more}
		return answer(out, req.WireVersion, frames...)
	}
	a := w.connect("a", "ada")
	o1 := ssp2.ScopeMap{"org": {"o1"}}
	a.chunk(pullRequest("a", sub{"behind", "docs", o1}, sub{"ahead", "docs", o1}, sub{"bootstraps", "docs", o1}))
	a.response()
	w.commit(change("d1", "o1", "f"))
	w.commit(change("d2", "o1", "f"))
	a.expect("delta behind:1[d1]>1", "delta behind:2[d2]>2 ahead:2[d2]>2")
}

// TestABehindClientIsWokenUntilItHasCaughtUp is §8.2: deltas are contiguous.
func TestABehindClientIsWokenUntilItHasCaughtUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.fan.seqs["acme"] = 7
	w.record("a", "ada", 5, orgSub("o1"))
	a := w.connect("a", "ada")
	require.Equal(t, []any{int64(5), int64(7), true}, []any{a.hello.Cursor, a.hello.LatestCursor, a.hello.RequiresSync})
	w.commit(change("d1", "o1", "f"))
	a.expect("wake catchup-required 8")
	a.ack(7)
	w.commit(change("d2", "o1", "f"))
	a.expect("wake catchup-required 9")
	a.ack(9)
	w.commit(change("d3", "o1", "f"))
	a.expect("delta s:10[d3]>10")
	a.nothing(w)
}

func TestTooManyUnacknowledgedDeltasAreAWakeUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxUnacked: 2})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	for range 4 {
		w.commit(change("d", "o1", "f"))
		w.settle()
	}
	a.expect("delta s:1[d]>1", "delta s:2[d]>2", "wake catchup-required 3", "wake catchup-required 4")
	a.ack(3)
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 5")
	a.ack(5)
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:6[d]>6")
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:7[d]>7")
	a.ack(7)
	w.commit(change("d", "o1", "f"))
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:8[d]>8", "delta s:9[d]>9")
}

func TestADeltaThatIsTooLargeIsAWakeUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxDeltaBytes: 1000})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	large := change("d", "o1", "f")
	large.Payload = make([]byte, 2000)
	w.commit(large)
	a.expect("wake delta-too-large 1")
	w.settle()
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 2")
	a.ack(2)
	seq := w.commit(change("d", "o1", "f"))
	a.expect("delta s:3[d]>3")
	w.fan.seqs["acme"]++
	w.hub.Commits("acme", seq, []fanout.Commit{{Seq: seq + 1, Changes: []fanout.Change{change("d", "o1", "f")}, Oversize: true}})
	a.expect("wake delta-too-large 4")
}

func TestLostCommitsAreAWakeUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a, b := w.connect("a", "ada"), w.connect("b", "bob")
	w.hub.Lost("acme", 20)
	w.fan.seqs["acme"] = 20
	a.expect("wake catchup-required 20")
	a.ack(19)
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 21")
	a.ack(21)
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:22[d]>22")
	w.hub.Lost("acme", 21) // read before the newest was
	a.nothing(w)
	b.nothing(w) // it registered nothing that could be lost
}

// TestLostCommitsOfARoundThatIsBehind: what nobody knows of may be what its pull did not bring.
func TestLostCommitsOfARoundThatIsBehind(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(5)
	a := w.connect("a", "ada")
	w.commit(change("d", "elsewhere", "f"))
	w.hub.Lost("acme", 20)
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	a.expect("wake catchup-required 20")
}

// TestACommitComesOnce: what a fanout tells again changes nothing.
func TestACommitComesOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	w.commit(change("d", "o1", "f"))
	w.hub.Commits("acme", 0, []fanout.Commit{{Seq: 1, Changes: []fanout.Change{change("d", "o1", "f")}}})
	w.hub.Commits("other", 0, []fanout.Commit{{Seq: 1, Changes: []fanout.Change{change("d", "o1", "f")}}})
	a.expect("delta s:1[d]>1")
	a.nothing(w)
}

// TestRotatedEpochsAreForgotten: what another process rotated counts no more, whether
// anybody is connected in the partition or not.
func TestRotatedEpochsAreForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.hub.Rotated("acme")
	w.hub.Rotated("")
	w.hub.Reset("other", 3)
	require.Equal(t, []string{"acme", "(all)", "other"}, w.gate.forgotten)
}

// TestAnotherLogIsAReset: nothing a client says about the old log starts deltas of the new
// one, only a round on this connection does.
func TestAnotherLogIsAReset(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxUnacked: 1})
	w.fan.seqs["acme"] = 8
	w.record("a", "ada", 8, orgSub("o1"))
	w.engine.run = pushes(9)
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	w.fan.seqs["acme"] = 9
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 10")
	a.ack(10)
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:11[d]>11")
	w.hub.Reset("acme", 2)
	w.fan.seqs["acme"] = 2
	a.expect("wake reset-required 2")
	a.ack(9)
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 3")
	w.engine.run = pulls(3)
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	a.ack(9) // late
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:4[d]>4")
	w.settle()
	w.store.mu.Lock()
	writes := w.store.writes
	w.store.mu.Unlock()
	require.Len(t, writes, 1)
	require.Equal(t, []int64{3}, writes[0].Cursors, "nothing of the old log")

	w.record("b", "bob", 4, orgSub("o1"))
	b := w.connect("b", "bob")
	require.False(t, b.hello.RequiresSync, "it has read the log there is")
	b.nothing(w)
}

// TestTheBoundOfADelta is that of its message, up to a few bytes.
func TestTheBoundOfADelta(t *testing.T) {
	t.Parallel()
	const bound = 1000
	w := newWorld(t, realtime.Options{MaxDeltaBytes: bound})
	a := w.on("a", "o1")
	row, largest := change("d", "o1", "f"), 0
	for size := bound - 300; ; size++ {
		row.Payload = make([]byte, size)
		seq := w.commit(row)
		r := a.next()
		if r.delta == nil {
			require.Equal(t, fmt.Sprintf("wake delta-too-large %d", seq), r.String())
			break
		}
		largest = 1 + len(r.delta)
		a.ack(seq)
	}
	require.LessOrEqual(t, largest, bound)
	require.Greater(t, largest, bound-16)
}

// TestBufferedDeltasAreBounded: what waits for a socket has a bound in bytes, however few
// deltas it is.
func TestBufferedDeltasAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxUnacked: 1 << 20})
	w.record("deaf", "ada", 0, orgSub("o1"))
	w.deaf("deaf", "ada")
	row := change("d", "o1", "f")
	row.Payload = make([]byte, 400<<10)
	for range 60 { // 24 MiB, of which the socket takes a part
		w.commit(row)
	}
	_, _, _, queued := w.hub.Counts()
	require.LessOrEqual(t, queued, 3, "two deltas and a wake-up")
}

// TestWhatIsWrittenTakesNoRoom of the bound, and one delta always fits.
func TestWhatIsWrittenTakesNoRoom(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{MaxBufferedBytes: 1000})
	a := w.on("a", "o1")
	row := change("d", "o1", "f")
	for size := range int64(4) {
		row.Payload = make([]byte, 400*size)
		seq := w.commit(row)
		a.expect(fmt.Sprintf("delta s:%d[d]>%d", seq, seq))
	}
}

// TestManyScopeValues: whatever a subscription is filed under, a change is of it only if every
// variable has the value of the change (§3.2).
func TestManyScopeValues(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	var orgs, folders []string
	for i := range 40 { // together more than are filed
		orgs, folders = append(orgs, fmt.Sprintf("o%02d", i)), append(folders, fmt.Sprintf("f%02d", i))
	}
	many := sub{"s", "docs", ssp2.ScopeMap{"org": orgs, "folder": folders}}
	w.record("a", "ada", 0, many)
	a := w.connect("a", "ada")
	w.commit(change("d1", "o01", "elsewhere"), change("d2", "elsewhere", "f01"))
	a.nothing(w)
	w.engine.run = pulls(0)
	b := w.connect("b", "bob")
	b.chunk(pullRequest("b", many))
	b.response()
	w.commit(change("d3", "o39", "f39"), change("d4", "o01", "elsewhere"))
	a.expect("delta s:2[d3]>2")
	b.expect("delta s:2[d3]>2") // it missed nothing before
}
