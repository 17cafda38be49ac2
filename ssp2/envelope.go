package ssp2

import (
	"encoding/binary"
	"fmt"
)

// WireVersion is the protocol version in the envelope (§1.2, §9).
type WireVersion uint16

// The wire versions this package reads and writes.
const (
	WireV1 WireVersion = 1
	WireV2 WireVersion = 2 // log epoch in the headers
	WireV3 WireVersion = 3 // sparse push payloads, conflict columns
)

func (v WireVersion) supported() bool { return v >= WireV1 && v <= WireV3 }

// Kind is the message kind in the envelope (§1.2).
type Kind uint8

// Message kinds.
const (
	KindRequest  Kind = 1
	KindResponse Kind = 2
)

// String returns the name the debug rendering uses (§11.1).
func (k Kind) String() string {
	switch k {
	case KindRequest:
		return "request"
	case KindResponse:
		return "response"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// FrameType is the type byte of a frame (§1.2).
type FrameType uint8

// The frame registry of §1.2. It is the same in all three wire versions; types
// that are reserved without a layout are unknown frames.
const (
	FrameEnd               FrameType = 0x00
	FrameReqHeader         FrameType = 0x01
	FramePushCommit        FrameType = 0x02
	FramePullHeader        FrameType = 0x03
	FrameSubscription      FrameType = 0x04
	FrameRespHeader        FrameType = 0x10
	FramePushResult        FrameType = 0x11
	FrameSubStart          FrameType = 0x12
	FrameCommit            FrameType = 0x13
	FrameSegmentRef        FrameType = 0x14
	FrameSegmentInline     FrameType = 0x15
	FrameSubEnd            FrameType = 0x16
	FrameLease             FrameType = 0x19
	FramePushResultDetails FrameType = 0x1B
	FrameError             FrameType = 0x1F
)

// String returns the name of the registry, UNKNOWN(0x..) for a type without a
// layout.
func (t FrameType) String() string {
	switch t {
	case FrameEnd:
		return "END"
	case FrameReqHeader:
		return "REQ_HEADER"
	case FramePushCommit:
		return "PUSH_COMMIT"
	case FramePullHeader:
		return "PULL_HEADER"
	case FrameSubscription:
		return "SUBSCRIPTION"
	case FrameRespHeader:
		return "RESP_HEADER"
	case FramePushResult:
		return "PUSH_RESULT"
	case FrameSubStart:
		return "SUB_START"
	case FrameCommit:
		return "COMMIT"
	case FrameSegmentRef:
		return "SEGMENT_REF"
	case FrameSegmentInline:
		return "SEGMENT_INLINE"
	case FrameSubEnd:
		return "SUB_END"
	case FrameLease:
		return "LEASE"
	case FramePushResultDetails:
		return "PUSH_RESULT_DETAILS"
	case FrameError:
		return "ERROR"
	}
	return fmt.Sprintf("UNKNOWN(0x%02x)", uint8(t))
}

// kind returns the message kind a frame type belongs to, 0 for END and for
// types without a layout.
func (t FrameType) kind() Kind {
	switch t {
	case FrameReqHeader, FramePushCommit, FramePullHeader, FrameSubscription:
		return KindRequest
	case FrameRespHeader, FramePushResult, FrameSubStart, FrameCommit, FrameSegmentRef, FrameSegmentInline,
		FrameSubEnd, FrameLease, FramePushResultDetails, FrameError:
		return KindResponse
	default:
		return 0
	}
}

// Frame is one decoded frame. END is never a Frame: it is the end of the
// message (io.EOF from a Reader).
type Frame interface {
	// FrameType returns the type byte the frame is written under.
	FrameType() FrameType
}

// payloadCodec is a Frame with a layout.
type payloadCodec interface {
	Frame
	encode(e *encoder, v WireVersion)
	decode(c *cursor, v WireVersion)
}

// UnknownFrame is a frame whose type has no layout in the wire version. It is
// kept byte for byte and in place (§1.2 rule 2).
type UnknownFrame struct {
	Type    FrameType
	Payload []byte
}

// FrameType implements [Frame].
func (f *UnknownFrame) FrameType() FrameType { return f.Type }

const (
	envelopeLen    = 8
	frameHeaderLen = 5
)

// AppendEnvelope appends the 8 bytes a message begins with (§1.2).
func AppendEnvelope(dst []byte, v WireVersion, k Kind) []byte {
	return append(AppendU16(append(dst, "SSP2"...), uint16(v)), byte(k), 0)
}

// parseEnvelope reads the 8 bytes a message begins with.
func parseEnvelope(b []byte) (WireVersion, Kind, error) {
	v, k := WireVersion(binary.LittleEndian.Uint16(b[4:])), Kind(b[6])
	switch {
	case string(b[:4]) != "SSP2":
		return 0, 0, invalid("envelope: the magic is not SSP2")
	case !v.supported():
		return 0, 0, invalid("envelope: wire version %d is not supported (1, 2 and 3 are)", v)
	case k != KindRequest && k != KindResponse:
		return 0, 0, invalid("envelope: message kind 0x%02x is unknown", uint8(k))
	case b[7] != 0:
		return 0, 0, invalid("envelope: flags are 0x%02x, not 0x00", b[7])
	}
	return v, k, nil
}

// Mark is the place of a frame that is being written; see [BeginFrame].
type Mark int

// BeginFrame appends the header of a frame whose payload the caller appends
// next, up to [EndFrame]. The length is filled in there.
func BeginFrame(dst []byte, t FrameType) ([]byte, Mark) {
	return append(dst, byte(t), 0, 0, 0, 0), Mark(len(dst))
}

// EndFrame fills in the length of the frame that began at m. It fails when the
// payload does not fit in a frame (4 GiB).
func EndFrame(dst []byte, m Mark) ([]byte, error) {
	n := len(dst) - int(m) - frameHeaderLen
	if uint64(n) > maxLength {
		return dst[:m], invalid("%v: a payload of %d bytes does not fit in a frame", FrameType(dst[m]), n)
	}
	binary.LittleEndian.PutUint32(dst[int(m)+1:], uint32(n))
	return dst, nil
}

// AppendEnd appends the END frame.
func AppendEnd(dst []byte) []byte { return append(dst, byte(FrameEnd), 0, 0, 0, 0) }

// AppendFrame appends one frame in the layout of a wire version. It refuses what
// a decoder would refuse of a single frame with an [*Error], and then returns
// dst as it was. Frame order is not its business ([AppendMessage] checks it).
func AppendFrame(dst []byte, v WireVersion, f Frame) ([]byte, error) {
	if !v.supported() {
		return dst, invalid("wire version %d is not supported (1, 2 and 3 are)", v)
	}
	buf, mark := BeginFrame(dst, f.FrameType())
	switch f := f.(type) {
	case payloadCodec:
		e := encoder{buf: buf, name: f.FrameType().String()}
		f.encode(&e, v)
		if e.err != nil {
			return dst, e.err
		}
		buf = e.buf
	case *UnknownFrame:
		if f.Type == FrameEnd || f.Type.kind() != 0 {
			return dst, invalid("an unknown frame must not use the registered type %v", f.Type)
		}
		buf = append(buf, f.Payload...)
	default:
		return dst, invalid("%T is not a frame of this package", f)
	}
	buf, err := EndFrame(buf, mark)
	if err != nil {
		return dst, err
	}
	return buf, nil
}

// newFrame returns an empty frame of a type, nil for a type without a layout.
func newFrame(t FrameType) payloadCodec {
	switch t {
	case FrameReqHeader:
		return new(RequestHeader)
	case FramePushCommit:
		return new(PushCommit)
	case FramePullHeader:
		return new(PullHeader)
	case FrameSubscription:
		return new(Subscription)
	case FrameRespHeader:
		return new(ResponseHeader)
	case FramePushResult:
		return new(PushResult)
	case FrameSubStart:
		return new(SubStart)
	case FrameCommit:
		return new(Commit)
	case FrameSegmentRef:
		return new(SegmentRef)
	case FrameSegmentInline:
		return new(SegmentInline)
	case FrameSubEnd:
		return new(SubEnd)
	case FrameLease:
		return new(Lease)
	case FramePushResultDetails:
		return new(PushResultDetails)
	case FrameError:
		return new(ErrorFrame)
	default:
		return nil
	}
}

// DecodeFrame decodes the payload of one frame of a message, an unknown one as
// [*UnknownFrame]. Byte slices of the result alias the payload, strings are copies. END
// is not a frame. Whether the frame may stand where it stands is for [Reader].
func DecodeFrame(v WireVersion, k Kind, t FrameType, payload []byte) (Frame, error) {
	if !v.supported() {
		return nil, invalid("wire version %d is not supported (1, 2 and 3 are)", v)
	}
	return decodeFrame(v, k, t, payload)
}

// decodeFrame decodes one payload in a message of kind k. The frame may alias
// the payload.
func decodeFrame(v WireVersion, k Kind, t FrameType, payload []byte) (Frame, error) {
	f := newFrame(t)
	if f == nil {
		return &UnknownFrame{Type: t, Payload: payload}, nil
	}
	if t.kind() != k {
		return nil, invalid("%v: not a frame of a %v", t, k)
	}
	c := cursor{buf: payload, name: t.String()}
	f.decode(&c, v)
	if err := c.done(); err != nil {
		return nil, err
	}
	return f, nil
}
