package ssp2_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// Pieces of valid messages that the malformed ones are made of.
var (
	pullFrame   = wireFrame(ssp2.FramePullHeader, payload{}.i32(0).i32(0).i32(0).u8(3))
	deleteFrame = wireFrame(ssp2.FramePushCommit, commitHead(1).str("t").str("r").u8(2).none().none())
	subFrame    = wireFrame(ssp2.FrameSubscription, subHead().none().i64(-1).none())
	leaseFrame  = wireFrame(ssp2.FrameLease, payload{}.str("l").i64(1))
	startFrame  = wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(1).str("").u32(0).u8(0))
	endFrame    = wireFrame(ssp2.FrameSubEnd, payload{}.i64(5).none())
	emptyCommit = wireFrame(ssp2.FrameCommit, payload{}.i64(1).i64(2).str("a").u32(0).u32(0))
	inlineFrame = wireFrame(ssp2.FrameSegmentInline, segmentHead().u32(0))
	errorFrame  = wireFrame(ssp2.FrameError, errorHead().none())
	okResult    = wireFrame(ssp2.FramePushResult, payload{}.str("k").u8(1).some().i64(9).u32(0))
	badResult   = wireFrame(ssp2.FramePushResult,
		payload{}.str("k").u8(3).none().u32(2).i32(4).u8(3).str("x.y").str("no").u8(0).i32(5).u8(1))
	hints   = wireFrame(ssp2.FramePushResultDetails, hintsFor("k", 4, `{"reason":"why"}`))
	unknown = wireFrame(0x17, payload{1, 2, 3})
)

func commitHead(operations uint32) payload { return payload{}.str("k").u32(operations) }

func subHead() payload { return payload{}.str("s").str("t").u32(0) }

func errorHead() payload {
	return payload{}.str("sync.forbidden").str("m").str("forbidden").u8(0).str("checkPermissions")
}

func hintsFor(commit string, opIndex int32, details ...string) payload {
	p := payload{}.str(commit).u32(uint32(len(details)))
	for i, d := range details {
		p = p.i32(opIndex + int32(i)).str(d)
	}
	return p
}

func segmentHead() payload {
	return payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(1).str("k").u8(byte(ssp2.TypeString), 0)
}

// refHead is a SEGMENT_REF up to its optional fields.
func refHead(mediaType byte) payload {
	return payload{}.str("id").u8(mediaType).str("t").i64(1).i64(1).i64(1).str("d")
}

// changeFrame is a COMMIT with one table and the given change record.
func changeFrame(change payload) []byte {
	return wireFrame(ssp2.FrameCommit, append(payload{}.i64(1).i64(2).str("a").u32(1).str("t").u32(1), change...))
}

func inSection(frames ...[]byte) []byte {
	return responseOf(append(append([][]byte{startFrame}, frames...), endFrame)...)
}

func operation(p payload) []byte {
	return requestOf(wireFrame(ssp2.FramePushCommit, append(commitHead(1).str("t").str("r"), p...)))
}

func scopesFrame(scopes payload) []byte {
	p := append(payload{}.str("s").str("t"), scopes...)
	return requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, p.none().i64(0).none()))
}

func cut(b []byte, n int) []byte { return b[:len(b)-n] }

func patched(b []byte, at int, with ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], with)
	return b
}

