package realtime_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
)

// crowd connects clients that cost next to nothing: bare connections, whose bytes are
// thrown away when they are to listen. org says what each of them is registered on.
func (w *world) crowd(n int, listen bool, org func(i int) string) {
	w.t.Helper()
	address := w.server.Listener.Addr().String()
	buf := make([]byte, 4096)
	for i := range n {
		name := fmt.Sprintf("c%d", i)
		w.record(name, "ada", w.head(), orgSub(org(i)))
		conn, err := net.Dial("tcp", address)
		require.NoError(w.t, err)
		w.t.Cleanup(func() { _ = conn.Close() })
		_, err = fmt.Fprintf(conn, "GET /realtime?clientId=%s HTTP/1.1\r\nHost: x\r\nX-Actor: ada\r\nConnection: Upgrade\r\n"+
			"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", name)
		require.NoError(w.t, err)
		for got := 0; !bytes.Contains(buf[:got], []byte("\r\n\r\n")); {
			n, err := conn.Read(buf[got:])
			require.NoError(w.t, err)
			got += n
		}
		if listen {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = io.Copy(io.Discard, conn)
			}()
			w.t.Cleanup(func() {
				_ = conn.Close()
				<-ended
			})
		}
	}
	w.settle()
}

func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// BenchmarkIdleConnections reports what an idle connection keeps in memory, its buffers,
// its goroutine and the other end of it in this process included.
func BenchmarkIdleConnections(b *testing.B) {
	w := newWorld(b, realtime.Options{})
	before := inUse()
	const connections = 5000
	w.crowd(connections, false, func(i int) string { return fmt.Sprintf("o%d", i) })
	b.ReportMetric(float64(inUse()-before)/connections/1024, "KiB/connection")
	for range b.N {
		w.hub.BeatAll()
	}
	w.settle()
}

// BenchmarkCommitOfTen is a commit that 10 connections get, of 100 and of 5,000.
func BenchmarkCommitOfTen(b *testing.B) {
	for _, connections := range []int{100, 5000} {
		b.Run(fmt.Sprintf("of %d connections", connections), func(b *testing.B) {
			w := newWorld(b, realtime.Options{MaxUnacked: 1 << 30, MaxBufferedBytes: 1 << 30})
			w.crowd(connections, true, func(i int) string {
				if i < 10 {
					return "o"
				}
				return fmt.Sprintf("o%d", i)
			})
			runtime.GC()
			b.ResetTimer()
			for range b.N {
				w.commit(change("d", "o", "f"))
			}
			w.settle()
		})
	}
}

// BenchmarkCommitOfAll is a commit that 2,000 connections get.
func BenchmarkCommitOfAll(b *testing.B) {
	const connections = 2000
	w := newWorld(b, realtime.Options{MaxUnacked: 1 << 30, MaxBufferedBytes: 1 << 30})
	w.crowd(connections, true, func(int) string { return "o" })
	row := change("d", "o", "f")
	row.Payload = make([]byte, 256)
	before := w.hub.Encodes()
	b.ResetTimer()
	n := 0
	for range b.N {
		w.commit(row)
		if n++; n%100 == 0 {
			b.StopTimer() // what the sockets cannot hold
			w.settle()
			b.StartTimer()
		}
	}
	b.StopTimer()
	b.ReportMetric(float64(w.hub.Encodes()-before)/float64(b.N), "encodes/commit")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/connections, "ns/receiver")
}
