package realtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/syncpg/syncpg/events"
	"github.com/syncpg/syncpg/round"
	"github.com/syncpg/syncpg/ssp2"
)

const (
	// maxWaiting bounds the control events that wait for the socket of a client. One that
	// reads none of them is closed: it gets the presence of its peers anew when it is back.
	maxWaiting = 1024
	// maxWaitingText bounds the bytes of those that are of this client alone: a refusal
	// repeats the key that it is about.
	maxWaitingText = 1 << 20
	// textSlack is what a text may have besides a presence document.
	textSlack = 64 << 10
	// chunkBytes is up to how much of a response goes out as one message.
	chunkBytes = 64 << 10
)

// conn is one connection.
type conn struct {
	hub     *Hub
	p       *partition
	ws      *websocket.Conn
	net     *netConn
	id      round.Identity
	name    string // client id
	session string
	opened  time.Time
	values  context.Context //nolint:containedctx // what the host put into the context of the request
	part    int             // of the connections, in heartbeats

	heard   atomic.Bool // something arrived since the last beat
	counted bool        // a message is being handled; only the reader looks at it

	// Scratch of a dispatch, under partition.mu, as are the registrations.
	mark uint64
	hits []hit
	regs []*registration

	mu         sync.Mutex
	closed     bool // nothing is queued any more
	queue      []item
	deltaBytes int               // of the deltas in queue
	textBytes  int               // of the texts in queue
	writing    bool              // a goroutine writes what is in queue
	batch      *batch            // who sees to it that it is written, nil: a goroutine of its own
	pinged     bool              // a ping waits for its answer
	dropped    events.DropReason // why the server ended it; "" when it did not
	leaving    bool              // the server goes away; no further round begins
	writers    sync.WaitGroup
	pings      sync.WaitGroup

	wire       ssp2.WireVersion
	version    int32 // schema version that deltas are in; 0: none, before a round tells it
	epoch      string
	acked      int64 // newest acknowledgement
	observed   int64 // while suppressed: the acknowledgement that ends it
	suppressed bool
	stale      bool // until a round: the log became another one
	resets     int  // of the partition that it knows of
	ownSeq     int64
	pulled     int64   // up to where rounds of this connection brought it
	unacked    []int64 // deltas that are not acknowledged
	wakeReason ssp2.WakeReason
	inRound    bool
	rounds     sync.WaitGroup

	presence map[string]*present // own documents by scope key, under partition.mu
	held     map[string]heldBack // documents that the rate cap holds back, likewise

	uploading atomic.Bool  // the request of a round is being read
	progress  atomic.Int64 // of it

	// Only the pulse looks at these.
	missed  int   // beats since something was heard
	stalled int   // beats since the request went on
	reached int64 // progress at the last beat
}

// item is something to be written: one of these.
type item struct {
	delta *delta
	text  []byte
	event *presenceEvent
	chunk []byte // of a response, as a round writer made it
	done  chan<- error
	wake  *ssp2.Wake // filled in when it is written
	close *closing
}

type closing struct {
	code   websocket.StatusCode
	reason string
}

func (c *conn) client() client { return client{c.id.Partition, c.name} }

func (c *conn) eventSession() events.Session {
	return events.Session{Partition: c.id.Partition, Actor: c.id.Actor, ClientID: c.name, SessionID: c.session}
}

// kill ends a connection at once. It never blocks.
func (c *conn) kill() { c.net.cut() }

// push queues an item and sees that it is written. c.mu is held.
func (c *conn) push(it item) {
	switch {
	case !c.queued(it):
	case c.batch != nil:
		c.batch.conns = append(c.batch.conns, c)
	default:
		go c.drain()
	}
}

// batch is connections that have something to be written at the same time.
type batch struct{ conns []*conn }

// flushTogether is how many connections of a batch share a goroutine: starting one costs
// about a fifth of writing a message.
const flushTogether = 32

// flush sees that it is written.
func (b *batch) flush() {
	for part := range slices.Chunk(b.conns, flushTogether) {
		go func() {
			for _, c := range part {
				c.flush()
			}
		}()
	}
	b.conns = nil
}