// TestMalformedMessages has one case for every rule of §1.7: each is refused with
// its code, by every way to decode a message, and by the rendering.
func TestMalformedMessages(t *testing.T) {
	t.Parallel()

	valid := requestOf(deleteFrame)
	header := func(v ssp2.WireVersion, p payload, frames ...[]byte) []byte {
		return build(v, ssp2.KindRequest, append([][]byte{wireFrame(ssp2.FrameReqHeader, p)}, frames...)...)
	}
	respHeader := func(v ssp2.WireVersion, p payload) []byte {
		return build(v, ssp2.KindResponse, wireFrame(ssp2.FrameRespHeader, p))
	}
	pushResult := func(v ssp2.WireVersion, p payload) []byte {
		head := payload{}.none().none()
		if v >= ssp2.WireV2 {
			head = head.str("e").u8(0)
		}
		return build(v, ssp2.KindResponse, wireFrame(ssp2.FrameRespHeader, head),
			wireFrame(ssp2.FramePushResult, append(payload{}.str("k"), p...)))
	}
	withDetails := func(details ...string) []byte {
		return responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("k", 4, details...)))
	}
	conflict := payload{}.u8(3).none().u32(1).i32(0).u8(2).str("sync.version_conflict").str("m").i64(7).bytes(0)

	cases := []struct {
		rule string
		bin  []byte
	}{
		// §1.2, envelope
		{"envelope truncated: nothing", nil},
		{"envelope truncated: 7 bytes", valid[:7]},
		{"magic", patched(valid, 3, '1')},
		{"wireVersion 0", patched(valid, 4, 0)},
		{"wireVersion 4", patched(valid, 4, 4)},
		{"wireVersion 257", patched(valid, 4, 1, 1)},
		{"msgKind 0", patched(valid, 6, 0)},
		{"msgKind 3", patched(valid, 6, 3)},
		{"flags", patched(valid, 7, 1)},

		// §1.2, framing
		{"no END", cut(valid, 5)},
		{"END truncated", cut(valid, 1)},
		{"END with a length", append(cut(valid, 5), 0, 1, 0, 0, 0, 9)},
		{"bytes after END", append(bytes.Clone(valid), 0)},
		{"a second message after END", append(bytes.Clone(valid), valid...)},
		{"frame header truncated", append(cut(valid, 5), 2, 1)},
		{"frame length beyond the end", append(cut(valid, 5), 2, 200, 0, 0, 0, 1)},
		{"frame length of 4 GiB", append(cut(valid, 5), 0x17, 255, 255, 255, 255, 1)},
		{"trailing bytes in a known frame", requestOf(wireFrame(ssp2.FramePullHeader, payload{}.i32(0).i32(0).i32(0).u8(3, 0)))},
		{"payload shorter than its layout", requestOf(wireFrame(ssp2.FramePullHeader, payload{}.i32(0).i32(0).i32(0)))},
		{"empty payload of a known frame", requestOf(wireFrame(ssp2.FramePullHeader, nil))},
		{"first frame unknown", build(1, ssp2.KindRequest, unknown, wireFrame(ssp2.FrameReqHeader, payload{}.str("c").i32(1)), pullFrame)},
		{"response frame in a request", requestOf(pullFrame, startFrame, endFrame)},
		{"request frame in a response", responseOf(pullFrame)},

		// §1.5
		{"request without header", build(1, ssp2.KindRequest, pullFrame)},
		{"request without frames", build(1, ssp2.KindRequest)},
		{"second REQ_HEADER", requestOf(wireFrame(ssp2.FrameReqHeader, payload{}.str("c").i32(1)), pullFrame)},
		{"PUSH_COMMIT after PULL_HEADER", requestOf(pullFrame, deleteFrame)},
		{"second PULL_HEADER", requestOf(pullFrame, pullFrame)},
		{"SUBSCRIPTION without PULL_HEADER", requestOf(deleteFrame, subFrame)},
		{"request without content", requestOf()},
		{"request with nothing but an unknown frame", requestOf(unknown)},

		// §1.6
		{"response without header", build(1, ssp2.KindResponse, okResult)},
		{"response without frames", build(1, ssp2.KindResponse)},
		{"second RESP_HEADER", responseOf(wireFrame(ssp2.FrameRespHeader, payload{}.none().none()))},
		{"second LEASE", responseOf(leaseFrame, leaseFrame)},
		{"LEASE after PUSH_RESULT", responseOf(okResult, leaseFrame)},
		{"LEASE after SUB_START", inSection(leaseFrame)},
		{"PUSH_RESULT after SUB_START", inSection(okResult)},
		{"PUSH_RESULT after SUB_END", responseOf(startFrame, endFrame, okResult)},
		{"PUSH_RESULT_DETAILS without PUSH_RESULT", responseOf(hints)},
		{"PUSH_RESULT_DETAILS twice", responseOf(badResult, hints, hints)},
		{"PUSH_RESULT_DETAILS after SUB_START", responseOf(badResult, startFrame, hints, endFrame)},
		{"PUSH_RESULT_DETAILS of an applied commit", responseOf(okResult, hints)},
		{"PUSH_RESULT_DETAILS of another commit", responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("x", 4, `{"reason":"a"}`)))},
		{"PUSH_RESULT_DETAILS of an operation that did not fail", responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("k", 5, `{"reason":"a"}`)))},
		{"nested SUB_START", inSection(startFrame, endFrame)},
		{"COMMIT outside a subscription", responseOf(emptyCommit)},
		{"COMMIT after SUB_END", responseOf(startFrame, endFrame, emptyCommit)},
		{"segment outside a subscription", responseOf(inlineFrame)},
		{"SUB_END without SUB_START", responseOf(endFrame)},
		{"subscription left open", responseOf(startFrame)},
		{"segment after COMMIT", inSection(emptyCommit, inlineFrame)},
		{"COMMIT after segment", inSection(inlineFrame, emptyCommit)},
		{"known frame after ERROR", responseOf(startFrame, errorFrame, endFrame)},
		{"unknown frame after ERROR", responseOf(errorFrame, unknown)},
		{"second ERROR", responseOf(errorFrame, errorFrame)},

		// Conventions, primitives
		{"i64 above 2^53−1", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().none().i64(ssp2.MaxSafeInteger+1).none()))},
		{"i64 below −(2^53−1)", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().none().i64(-ssp2.MaxSafeInteger-1).none()))},
		{"i64 at the end of 64 bits", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().none().i64(math.MinInt64).none()))},
		{"bool byte 2", responseOf(wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(1).str("").u32(0).u8(2)), endFrame)},
		{"bool byte 255", pushResult(1, payload{}.u8(3).none().u32(1).i32(0).u8(3).str("c").str("m").u8(255))},
		{"presence byte 2", respHeader(1, payload{}.u8(2).none())},
		{"str not UTF-8", header(1, payload{}.str("\xff").i32(1), pullFrame)},
		{"str with a UTF-8 surrogate", header(1, payload{}.str("\xed\xa0\x80").i32(1), pullFrame)},
		{"str with an overlong form", header(1, payload{}.str("\xc0\xaf").i32(1), pullFrame)},
		{"str longer than the frame", header(1, payload{}.u32(1<<32-1).u8('c'), pullFrame)},
		{"bytes longer than the frame", operation(payload{}.u8(1).none().some().u32(5).u8(1))},
		{"list count beyond the frame", requestOf(wireFrame(ssp2.FramePushCommit, commitHead(1<<32-1).str("t")))},
		{"list one element short", requestOf(wireFrame(ssp2.FramePushCommit, commitHead(2).str("t").str("r").u8(2).none().none()))},
		{"map key twice", scopesFrame(payload{}.u32(2).str("a").u32(0).str("a").u32(0))},
		{"map keys descending", scopesFrame(payload{}.u32(2).str("b").u32(0).str("a").u32(0))},
		{"map keys in UTF-8 order where UTF-16 differs", scopesFrame(payload{}.u32(2).str("\uffee").u32(0).str("\U0001F9EA").u32(0))},
		{"map of strings out of order", inSection(changeFrame(payload{}.u16(0).str("r").u8(2).none().u32(2).str("b").str("").str("a").str("").none()))},
		{"json: params", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().some().str("{").i64(0).none()))},
		{"json: empty", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().some().str("").i64(0).none()))},
		{"json: bootstrapState of a request", requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().none().i64(0).some().str("01")))},
		{"json: bootstrapState of a response", responseOf(startFrame, wireFrame(ssp2.FrameSubEnd, payload{}.i64(5).some().str("{} {}")))},
		{"json: details", responseOf(wireFrame(ssp2.FrameError, errorHead().some().str("'x'")))},

		// Conventions, enums
		{"operation op 0", operation(payload{}.u8(0).none().none())},
		{"operation op 3", operation(payload{}.u8(3).none().none())},
		{"change op 3", inSection(changeFrame(payload{}.u16(0).str("r").u8(3).none().u32(0).none()))},
		{"PUSH_RESULT status 0", pushResult(1, payload{}.u8(0).none().u32(0))},
		{"PUSH_RESULT status 4", pushResult(1, payload{}.u8(4).none().u32(0))},
		{"result record status 0", pushResult(1, payload{}.u8(3).none().u32(1).i32(0).u8(0))},
		{"result record status 4", pushResult(1, payload{}.u8(3).none().u32(1).i32(0).u8(4))},
		{"SUB_START status 0", responseOf(wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(0).str("").u32(0).u8(0)), endFrame)},
		{"SUB_START status 4", responseOf(wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(4).str("").u32(0).u8(0)), endFrame)},
		{"mediaType 0", inSection(wireFrame(ssp2.FrameSegmentRef, refHead(0).none().none().none().none()))},
		{"mediaType 3", inSection(wireFrame(ssp2.FrameSegmentRef, refHead(3).none().none().none().none()))},

		// Conventions, presence ties
		{"upsert operation without payload", operation(payload{}.u8(1).none().none())},
		{"delete operation with payload", operation(payload{}.u8(2).none().some().bytes())},
		{"upsert change without rowVersion", inSection(changeFrame(payload{}.u16(0).str("r").u8(1).none().u32(0).some().bytes()))},
		{"upsert change without row", inSection(changeFrame(payload{}.u16(0).str("r").u8(1).some().i64(1).u32(0).none()))},
		{"delete change with rowVersion", inSection(changeFrame(payload{}.u16(0).str("r").u8(2).some().i64(1).u32(0).none()))},
		{"delete change with row", inSection(changeFrame(payload{}.u16(0).str("r").u8(2).none().u32(0).some().bytes()))},
		{"applied without commitSeq", pushResult(1, payload{}.u8(1).none().u32(0))},
		{"cached without commitSeq", pushResult(1, payload{}.u8(2).none().u32(0))},
		{"rejected with commitSeq", pushResult(1, payload{}.u8(3).some().i64(1).u32(0))},
		{"url without urlExpiresAtMs", inSection(wireFrame(ssp2.FrameSegmentRef, refHead(1).none().none().some().str("u").none()))},
		{"urlExpiresAtMs without url", inSection(wireFrame(ssp2.FrameSegmentRef, refHead(1).none().none().none().some().i64(1)))},

		// §1.7, single-frame constraints
		{"clientId empty", header(1, payload{}.str("").i32(1), pullFrame)},
		{"schemaVersion 0", header(1, payload{}.str("c").i32(0), pullFrame)},
		{"schemaVersion negative", header(1, payload{}.str("c").i32(-1), pullFrame)},
		{"clientCommitId empty", requestOf(wireFrame(ssp2.FramePushCommit, payload{}.str("").u32(1).str("t").str("r").u8(2).none().none()))},
		{"tableIndex out of range", inSection(changeFrame(payload{}.u16(1).str("r").u8(2).none().u32(0).none()))},
		{"tableIndex without tables", inSection(wireFrame(ssp2.FrameCommit, payload{}.i64(1).i64(2).str("a").u32(0).u32(1).u16(0).str("r").u8(2).none().u32(0).none()))},
		{"accept bit 4", requestOf(wireFrame(ssp2.FramePullHeader, payload{}.i32(0).i32(0).i32(0).u8(0x13)))},
		{"accept bit 7", requestOf(wireFrame(ssp2.FramePullHeader, payload{}.i32(0).i32(0).i32(0).u8(0x83)))},
		{"SEGMENT_INLINE empty", inSection(wireFrame(ssp2.FrameSegmentInline, nil))},
		{"SEGMENT_INLINE without end marker", inSection(wireFrame(ssp2.FrameSegmentInline, segmentHead()))},
		{"SEGMENT_INLINE with a bad row", inSection(wireFrame(ssp2.FrameSegmentInline, segmentHead().u32(1).bytes(payload{}.i64(1).u8(1)...).u32(0)))},

		// the fields of wire versions 2 and 3
		{"version 1 with a log epoch", header(1, payload{}.str("c").i32(1).some().str("e"), pullFrame)},
		{"version 2 without presence of the log epoch", header(2, payload{}.str("c").i32(1), pullFrame)},
		{"version 2 with an empty log epoch", header(2, payload{}.str("c").i32(1).some().str(""), pullFrame)},
		{"version 2 response with an empty log epoch", respHeader(2, payload{}.none().none().str("").u8(0))},
		{"version 2 response without resetRequired", respHeader(2, payload{}.none().none().str("e"))},
		{"version 2 response with resetRequired 2", respHeader(2, payload{}.none().none().str("e").u8(2))},
		{"version 1 response with a log epoch", respHeader(1, payload{}.none().none().str("e").u8(0))},
		{"version 2 conflict with conflictColumns", pushResult(2, conflict.bytes(1))},
		{"version 3 conflict without conflictColumns", pushResult(3, conflict)},
		{"leaseId empty", responseOf(wireFrame(ssp2.FrameLease, payload{}.str("").i64(1)))},

		// §6.3.1
		{"details: clientCommitId empty", responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("", 4, `{"reason":"a"}`)))},
		{"details: no entries", withDetails()},
		{"details: opIndex negative", responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, hintsFor("k", -1, `{"reason":"a"}`)))},
		{"details: opIndex twice", responseOf(badResult, wireFrame(ssp2.FramePushResultDetails, payload{}.str("k").u32(2).i32(4).str(`{"reason":"a"}`).i32(4).str(`{"reason":"a"}`)))},
		{"details: not JSON", withDetails(`{`)},
		{"details: outside the bounds", withDetails(`{"prose":"it broke"}`)},
	}
	for _, c := range cases {
		t.Run(c.rule, func(t *testing.T) {
			t.Parallel()
			requireRefused(t, c.bin, ssp2.CodeInvalidRequest)
		})
	}
	t.Run("operations empty", func(t *testing.T) {
		t.Parallel()
		requireRefused(t, requestOf(wireFrame(ssp2.FramePushCommit, commitHead(0))), ssp2.CodeEmptyCommit)
	})
}

