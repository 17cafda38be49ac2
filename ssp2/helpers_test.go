package ssp2_test

import (
	"bytes"
	"errors"
	"io"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/syncpg/syncpg/ssp2"
)

// payload builds frame payloads byte by byte, valid or not.
type payload []byte

func (p payload) u8(v ...byte) payload    { return append(p, v...) }
func (p payload) u16(v uint16) payload    { return ssp2.AppendU16(p, v) }
func (p payload) u32(v uint32) payload    { return ssp2.AppendU32(p, v) }
func (p payload) i32(v int32) payload     { return ssp2.AppendI32(p, v) }
func (p payload) i64(v int64) payload     { return ssp2.AppendI64(p, v) }
func (p payload) str(s string) payload    { return ssp2.AppendStr(p, s) }
func (p payload) bytes(b ...byte) payload { return ssp2.AppendBytes(p, b) }
func (p payload) none() payload           { return append(p, 0) }
func (p payload) some() payload           { return append(p, 1) }

// wireFrame frames a payload.
func wireFrame(t ssp2.FrameType, p payload) []byte {
	b, mark := ssp2.BeginFrame(nil, t)
	b, err := ssp2.EndFrame(append(b, p...), mark)
	if err != nil {
		panic(err)
	}
	return b
}

// build puts frames between envelope and END.
func build(v ssp2.WireVersion, k ssp2.Kind, frames ...[]byte) []byte {
	b := ssp2.AppendEnvelope(nil, v, k)
	for _, f := range frames {
		b = append(b, f...)
	}
	return ssp2.AppendEnd(b)
}

// requestOf is a request of wire version 1 with a valid header in front.
func requestOf(frames ...[]byte) []byte {
	header := wireFrame(ssp2.FrameReqHeader, payload{}.str("c").i32(1))
	return build(ssp2.WireV1, ssp2.KindRequest, append([][]byte{header}, frames...)...)
}

// responseOf is a response of wire version 1 with a valid header in front.
func responseOf(frames ...[]byte) []byte {
	header := wireFrame(ssp2.FrameRespHeader, payload{}.none().none())
	return build(ssp2.WireV1, ssp2.KindResponse, append([][]byte{header}, frames...)...)
}

// readAll decodes a message with the streaming reader.
func readAll(r *ssp2.Reader) (*ssp2.Message, error) {
	v, k, err := r.Header()
	if err != nil {
		return nil, err
	}
	m := &ssp2.Message{WireVersion: v, Kind: k}
	for {
		f, err := r.Next()
		if errors.Is(err, io.EOF) {
			return m, nil
		}
		if err != nil {
			return nil, err
		}
		m.Frames = append(m.Frames, f)
	}
}

// readBytes is readAll over b without limits.
func readBytes(b []byte) (*ssp2.Message, error) {
	return readAll(ssp2.NewReader(bytes.NewReader(b), ssp2.Limits{MaxMessageBytes: -1, MaxFrameBytes: -1}))
}

// readSegment decodes a segment with the streaming reader.
func readSegment(b []byte) (*ssp2.Segment, error) {
	r := ssp2.NewSegmentReader(bytes.NewReader(b), ssp2.Limits{})
	h, err := r.Header()
	if err != nil {
		return nil, err
	}
	s := &ssp2.Segment{SegmentHeader: *h}
	for {
		block, err := r.NextBlock()
		if errors.Is(err, io.EOF) {
			return s, nil
		}
		if err != nil {
			return nil, err
		}
		s.Blocks = append(s.Blocks, block)
	}
}

// diff compares decoded with intended values: empty and nil slices and maps are
// the same to the wire, and NaN is NaN.
func diff(want, got any) string {
	return cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.EquateNaNs())
}
