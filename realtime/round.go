package realtime

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"sync"

	"github.com/coder/websocket"

	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

// beginRound reads the request of a round and runs it on a goroutine of its own. An error
// ends the connection.
func (c *conn) beginRound(ctx context.Context, first message) error {
	c.p.mu.Lock()
	resets := c.p.resets
	c.p.mu.Unlock()
	c.mu.Lock()
	closed, busy := c.closed, c.inRound
	if !closed {
		c.inRound = true
	}
	c.mu.Unlock()
	switch {
	case closed:
		// The close is on its way; the client cannot know.
		_, err := io.Copy(io.Discard, first.body)
		return err //nolint:wrapcheck // it only ends the connection
	case busy:
		return violated(websocket.StatusPolicyViolation, "a round was begun while another one is in flight")
	}
	c.uploading.Store(true)
	in := &requestReader{c: c, body: first.body, limit: c.hub.cfg.MaxRequestBytes}
	req, failure, err := in.read()
	c.uploading.Store(false)
	if err != nil {
		return err
	}
	out := &roundWriter{c: c, wire: req.WireVersion, schema: req.Header.SchemaVersion, pull: req.Pull != nil, subs: req.Subscriptions, resets: resets, received: in.seen}
	if failure != nil && !in.scan.ended {
		// Where the next request would begin is not known.
		c.runRound(ctx, req, failure, out)
		return violated(websocket.StatusMessageTooBig, "the request is too large")
	}
	c.hub.activity.begin()
	c.rounds.Go(func() {
		defer c.hub.activity.end()
		c.runRound(ctx, req, failure, out)
	})
	return nil
}

// runRound answers a request, or what is wrong with it (§8.7).
func (c *conn) runRound(ctx context.Context, req *ssp2.Request, failure error, out *roundWriter) {
	defer out.finished()
	defer func() {
		if v := recover(); v != nil {
			c.hub.log.ErrorContext(c.values, "panic while serving a round", "panic", v, "stack", string(debug.Stack()))
			if out.begun {
				c.kill()
				return
			}
			out.fail(&ssp2.Error{Code: ssp2.CodeInternalError, Message: "the server failed to process the request"})
		}
	}()
	if failure == nil && req.Header.ClientID != c.name {
		failure = ssp2.Errorf(ssp2.CodeInvalidClientID, "the request names another client id than the connection")
	}
	if failure == nil && req.Pull != nil {
		// What was acknowledged before must not be written over what the pull records.
		failure = c.hub.acks.settle(ctx, c.client())
	}
	if failure == nil {
		failure = c.hub.cfg.Rounds.Run(ctx, c.id, req, out)
	}
	var stream *round.StreamError
	switch {
	case failure == nil:
	case errors.As(failure, &stream):
		if !stream.Reported {
			c.kill()
		}
	default:
		out.fail(round.Failure(failure))
	}
}

// requestReader is the byte stream of one request, over the messages of a connection.
// Texts among them are handled as they come.
type requestReader struct {
	c     *conn
	body  io.Reader
	scan  frameScan
	limit int64
	seen  int64
}

// read reads a request. failure is what the round fails with; then req has a wire version
// and nothing else. err ends the connection.
func (r *requestReader) read() (req *ssp2.Request, failure, err error) {
	reader := ssp2.NewStreamReader(r, ssp2.Limits{MaxMessageBytes: r.limit, MaxFrameBytes: r.limit})
	wire, kind, err := reader.Header()
	switch {
	case ssp2.CodeOf(err) != "" || err == nil && kind != ssp2.KindRequest:
		return nil, nil, violated(websocket.StatusPolicyViolation, "the stream does not begin as an SSP2 request")
	case err != nil:
		return nil, nil, unwrapped(err)
	}
	m := &ssp2.Message{WireVersion: wire, Kind: kind}
	for {
		frame, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if _, large := errors.AsType[*ssp2.LimitError](err); large || errors.Is(err, errTooLarge) {
			return &ssp2.Request{WireVersion: wire}, ssp2.Errorf(ssp2.CodeInvalidRequest, "the request is larger than %d bytes", r.limit), nil
		}
		if ssp2.CodeOf(err) != "" {
			// What is left of the request belongs to it, not to the next one.
			return &ssp2.Request{WireVersion: wire}, err, r.skip()
		}
		if err != nil {
			return nil, nil, unwrapped(err)
		}
		m.Frames = append(m.Frames, frame)
	}
	if err := r.atEnd(); err != nil {
		return nil, nil, err
	}
	if req, err = m.Request(); err != nil {
		return &ssp2.Request{WireVersion: wire}, err, nil
	}
	return req, nil, nil
}

