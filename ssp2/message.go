package ssp2

import "encoding/binary"

// Message is a whole message: every frame in wire order, END left out.
type Message struct {
	WireVersion WireVersion
	Kind        Kind
	Frames      []Frame
}

// Request is the typed view of a request message (§1.5), unknown frames left out.
type Request struct {
	WireVersion   WireVersion
	Header        RequestHeader
	Commits       []PushCommit
	Pull          *PullHeader
	Subscriptions []Subscription
}

func (r *Request) add(f Frame) {
	switch f := f.(type) {
	case *RequestHeader:
		r.Header = *f
	case *PushCommit:
		r.Commits = append(r.Commits, *f)
	case *PullHeader:
		r.Pull = f
	case *Subscription:
		r.Subscriptions = append(r.Subscriptions, *f)
	}
}

// Request returns the typed view of a request message. It fails for a response
// and for frames out of order.
func (m *Message) Request() (*Request, error) {
	if m.Kind != KindRequest {
		return nil, invalid("a %v message where a request is expected", m.Kind)
	}
	if err := m.checkOrder(); err != nil {
		return nil, err
	}
	req := &Request{WireVersion: m.WireVersion}
	for _, f := range m.Frames {
		req.add(f)
	}
	return req, nil
}

// Message returns the request as a message, ready for [AppendMessage].
func (r *Request) Message() *Message {
	m := &Message{WireVersion: r.WireVersion, Kind: KindRequest, Frames: []Frame{&r.Header}}
	for i := range r.Commits {
		m.Frames = append(m.Frames, &r.Commits[i])
	}
	if r.Pull != nil {
		m.Frames = append(m.Frames, r.Pull)
	}
	for i := range r.Subscriptions {
		m.Frames = append(m.Frames, &r.Subscriptions[i])
	}
	return m
}

func (m *Message) checkOrder() error {
	rules := grammar{kind: m.Kind}
	for _, f := range m.Frames {
		if err := rules.next(f); err != nil {
			return err
		}
	}
	return rules.end()
}

// DecodeMessage decodes a whole message (§1.2 to §1.7). Byte slices of the result
// alias b, strings are copies. There is no limit but the length of b.
func DecodeMessage(b []byte) (*Message, error) {
	if len(b) < envelopeLen {
		return nil, invalid("the message is truncated: it ends in the envelope")
	}
	v, k, err := parseEnvelope(b)
	if err != nil {
		return nil, err
	}
	m := &Message{WireVersion: v, Kind: k}
	rules := grammar{kind: k}
	for rest := b[envelopeLen:]; ; {
		if len(rest) < frameHeaderLen {
			return nil, invalid("the message is truncated: it ends in a frame header (no END)")
		}
		t, n := FrameType(rest[0]), binary.LittleEndian.Uint32(rest[1:])
		rest = rest[frameHeaderLen:]
		if t == FrameEnd {
			switch {
			case n != 0:
				return nil, invalid("END: the length is %d, not 0", n)
			case len(rest) > 0:
				return nil, invalid("bytes follow the end of the message")
			}
			return m, rules.end()
		}
		if uint64(n) > uint64(len(rest)) {
			return nil, invalid("the message is truncated: %v announces %d bytes, %d left", t, n, len(rest))
		}
		if err := rules.admit(t); err != nil {
			return nil, err
		}
		f, err := decodeFrame(v, k, t, rest[:n:n])
		if err != nil {
			return nil, err
		}
		if err := rules.next(f); err != nil {
			return nil, err
		}
		m.Frames = append(m.Frames, f)
		rest = rest[n:]
	}
}

// DecodeRequest decodes a whole request message, as [DecodeMessage] does, into
// its typed view.
func DecodeRequest(b []byte) (*Request, error) {
	m, err := DecodeMessage(b)
	if err != nil {
		return nil, err
	}
	return m.Request()
}

// AppendMessage appends a whole message, END included. It refuses frames that a
// decoder would refuse, for what they hold or where they stand, and then returns
// dst as it was.
func AppendMessage(dst []byte, m *Message) ([]byte, error) {
	if !m.WireVersion.supported() {
		return dst, invalid("wire version %d is not supported (1, 2 and 3 are)", m.WireVersion)
	}
	if m.Kind != KindRequest && m.Kind != KindResponse {
		return dst, invalid("message kind %d is unknown", m.Kind)
	}
	if err := m.checkOrder(); err != nil {
		return dst, err
	}
	buf := AppendEnvelope(dst, m.WireVersion, m.Kind)
	for _, f := range m.Frames {
		var err error
		if buf, err = AppendFrame(buf, m.WireVersion, f); err != nil {
			return dst, err
		}
	}
	return AppendEnd(buf), nil
}