// queued queues an item. true: nobody writes yet, and the caller is to see to it, by drain
// or flush. c.mu is held.
func (c *conn) queued(it item) bool {
	if c.closed {
		return false
	}
	if it.chunk == nil && it.close == nil && (len(c.queue) >= maxWaiting || c.textBytes+len(it.text) > maxWaitingText) {
		// It takes neither deltas, which are bounded before, nor events.
		c.closed = true
		c.dropped = events.DropUnread
		c.hub.log.DebugContext(c.values, "client closed: it does not read", "client", c.name, "partition", c.id.Partition)
		c.kill()
		return false
	}
	c.queue = append(c.queue, it)
	c.textBytes += len(it.text)
	if c.writing {
		return false
	}
	c.writing = true
	c.hub.activity.begin()
	c.writers.Add(1)
	return true
}

// unqueue takes the next item, or ends the writing when there is none.
func (c *conn) unqueue() (it item, more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		c.writing = false
		if cap(c.queue) > 16 {
			c.queue = nil
		} else {
			c.queue = c.queue[:0]
		}
		return item{}, false
	}
	it = c.queue[0]
	c.queue[0] = item{}
	c.queue = c.queue[1:]
	switch {
	case it.wake != nil:
		it.wake = &ssp2.Wake{Reason: c.wakeReason, Cursor: max(c.p.latest.Load(), c.observed), TimestampMs: c.hub.nowMs()}
		c.wakeReason = ""
	case it.delta != nil:
		c.deltaBytes -= it.delta.size
	}
	c.textBytes -= len(it.text)
	return it, true
}

// drain writes what is queued until nothing is.
func (c *conn) drain() { c.drainFrom(nil) }

// drainFrom is drain, behind something that is under way.
func (c *conn) drainFrom(begun func() error) {
	defer c.writers.Done()
	defer c.hub.activity.end()
	var failed error
	if begun != nil {
		failed = begun()
	}
	for {
		if failed != nil {
			c.kill()
		}
		it, more := c.unqueue()
		if !more {
			return
		}
		if failed == nil {
			failed = c.write(it)
		}
		if it.done != nil {
			it.done <- failed
		}
	}
}

// flush writes what is queued, as long as that needs no waiting. What does is left to a
// goroutine: whoever flushes has other connections to see to.
func (c *conn) flush() {
	for {
		it, more := c.unqueue()
		if !more {
			c.hub.activity.end()
			c.writers.Done()
			return
		}
		frame, release := c.frame(it)
		if frame == nil {
			go c.drainFrom(func() error { return c.writeLast(it) })
			return
		}
		began, rest, err := c.net.offer(frame)
		switch {
		case err != nil:
			release()
			go c.drainFrom(func() error { return err })
			return
		case rest != nil:
			go c.drainFrom(func() error {
				defer release()
				if err := c.net.finish(rest); err != nil {
					return err
				}
				c.sent(it, frame)
				return nil
			})
			return
		case !began:
			release()
			go c.drainFrom(func() error { return c.writeLast(it) })
			return
		}
		c.sent(it, frame)
		release()
	}
}

// writeLast writes an item and says so.
func (c *conn) writeLast(it item) error {
	err := c.write(it)
	if it.done != nil {
		it.done <- err
	}
	return err
}

// buffers holds *[]byte for messages that are made for one connection.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// frame returns an item as a whole frame of the WebSocket, nil when it is none or cannot be
// one. Afterwards the frame is to be released.
func (c *conn) frame(it item) (frame []byte, release func()) {
	room := func(size int) (buf *[]byte, release func()) {
		buf, _ = buffers.Get().(*[]byte)
		*buf = slices.Grow((*buf)[:0], maxFrameHeader+size)[:maxFrameHeader]
		return buf, func() {
			if cap(*buf) <= 1<<20 {
				buffers.Put(buf)
			}
		}
	}
	switch {
	case it.delta != nil && it.delta.framed != nil:
		return it.delta.framed, func() {}
	case it.delta != nil:
		buf, release := room(it.delta.size)
		message, err := it.delta.append(*buf, c.hub.cfg.Schema.Version)
		if err != nil {
			release()
			return nil, nil
		}
		*buf = message
		return framed(message, binaryFrame), release
	case it.wake != nil:
		buf, release := room(128)
		text, err := ssp2.AppendControl(*buf, it.wake)
		if err != nil {
			release()
			return nil, nil
		}
		*buf = text
		return framed(text, textFrame), release
	default:
		return nil, nil
	}
}

