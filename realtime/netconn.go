package realtime

import (
	"encoding/binary"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// closeWithin bounds what is left to do for a connection that the server closes.
	closeWithin = 5 * time.Second
	// writeStep is how much a client must take within the write timeout.
	writeStep = 64 << 10
)

// netConn bounds every write to a connection, and takes some that must not wait.
type netConn struct {
	net.Conn
	raw     syscall.RawConn // nil: every write may wait
	timeout atomic.Int64    // a time.Duration

	writes sync.Mutex // one write at a time
	due    bool       // there is a deadline for writes
	frame  frameTrack
	given  []byte // of offer: what is to be written, and what became of it
	taken  int
	fault  error
	give   func(fd uintptr) bool
}

// use makes conn the connection.
func (n *netConn) use(conn net.Conn) {
	n.Conn, n.raw = conn, nil
	n.give = n.giveNow
	// One that wraps a socket may have its methods, and a Write of its own.
	switch socket := conn.(type) {
	case *net.TCPConn:
		n.raw, _ = socket.SyscallConn()
	case *net.UnixConn:
		n.raw, _ = socket.SyscallConn()
	}
}

// cut closes the connection at once: without what TLS would say first.
func (n *netConn) cut() {
	under := n.Conn
	for {
		over, ok := under.(interface{ NetConn() net.Conn })
		if !ok {
			break
		}
		under = over.NetConn()
	}
	_ = under.Close()
}

// hurry gives reads and writes, those under way included, little time.
func (n *netConn) hurry() {
	n.timeout.Store(int64(closeWithin))
	_ = n.SetDeadline(time.Now().Add(closeWithin))
}

// Write implements [io.Writer].
func (n *netConn) Write(p []byte) (int, error) {
	n.writes.Lock()
	defer n.writes.Unlock()
	n.frame.follow(p)
	return n.write(p)
}

// write writes p, and waits for as long as the client takes some of it.
func (n *netConn) write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		n.due = true
		_ = n.SetWriteDeadline(time.Now().Add(time.Duration(n.timeout.Load())))
		m, err := n.Conn.Write(p[written:min(written+writeStep, len(p))])
		written += m
		if err != nil {
			return written, err //nolint:wrapcheck // a connection's errors are compared
		}
	}
	return written, nil
}

// offer writes whole frames if that needs no waiting. began: some of them is written, and
// what is not is rest, for finish, before which nothing else is written. Only the one who
// writes messages may call it: no message of the library is half written.
func (n *netConn) offer(frames []byte) (began bool, rest []byte, err error) {
	if n.raw == nil || !n.writes.TryLock() {
		return false, nil, nil
	}
	if n.frame.closed || n.frame.left > 0 {
		n.writes.Unlock()
		return false, nil, nil
	}
	if n.due {
		n.due = false // it was for what is written
		_ = n.SetWriteDeadline(time.Time{})
	}
	n.given, n.taken, n.fault = frames, 0, nil
	err = n.raw.Write(n.give)
	n.given = nil
	if err == nil {
		err = n.fault
	}
	if err != nil || n.taken == 0 || n.taken == len(frames) {
		n.writes.Unlock()
		return n.taken > 0, nil, err
	}
	return true, frames[n.taken:], nil
}

// finish writes what an offer left.
func (n *netConn) finish(rest []byte) error {
	defer n.writes.Unlock()
	_, err := n.write(rest)
	return err
}

// frameTrack follows the frames of a stream (RFC 6455 §5.2) that starts every frame in a
// write that has its whole header, as the library does.
type frameTrack struct {
	left   uint64 // of the payload of the frame that is being written
	closed bool   // a close frame was written: no message may follow
}

func (f *frameTrack) follow(p []byte) {
	for len(p) > 0 {
		if f.left > 0 {
			n := min(f.left, uint64(len(p)))
			f.left -= n
			p = p[n:]
			continue
		}
		const closeFrame = 0x88
		f.closed = f.closed || p[0] == closeFrame
		switch {
		case len(p) >= 10 && p[1] == 127:
			f.left, p = binary.BigEndian.Uint64(p[2:]), p[10:]
		case len(p) >= 4 && p[1] == 126:
			f.left, p = uint64(binary.BigEndian.Uint16(p[2:])), p[4:]
		case len(p) >= 2 && p[1] < 126:
			f.left, p = uint64(p[1]), p[2:]
		default:
			f.closed = true // never
			return
		}
	}
}

// maxFrameHeader is how long the header of a frame may be.
const maxFrameHeader = 10

// Opcodes of whole messages, with FIN.
const (
	textFrame   = 0x81
	binaryFrame = 0x82
)

// framed puts the header of an unmasked frame before the payload that is behind
// maxFrameHeader bytes of room, and returns the frame.
func framed(room []byte, kind byte) []byte {
	n := len(room) - maxFrameHeader
	switch {
	case n < 126:
		room[8], room[9] = kind, byte(n)
		return room[8:]
	case n < 1<<16:
		room[6], room[7] = kind, 126
		binary.BigEndian.PutUint16(room[8:], uint16(n))
		return room[6:]
	default:
		room[0], room[1] = kind, 127
		binary.BigEndian.PutUint64(room[2:], uint64(n))
		return room
	}
}

// payloadOf returns what a frame of framed carries.
func payloadOf(frame []byte) []byte {
	switch frame[1] {
	case 127:
		return frame[10:]
	case 126:
		return frame[4:]
	default:
		return frame[2:]
	}
}
