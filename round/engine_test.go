package round_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/gate"
	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pushsvc"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

var wires = []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3}

// servedHeader is the RESP_HEADER of a request that is served.
func (w *world) servedHeader(wire ssp2.WireVersion) *ssp2.ResponseHeader {
	h := &ssp2.ResponseHeader{LatestSchemaVersion: &w.schema.Version}
	if wire >= ssp2.WireV2 {
		h.LogEpoch = "epoch-1"
	}
	return h
}

func TestHalvesOfARound(t *testing.T) {
	t.Parallel()
	applied := func(id string, seq int64) ssp2.Frame {
		return &ssp2.PushResult{
			ClientCommitID: id, Status: ssp2.PushApplied, CommitSeq: &seq,
			Results: []ssp2.OpResult{{Status: ssp2.OpApplied}},
		}
	}
	start := func(id string) ssp2.Frame {
		return &ssp2.SubStart{ID: id, Status: ssp2.SubActive, EffectiveScopes: ssp2.ScopeMap{}}
	}
	end := &ssp2.SubEnd{NextCursor: 7}
	for _, tc := range []struct {
		name    string
		make    func(req *ssp2.Request) *ssp2.Request
		trace   []string
		frames  []ssp2.Frame
		flushes int
	}{
		{
			"push only",
			func(req *ssp2.Request) *ssp2.Request { return pushing(req, "c1", "c2") },
			[]string{"push rules", "gate", "resolve", "push"},
			[]ssp2.Frame{applied("c1", 1), applied("c2", 2)},
			0,
		},
		{
			"pull only",
			func(req *ssp2.Request) *ssp2.Request { return pulling(req, "s1", "s2") },
			[]string{"push rules", "pull rules", "gate", "resolve", "pull", "stream", "close"},
			[]ssp2.Frame{start("s1"), end, start("s2"), end},
			2,
		},
		{
			"push and pull",
			func(req *ssp2.Request) *ssp2.Request { return pulling(pushing(req, "c1"), "s1") },
			[]string{"push rules", "pull rules", "gate", "resolve", "push", "pull", "stream", "close"},
			[]ssp2.Frame{applied("c1", 1), start("s1"), end},
			1,
		},
		{
			"pull of nothing",
			func(req *ssp2.Request) *ssp2.Request { return pulling(req) },
			[]string{"push rules", "pull rules", "gate", "resolve", "pull", "stream", "close"},
			nil, 0,
		},
	} {
		for _, wire := range wires {
			t.Run(fmt.Sprintf("%s, wire version %d", tc.name, wire), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				req := tc.make(w.request(wire))
				require.NoError(t, w.run(t, req))
				require.Equal(t, tc.trace, w.trace)
				require.Empty(t, cmp.Diff(append([]ssp2.Frame{w.servedHeader(wire)}, tc.frames...), w.response(t)))
				require.Len(t, w.out.pieces, tc.flushes+1)

				require.Equal(t, round.ScopeRequest{Identity: round.Identity{Actor: "ada", Partition: "acme"}, ClientID: "device"}, w.asked)
				if len(req.Commits) > 0 {
					require.Equal(t, []string{"acme", "ada", "device"}, []string{w.pushed.Partition, w.pushed.Actor, w.pushed.ClientID})
					require.Equal(t, req.Commits, w.pushed.Commits)
					require.Equal(t, wire, w.pushed.WireVersion)
					require.Equal(t, req.Header.LogEpoch, w.pushed.LogEpoch)
				}
				if req.Pull != nil {
					require.Equal(t, []string{"acme", "ada", "device"}, []string{w.pulled.Partition, w.pulled.Actor, w.pulled.ClientID})
					require.Equal(t, *req.Pull, w.pulled.Header)
					require.Equal(t, req.Subscriptions, w.pulled.Subscriptions)
					require.Equal(t, wire, w.pulled.WireVersion)
					require.Equal(t, req.Header.LogEpoch, w.pulled.LogEpoch)
					require.EqualValues(t, len(req.Commits), w.pulled.AfterSeq, "the pull sees what the push did")
				}
			})
		}
	}
}