// write writes one item.
func (c *conn) write(it item) error {
	ctx := c.values // netConn bounds it
	switch {
	case it.close != nil:
		c.net.hurry()
		_ = c.ws.Close(it.close.code, it.close.reason)
		return net.ErrClosed
	case it.text != nil:
		return c.ws.Write(ctx, websocket.MessageText, it.text) //nolint:wrapcheck // it ends the connection
	case it.event != nil:
		text, err := it.event.text()
		if err != nil {
			return fmt.Errorf("encoding presence: %w", err)
		}
		return c.ws.Write(ctx, websocket.MessageText, text) //nolint:wrapcheck // likewise
	case it.chunk != nil:
		return c.ws.Write(ctx, websocket.MessageBinary, it.chunk) //nolint:wrapcheck // likewise
	}
	frame, release := c.frame(it)
	if frame == nil {
		return errors.New("encoding a message failed")
	}
	defer release()
	kind := websocket.MessageBinary
	if it.wake != nil {
		kind = websocket.MessageText
	}
	if err := c.ws.Write(ctx, kind, payloadOf(frame)); err != nil {
		return err //nolint:wrapcheck // likewise
	}
	c.sent(it, frame)
	return nil
}

// sent tells that a delta or a wake-up went out.
func (c *conn) sent(it item, frame []byte) {
	switch {
	case it.wake != nil:
		events.Emit(c.values, c.hub.cfg.Events, events.RealtimeWakeSent{Session: c.eventSession(), Reason: it.wake.Reason})
	case it.delta != nil:
		events.Emit(c.values, c.hub.cfg.Events, events.RealtimeDeltaSent{
			Session: c.eventSession(), CommitSeq: it.delta.seq, Changes: it.delta.changes, Bytes: int64(len(payloadOf(frame))),
		})
	}
}

// violation is what a client did against the rules of the channel. It ends the
// connection with a close code.
type violation struct {
	code   websocket.StatusCode
	reason string
}

func (v *violation) Error() string { return v.reason }

func violated(code websocket.StatusCode, format string, args ...any) error {
	return &violation{code, fmt.Sprintf(format, args...)}
}

// serve reads until the connection ends, and then takes it down.
func (c *conn) serve(base context.Context) {
	ctx, cancel := context.WithCancel(c.values)
	stop := context.AfterFunc(base, cancel)
	err := c.readAll(ctx) //nolint:contextcheck // reading ends with the connection, not with ctx
	stop()
	cancel() // a round in flight
	if v, ok := errors.AsType[*violation](err); ok {
		c.logViolation(v)
		c.expel(v)
	} else {
		c.kill()
	}
	c.teardown()
}

func (c *conn) logViolation(v *violation) {
	c.hub.log.DebugContext(c.values, "client closed: it broke a rule", "client", c.name, "partition", c.id.Partition, "reason", v.reason)
}

// expel closes the connection with the reason, instead of all that is still to be written.
func (c *conn) expel(v *violation) {
	c.net.hurry()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.queue {
		if done := c.queue[i].done; done != nil {
			done <- net.ErrClosed
		}
		c.queue[i] = item{}
	}
	c.queue, c.deltaBytes, c.textBytes = c.queue[:0], 0, 0
	c.push(item{close: &closing{v.code, v.reason}})
	c.closed = true
}

// readAll handles messages until one of them, or reading, ends the connection.
func (c *conn) readAll(ctx context.Context) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.hub.log.ErrorContext(c.values, "panic while serving a connection", "panic", v, "stack", string(debug.Stack()))
			err = violated(websocket.StatusInternalError, "the server failed")
		}
	}()
	for {
		m, err := c.next()
		if err != nil {
			return err
		}
		if m.round {
			err = c.beginRound(ctx, m)
		} else {
			err = c.control(m.text)
		}
		if err != nil {
			return err
		}
	}
}