// unwrapped returns the error of the connection behind one of a reader.
func unwrapped(err error) error {
	if v, ok := errors.AsType[*violation](err); ok {
		return v
	}
	return err
}

// errPipelined is what a client may not do (§8.7).
func errPipelined() error {
	return violated(websocket.StatusPolicyViolation, "bytes follow the end of the request")
}

// Read implements [io.Reader]. It ends behind END.
func (r *requestReader) Read(p []byte) (int, error) {
	for {
		if r.scan.ended {
			return 0, io.EOF
		}
		if r.limit >= 0 && r.seen > r.limit {
			return 0, errTooLarge
		}
		n, err := r.body.Read(p)
		if n > 0 {
			r.seen += int64(n)
			r.c.progress.Add(1)
			r.c.heard.Store(true)
			used := r.scan.feed(p[:n])
			if r.scan.ended && used < n {
				return 0, errPipelined()
			}
			return n, nil
		}
		switch {
		case errors.Is(err, io.EOF):
			if err := r.nextMessage(); err != nil {
				return 0, err
			}
		case err != nil:
			return 0, err //nolint:wrapcheck // it only ends the connection
		}
	}
}

var errTooLarge = errors.New("the request is too large")

// nextMessage goes on to the next chunk.
func (r *requestReader) nextMessage() error {
	for {
		m, err := r.c.next()
		switch {
		case err != nil:
			return err
		case m.round:
			r.body = m.body
			return nil
		}
		if err := r.c.control(m.text); err != nil {
			return err
		}
	}
}

// skip reads up to END, unless that is too far.
func (r *requestReader) skip() error {
	buf := make([]byte, 4<<10)
	for !r.scan.ended {
		_, err := r.Read(buf)
		switch {
		case errors.Is(err, errTooLarge):
			return nil
		case err != nil:
			return err
		}
	}
	return r.atEnd()
}

// atEnd checks that nothing follows END in its message.
func (r *requestReader) atEnd() error {
	var one [1]byte
	switch n, err := io.ReadFull(r.body, one[:]); {
	case n > 0:
		return errPipelined()
	case errors.Is(err, io.EOF):
		return nil
	default:
		return err //nolint:wrapcheck // it only ends the connection
	}
}

// frameScan follows the frames of a message (§1.2) without decoding them.
type frameScan struct {
	// on is called with the payload of each frame whose type it wants, nil: with none.
	wants func(ssp2.FrameType) bool
	on    func(t ssp2.FrameType, payload []byte)

	head    [5]byte
	have    int // bytes of the envelope or of head
	started bool
	left    uint32 // of the payload
	kept    []byte
	ended   bool
}

const (
	envelopeLen    = 8
	frameHeaderLen = 5
)

// feed takes the next bytes and returns how many of them belong to the message.
func (s *frameScan) feed(p []byte) int {
	fed := len(p)
	for len(p) > 0 && !s.ended {
		if !s.started {
			n := min(envelopeLen-s.have, len(p))
			p = p[n:]
			if s.have += n; s.have == envelopeLen {
				s.started, s.have = true, 0
			}
			continue
		}
		if s.have < frameHeaderLen {
			n := copy(s.head[s.have:], p)
			p = p[n:]
			if s.have += n; s.have == frameHeaderLen {
				s.left = binary.LittleEndian.Uint32(s.head[1:])
				s.kept = nil
				s.complete(nil)
			}
			continue
		}
		n := min(int64(s.left), int64(len(p)))
		payload := p[:n]
		p = p[n:]
		whole := s.kept == nil && uint32(n) == s.left
		s.left -= uint32(n)
		if !whole && s.wanted() {
			s.kept = append(s.kept, payload...)
			payload = s.kept
		}
		s.complete(payload)
	}
	return fed - len(p)
}