func requireRefused(t *testing.T, bin []byte, code ssp2.Code) {
	t.Helper()
	_, err := ssp2.DecodeMessage(bin)
	require.Equal(t, code, ssp2.CodeOf(err), "%v", err)
	whole := err
	_, err = readBytes(bin)
	require.Equal(t, code, ssp2.CodeOf(err), "streaming: %v", err)
	_, err = ssp2.ReadRequest(bytes.NewReader(bin), ssp2.Limits{})
	require.NotEmpty(t, ssp2.CodeOf(err), "request: %v", err)
	_, err = ssp2.Render(bin)
	require.Equal(t, whole.Error(), err.Error())
}

// TestToleratedMessages has what a decoder must not refuse (§1.7): it is for
// request validation, or for the producer.
func TestToleratedMessages(t *testing.T) {
	t.Parallel()

	revoked := wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(2).str("").u32(1).str("k").u32(1).str("v").u8(1))
	reasoned := wireFrame(ssp2.FrameSubStart, payload{}.str("s").u8(1).str("anything").u32(0).u8(0))
	for rule, bin := range map[string][]byte{
		"delete operation with a base version":    operation(payload{}.u8(2).some().i64(-3).none()),
		"upsert with an empty payload":            operation(payload{}.u8(1).none().some().bytes()),
		"payload that is no row":                  operation(payload{}.u8(1).none().some().bytes(255)),
		"the same subscription id twice":          requestOf(pullFrame, subFrame, subFrame),
		"the same clientCommitId twice":           requestOf(deleteFrame, deleteFrame),
		"scope value *":                           scopesFrame(payload{}.u32(1).str("a").u32(1).str("*")),
		"scope values unsorted and repeated":      scopesFrame(payload{}.u32(1).str("").u32(3).str("b").str("a").str("b")),
		"UTF-16 key order":                        scopesFrame(payload{}.u32(2).str("\U0001F9EA").u32(0).str("\uffee").u32(0)),
		"accept without rows":                     requestOf(wireFrame(ssp2.FramePullHeader, payload{}.i32(-5).i32(1<<30).i32(0).u8(0))),
		"json scalar":                             requestOf(pullFrame, wireFrame(ssp2.FrameSubscription, subHead().some().str(" 7 ").i64(0).some().str(`"x"`))),
		"reset with pushes and without log epoch": build(2, ssp2.KindRequest, wireFrame(ssp2.FrameReqHeader, payload{}.str("c").i32(1).none()), deleteFrame),
		"unknown frames anywhere":                 requestOf(unknown, deleteFrame, unknown, pullFrame, unknown, subFrame, unknown),
		"every unregistered type":                 requestOf(append(unregistered(), pullFrame)...),
		"unknown frames in a response":            responseOf(unknown, leaseFrame, unknown, badResult, unknown, hints, unknown, startFrame, unknown, endFrame, unknown),
		"reason code of an active subscription":   responseOf(reasoned, endFrame),
		"scopes of a revoked subscription":        responseOf(revoked, endFrame),
		"ERROR at once":                           responseOf(errorFrame),
		"ERROR in a subscription":                 responseOf(startFrame, emptyCommit, errorFrame),
		"applied without results":                 responseOf(okResult),
		"header only":                             responseOf(),
		"commit without tables and changes":       inSection(emptyCommit),
		"segments of both kinds": inSection(inlineFrame,
			wireFrame(ssp2.FrameSegmentRef, refHead(2).some().str("a").some().str("b").none().none())),
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			m, err := ssp2.DecodeMessage(bin)
			require.NoError(t, err)
			require.Equal(t, bin, mustMessage(m))
			streamed, err := readBytes(bin)
			require.NoError(t, err)
			require.Empty(t, diff(m, streamed))
			_, err = ssp2.Render(bin)
			require.NoError(t, err)
		})
	}
}

