package ssp2_test

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

func TestReaderLimits(t *testing.T) {
	t.Parallel()

	big := requestOf(wireFrame(0x20, make([]byte, 5000)), pullFrame)
	for rule, c := range map[string]struct {
		limits ssp2.Limits
		what   string
		limit  int64
	}{
		"frame":            {ssp2.Limits{MaxFrameBytes: 4999}, "frame", 4999},
		"message":          {ssp2.Limits{MaxMessageBytes: int64(len(big)) - 1}, "message", int64(len(big)) - 1},
		"message, at once": {ssp2.Limits{MaxMessageBytes: 7}, "message", 7},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			_, err := readAll(ssp2.NewReader(bytes.NewReader(big), c.limits))
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
			var limit *ssp2.LimitError
			require.ErrorAs(t, err, &limit)
			require.Equal(t, &ssp2.LimitError{What: c.what, Limit: c.limit}, limit)
			require.ErrorContains(t, err, "larger than the limit of")
		})
	}
	for rule, limits := range map[string]ssp2.Limits{
		"at the limits": {MaxFrameBytes: 5000, MaxMessageBytes: int64(len(big))},
		"defaults":      {},
		"no limits":     {MaxFrameBytes: -1, MaxMessageBytes: -1},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			_, err := readAll(ssp2.NewReader(bytes.NewReader(big), limits))
			require.NoError(t, err)
		})
	}
}

// hostile is an endless claim: a header that announces far more than follows.
func hostile(head payload, length uint32) []byte { return append(head.u32(length), "short"...) }

// TestClaimedLengthsAllocateLittle announces 4 GiB in every length field there is
// and sends next to nothing.
//
//nolint:paralleltest // counts what the process allocates
func TestClaimedLengthsAllocateLittle(t *testing.T) {
	const all = 1<<32 - 1
	unlimited := ssp2.Limits{MaxMessageBytes: -1, MaxFrameBytes: -1}
	envelope := func(k ssp2.Kind) payload { return ssp2.AppendEnvelope(nil, ssp2.WireV1, k) }
	inRequest := func(t ssp2.FrameType, p payload) []byte { return requestOf(wireFrame(t, p)) }
	message := func(b []byte) func() error {
		return func() error {
			_, err := readAll(ssp2.NewReader(bytes.NewReader(b), unlimited))
			_, whole := ssp2.DecodeMessage(b)
			return errors.Join(err, whole)
		}
	}
	segment := func(b []byte) func() error {
		return func() error {
			r := ssp2.NewSegmentReader(bytes.NewReader(b), unlimited)
			_, err := r.NextBlock()
			return errors.Join(err, ssp2.CheckSegment(b))
		}
	}
	cases := map[string]func() error{
		"frame":           message(hostile(envelope(ssp2.KindRequest).u8(byte(ssp2.FrameReqHeader)), all)),
		"unknown frame":   message(hostile(payload(cut(requestOf(), 5)).u8(0x20), all)),
		"str":             message(build(1, ssp2.KindRequest, wireFrame(ssp2.FrameReqHeader, payload{}.u32(all).u8(1)))),
		"operations":      message(inRequest(ssp2.FramePushCommit, commitHead(all).u8(1))),
		"payload":         message(inRequest(ssp2.FramePushCommit, commitHead(1).str("t").str("r").u8(1).none().some().u32(all))),
		"scope map":       message(requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, payload{}.str("s").str("t").u32(all)))),
		"scope values":    message(requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, payload{}.str("s").str("t").u32(1).str("k").u32(all)))),
		"results":         message(responseOf(wireFrame(ssp2.FramePushResult, payload{}.str("k").u8(3).none().u32(all)))),
		"detail entries":  message(responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, payload{}.str("k").u32(all)))),
		"tables":          message(inSection(wireFrame(ssp2.FrameCommit, payload{}.i64(1).i64(1).str("a").u32(all)))),
		"changes":         message(inSection(wireFrame(ssp2.FrameCommit, payload{}.i64(1).i64(1).str("a").u32(0).u32(all)))),
		"segment table":   segment(hostile(payload("SSG2").u16(1).u16(0), all)),
		"segment columns": segment(payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(65535)),
		"segment rows":    segment(segmentHead().u32(all).u32(4).u32(0)),
		"segment block":   segment(hostile(segmentHead().u32(1), all)),
		"row": func() error {
			_, err := ssp2.DecodeRow([]ssp2.Column{{Type: ssp2.TypeBytes}}, hostile(payload{0}, all), nil)
			return err
		},
		"stored results": func() error {
			_, err := ssp2.DecodeResults(hostile(payload{1}, all))
			return err
		},
	}
	for name, work := range cases {
		require.Error(t, work(), name)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 8 {
			require.Error(t, work(), name)
		}
		runtime.ReadMemStats(&after)
		require.Less(t, (after.TotalAlloc-before.TotalAlloc)/8, uint64(512<<10), name)
	}
}