func (s *frameScan) wanted() bool { return s.wants != nil && s.wants(ssp2.FrameType(s.head[0])) }

// complete ends the frame when there is nothing left of it.
func (s *frameScan) complete(payload []byte) {
	if s.left > 0 {
		return
	}
	t := ssp2.FrameType(s.head[0])
	s.have = 0
	if t == ssp2.FrameEnd {
		s.ended = true
		return
	}
	if s.wanted() {
		s.on(t, payload)
	}
}

// chunks holds *[]byte for the messages of responses: a tag and up to chunkBytes.
var chunks = sync.Pool{New: func() any {
	b := make([]byte, 0, 1+chunkBytes)
	return &b
}}

// roundWriter writes the response of a round, as messages of a connection. It looks for
// what the round left: registrations, cursors, commits.
type roundWriter struct {
	c      *conn
	wire   ssp2.WireVersion
	schema int32 // schema version of the request
	pull   bool
	subs   []ssp2.Subscription
	resets int

	buf   *[]byte
	begun bool
	scan  *frameScan

	header  *ssp2.ResponseHeader
	failed  bool
	open    *ssp2.SubStart
	left    []registered
	ownSeq  int64
	unknown error // a frame of ours that cannot be decoded

	received, sent int64
	report         func(received, sent int64)
}

// registered is a subscription as a round left it.
type registered struct {
	id     string
	table  string
	order  int
	scopes ssp2.ScopeMap
	from   int64
	quiet  bool
}

// WhenFinished implements [round.Finisher].
func (w *roundWriter) WhenFinished(report func(received, sent int64)) { w.report = report }

func (w *roundWriter) finished() {
	if w.buf != nil {
		chunks.Put(w.buf)
	}
	if w.report != nil {
		w.report(w.received, w.sent)
	}
}

// Write implements [round.Writer].
func (w *roundWriter) Write(frames []byte) (int, error) {
	if w.scan == nil {
		w.scan = &frameScan{wants: wantsOfResponse, on: w.frame}
	}
	w.scan.feed(frames)
	for rest := frames; len(rest) > 0; {
		if w.buf == nil {
			w.buf, _ = chunks.Get().(*[]byte)
			*w.buf = append((*w.buf)[:0], byte(ssp2.TagRound))
		}
		n := min(len(rest), cap(*w.buf)-len(*w.buf))
		*w.buf = append(*w.buf, rest[:n]...)
		rest = rest[n:]
		if len(rest) > 0 {
			if err := w.send(); err != nil {
				return 0, err
			}
		}
	}
	if w.scan.ended {
		if err := w.end(); err != nil {
			return 0, err
		}
	}
	return len(frames), nil
}

// Flush implements [round.Writer].
func (w *roundWriter) Flush() error { return w.send() }

// send writes what is gathered as one message, and waits until the socket has taken it.
func (w *roundWriter) send() error {
	if w.buf == nil || len(*w.buf) == 1 {
		return nil
	}
	w.begun = true
	done := make(chan error, 1)
	w.c.mu.Lock()
	if w.c.closed {
		w.c.mu.Unlock()
		return net.ErrClosed
	}
	w.c.push(item{chunk: *w.buf, done: done})
	w.c.mu.Unlock()
	return w.wait(done)
}

func (w *roundWriter) wait(done <-chan error) error {
	err := <-done
	w.sent += int64(len(*w.buf) - 1)
	*w.buf = (*w.buf)[:1]
	if err != nil {
		return fmt.Errorf("connection: %w", err)
	}
	return nil
}

func wantsOfResponse(t ssp2.FrameType) bool {
	switch t {
	case ssp2.FrameRespHeader, ssp2.FramePushResult, ssp2.FrameSubStart, ssp2.FrameSubEnd, ssp2.FrameError:
		return true
	default:
		return false
	}
}