// unregistered returns a frame of every type without a layout.
func unregistered() [][]byte {
	var frames [][]byte
	for t := 1; t < 256; t++ {
		switch {
		case t <= 0x04, t >= 0x10 && t <= 0x16, t == 0x19, t == 0x1B, t == 0x1F:
		default:
			frames = append(frames, wireFrame(ssp2.FrameType(t), payload{byte(t)}))
		}
	}
	return frames
}

// TestMalformedSegments has one case for every structural rule of §5.2.
func TestMalformedSegments(t *testing.T) {
	t.Parallel()

	row := payload{}.i64(1).u8(0).str("a") // a record of the one column
	valid := segmentHead().u32(1).bytes(row...).u32(0)
	_, err := ssp2.DecodeSegment(valid)
	require.NoError(t, err)
	column := func(tag, flags byte) payload {
		return payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(1).str("k").u8(tag, flags).u32(0)
	}
	for rule, bin := range map[string][]byte{
		"empty":                         nil,
		"prefix truncated":              valid[:7],
		"magic":                         patched(valid, 3, '1'),
		"formatVersion 0":               patched(valid, 4, 0),
		"formatVersion 2":               patched(valid, 4, 2),
		"flags":                         patched(valid, 6, 1),
		"flags, high byte":              patched(valid, 7, 1),
		"header truncated":              valid[:15],
		"table not UTF-8":               payload("SSG2").u16(1).u16(0).str("\xff").i32(1).u16(0).u32(0),
		"table longer than the segment": payload("SSG2").u16(1).u16(0).u32(1 << 31).u8('t'),
		"columns short":                 payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(2).str("k").u8(1, 0).u32(0),
		"column name not UTF-8":         payload("SSG2").u16(1).u16(0).str("t").i32(1).u16(1).str("\xff").u8(1, 0).u32(0),
		"column type 0":                 column(0, 0),
		"column type 9":                 column(9, 0),
		"reserved column flag":          column(1, 2),
		"all column flags":              column(1, 255),
		"no end marker":                 cut(valid, 4),
		"end marker truncated":          cut(valid, 1),
		"bytes after the end marker":    append(bytes.Clone(valid), 0),
		"block header truncated":        segmentHead().u32(1),
		"block truncated":               segmentHead().u32(1).u32(uint32(len(row)) + 1).bytes(row...),
		"block of 4 GiB":                segmentHead().u32(1).u32(1<<32 - 1),
		"4 billion rows":                segmentHead().u32(1<<32 - 1).bytes(row...).u32(0),
		"byteLength above the rows":     segmentHead().u32(1).bytes(append(row, 0)...).u32(0),
		"byteLength below the rows":     segmentHead().u32(1).bytes(cut(row, 1)...).u32(0),
		"fewer rows than rowCount":      segmentHead().u32(2).bytes(row...).u32(0),
		"more rows than rowCount":       segmentHead().u32(1).bytes(append(row, row...)...).u32(0),
		"empty block":                   segmentHead().u32(1).bytes().u32(0),
		"serverVersion 0":               segmentHead().u32(1).bytes(payload{}.i64(0).u8(0).str("a")...).u32(0),
		"serverVersion negative":        segmentHead().u32(1).bytes(payload{}.i64(-1).u8(0).str("a")...).u32(0),
		"serverVersion above 2^53−1":    segmentHead().u32(1).bytes(payload{}.i64(ssp2.MaxSafeInteger + 1).u8(0).str("a")...).u32(0),
		"NULL where it may not be":      segmentHead().u32(1).bytes(payload{}.i64(1).u8(1)...).u32(0),
		"padding bit":                   segmentHead().u32(1).bytes(payload{}.i64(1).u8(2).str("a")...).u32(0),
		"row text not UTF-8":            segmentHead().u32(1).bytes(payload{}.i64(1).u8(0).str("\xff")...).u32(0),
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			_, err := ssp2.DecodeSegment(bin)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Equal(t, err, ssp2.CheckSegment(bin))
			_, err = readSegment(bin)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "streaming: %v", err)
			requireRefused(t, inSection(wireFrame(ssp2.FrameSegmentInline, bin)), ssp2.CodeInvalidRequest)
		})
	}
}