func TestDetailsFollowTheirResult(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.push = func(req pushsvc.Request) (*pushsvc.Response, error) {
		resp := applied(req)
		resp.Results[1] = ssp2.PushResult{
			ClientCommitID: "c2", Status: ssp2.PushRejected,
			Results: []ssp2.OpResult{{Status: ssp2.OpError, Code: "app.too_long"}},
		}
		resp.Details[1] = &ssp2.PushResultDetails{
			ClientCommitID: "c2", Entries: []ssp2.DetailEntry{{DetailsJSON: `{"reason":"max_length"}`}},
		}
		return resp, nil
	}
	require.NoError(t, w.run(t, pushing(w.request(ssp2.WireV2), "c1", "c2", "c3")))
	var order []string
	for _, f := range w.response(t) {
		order = append(order, f.FrameType().String())
	}
	require.Equal(t, []string{"RESP_HEADER", "PUSH_RESULT", "PUSH_RESULT", "PUSH_RESULT_DETAILS", "PUSH_RESULT"}, order)
}

func TestRequestRulesFailBeforeAnythingIsDone(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		setup func(w *world)
		make  func(req *ssp2.Request) *ssp2.Request
		trace []string
		code  ssp2.Code
	}{
		{
			"acquiring an epoch carries no commits",
			func(*world) {},
			func(req *ssp2.Request) *ssp2.Request {
				req.Header.LogEpoch = nil
				return pushing(req, "c1")
			},
			nil, ssp2.CodeInvalidRequest,
		},
		{
			"not even of a schema version that is not served",
			func(*world) {},
			func(req *ssp2.Request) *ssp2.Request {
				req.Header.LogEpoch = nil
				req.Header.SchemaVersion += 5
				return pushing(req, "c1")
			},
			nil, ssp2.CodeInvalidRequest,
		},
		{
			"the rules of pushes",
			func(w *world) { w.pushRule = ssp2.Errorf(ssp2.CodeTooManyOperations, "too many") },
			func(req *ssp2.Request) *ssp2.Request { return pulling(pushing(req, "c1"), "s1") },
			[]string{"push rules"},
			ssp2.CodeTooManyOperations,
		},
		{
			"the client id of a pull",
			func(w *world) { w.pushRule = ssp2.Errorf(ssp2.CodeInvalidClientID, "reserved") },
			func(req *ssp2.Request) *ssp2.Request { return pulling(req, "s1") },
			[]string{"push rules"},
			ssp2.CodeInvalidClientID,
		},
		{
			"the rules of pulls, before the push",
			func(w *world) { w.pullRule = ssp2.Errorf(ssp2.CodeUnknownTable, "no such table") },
			func(req *ssp2.Request) *ssp2.Request { return pulling(pushing(req, "c1"), "s1") },
			[]string{"push rules", "pull rules"},
			ssp2.CodeUnknownTable,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			tc.setup(w)
			err := w.run(t, tc.make(w.request(ssp2.WireV2)))
			require.Equal(t, tc.code, ssp2.CodeOf(err))
			require.Equal(t, tc.trace, w.trace)
			require.Zero(t, w.out.calls)
			require.Empty(t, w.logged.String())
		})
	}
}

// §1.6: the answer to a schema version that is not served is the header alone.
func TestSchemaFloor(t *testing.T) {
	t.Parallel()
	for _, wire := range wires {
		for _, off := range []int32{-1, 1, 1000} {
			for _, epoch := range []*string{nil, new("epoch-1"), new("epoch-0")} {
				if wire == ssp2.WireV1 && epoch != nil {
					continue
				}
				t.Run(fmt.Sprintf("wire version %d, schema %+d, epoch %v", wire, off, epoch), func(t *testing.T) {
					t.Parallel()
					w := newWorld(t)
					w.schema.Version = 3
					// Nothing is said about tables that the other version may have.
					w.pullRule = ssp2.Errorf(ssp2.CodeUnknownTable, "no such table")
					req := pulling(w.request(wire), "s1")
					if epoch != nil || wire == ssp2.WireV1 {
						pushing(req, "c1")
					}
					req.Header.SchemaVersion += off
					req.Header.LogEpoch = epoch
					require.NoError(t, w.run(t, req))
					want := w.servedHeader(wire)
					want.RequiredSchemaVersion = &w.schema.Version
					want.ResetRequired = wire >= ssp2.WireV2 && (epoch == nil || *epoch != "epoch-1")
					require.Empty(t, cmp.Diff([]ssp2.Frame{want}, w.response(t)))
					require.Subset(t, []string{"gate", "forget"}, w.trace)
				})
			}
		}
	}
}

