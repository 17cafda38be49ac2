package realtime_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/realtime"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

type runner = func(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error

// pulls answers every round as a pull whose cursors end at next.
func pulls(next int64) runner {
	return func(_ context.Context, _ round.Identity, req *ssp2.Request, w round.Writer) error {
		return answer(w, req.WireVersion, pulled(req, next)...)
	}
}

// pushes answers every round as a push that became a commit, and a pull that brings it.
func pushes(seq int64) runner {
	return func(_ context.Context, _ round.Identity, req *ssp2.Request, w round.Writer) error {
		result := &ssp2.PushResult{
			ClientCommitID: "c", Status: ssp2.PushApplied, CommitSeq: &seq, Results: []ssp2.OpResult{{Status: ssp2.OpApplied}},
		}
		return answer(w, req.WireVersion, append([]ssp2.Frame{result}, pulled(req, seq)...)...)
	}
}

// held is a round that waits, for a test to do something meanwhile.
type held struct {
	began, goOn chan struct{}
	once        sync.Once
}

func hold(then runner) (*held, runner) {
	h := &held{began: make(chan struct{}), goOn: make(chan struct{})}
	return h, func(ctx context.Context, id round.Identity, req *ssp2.Request, w round.Writer) error {
		h.once.Do(func() { close(h.began) })
		select {
		case <-h.goOn:
			return then(ctx, id, req, w)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func statusOf(m *ssp2.Message) string {
	if e, ok := m.Frames[len(m.Frames)-1].(*ssp2.ErrorFrame); ok {
		return e.Code
	}
	return ""
}

// TestARoundIsTheBytesOfItsChunks: chunk boundaries carry no meaning (§8.7).
func TestARoundIsTheBytesOfItsChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	var got *ssp2.Request
	w.engine.run = func(_ context.Context, id round.Identity, req *ssp2.Request, out round.Writer) error {
		got = req
		require.Equal(t, round.Identity{Actor: "ada", Partition: "acme"}, id)
		return answer(out, req.WireVersion, pulled(req, 0)...)
	}
	a := w.connect("a", "ada")
	request := pullRequest("a", orgSub("o1"))
	want, err := ssp2.DecodeRequest(request)
	require.NoError(t, err)
	for _, size := range []int{1, 3, 8, len(request)} {
		for rest := request; len(rest) > 0; {
			n := min(size, len(rest))
			a.chunk(rest[:n])
			if rest = rest[n:]; len(rest) > 0 {
				a.text(`{"type":"ack","cursor":0}`) // texts interleave
			}
		}
		m, others := a.response()
		require.Empty(t, others)
		require.Empty(t, cmp.Diff(want, got))
		require.Empty(t, statusOf(m))
	}
	a.chunk(nil) // an empty chunk is one
	a.chunk(request)
	a.response()
}

// TestTheLastChunkEndsAtEND and no chunk is large.
func TestAResponseIsChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	body := make([]byte, 300<<10)
	w.engine.run = func(_ context.Context, _ round.Identity, req *ssp2.Request, out round.Writer) error {
		frames := pulled(req, 1)
		rowVersion := int64(1)
		frames = []ssp2.Frame{frames[0], &ssp2.Commit{CommitSeq: 1, ActorID: "x", Tables: []string{"docs"}, Changes: []ssp2.Change{
			{RowID: "d", Op: ssp2.OpUpsert, RowVersion: &rowVersion, Row: body},
		}}, frames[1]}
		return answer(out, req.WireVersion, frames...)
	}
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	var all []byte
	for {
		r := a.next()
		require.NotNil(t, r.chunk)
		require.LessOrEqual(t, len(r.chunk), 64<<10)
		all = append(all, r.chunk...)
		if m, err := ssp2.DecodeMessage(all); err == nil {
			commit, ok := m.Frames[2].(*ssp2.Commit)
			require.True(t, ok)
			require.Equal(t, body, commit.Changes[0].Row)
			break
		}
	}
	a.nothing(w)
	handled := w.ring.Query(events.Filter{Name: "request.handled"})
	require.Empty(t, handled, "the engine tells of rounds, not the hub")
}

func TestFailuresOfARoundAreResponses(t *testing.T) {
	t.Parallel()
	good := pullRequest("a", orgSub("o1"))
	fails := func(err error) runner {
		return func(context.Context, round.Identity, *ssp2.Request, round.Writer) error { return err }
	}
	unordered := append([]byte{}, good[:8]...)
	unordered = append(ssp2.AppendEnd(append(unordered, good[8:len(good)-5]...)[:8:8]), 0)[:13] // an envelope and END
	for _, tc := range []struct {
		name    string
		request []byte
		run     runner
		code    ssp2.Code
	}{
		{"refused by a rule", good, fails(ssp2.Errorf(ssp2.CodeInvalidSubscription, "no")), ssp2.CodeInvalidSubscription},
		{"an internal error", good, fails(errors.New("secret")), ssp2.CodeInternalError},
		{"another client id", pullRequest("b", orgSub("o1")), nil, ssp2.CodeInvalidClientID},
		{"a request without content", unordered, nil, ssp2.CodeInvalidRequest},
		{"a panic", good, func(context.Context, round.Identity, *ssp2.Request, round.Writer) error { panic("secret") }, ssp2.CodeInternalError},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.engine.run = tc.run
			a := w.connect("a", "ada")
			a.chunk(tc.request)
			m, _ := a.response()
			require.Len(t, m.Frames, 2, "RESP_HEADER and ERROR")
			require.Equal(t, string(tc.code), statusOf(m))
			header, ok := m.Frames[0].(*ssp2.ResponseHeader)
			require.True(t, ok)
			require.Equal(t, "epoch-1", header.LogEpoch)
			e, ok := m.Frames[1].(*ssp2.ErrorFrame)
			require.True(t, ok)
			require.NotContains(t, e.Message, "secret")

			w.engine.mu.Lock()
			w.engine.run = pulls(0)
			w.engine.mu.Unlock()
			a.chunk(good)
			m, _ = a.response()
			require.Empty(t, statusOf(m), "the connection goes on")
		})
	}
}