func TestReaderPassesOnReadErrors(t *testing.T) {
	t.Parallel()

	bin := requestOf(wireFrame(0x20, make([]byte, 200<<10)), pullFrame)
	cause := errors.New("connection reset")
	for _, n := range []int{0, 3, 8, 10, 30, 100 << 10, len(bin) - 3, len(bin)} {
		r := ssp2.NewReader(io.MultiReader(bytes.NewReader(bin[:n]), iotest.ErrReader(cause)), ssp2.Limits{})
		_, err := readAll(r)
		require.ErrorIs(t, err, cause)
		require.Empty(t, ssp2.CodeOf(err), "not the fault of the message")
	}
}

func TestReaderRepeatsItsError(t *testing.T) {
	t.Parallel()

	r := ssp2.NewReader(bytes.NewReader(requestOf(pullFrame)), ssp2.Limits{})
	_, err := readAll(r)
	require.NoError(t, err)
	_, err = r.Next()
	require.ErrorIs(t, err, io.EOF)
	v, k, err := r.Header()
	require.NoError(t, err)
	require.Equal(t, ssp2.WireV1, v)
	require.Equal(t, ssp2.KindRequest, k)

	r = ssp2.NewReader(bytes.NewReader(requestOf(deleteFrame, subFrame)), ssp2.Limits{})
	_, err = readAll(r)
	require.Error(t, err)
	_, again := r.Next()
	require.Equal(t, err, again)

	r = ssp2.NewReader(bytes.NewReader([]byte("GET / HTTP/1.1")), ssp2.Limits{})
	_, err = r.Next()
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	_, _, again = r.Header()
	require.Equal(t, err, again)
}

func TestReaderRefusesBeforeThePayloadArrives(t *testing.T) {
	t.Parallel()

	// The payload of a frame that is out of place is not waited for.
	stuck := errors.New("read too far")
	head := append(cut(requestOf(pullFrame), 5), byte(ssp2.FrameSubStart), 0, 0, 1, 0)
	r := ssp2.NewReader(io.MultiReader(bytes.NewReader(head), iotest.ErrReader(stuck)), ssp2.Limits{})
	_, err := readAll(r)
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
}

func TestStreamReaderStopsAtEnd(t *testing.T) {
	t.Parallel()

	client, server := io.Pipe()
	message := requestOf(deleteFrame, pullFrame)
	go func() {
		// No end follows: a reader that looked for one would block for ever.
		_, _ = server.Write(message)
	}()
	r := ssp2.NewStreamReader(client, ssp2.Limits{})
	m, err := readAll(r)
	require.NoError(t, err)
	require.Len(t, m.Frames, 3)
	require.Zero(t, r.Buffered())

	r = ssp2.NewStreamReader(bytes.NewReader(append(bytes.Clone(message), "next"...)), ssp2.Limits{})
	_, err = readAll(r)
	require.NoError(t, err)
	require.Equal(t, len("next"), r.Buffered(), "the bytes of a client that did not wait")
}

func TestFramesHaveBuffersOfTheirOwn(t *testing.T) {
	t.Parallel()

	frame := func(b byte) []byte {
		return wireFrame(ssp2.FramePushCommit, commitHead(1).str("t").str("r").u8(1).none().some().bytes(b, b, b))
	}
	m, err := readBytes(requestOf(frame(1), frame(2), frame(3)))
	require.NoError(t, err)
	for i, f := range m.Frames[1:] {
		b := byte(i + 1)
		require.Equal(t, []byte{b, b, b}, f.(*ssp2.PushCommit).Operations[0].Payload)
	}
}

func TestReadRequestRefusesAResponse(t *testing.T) {
	t.Parallel()

	_, err := ssp2.ReadRequest(bytes.NewReader(responseOf()), ssp2.Limits{})
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	_, err = ssp2.DecodeRequest(responseOf())
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
	_, err = (&ssp2.Message{WireVersion: ssp2.WireV1, Kind: ssp2.KindRequest}).Request()
	require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
}

// TestReaderTruncatedEverywhere cuts the vectors at every byte.
func TestReaderTruncatedEverywhere(t *testing.T) {
	t.Parallel()

	for _, v := range vectors() {
		if v.message == nil && v.segment == nil {
			continue
		}
		t.Run(v.kind+"/"+v.name, func(t *testing.T) {
			t.Parallel()
			bin, _ := v.encode(t)
			for cut := range bin {
				var err error
				if v.segment != nil {
					_, err = readSegment(bin[:cut])
				} else {
					_, err = readBytes(bin[:cut])
				}
				if code := ssp2.CodeOf(err); code != ssp2.CodeInvalidRequest {
					t.Fatalf("cut at %d: %v", cut, err)
				}
			}
		})
	}
}
