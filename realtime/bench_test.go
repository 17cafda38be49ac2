package realtime_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
)

// crowd connects clients that cost next to nothing: bare connections, whose bytes are
// thrown away. org says what each of them is registered on.
func (w *world) crowd(n int, org func(i int) string) {
	w.t.Helper()
	needDescriptors(w.t, 2*n)
	for i := range n {
		name := fmt.Sprintf("c%d", i)
		w.record(name, "ada", w.head(), orgSub(org(i)))
		conn, err := net.Dial("tcp", w.server.Listener.Addr().String())
		require.NoError(w.t, err)
		require.NoError(w.t, upgradeBare(conn, name))
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
	w.settle()
}

// crowdElsewhere is crowd with the clients in another process: what this one uses is what
// the server uses.
func (w *world) crowdElsewhere(n int, org func(i int) string) {
	w.t.Helper()
	needDescriptors(w.t, n)
	for i := range n {
		w.record(fmt.Sprintf("c%d", i), "ada", w.head(), orgSub(org(i)))
	}
	binary, err := os.Executable()
	require.NoError(w.t, err)
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), crowdVariable+"="+w.server.Listener.Addr().String(), fmt.Sprintf("%s_SIZE=%d", crowdVariable, n))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(w.t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, cmd.Start())
	w.t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	said, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(w.t, err, "the clients did not connect")
	require.Equal(w.t, "connected\n", said)
	w.settle()
	require.Equal(w.t, n, w.connections())
}

// needDescriptors ends a benchmark that cannot have as many sockets as it needs.
func needDescriptors(t testing.TB, n int) {
	t.Helper()
	const besides = 100
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	if limit.Cur < uint64(n+besides) {
		t.Fatalf("%d file descriptors are needed, and the limit is %d: see ulimit -n", n+besides, limit.Cur)
	}
}

// upgradeBare makes a WebSocket of a connection, and reads no further than the upgrade.
func upgradeBare(conn net.Conn, name string) error {
	_, err := fmt.Fprintf(conn, "GET /realtime?clientId=%s HTTP/1.1\r\nHost: x\r\nX-Actor: ada\r\nConnection: Upgrade\r\n"+
		"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", name)
	if err != nil {
		return err
	}
	buf := make([]byte, 4096)
	for got := 0; !bytes.Contains(buf[:got], []byte("\r\n\r\n")); {
		n, err := conn.Read(buf[got:])
		if err != nil {
			return err
		}
		got += n
	}
	if !bytes.HasPrefix(buf, []byte("HTTP/1.1 101 ")) {
		return fmt.Errorf("no upgrade: %.100s", buf)
	}
	return nil
}

func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// residentMemory is what the process has in memory, as Linux says; 0 where it does not.
func residentMemory() int64 {
	debug.FreeOSMemory()
	var size, resident int64
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	_, _ = fmt.Sscan(string(text), &size, &resident)
	return resident * int64(os.Getpagesize())
}

// BenchmarkIdleConnections reports what 10,000 idle connections keep in memory, the buffers
// and the goroutine of each included, the clients, which are another process, not. An
// operation is a commit that none of them gets.
func BenchmarkIdleConnections(b *testing.B) {
	const connections = 10_000
	w := newWorld(b, realtime.Options{})
	heap, resident := inUse(), residentMemory()
	w.crowdElsewhere(connections, func(i int) string { return fmt.Sprintf("o%d", i) })
	heap, resident = inUse()-heap, residentMemory()-resident
	for b.Loop() {
		w.commit(change("d", "elsewhere", "f"))
		w.settle()
	}
	b.ReportMetric(float64(heap)/connections/1024, "KiB/connection")
	b.ReportMetric(float64(resident)/connections/1024, "resident-KiB/connection")
	require.Equal(b, connections, w.connections(), "nobody was dropped")
}

// BenchmarkCommitOfTen is a commit that 10 connections get, of 100 and of 10,000, until
// they have been written to.
func BenchmarkCommitOfTen(b *testing.B) {
	for _, connections := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("of %d connections", connections), func(b *testing.B) {
			w := newWorld(b, realtime.Options{MaxUnacked: 1 << 30, MaxBufferedBytes: 1 << 30})
			w.crowdElsewhere(connections, func(i int) string {
				if i < 10 {
					return "o"
				}
				return fmt.Sprintf("o%d", i)
			})
			runtime.GC()
			for b.Loop() {
				w.commit(change("d", "o", "f"))
				w.settle()
			}
			require.Equal(b, connections, w.connections(), "nobody was dropped")
		})
	}
}

// BenchmarkCommitOfAll is a commit that 2,000 connections get, until all of them have been
// written to. Its floor is to write the same bytes to as many bare sockets, with a
// goroutine per processor. Both are measured in time and in processor time, the other ends
// included, which are the same.
func BenchmarkCommitOfAll(b *testing.B) {
	const connections = 2000
	w := newWorld(b, realtime.Options{MaxUnacked: 1 << 30, MaxBufferedBytes: 1 << 30})
	w.crowd(connections, func(int) string { return "o" })
	row := change("d", "o", "f")
	row.Payload = make([]byte, 256)
	floor := bareSockets(b, connections)
	message := make([]byte, 470)
	before := w.hub.Encodes()
	var took, cpu [2]time.Duration
	for b.Loop() {
		for i, run := range []func(){
			func() { w.commit(row); w.settle() },
			func() { floor(message) },
		} {
			began, used := time.Now(), processorTime()
			run()
			took[i] += time.Since(began)
			cpu[i] += processorTime() - used
		}
	}
	b.StopTimer()
	require.Equal(b, connections, w.connections(), "nobody was dropped")
	per := float64(b.N) * connections
	b.ReportMetric(float64(w.hub.Encodes()-before)/float64(b.N), "encodes/commit")
	b.ReportMetric(float64(took[0].Nanoseconds())/per, "ns/receiver")
	b.ReportMetric(float64(cpu[0].Nanoseconds())/per, "cpu-ns/receiver")
	b.ReportMetric(float64(took[0])/float64(took[1]), "time/floor")
	b.ReportMetric(float64(cpu[0])/float64(cpu[1]), "cpu/floor")
}

// connections is how many are open.
func (w *world) connections() int {
	n, _, _, _ := w.hub.Counts()
	return n
}

// bareSockets connects sockets whose bytes are thrown away, and returns what writes a
// message to all of them.
func bareSockets(b *testing.B, n int) func(message []byte) {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer func() { _ = listener.Close() }()
	conns := make([]net.Conn, n)
	for i := range conns {
		near, err := net.Dial("tcp", listener.Addr().String())
		require.NoError(b, err)
		conns[i], err = listener.Accept()
		require.NoError(b, err)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, near)
		}()
		b.Cleanup(func() {
			_ = conns[i].Close()
			_ = near.Close()
			<-ended
		})
	}
	return func(message []byte) {
		var writers sync.WaitGroup
		for part := range slices.Chunk(conns, n/runtime.GOMAXPROCS(0)) {
			writers.Go(func() {
				for _, conn := range part {
					_, _ = conn.Write(message)
				}
			})
		}
		writers.Wait()
	}
}

// processorTime is what the process has used.
func processorTime() time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