// TestABrokenRequestIsReadToItsEnd: what follows it is the next round.
func TestABrokenRequestIsReadToItsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(0)
	a := w.connect("a", "ada")
	good := pullRequest("a", orgSub("o1"))
	broken := append([]byte{}, good...)
	broken[8] = byte(ssp2.FrameSubscription) // where REQ_HEADER has to be
	for i := range broken {
		a.chunk(broken[i : i+1])
	}
	m, _ := a.response()
	require.Equal(t, string(ssp2.CodeInvalidRequest), statusOf(m))
	a.chunk(good)
	m, _ = a.response()
	require.Empty(t, statusOf(m))
}

func TestAnErrorInTheMiddleLeavesRegistrations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	w.engine.run = func(_ context.Context, _ round.Identity, req *ssp2.Request, out round.Writer) error {
		e := ssp2.Errorf(ssp2.CodeInternalError, "cut")
		if err := answer(out, req.WireVersion, append(pulled(req, 0), e.Frame())...); err != nil {
			return err
		}
		return &round.StreamError{Reported: true, Err: e}
	}
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o2")))
	m, _ := a.response()
	require.Equal(t, string(ssp2.CodeInternalError), statusOf(m))
	w.commit(change("d2", "o2", "f"))
	w.commit(change("d1", "o1", "f"))
	a.expect("delta s:2[d1]>2")
}

// TestViolationsCloseTheConnection (§8.7).
func TestViolationsCloseTheConnection(t *testing.T) {
	t.Parallel()
	good := pullRequest("a", orgSub("o1"))
	response, err := ssp2.AppendMessage(nil, &ssp2.Message{
		WireVersion: 2, Kind: ssp2.KindResponse, Frames: []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: "e"}},
	})
	require.NoError(t, err)
	for _, tc := range []struct {
		name string
		send func(c *client)
		code websocket.StatusCode
	}{
		{"no tag", func(c *client) { c.binary() }, websocket.StatusPolicyViolation},
		{"the tag of a delta", func(c *client) { c.binary(append([]byte{0}, good...)...) }, websocket.StatusPolicyViolation},
		{"an unknown tag", func(c *client) { c.binary(7, 1, 2) }, websocket.StatusPolicyViolation},
		{"no envelope", func(c *client) { c.chunk([]byte("GET / HTTP/1.1")) }, websocket.StatusPolicyViolation},
		{"an unknown wire version", func(c *client) { c.chunk([]byte("SSP2\x09\x00\x01\x00")) }, websocket.StatusPolicyViolation},
		{"a response", func(c *client) { c.chunk(response) }, websocket.StatusPolicyViolation},
		{"bytes behind END", func(c *client) { c.chunk(append(append([]byte{}, good...), 0)) }, websocket.StatusPolicyViolation},
		{"two requests in a message", func(c *client) { c.chunk(append(append([]byte{}, good...), good...)) }, websocket.StatusPolicyViolation},
		{"text that is not JSON", func(c *client) { c.text("hello") }, websocket.StatusPolicyViolation},
		{"an ack without a cursor", func(c *client) { c.text(`{"type":"ack"}`) }, websocket.StatusPolicyViolation},
		{"an ack with a fraction", func(c *client) { c.text(`{"type":"ack","cursor":1.5}`) }, websocket.StatusPolicyViolation},
		{"presence without data", func(c *client) { c.text(`{"event":"presence"}`) }, websocket.StatusPolicyViolation},
		{"presence with a scalar", func(c *client) { c.text(`{"event":"presence","data":{"scopeKey":"org:o1","doc":1}}`) }, websocket.StatusPolicyViolation},
		{"a text between two chunks that is malformed", func(c *client) {
			c.chunk(good[:20])
			c.text("{")
		}, websocket.StatusPolicyViolation},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.engine.run = pulls(0)
			a := w.connect("a", "ada")
			tc.send(a)
			require.Equal(t, tc.code, a.ended())
		})
	}
}

