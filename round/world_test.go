package round_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

// world is an engine between stand-ins that write down what is asked of them.
type world struct {
	schema *schema.Schema
	trace  []string
	logged bytes.Buffer

	epoch    gate.Epoch // what the database holds
	known    *gate.Epoch
	gateErr  error
	allowed  scope.Allowed
	resolve  func(context.Context, round.ScopeRequest) (scope.Allowed, error)
	pushRule error
	pullRule error
	push     func(pushsvc.Request) (*pushsvc.Response, error)
	events   events.Sink
	begin    func(pullsvc.Request) (round.Reading, error)
	stream   func(ctx context.Context, emit func([]byte) error) error

	pushed pushsvc.Request
	pulled pullsvc.Request
	asked  round.ScopeRequest

	out writer
}

func newWorld(t *testing.T) *world {
	t.Helper()
	s, err := schema.Parse(sample.IR())
	require.NoError(t, err)
	return &world{schema: s, epoch: gate.Epoch{LogEpoch: "epoch-1"}, allowed: scope.Allowed{}}
}

func (w *world) note(what string) { w.trace = append(w.trace, what) }

func (w *world) run(t *testing.T, req *ssp2.Request) error {
	t.Helper()
	return w.runContext(t.Context(), req)
}

func (w *world) runContext(ctx context.Context, req *ssp2.Request) error {
	return w.runOn(ctx, req, &w.out)
}

func (w *world) runOn(ctx context.Context, req *ssp2.Request, out round.Writer) error {
	e := round.NewWith(round.Config{
		Schema: w.schema,
		Events: w.events,
		Logger: slog.New(slog.NewTextHandler(&w.logged, nil)),
		ResolveScopes: func(ctx context.Context, req round.ScopeRequest) (scope.Allowed, error) {
			w.note("resolve")
			w.asked = req
			if w.resolve != nil {
				return w.resolve(ctx, req)
			}
			return w.allowed, nil
		},
	}, pushFake{w}, pullFake{w}, gateFake{w})
	return e.Run(ctx, round.Identity{Actor: "ada", Partition: "acme"}, req, out)
}

// response decodes what was written.
func (w *world) response(t *testing.T) []ssp2.Frame {
	t.Helper()
	m, err := ssp2.DecodeMessage(w.out.bytes)
	require.NoError(t, err)
	require.Equal(t, ssp2.KindResponse, m.Kind)
	return m.Frames
}

type pushFake struct{ *world }

func (f pushFake) Validate(pushsvc.Request) error {
	f.note("push rules")
	return f.pushRule
}

func (f pushFake) Push(_ context.Context, req pushsvc.Request) (*pushsvc.Response, error) {
	f.note("push")
	f.pushed = req
	if f.push != nil {
		return f.push(req)
	}
	return applied(req), nil
}

// applied accepts every commit, as seqs 1, 2, 3…
func applied(req pushsvc.Request) *pushsvc.Response {
	resp := &pushsvc.Response{
		LogEpoch: "epoch-1",
		Results:  make([]ssp2.PushResult, len(req.Commits)),
		Details:  make([]*ssp2.PushResultDetails, len(req.Commits)),
		LastSeq:  int64(len(req.Commits)),
	}
	for i, c := range req.Commits {
		seq := int64(i + 1)
		resp.Results[i] = ssp2.PushResult{ClientCommitID: c.ClientCommitID, Status: ssp2.PushApplied, CommitSeq: &seq}
		for op := range c.Operations {
			resp.Results[i].Results = append(resp.Results[i].Results, ssp2.OpResult{OpIndex: int32(op), Status: ssp2.OpApplied})
		}
	}
	return resp
}

type pullFake struct{ *world }

func (f pullFake) Validate(pullsvc.Request) error {
	f.note("pull rules")
	return f.pullRule
}

func (f pullFake) Begin(_ context.Context, req pullsvc.Request) (round.Reading, error) {
	f.note("pull")
	f.pulled = req
	if f.begin != nil {
		return f.begin(req)
	}
	return f.reading(), nil
}

func (w *world) reading() round.Reading {
	return round.Reading{
		LogEpoch: w.epoch.LogEpoch,
		Stream: func(ctx context.Context, emit func([]byte) error) error {
			w.note("stream")
			if w.stream != nil {
				return w.stream(ctx, emit)
			}
			for _, sub := range w.pulled.Subscriptions {
				if err := emit(section(sub.ID)); err != nil {
					return err
				}
			}
			return nil
		},
		Close: func() { w.note("close") },
	}
}

// section is an empty answer to a subscription.
func section(id string) []byte {
	var b []byte
	for _, f := range []ssp2.Frame{
		&ssp2.SubStart{ID: id, Status: ssp2.SubActive, EffectiveScopes: ssp2.ScopeMap{}},
		&ssp2.SubEnd{NextCursor: 7},
	} {
		var err error
		if b, err = ssp2.AppendFrame(b, ssp2.WireV2, f); err != nil {
			panic(err)
		}
	}
	return b
}

type gateFake struct{ *world }

func (f gateFake) Enter(context.Context, string) (gate.Epoch, error) {
	f.note("gate")
	if f.gateErr != nil {
		return gate.Epoch{}, f.gateErr
	}
	if f.known != nil {
		return *f.known, nil
	}
	return f.epoch, nil
}

func (f gateFake) Forget(string) {
	f.note("forget")
	f.known = nil
}

// writer keeps what is written, and tells a write from a flush.
type writer struct {
	bytes  []byte
	pieces []int // bytes written before each flush, and behind the last
	fail   int   // the how-manieth call fails; 0: none
	calls  int
}

var errPeer = errors.New("peer gone")

func (w *writer) call() error {
	w.calls++
	if w.fail != 0 && w.calls >= w.fail {
		return errPeer
	}
	return nil
}

func (w *writer) Write(p []byte) (int, error) {
	if err := w.call(); err != nil {
		return 0, err
	}
	if len(w.pieces) == 0 {
		w.pieces = []int{0}
	}
	w.pieces[len(w.pieces)-1] += len(p)
	w.bytes = append(w.bytes, p...)
	return len(p), nil
}

func (w *writer) Flush() error {
	w.pieces = append(w.pieces, 0)
	return w.call()
}

// request is a request of the running schema version and the current epoch.
func (w *world) request(wire ssp2.WireVersion) *ssp2.Request {
	req := &ssp2.Request{
		WireVersion: wire,
		Header:      ssp2.RequestHeader{ClientID: "device", SchemaVersion: w.schema.Version},
	}
	if wire >= ssp2.WireV2 {
		epoch := "epoch-1"
		req.Header.LogEpoch = &epoch
	}
	return req
}

func pushing(req *ssp2.Request, commits ...string) *ssp2.Request {
	for _, id := range commits {
		req.Commits = append(req.Commits, ssp2.PushCommit{
			ClientCommitID: id,
			Operations:     []ssp2.Operation{{Table: "t", RowID: "r", Op: ssp2.OpDelete}},
		})
	}
	return req
}

func pulling(req *ssp2.Request, subscriptions ...string) *ssp2.Request {
	req.Pull = &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows}
	for _, id := range subscriptions {
		req.Subscriptions = append(req.Subscriptions, ssp2.Subscription{ID: id, Table: "t", Cursor: -1})
	}
	return req
}