// §2.1: no epoch, or another one, is answered with the current one and a reset.
func TestEpochReset(t *testing.T) {
	t.Parallel()
	for _, wire := range wires[1:] {
		for _, epoch := range []*string{nil, new("epoch-0")} {
			w := newWorld(t)
			req := pulling(w.request(wire), "s1")
			if epoch != nil {
				pushing(req, "c1")
			}
			req.Header.LogEpoch = epoch
			require.NoError(t, w.run(t, req))
			want := w.servedHeader(wire)
			want.ResetRequired = true
			require.Empty(t, cmp.Diff([]ssp2.Frame{want}, w.response(t)))
			require.NotContains(t, w.trace, "resolve")
			require.NotContains(t, w.trace, "push")
			require.NotContains(t, w.trace, "pull")
		}
	}
}

func TestARememberedEpochResetsNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.known = &gate.Epoch{LogEpoch: "epoch-0"} // from before the rotation
	require.NoError(t, w.run(t, pulling(w.request(ssp2.WireV2), "s1")))
	require.Equal(t, []string{"push rules", "pull rules", "gate", "forget", "gate", "resolve", "pull", "stream", "close"}, w.trace)
	require.Empty(t, cmp.Diff(ssp2.Frame(w.servedHeader(ssp2.WireV2)), w.response(t)[0]))
}

func TestWireVersion1EndsWithTheFirstRotation(t *testing.T) {
	t.Parallel()
	for _, off := range []int32{0, 1} { // the floor does not hide it
		w := newWorld(t)
		w.epoch.Required = true
		req := pulling(pushing(w.request(ssp2.WireV1), "c1"), "s1")
		req.Header.SchemaVersion += off
		require.Equal(t, ssp2.CodeClientWireUnsupported, ssp2.CodeOf(w.run(t, req)))
		require.NotContains(t, w.trace, "resolve")
		require.Zero(t, w.out.calls)
	}
}

func TestARotationDuringTheRound(t *testing.T) {
	t.Parallel()
	inPush := func(w *world) {
		w.push = func(pushsvc.Request) (*pushsvc.Response, error) {
			return &pushsvc.Response{Reset: true, LogEpoch: "epoch-2"}, nil
		}
	}
	inPull := func(w *world) {
		w.begin = func(pullsvc.Request) (round.Reading, error) {
			r := w.reading()
			r.Reset, r.LogEpoch = true, "epoch-2"
			return r, nil
		}
	}
	for _, tc := range []struct {
		name  string
		setup func(*world)
		ends  string
	}{{"seen by the push", inPush, "push"}, {"seen by the pull", inPull, "close"}} {
		for _, wire := range wires {
			t.Run(fmt.Sprintf("%s, wire version %d", tc.name, wire), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				tc.setup(w)
				err := w.run(t, pulling(pushing(w.request(wire), "c1"), "s1"))
				require.Equal(t, tc.ends, w.trace[len(w.trace)-1])
				if wire == ssp2.WireV1 {
					require.Equal(t, ssp2.CodeClientWireUnsupported, ssp2.CodeOf(err))
					require.Zero(t, w.out.calls)
					return
				}
				require.NoError(t, err)
				require.Empty(t, cmp.Diff([]ssp2.Frame{&ssp2.ResponseHeader{
					LatestSchemaVersion: &w.schema.Version, LogEpoch: "epoch-2", ResetRequired: true,
				}}, w.response(t)))
			})
		}
	}
}

