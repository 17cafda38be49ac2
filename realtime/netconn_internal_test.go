package realtime

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sockets returns both ends of a connection. The near one is what a hub has, and takes
// little before it has to wait.
func sockets(t require.TestingT) (near *netConn, far net.Conn) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	far, err = net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	accepted, err := listener.Accept()
	require.NoError(t, err)
	tcp, ok := accepted.(*net.TCPConn)
	require.True(t, ok)
	require.NoError(t, tcp.SetWriteBuffer(16<<10))
	near = new(netConn)
	near.timeout.Store(int64(time.Minute))
	near.use(accepted)
	return near, far
}

// frameOf returns a frame of n bytes of payload, which all are what.
func frameOf(kind, what byte, n int) []byte {
	return framed(append(make([]byte, maxFrameHeader), bytes.Repeat([]byte{what}, n)...), kind)
}

// readFrame reads a frame (RFC 6455 §5.2).
func readFrame(r io.Reader) (kind byte, payload []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := uint64(head[1])
	switch head[1] {
	case 126:
		var long [2]byte
		_, err = io.ReadFull(r, long[:])
		n = uint64(binary.BigEndian.Uint16(long[:]))
	case 127:
		var long [8]byte
		_, err = io.ReadFull(r, long[:])
		n = binary.BigEndian.Uint64(long[:])
	}
	if err == nil {
		payload = make([]byte, n)
		_, err = io.ReadFull(r, payload)
	}
	return head[0], payload, err
}

// TestFramesThatAreOfferedAreWhole: whatever the socket takes of a frame at once, its bytes
// are followed by their rest, and by nothing of another frame.
func TestFramesThatAreOfferedAreWhole(t *testing.T) {
	t.Parallel()
	partial, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		near, far := sockets(t)
		defer func() { _, _ = near.Close(), far.Close() }()
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{0, 1, 125, 126, 4000, 1<<16 - 1, 1 << 16, 100_000}), 10, 20).Draw(t, "sizes")
		reading := make(chan struct{})
		got := make(chan string, 1)
		go func() {
			<-reading
			r, next := bufio.NewReader(far), 0
			for next < len(sizes) {
				kind, payload, err := readFrame(r)
				switch {
				case err != nil:
					got <- err.Error()
					return
				case kind == 0x89 && bytes.Equal(payload, []byte("ping")):
				case kind == binaryFrame && bytes.Equal(payload, bytes.Repeat([]byte{byte(next)}, sizes[next])):
					next++
				default:
					got <- "a frame that nobody wrote"
					return
				}
			}
			got <- ""
		}()
		pings := make(chan error, len(sizes))
		for i, size := range sizes {
			frame := frameOf(binaryFrame, byte(i), size)
			if i%3 == 0 { // a ping of the library, at the same time
				go func() {
					_, err := near.Write(append([]byte{0x89, 4}, "ping"...))
					pings <- err
				}()
			}
			began, rest, err := near.offer(frame)
			require.NoError(t, err)
			switch {
			case !began:
				if refused++; i > 0 {
					closeOnce(reading)
				}
				_, err = near.Write(frame)
			case rest != nil:
				partial++
				closeOnce(reading)
				err = near.finish(rest)
			}
			require.NoError(t, err)
		}
		closeOnce(reading)
		for i := range sizes {
			if i%3 == 0 {
				require.NoError(t, <-pings)
			}
		}
		require.Empty(t, <-got)
	})
	require.Positive(t, partial, "some were taken in part")
	t.Logf("%d in part, %d not at all", partial, refused)
}

func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// TestWhatIsNotOffered: a write that may not be made now is left to one that may wait.
func TestWhatIsNotOffered(t *testing.T) {
	t.Parallel()
	frame := frameOf(binaryFrame, 1, 10)
	for name, prepare := range map[string]func(n *netConn){
		"behind a close frame": func(n *netConn) {
			_, err := n.Write([]byte{0x88, 2, 3, 232})
			require.NoError(t, err)
		},
		"in a message": func(n *netConn) {
			_, err := n.Write(frameOf(binaryFrame, 1, 5000)[:4000])
			require.NoError(t, err)
		},
		"while another is written": func(n *netConn) { n.writes.Lock() },
		"no socket":                func(n *netConn) { n.raw = nil },
		"somebody's own connection": func(n *netConn) {
			tcp, ok := n.Conn.(*net.TCPConn)
			require.True(t, ok)
			n.use(struct{ *net.TCPConn }{tcp}) // whose Write may do what the socket does not
		},
	} {
		near, far := sockets(t)
		prepare(near)
		began, rest, err := near.offer(frame)
		require.NoError(t, err, name)
		require.False(t, began, name)
		require.Nil(t, rest, name)
		_, _ = near.Close(), far.Close()
	}

	near, far := sockets(t)
	_, err := near.Write(frame)
	require.NoError(t, err)
	require.NoError(t, near.SetWriteDeadline(time.Now().Add(-time.Second)), "that of the write before")
	began, rest, err := near.offer(frame)
	require.NoError(t, err, "a deadline that is over is not of this one")
	require.True(t, began)
	require.Nil(t, rest)
	_ = far.Close()
	require.NoError(t, near.Close())
	_, _, err = near.offer(frame)
	require.Error(t, err, "it is closed")
}

// TestACutIsSilent: a connection with TLS says good-bye when it is closed, for which it may
// have to wait. One that is cut does not.
func TestACutIsSilent(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(nil)
	server.StartTLS()
	defer server.Close()
	near, far := sockets(t)
	defer func() { _ = far.Close() }()
	witness := &witness{Conn: near.Conn}
	secure := tls.Server(witness, server.TLS)
	near.use(secure)
	require.Nil(t, near.raw, "what is written to the socket is encrypted")
	shaken := make(chan error, 1)
	go func() {
		shaken <- tls.Client(far, &tls.Config{InsecureSkipVerify: true}).Handshake()
	}()
	_, err := near.Write([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, <-shaken)
	before := witness.writes.Load()
	near.cut()
	require.Equal(t, before, witness.writes.Load())
	_, err = near.Write([]byte("hello"))
	require.Error(t, err)
}

// witness counts writes.
type witness struct {
	net.Conn
	writes atomic.Int64
}

func (w *witness) Write(p []byte) (int, error) {
	w.writes.Add(1)
	return w.Conn.Write(p)
}
