package ssp2

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Defaults of [Limits].
const (
	DefaultMaxMessageBytes = 64 << 20
	DefaultMaxFrameBytes   = 32 << 20
)

// Limits bound what a reader takes in. In both fields 0 means the default and a
// negative number means no limit.
type Limits struct {
	// MaxMessageBytes bounds a whole message or segment, envelope included.
	MaxMessageBytes int64
	// MaxFrameBytes bounds the payload of one frame or the rows of one block.
	MaxFrameBytes int64
}

func (l Limits) withDefaults() Limits {
	if l.MaxMessageBytes == 0 {
		l.MaxMessageBytes = DefaultMaxMessageBytes
	}
	if l.MaxFrameBytes == 0 {
		l.MaxFrameBytes = DefaultMaxFrameBytes
	}
	return l
}

// LimitError is the cause in an [*Error] of an input that exceeds [Limits]. The
// code of that error is sync.invalid_request.
type LimitError struct {
	What  string // "message", "frame", "segment" or "block"
	Limit int64  // bytes
}

// Error names the limit.
func (e *LimitError) Error() string {
	return fmt.Sprintf("the %s is larger than the limit of %d bytes", e.What, e.Limit)
}

// source reads from an io.Reader under limits and counts.
type source struct {
	r      *bufio.Reader
	limits Limits
	whole  string // what MaxMessageBytes bounds
	part   string // what MaxFrameBytes bounds
	seen   int64
}

func newSource(r io.Reader, limits Limits, whole, part string) source {
	return source{r: bufio.NewReader(r), limits: limits.withDefaults(), whole: whole, part: part}
}

func tooLarge(what string, limit int64) error {
	cause := &LimitError{What: what, Limit: limit}
	return &Error{Code: CodeInvalidRequest, Message: cause.Error(), Err: cause}
}

// admit counts n bytes that are about to be read.
func (s *source) admit(n int64) error {
	s.seen += n
	if limit := s.limits.MaxMessageBytes; limit >= 0 && s.seen > limit {
		return tooLarge(s.whole, limit)
	}
	return nil
}

// fail turns the end of the input into a decode error; other errors of the
// reader stay what they are.
func (s *source) fail(err error, what string) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return invalid("the %s is truncated: it ends in %s", s.whole, what)
	}
	return fmt.Errorf("ssp2: read %s: %w", what, err)
}

// fixed fills b.
func (s *source) fixed(b []byte, what string) error {
	if err := s.admit(int64(len(b))); err != nil {
		return err
	}
	if _, err := io.ReadFull(s.r, b); err != nil {
		return s.fail(err, what)
	}
	return nil
}

// firstStep is how much is allocated on the word of a length field.
const firstStep = 64 << 10

// payload reads n bytes into a slice of their own, which grows as they arrive.
func (s *source) payload(n uint32, what string) ([]byte, error) {
	if limit := s.limits.MaxFrameBytes; limit >= 0 && int64(n) > limit {
		return nil, tooLarge(s.part, limit)
	}
	if err := s.admit(int64(n)); err != nil {
		return nil, err
	}
	var buf []byte
	for uint64(len(buf)) < uint64(n) {
		have := len(buf)
		step := int(min(uint64(n)-uint64(have), uint64(max(have, firstStep))))
		buf = slices.Grow(buf, step)[:have+step]
		if _, err := io.ReadFull(s.r, buf[have:]); err != nil {
			return nil, s.fail(err, what)
		}
	}
	return buf, nil
}

// atEnd checks that nothing follows.
func (s *source) atEnd() error {
	switch _, err := s.r.ReadByte(); {
	case err == nil:
		return invalid("bytes follow the end of the %s", s.whole)
	case errors.Is(err, io.EOF):
		return nil
	default:
		return fmt.Errorf("ssp2: read the end of the %s: %w", s.whole, err)
	}
}

// Reader decodes one message from a stream, frame by frame (§1.4). It holds one
// frame in memory. It checks everything §1.7 lists, frame order included. It may
// read ahead of the frame it returns, but asks the underlying reader for more
// only when it needs bytes.
//
// Every frame has a buffer of its own: byte slices in it stay valid and may
// alias each other's buffer, strings are copies.
//
// A Reader is for one goroutine. Its first error, io.EOF included, is repeated
// for ever.
type Reader struct {
	src     source
	rules   grammar
	version WireVersion
	started bool
	open    bool // the stream goes on behind END
	err     error
}

// NewReader returns a Reader of a message that is all there is in r, as in an
// HTTP body: behind END nothing may follow.
func NewReader(r io.Reader, limits Limits) *Reader {
	return &Reader{src: newSource(r, limits, "message", "frame")}
}

// NewStreamReader returns a Reader that is done at END and does not look for the
// end of r, as for a round over a socket (§8.7). [Reader.Buffered] tells what has
// been read past END.
func NewStreamReader(r io.Reader, limits Limits) *Reader {
	reader := NewReader(r, limits)
	reader.open = true
	return reader
}

// Buffered returns how many bytes have been read from the underlying reader and
// belong to no frame that Next has returned.
func (r *Reader) Buffered() int { return r.src.r.Buffered() }

// Header reads the envelope on the first call and returns what it says.
func (r *Reader) Header() (WireVersion, Kind, error) {
	if !r.started && r.err == nil {
		r.started = true
		var b [envelopeLen]byte
		r.err = r.src.fixed(b[:], "the envelope")
		if r.err == nil {
			r.version, r.rules.kind, r.err = parseEnvelope(b[:])
		}
	}
	if r.version == 0 {
		return 0, 0, r.err
	}
	return r.version, r.rules.kind, nil
}

// Next returns the next frame, unknown ones as [*UnknownFrame], and io.EOF behind
// END, once everything that can be said about the whole message has been checked.
func (r *Reader) Next() (Frame, error) {
	if _, _, err := r.Header(); err != nil {
		return nil, err
	}
	if r.err != nil {
		return nil, r.err
	}
	f, err := r.next()
	if err != nil {
		r.err = err
		return nil, err
	}
	return f, nil
}

func (r *Reader) next() (Frame, error) {
	var head [frameHeaderLen]byte
	if err := r.src.fixed(head[:], "a frame header (no END)"); err != nil {
		return nil, err
	}
	t, n := FrameType(head[0]), binary.LittleEndian.Uint32(head[1:])
	if t == FrameEnd {
		if n != 0 {
			return nil, invalid("END: the length is %d, not 0", n)
		}
		if err := r.rules.end(); err != nil {
			return nil, err
		}
		if !r.open {
			if err := r.src.atEnd(); err != nil {
				return nil, err
			}
		}
		return nil, io.EOF
	}
	if err := r.rules.admit(t); err != nil {
		return nil, err
	}
	payload, err := r.src.payload(n, t.String())
	if err != nil {
		return nil, err
	}
	f, err := decodeFrame(r.version, r.rules.kind, t, payload)
	if err != nil {
		return nil, err
	}
	if err := r.rules.next(f); err != nil {
		return nil, err
	}
	return f, nil
}

// ReadRequest reads a whole request message, as [Reader] does, into its typed
// view.
func ReadRequest(r io.Reader, limits Limits) (*Request, error) {
	reader := NewReader(r, limits)
	v, kind, err := reader.Header()
	if err != nil {
		return nil, err
	}
	if kind != KindRequest {
		return nil, invalid("a response message where a request is expected")
	}
	req := &Request{WireVersion: v}
	for {
		f, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return req, nil
		}
		if err != nil {
			return nil, err
		}
		req.add(f)
	}
}