func TestUnknownControlMessagesAreTolerated(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a := w.connect("a", "ada")
	for _, text := range []string{`{"type":"nack","cursor":"x"}`, `{"event":"cursor","data":7}`, `{"event":"hello","data":null}`} {
		a.text(text)
	}
	a.nothing(w)
}

// TestOneRoundInFlight: a second one, while the first is answered, ends the connection.
func TestOneRoundInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	held, run := hold(pulls(0))
	w.engine.run = run
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	<-held.began
	a.chunk(pullRequest("a", orgSub("o1"))[:1])
	require.Equal(t, websocket.StatusPolicyViolation, a.ended())
}

// TestTextsInterleaveWithARound: what is no delta goes both ways while a response is under
// way (§8.7).
func TestTextsInterleaveWithARound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a, b := w.on("a", "o1"), w.on("b", "o1")
	held, run := hold(pulls(0))
	w.engine.run = run
	a.chunk(pullRequest("a", orgSub("o1")))
	<-held.began
	a.present("org:o1", `{}`)
	b.expect(`join org:o1 a/a {}`)
	b.present("org:o1", `{}`)
	a.expect(`join org:o1 b/b {}`)
	close(held.goOn)
	_, others := a.response()
	require.Empty(t, others, "the round changes nothing about it")
	b.nothing(w)
}

// TestNoDeltaDuringARound: a commit that lands while a round is in flight is a wake-up,
// and deltas go on with the acknowledgement behind it (§8.7).
func TestNoDeltaDuringARound(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	a := w.connect("a", "ada")
	held, run := hold(pulls(1))
	w.engine.run = run
	a.chunk(pullRequest("a", orgSub("o1")))
	<-held.began
	w.commit(change("d1", "o1", "f"))
	a.expect("wake catchup-required 1")
	close(held.goOn)
	a.response()
	w.commit(change("d2", "o1", "f"))
	a.expect("wake catchup-required 2")
	a.ack(1)
	w.commit(change("d3", "o1", "f"))
	a.expect("wake catchup-required 3")
	a.ack(3)
	w.commit(change("d4", "o1", "f"))
	a.expect("delta s:4[d4]>4")
}

// TestCommitsOfARoundAreDuringIt, whenever they arrive here.
func TestCommitsOfARoundAreDuringIt(t *testing.T) {
	t.Parallel()
	// pushed is a client behind a round that pushed commit 1, which is not offered yet.
	pushed := func(t *testing.T) (*world, *client) {
		t.Helper()
		w := newWorld(t, realtime.Options{})
		w.record("a", "ada", 0, orgSub("o1"))
		w.engine.run = pushes(1)
		a := w.connect("a", "ada")
		a.chunk(pullRequest("a", orgSub("o1")))
		a.response()
		return w, a
	}
	t.Run("before the acknowledgement", func(t *testing.T) {
		t.Parallel()
		w, a := pushed(t)
		w.commit(change("d1", "o1", "f"))
		a.expect("wake catchup-required 1")
		a.ack(1)
		w.commit(change("d2", "o1", "f"))
		a.expect("delta s:2[d2]>2")
	})
	t.Run("and others follow before the acknowledgement", func(t *testing.T) {
		t.Parallel()
		w, a := pushed(t)
		w.commit(change("d1", "o1", "f"))
		a.expect("wake catchup-required 1")
		w.commit(change("d2", "o1", "f"))
		a.expect("wake catchup-required 2")
		a.ack(2)
		w.commit(change("d3", "o1", "f"))
		a.expect("delta s:3[d3]>3")
	})
	t.Run("behind it", func(t *testing.T) {
		t.Parallel()
		w, a := pushed(t)
		a.ack(1)
		w.commit(change("d1", "o1", "f"))
		a.expect("wake catchup-required 1")
		w.commit(change("d2", "o1", "f"))
		a.expect("delta s:2[d2]>2")
	})
}