// TestMalformedRows has one case for every rule of §2.4.
func TestMalformedRows(t *testing.T) {
	t.Parallel()

	one := func(t ssp2.ColumnType, nullable bool) []ssp2.Column {
		return []ssp2.Column{{Name: "c", Type: t, Nullable: nullable}}
	}
	nine := make([]ssp2.Column, 9)
	for i := range nine {
		nine[i] = ssp2.Column{Name: "c", Type: ssp2.TypeBoolean, Nullable: true}
	}
	for _, c := range []struct {
		rule string
		cols []ssp2.Column
		src  payload
	}{
		{"no bitmap", one(ssp2.TypeString, true), nil},
		{"bitmap short", nine, payload{255}},
		{"NULL in a column that is not nullable", one(ssp2.TypeString, false), payload{1}},
		{"padding bit", one(ssp2.TypeString, true), payload{3}},
		{"padding bit of the second byte", nine, payload{255, 3}},
		{"value missing", one(ssp2.TypeString, true), payload{0}},
		{"bytes left over", one(ssp2.TypeString, true), payload{1, 0}},
		{"string: length truncated", one(ssp2.TypeString, false), payload{0, 1, 0, 0}},
		{"string: length beyond the end", one(ssp2.TypeString, false), payload{0}.u32(2).u8('a')},
		{"string: length of 4 GiB", one(ssp2.TypeString, false), payload{0}.u32(1<<32 - 1).u8('a')},
		{"string: not UTF-8", one(ssp2.TypeString, false), payload{0}.str("a\x80")},
		{"integer: truncated", one(ssp2.TypeInteger, false), payload{0, 1, 2, 3, 4, 5, 6, 7}},
		{"integer: above 2^53−1", one(ssp2.TypeInteger, false), payload{0}.i64(1 << 53)},
		{"integer: below −(2^53−1)", one(ssp2.TypeInteger, false), payload{0}.i64(-1 << 53)},
		{"float: truncated", one(ssp2.TypeFloat, false), payload{0, 1, 2, 3, 4, 5, 6, 7}},
		{"boolean: missing", one(ssp2.TypeBoolean, false), payload{0}},
		{"boolean: 2", one(ssp2.TypeBoolean, false), payload{0, 2}},
		{"json: empty", one(ssp2.TypeJSON, false), payload{0}.str("")},
		{"json: not a document", one(ssp2.TypeJSON, false), payload{0}.str("{a:1}")},
		{"json: two documents", one(ssp2.TypeJSON, false), payload{0}.str("1 2")},
		{"json: not UTF-8", one(ssp2.TypeJSON, false), payload{0}.str("\"\xff\"")},
		{"bytes: length beyond the end", one(ssp2.TypeBytes, false), payload{0}.u32(1)},
		{"blob_ref: not JSON", one(ssp2.TypeBlobRef, false), payload{0}.str("x")},
		{"blob_ref: another object", one(ssp2.TypeBlobRef, false), payload{0}.str("{}")},
		{"crdt: length beyond the end", one(ssp2.TypeCRDT, false), payload{0}.u32(1)},
		{"column type 9", one(9, false), payload{0}.u32(0)},
	} {
		t.Run(c.rule, func(t *testing.T) {
			t.Parallel()
			vals, err := ssp2.DecodeRow(c.cols, c.src, nil)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Nil(t, vals)
			if c.rule != "bytes left over" {
				_, err = ssp2.ScanRow(c.cols, c.src)
				require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err))
			}
		})
	}
}