func TestBothHalvesUseOneResolution(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	variable := w.schema.Tables[0].Scopes[0].Variable
	w.allowed = scope.Allowed{variable: {"v1"}}
	require.NoError(t, w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1")))
	require.Equal(t, 1, strings.Count(strings.Join(w.trace, " "), "resolve"))
	require.Same(t, w.pushed.Scopes.Grants, w.pulled.Scopes.Grants)
	require.True(t, w.pushed.Scopes.Grants.Permits(variable, "v1"))
	require.False(t, w.pushed.Scopes.Grants.Permits(variable, "v2"))
}

// §3.2 rule 5, §3.4 rule 4: nothing is read and nothing is written, but the
// round is answered.
func TestAFailingResolverGrantsNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		resolve func(context.Context, round.ScopeRequest) (scope.Allowed, error)
		logged  string
	}{
		{"error", func(context.Context, round.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"x": {"*"}}, errors.New("directory said 500")
		}, "directory said 500"},
		{"panic", func(context.Context, round.ScopeRequest) (scope.Allowed, error) { panic("nil map") }, "nil map"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.resolve = tc.resolve
			require.NoError(t, w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1")))
			for _, r := range []scope.Resolution{w.pushed.Scopes, w.pulled.Scopes} {
				require.Error(t, r.Err)
				require.Nil(t, r.Grants)
			}
			require.Contains(t, w.logged.String(), tc.logged)
			require.NotContains(t, string(w.out.bytes), tc.logged)
		})
	}
}

func TestAnOutageRefusesNothingForGood(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.resolve = func(context.Context, round.ScopeRequest) (scope.Allowed, error) {
		return nil, fmt.Errorf("directory: %w", round.ErrOutage)
	}
	err := w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1"))
	require.Equal(t, ssp2.CodeAuthLeaseRequired, ssp2.CodeOf(err))
	require.Equal(t, "resolve", w.trace[len(w.trace)-1])
	require.Zero(t, w.out.calls)
}

func TestARequestThatEndsInTheResolverRefusesNothingForGood(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.resolve = func(ctx context.Context, _ round.ScopeRequest) (scope.Allowed, error) {
		cancel()
		return nil, ctx.Err()
	}
	err := w.runContext(ctx, pushing(w.request(ssp2.WireV2), "c1"))
	require.ErrorIs(t, err, context.Canceled)
	require.NotContains(t, w.trace, "push")
	require.Empty(t, w.logged.String())
}

// §3.2 rule 3.
func TestResolvedScopesNameDeclaredVariables(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.allowed = scope.Allowed{"no_such_variable": {"*"}}
	err := w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1"))
	require.Equal(t, ssp2.CodeInvalidSubscription, ssp2.CodeOf(err))
	require.Equal(t, "resolve", w.trace[len(w.trace)-1])
	require.Contains(t, w.logged.String(), "no_such_variable")
}

func TestAnIdentityIsWholeAndStorable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	e := round.NewWith(round.Config{Schema: w.schema}, pushFake{w}, pullFake{w}, gateFake{w})
	for _, id := range []round.Identity{
		{},
		{Actor: "ada"},
		{Partition: "acme"},
		{Actor: "a\x00", Partition: "acme"},
		{Actor: "ada", Partition: "\xff"},
		{Actor: "ada", Partition: strings.Repeat("a", 513)},
	} {
		err := e.Run(t.Context(), id, pulling(w.request(ssp2.WireV2)), &w.out)
		require.Equal(t, ssp2.CodeInternalError, round.Failure(err).Code)
	}
	require.Empty(t, w.trace)
}