// frame notes a frame of the response.
func (w *roundWriter) frame(t ssp2.FrameType, payload []byte) {
	f, err := ssp2.DecodeFrame(w.wire, ssp2.KindResponse, t, payload)
	if err != nil {
		w.unknown = err
		return
	}
	switch f := f.(type) {
	case *ssp2.ResponseHeader:
		w.header = f
	case *ssp2.ErrorFrame:
		w.failed = true
	case *ssp2.PushResult:
		if f.Status == ssp2.PushApplied && f.CommitSeq != nil {
			w.ownSeq = max(w.ownSeq, *f.CommitSeq)
		}
	case *ssp2.SubStart:
		w.open = f
	case *ssp2.SubEnd:
		w.section(f)
	}
}

// section notes a subscription that was answered. They come in the order of the request.
func (w *roundWriter) section(end *ssp2.SubEnd) {
	start := w.open
	w.open = nil
	if start == nil || start.Status != ssp2.SubActive {
		return
	}
	for i := range w.subs {
		if w.subs[i].ID == start.ID {
			w.left = append(w.left, registered{
				id: start.ID, table: w.subs[i].Table, order: i, scopes: start.EffectiveScopes,
				from: end.NextCursor, quiet: end.BootstrapState != nil,
			})
			return
		}
	}
}

// end writes the last message, and makes what the round left hold from there on. Both
// happen at once: nothing gets between END and the registrations, neither a delta before
// END nor a message of the client that knows of it.
func (w *roundWriter) end() error {
	c, p := w.c, w.c.p
	w.begun = true
	done := make(chan error, 1)
	served := !w.failed && w.unknown == nil && w.header != nil &&
		w.header.RequiredSchemaVersion == nil && !w.header.ResetRequired

	p.mu.Lock()
	var snapshot []*presenceEvent
	var missed int64
	if served && w.pull {
		snapshot, missed = c.hub.install(c, w.left)
	}
	fresh := w.resets == p.resets
	c.mu.Lock()
	if c.closed {
		done <- net.ErrClosed
	} else {
		c.push(item{chunk: *w.buf, done: done})
	}
	c.inRound = false
	if fresh {
		c.ownSeq = max(c.ownSeq, w.ownSeq)
	}
	if served {
		c.wire, c.version = w.wire, w.schema
		if w.header.LogEpoch != "" {
			c.epoch = w.header.LogEpoch
		}
		switch {
		case !w.pull:
		case fresh:
			c.stale, c.resets = false, w.resets
			for i := range w.left {
				c.pulled = max(c.pulled, w.left[i].from)
			}
		case c.resets != p.resets && !c.closed:
			c.restart(p.head, p.resets) // it had no registrations when the others were told
		}
	}
	if missed > 0 {
		c.suppress(missed, ssp2.WakeCatchupRequired)
	}
	for _, ev := range snapshot {
		c.push(item{event: ev})
	}
	if c.leaving {
		c.farewell()
	}
	c.mu.Unlock()
	p.mu.Unlock()
	if w.unknown != nil {
		c.hub.logFailure("a response cannot be read", c, w.unknown)
	}
	return w.wait(done)
}

// fail writes a whole response that says what the round failed with.
func (w *roundWriter) fail(e *ssp2.Error) {
	w.c.mu.Lock()
	epoch := w.c.epoch
	w.c.mu.Unlock()
	frames := ssp2.AppendEnvelope(nil, w.wire, ssp2.KindResponse)
	version := w.c.hub.cfg.Schema.Version
	frames, err := ssp2.AppendFrame(frames, w.wire, &ssp2.ResponseHeader{LatestSchemaVersion: &version, LogEpoch: epoch})
	if err == nil {
		frames, err = ssp2.AppendFrame(frames, w.wire, e.Frame())
	}
	if err != nil {
		w.c.hub.logFailure("encoding an error failed", w.c, err)
		w.c.kill()
		return
	}
	w.failed = true
	_, _ = w.Write(ssp2.AppendEnd(frames))
}