// TestMalformedSparseRows has one case for every rule of the sparse row.
func TestMalformedSparseRows(t *testing.T) {
	t.Parallel()

	cols := []ssp2.Column{
		{Name: "a", Type: ssp2.TypeInteger, Nullable: true},
		{Name: "key", Type: ssp2.TypeString},
		{Name: "b", Type: ssp2.TypeString, Nullable: true},
		{Name: "c", Type: ssp2.TypeBoolean},
	}
	const key = 1
	for rule, src := range map[string]payload{
		"nothing":                               nil,
		"no null bitmap":                        {2},
		"primary key absent":                    payload{4, 0}.str("x"),
		"nothing present":                       {0},
		"presence padding bit":                  payload{2 | 16, 0}.str("k"),
		"null padding bit":                      payload{2, 2}.str("k"),
		"null bit beyond the present columns":   payload{2 | 4, 4}.str("k").str("x"),
		"NULL in a column that is not nullable": payload{2 | 8, 2}.str("k"),
		"NULL primary key":                      {2, 1},
		"value missing":                         {2, 0},
		"value truncated":                       payload{2 | 1, 0}.u32(1),
		"value of an absent column":             payload{2, 0}.str("k").u8(1),
		"full row":                              payload{0}.i64(1).str("k").str("b").u8(1),
		"boolean 2":                             payload{2 | 8, 0}.str("k").u8(2),
		"integer above 2^53−1":                  payload{2 | 1, 0}.i64(1 << 53).str("k"),
		"string not UTF-8":                      payload{2, 0}.str("\xff"),
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			vals, present, err := ssp2.DecodeSparseRow(cols, key, src, nil)
			require.Equal(t, ssp2.CodeInvalidRequest, ssp2.CodeOf(err), "%v", err)
			require.Nil(t, vals)
			require.Nil(t, present)
		})
	}
}