func TestErrorsBeforeTheFirstByteAreReturned(t *testing.T) {
	t.Parallel()
	cause := errors.New("the cause")
	for _, tc := range []struct {
		name   string
		closes bool // a pull had begun
		setup  func(w *world)
	}{
		{"entering", false, func(w *world) { w.gateErr = cause }},
		{"pushing", false, func(w *world) {
			w.push = func(pushsvc.Request) (*pushsvc.Response, error) { return nil, cause }
		}},
		{"beginning to pull", false, func(w *world) {
			w.begin = func(pullsvc.Request) (round.Reading, error) { return round.Reading{}, cause }
		}},
		{"reading the first subscription", true, func(w *world) {
			w.stream = func(context.Context, func([]byte) error) error { return cause }
		}},
		{"encoding a result", true, func(w *world) {
			w.push = func(req pushsvc.Request) (*pushsvc.Response, error) {
				resp := applied(req)
				resp.Results[0].ClientCommitID = "\xff"
				return resp, nil
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			tc.setup(w)
			err := w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1"))
			require.Error(t, err)
			var stream *round.StreamError
			require.NotErrorAs(t, err, &stream)
			require.Equal(t, ssp2.CodeInternalError, round.Failure(err).Code)
			require.Zero(t, w.out.calls)
			require.Contains(t, w.logged.String(), "level=ERROR")
			require.Equal(t, tc.closes, slices.Contains(w.trace, "close"))
		})
	}
}

// §1.6: ERROR, then END, and nothing else.
func TestErrorsAfterTheFirstByteAreAnErrorFrame(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		err  error
		code ssp2.Code
	}{
		{"of the protocol", fmt.Errorf("pull: %w", ssp2.Errorf(ssp2.CodeStorageStaleRead, "stale")), ssp2.CodeStorageStaleRead},
		{"of the server", errors.New("secret: column x of table y"), ssp2.CodeInternalError},
		{"of the database", context.DeadlineExceeded, ssp2.CodeStorageUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.stream = func(_ context.Context, emit func([]byte) error) error {
				if err := emit(section("s1")); err != nil {
					return err
				}
				return tc.err
			}
			err := w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1", "s2"))
			var stream *round.StreamError
			require.ErrorAs(t, err, &stream)
			require.True(t, stream.Reported)
			require.ErrorIs(t, err, tc.err)

			frames := w.response(t)
			last, ok := frames[len(frames)-1].(*ssp2.ErrorFrame)
			require.True(t, ok)
			require.Equal(t, string(tc.code), last.Code)
			require.Equal(t, ssp2.FrameSubEnd, frames[len(frames)-2].FrameType())
			require.NotContains(t, string(w.out.bytes), "secret")
			require.Equal(t, "close", w.trace[len(w.trace)-1])
		})
	}
}

func TestAPeerThatIsGoneIsLeftAlone(t *testing.T) {
	t.Parallel()
	for call := 1; call <= 6; call++ {
		t.Run(fmt.Sprint("call ", call), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.out.fail = call
			// header and results · s1 · flush · s2 · flush · END
			err := w.run(t, pulling(pushing(w.request(ssp2.WireV2), "c1"), "s1", "s2"))
			require.ErrorIs(t, err, errPeer)
			var stream *round.StreamError
			require.ErrorAs(t, err, &stream)
			require.False(t, stream.Reported)
			require.Equal(t, call, w.out.calls)
			require.Equal(t, "close", w.trace[len(w.trace)-1])
			require.Empty(t, w.logged.String())
		})
	}
}

func TestManyResultsAreWrittenInPieces(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ids []string
	for i := range 500 {
		ids = append(ids, fmt.Sprintf("%0200d", i))
	}
	require.NoError(t, w.run(t, pushing(w.request(ssp2.WireV2), ids...)))
	require.Len(t, w.response(t), 501)
	require.Greater(t, w.out.calls, 2)
	require.Len(t, w.out.pieces, 1, "a push is not flushed before its end")

	// An error behind the first piece still comes behind whole frames.
	w = newWorld(t)
	w.push = func(req pushsvc.Request) (*pushsvc.Response, error) {
		resp := applied(req)
		resp.Results[499].ClientCommitID = "\xff"
		return resp, nil
	}
	err := w.run(t, pushing(w.request(ssp2.WireV2), ids...))
	var stream *round.StreamError
	require.ErrorAs(t, err, &stream)
	require.True(t, stream.Reported)
	frames := w.response(t)
	require.Len(t, frames, 501)
	require.Equal(t, ssp2.FrameError, frames[500].FrameType())
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	_, err := round.New(round.Config{})
	require.ErrorContains(t, err, "Config.Schema")
}
