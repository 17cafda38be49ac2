package pgtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
)

// Counter counts what connections exchange with the server, by reading along the bytes of the protocol: it sees pipelines
// and batches as they are on the wire, whichever layer of pgx sent them. The zero value is ready; it is safe for several
// connections and goroutines.
//
// A round trip is a turn of the conversation: the client has sent something that demands an answer (a simple query, or a
// Sync or Flush after extended messages), and then reads the answer. However many of these it sends before it reads, it
// waits once. Opening a connection is not counted.
//
// A connection prepares each statement before it runs it for the first time, which costs round trips of its own. To count
// what a warm connection does, do it once, call Reset, do it again; [Counter.PrepareRoundTrips] then tells that nothing was
// left to prepare.
type Counter struct {
	mu          sync.Mutex
	trips       int
	prepTrips   int
	prepares    int
	commits     int
	autocommits int
	statements  []string
}

// Attach makes every connection of a configuration be counted. It must happen before the first one is opened.
func (c *Counter) Attach(cfg *pgconn.Config) {
	next := cfg.AfterNetConnect
	cfg.AfterNetConnect = func(ctx context.Context, cfg *pgconn.Config, conn net.Conn) (net.Conn, error) {
		if next != nil {
			var err error
			if conn, err = next(ctx, cfg, conn); err != nil {
				return nil, err
			}
		}
		return c.wrap(conn), nil
	}
}

// Reset sets all counts to zero. What connections have prepared stays known.
func (c *Counter) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trips, c.prepTrips, c.prepares = 0, 0, 0
	c.commits, c.autocommits = 0, 0
	c.statements = nil
}

// RoundTrips returns the number of round trips, those that only prepared included.
func (c *Counter) RoundTrips() int { return c.read(&c.trips) }

// PrepareRoundTrips returns the number of round trips that only prepared statements.
func (c *Counter) PrepareRoundTrips() int { return c.read(&c.prepTrips) }

// Prepares returns the number of named statements that were prepared.
func (c *Counter) Prepares() int { return c.read(&c.prepares) }

// Commits returns the number of transactions that the client ended with COMMIT and the server committed.
func (c *Counter) Commits() int { return c.read(&c.commits) }

// Autocommits returns the number of transactions that the server committed though nobody began them: those of statements
// outside BEGIN and COMMIT, reads included.
func (c *Counter) Autocommits() int { return c.read(&c.autocommits) }

// Statements returns the text of every statement that was sent for execution, in that order, BEGIN and COMMIT included.
func (c *Counter) Statements() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.statements)
}

func (c *Counter) read(n *int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return *n
}

func (c *Counter) wrap(conn net.Conn) net.Conn {
	w := &countedConn{Conn: conn, counter: c, prepared: map[string]string{}, portals: map[string]string{}}
	w.sent = splitter{untyped: true, keep: keepSent, emit: w.onSent}
	w.received = splitter{keep: keepReceived, emit: w.onReceived}
	return w
}

// countedConn reads along. Its state is guarded by the counter's lock.
type countedConn struct {
	net.Conn
	counter *Counter

	sent, received splitter
	prepared       map[string]string // SQL by name of the statement
	portals        map[string]string // SQL by name of the portal

	demanded bool // something that wants an answer was sent since the last answer
	executed bool // of that, something was executed
	parsed   bool // of that, something was prepared under a name
	inTx     bool // inside a transaction that was begun
	implicit bool // a statement ran outside one since the last ReadyForQuery
}

func (w *countedConn) Write(p []byte) (int, error) {
	w.counter.mu.Lock()
	w.sent.feed(p)
	w.counter.mu.Unlock()
	return w.Conn.Write(p)
}

func (w *countedConn) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	w.counter.mu.Lock()
	w.received.feed(p[:n])
	w.counter.mu.Unlock()
	return n, err
}