// TestWhatAPullBroughtIsNoNews, when it arrives here behind the round and before the
// acknowledgement.
func TestWhatAPullBroughtIsNoNews(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(2)
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	w.commit(change("d1", "o1", "f"))
	w.commit(change("d2", "o1", "f"))
	a.nothing(w)
	w.commit(change("d3", "o1", "f"))
	a.expect("delta s:3[d3]>3")
}

// TestARoundRegisters: what it pulled is what its connection gets deltas of, at once (§8.7).
func TestARoundRegisters(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(0)
	a := w.connect("a", "ada")
	require.Equal(t, []any{int64(-1), int64(0), true}, []any{a.hello.Cursor, a.hello.LatestCursor, a.hello.RequiresSync})
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	w.commit(change("d1", "o1", "f"))
	a.expect("delta s:1[d1]>1")

	w.engine.run = pulls(1)
	a.chunk(pullRequest("a", orgSub("o2"), sub{"n", "notes", ssp2.ScopeMap{"org": {"o1"}}}))
	a.response()
	w.commit(change("d2", "o1", "f"))
	w.commit(change("d3", "o2", "f"))
	a.expect("delta s:3[d3]>3")
	a.nothing(w)

	a.chunk(pullRequest("a"))
	a.response()
	w.commit(change("d4", "o2", "f"))
	a.nothing(w)
	_, _, groups, _ := w.hub.Counts()
	require.Zero(t, groups, "nothing is kept of what it was registered on")
}

// TestWhatARoundDoesNotRegister.
func TestWhatARoundDoesNotRegister(t *testing.T) {
	t.Parallel()
	version := int32(3)
	only := func(h ssp2.ResponseHeader) runner {
		return func(_ context.Context, _ round.Identity, req *ssp2.Request, w round.Writer) error {
			b, err := ssp2.AppendMessage(nil, &ssp2.Message{WireVersion: req.WireVersion, Kind: ssp2.KindResponse, Frames: []ssp2.Frame{&h}})
			if err == nil {
				_, err = w.Write(b)
			}
			return err
		}
	}
	status := func(status ssp2.SubStatus, code string) runner {
		return func(_ context.Context, _ round.Identity, req *ssp2.Request, w round.Writer) error {
			frames := pulled(req, 0)
			frames[0] = &ssp2.SubStart{ID: "s", Status: status, ReasonCode: code, EffectiveScopes: ssp2.ScopeMap{}}
			return answer(w, req.WireVersion, frames...)
		}
	}
	bootstrap := `{"asOfCommitSeq":0}`
	for _, tc := range []struct {
		name string
		run  runner
		kept bool // the registrations of before
	}{
		{"a reset", only(ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: "e2", ResetRequired: true}), true},
		{"the schema floor", only(ssp2.ResponseHeader{LatestSchemaVersion: &version, RequiredSchemaVersion: &version, LogEpoch: "e"}), true},
		{"a revoked subscription", status(ssp2.SubRevoked, "sync.scope_revoked"), false},
		{"one behind the horizon", status(ssp2.SubReset, "sync.cursor_expired"), false},
		{"one that bootstraps", func(_ context.Context, _ round.Identity, req *ssp2.Request, w round.Writer) error {
			return answer(w, req.WireVersion, pulled(req, 0)[0], &ssp2.SubEnd{NextCursor: 0, BootstrapState: &bootstrap})
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, realtime.Options{})
			w.record("a", "ada", 0, orgSub("o1"))
			w.engine.run = tc.run
			a := w.connect("a", "ada")
			a.chunk(pullRequest("a", orgSub("o2")))
			a.response()
			w.commit(change("d2", "o2", "f"))
			w.commit(change("d1", "o1", "f"))
			if tc.kept {
				a.expect("delta s:2[d1]>2")
			}
			a.nothing(w)
		})
	}
}

// TestARoundThatOnlyPushesLeavesRegistrations, and what they have been given (§8.7).
func TestARoundThatOnlyPushesLeavesRegistrations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a := w.on("a", "o1")
	request, err := ssp2.DecodeRequest(pullRequest("a"))
	require.NoError(t, err)
	request.Pull = nil
	request.Commits = []ssp2.PushCommit{{ClientCommitID: "c", Operations: []ssp2.Operation{{Table: "docs", RowID: "d", Op: ssp2.OpDelete}}}}
	push, err := ssp2.AppendMessage(nil, request.Message())
	require.NoError(t, err)
	w.engine.run = pulls(0)
	a.chunk(push)
	a.response()
	w.commit(change("d1", "o1", "f"))
	a.expect("delta s:1[d1]>1")

	w.becomes(1)
	a.expect("wake reset-required 1")
	a.chunk(push)
	a.response()
	a.ack(1) // of whichever log: it pulled nothing of the one there is now
	w.commit(change("d2", "o1", "f"))
	a.expect("wake catchup-required 2")
}

