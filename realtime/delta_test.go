package realtime_test

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/realtime/fanout"
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
	a.ack(6)
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:7[d]>7")
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
	b.nothing(w) // it registered nothing that could be lost
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
	w := newWorld(t, realtime.Options{})
	w.fan.seqs["acme"] = 9
	w.record("a", "ada", 9, orgSub("o1"))
	a := w.connect("a", "ada")
	w.hub.Reset("acme", 2)
	w.fan.seqs["acme"] = 2
	a.expect("wake reset-required 2")
	a.ack(9)
	w.commit(change("d", "o1", "f"))
	a.expect("wake catchup-required 3")
	w.engine.run = pulls(3)
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	a.ack(3)
	w.commit(change("d", "o1", "f"))
	a.expect("delta s:4[d]>4")
	w.settle()
	w.store.mu.Lock()
	defer w.store.mu.Unlock()
	for _, write := range w.store.writes {
		require.NotContains(t, write.Cursors, int64(9), "a cursor of the old log")
	}
}