// message is one message of a client: a text, or a chunk of a round that is yet to be read.
type message struct {
	round bool
	text  []byte
	body  io.Reader
}

// next returns the next message. What came before counts as handled.
func (c *conn) next() (message, error) {
	if c.counted {
		c.counted = false
		c.hub.activity.end()
	}
	kind, r, err := c.ws.Reader(c.values)
	if err != nil {
		return message{}, err //nolint:wrapcheck // it only ends the connection
	}
	c.counted = true
	c.hub.activity.begin()
	c.heard.Store(true)
	if kind == websocket.MessageText {
		limit := int64(c.hub.cfg.MaxPresenceBytes) + textSlack
		text, err := io.ReadAll(io.LimitReader(r, limit+1))
		switch {
		case err != nil:
			return message{}, err //nolint:wrapcheck // likewise
		case int64(len(text)) > limit:
			return message{}, violated(websocket.StatusMessageTooBig, "a text message has at most %d bytes", limit)
		}
		return message{text: text}, nil
	}
	var tag [1]byte
	switch _, err := io.ReadFull(r, tag[:]); {
	case errors.Is(err, io.EOF):
		return message{}, violated(websocket.StatusPolicyViolation, "a binary message without a channel tag")
	case err != nil:
		return message{}, err //nolint:wrapcheck // likewise
	case tag[0] != byte(ssp2.TagRound):
		return message{}, violated(websocket.StatusPolicyViolation, "the channel tag 0x%02x is not a client's", tag[0])
	}
	return message{round: true, body: r}, nil
}

// control handles a text message.
func (c *conn) control(text []byte) error {
	ev, err := ssp2.ParseClientEvent(text)
	if err != nil {
		return violated(websocket.StatusPolicyViolation, "a control message that is malformed")
	}
	switch ev := ev.(type) {
	case *ssp2.Ack:
		c.ack(ev.Cursor)
	case *ssp2.PresencePublish:
		c.publish(ev)
	}
	return nil // others are tolerated (§8.1)
}

// goAway closes the connection once the round in flight is over.
func (c *conn) goAway() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leaving = true
	if !c.inRound {
		c.farewell()
	}
}

// farewell wakes the client and closes. c.mu is held.
func (c *conn) farewell() {
	if c.closed {
		return
	}
	c.net.hurry()
	c.wake(ssp2.WakeCatchupRequired)
	c.push(item{close: &closing{websocket.StatusGoingAway, "the server is going away"}})
	c.closed = true
}

// teardown undoes everything that the connection is known by. The reader is done.
func (c *conn) teardown() {
	h := c.hub
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.rounds.Wait()
	h.forget(c) // its peers see it leave
	c.writers.Wait()
	c.kill()
	_ = c.ws.CloseNow() // nor does a ping wait any longer
	c.pings.Wait()
	h.fan.Unwatch(c.p.name)
	h.release(c.p)
	c.mu.Lock()
	dropped := c.dropped
	c.mu.Unlock()
	if dropped != "" {
		events.Emit(c.values, h.cfg.Events, events.RealtimeDropped{Session: c.eventSession(), Reason: dropped})
	}
	events.Emit(c.values, h.cfg.Events, events.RealtimeDisconnected{
		Session: c.eventSession(), Duration: time.Since(c.opened),
	})
	h.mu.Lock()
	delete(h.conns, c)
	h.mu.Unlock()
	h.freeSlot(c.client())
	if c.counted {
		h.activity.end()
	}
}

// forget takes a connection out of its partition.
func (h *Hub) forget(c *conn) {
	p := c.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range c.regs {
		p.index.leave(r)
	}
	c.regs = nil
	h.leaveAll(p, c)
	if p.watchers--; p.watchers == 0 {
		p.known = false
	}
}

func (h *Hub) logFailure(what string, c *conn, err error) {
	h.log.Log(c.values, slog.LevelWarn, what, "client", c.name, "partition", c.id.Partition, "error", err)
}