// keepSent is how much of the body of a message to the server is looked at.
func keepSent(kind byte, length int) int {
	switch kind {
	case 'P', 'Q', 'E', 'C':
		return length
	case 'B':
		return min(length, 2*256) // the names come first; the values may be large
	default:
		return 0
	}
}

func (w *countedConn) onSent(kind byte, body []byte) {
	c := w.counter
	switch kind {
	case 'P':
		name, rest := cstring(body)
		sql, _ := cstring(rest)
		w.prepared[name] = sql
		if name != "" {
			c.prepares++
			w.parsed = true
		}
	case 'B':
		portal, rest := cstring(body)
		name, _ := cstring(rest)
		w.portals[portal] = w.prepared[name]
	case 'E':
		portal, _ := cstring(body)
		c.statements = append(c.statements, w.portals[portal])
		w.executed = true
	case 'C':
		if len(body) > 0 && body[0] == 'S' {
			name, _ := cstring(body[1:])
			delete(w.prepared, name)
		}
	case 'Q':
		sql, _ := cstring(body)
		c.statements = append(c.statements, sql)
		w.demanded, w.executed = true, true
	case 'S', 'H':
		w.demanded = true
	}
}

// keepReceived is how much of the body of a message from the server is looked at.
func keepReceived(kind byte, length int) int {
	switch kind {
	case 'C', 'Z':
		return length
	default:
		return 0
	}
}

func (w *countedConn) onReceived(kind byte, body []byte) {
	c := w.counter
	switch kind {
	case 'S', 'A', 'N', 'R', 'K':
		return // not an answer: parameter status, notification, notice; the opening of a connection
	}
	if w.demanded {
		c.trips++
		if w.parsed && !w.executed {
			c.prepTrips++
		}
		w.demanded, w.executed, w.parsed = false, false, false
	}
	switch kind {
	case 'C':
		switch tag, _ := cstring(body); tag {
		case "BEGIN", "START TRANSACTION":
			w.inTx, w.implicit = true, false // what ran before it has become a part of the transaction
		case "COMMIT":
			c.commits++
			w.inTx = false
		case "ROLLBACK": // or ROLLBACK TO: ReadyForQuery tells
		default:
			w.implicit = w.implicit || !w.inTx
		}
	case 'E':
		w.implicit = false
	case 'Z':
		if w.implicit {
			c.autocommits++
		}
		w.implicit, w.inTx = false, len(body) > 0 && body[0] != 'I'
	}
}

// splitter cuts a stream into messages: a byte for the kind, four for the length, the body.
type splitter struct {
	untyped bool // the next message has no kind, as the first one of a client
	keep    func(kind byte, length int) int
	emit    func(kind byte, body []byte)

	head []byte // of the message that has begun
	kind byte
	skip int // bytes of it that are still to come
	want int // of these, how many to put into body
	body []byte
}

func (s *splitter) feed(p []byte) {
	for len(p) > 0 {
		if s.skip > 0 {
			n := min(s.skip, len(p))
			take := min(s.want, n)
			s.body = append(s.body, p[:take]...)
			s.want -= take
			s.skip -= n
			p = p[n:]
		} else {
			size := 5
			if s.untyped {
				size = 4
			}
			n := min(size-len(s.head), len(p))
			s.head = append(s.head, p[:n]...)
			p = p[n:]
			if len(s.head) < size {
				return
			}
			s.kind = 0
			if !s.untyped {
				s.kind = s.head[0]
			}
			length := int(binary.BigEndian.Uint32(s.head[size-4:])) - 4
			s.untyped = false
			s.head = s.head[:0]
			s.body = s.body[:0]
			s.skip = length
			s.want = s.keep(s.kind, length)
		}
		if s.skip == 0 {
			s.emit(s.kind, s.body)
		}
	}
}

// cstring cuts off the text before the first zero byte.
func cstring(b []byte) (text string, rest []byte) {
	before, rest, _ := bytes.Cut(b, []byte{0})
	return string(before), rest
}