// TestARoundWhosePullIsBehindIsTold: commits that were offered before the subscription was
// registered, and that its pull has not brought, are a wake-up; others are nothing.
func TestARoundWhosePullIsBehindIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.connect("other", "ada") // watches the partition
	w.commit(change("d1", "o1", "f"))
	w.commit(change("d2", "o2", "f"))
	w.engine.run = pulls(0)
	a := w.connect("a", "ada")
	a.chunk(pullRequest("a", orgSub("o1")))
	a.response()
	a.expect("wake catchup-required 2")
	w.commit(change("d3", "o1", "f"))
	a.expect("wake catchup-required 3")
	a.ack(3)
	w.commit(change("d4", "o1", "f"))
	a.expect("delta s:4[d4]>4")

	w.engine.mu.Lock()
	w.engine.run = pulls(1)
	w.engine.mu.Unlock()
	b := w.connect("b", "ada")
	b.chunk(pullRequest("b", orgSub("o2"), sub{"n", "notes", ssp2.ScopeMap{"org": {"o1"}}}))
	b.response()
	b.expect("wake catchup-required 4") // d2
	w.engine.mu.Lock()
	w.engine.run = pulls(2)
	w.engine.mu.Unlock()
	c := w.connect("c", "ada")
	c.chunk(pullRequest("c", orgSub("o2"), sub{"n", "notes", ssp2.ScopeMap{"org": {"o1"}}}))
	c.response()
	w.commit(change("d5", "o2", "f"))
	c.expect("delta s:5[d5]>5")
}

// TestTheWireVersionOfARoundIsThatOfDeltas (§8.1).
func TestTheWireVersionOfARoundIsThatOfDeltas(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.record("a", "ada", 0, orgSub("o1"))
	w.engine.run = pulls(0)
	a := w.connect("a", "ada")
	request, err := ssp2.DecodeRequest(pullRequest("a", orgSub("o1")))
	require.NoError(t, err)
	for _, wire := range []ssp2.WireVersion{ssp2.WireV3, ssp2.WireV1, ssp2.WireV2} {
		request.WireVersion = wire
		epoch := "epoch-1"
		if request.Header.LogEpoch = &epoch; wire == ssp2.WireV1 {
			request.Header.LogEpoch = nil
		}
		b, err := ssp2.AppendMessage(nil, request.Message())
		require.NoError(t, err)
		w.engine.run = pulls(w.head())
		a.chunk(b)
		a.response()
		w.commit(change("d", "o1", "f"))
		m, err := ssp2.DecodeMessage(a.next().delta)
		require.NoError(t, err)
		require.Equal(t, wire, m.WireVersion)
	}
}

// TestALargeRequestIsRefused without being held, and the connection ends: nobody knows
// where the next request would begin.
func TestALargeRequestIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	a := w.connect("a", "ada")
	request := ssp2.AppendEnvelope(nil, ssp2.WireV2, ssp2.KindRequest)
	epoch := "epoch-1"
	request, err := ssp2.AppendFrame(request, ssp2.WireV2, &ssp2.RequestHeader{ClientID: "a", SchemaVersion: 3, LogEpoch: &epoch})
	require.NoError(t, err)
	request, _ = ssp2.BeginFrame(request, ssp2.FramePushCommit)
	copy(request[len(request)-4:], []byte{0, 0, 0, 4}) // 64 MiB follow
	a.chunk(request)
	m, _ := a.response()
	require.Equal(t, string(ssp2.CodeInvalidRequest), statusOf(m))
	require.Equal(t, websocket.StatusMessageTooBig, a.ended())
}

// TestARoundThatRegistersMuch is not compared with the recent commits for ever: who may have
// missed something is told to pull.
func TestARoundThatRegistersMuch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.engine.run = pulls(0)
	a, b := w.connect("a", "ada"), w.connect("b", "bob")
	for range 200 {
		w.commit(change("d", "elsewhere", "f"))
	}
	var many []sub
	for i := range 200 {
		many = append(many, sub{strconv.Itoa(i), "docs", ssp2.ScopeMap{"org": {strconv.Itoa(i)}}})
	}
	a.chunk(pullRequest("a", many[:50]...))
	a.response()
	a.nothing(w)
	b.chunk(pullRequest("b", many...))
	b.response()
	b.expect("wake catchup-required 200")
}
