package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/ssp2"
)

// BenchmarkPushToDelta pushes over HTTP and waits for the deltas, which all subscribers
// acknowledge. It reports the medians of the push and of the deltas, from the start of the
// push on, and how they compare.
func BenchmarkPushToDelta(b *testing.B) {
	for _, subscribers := range []int{1, 200} {
		b.Run(fmt.Sprintf("%d subscribers", subscribers), func(b *testing.B) {
			h := newHarbour(b, 1, nil)
			arrived := make(chan time.Time, subscribers)
			h.listeners(subscribers, arrived)
			writer := h.control("writer", "blue")
			measurePushes(b, h, writer, arrived, subscribers)
		})
	}
}

func measurePushes(b *testing.B, h *harbour, writer *client.Client, arrived <-chan time.Time, subscribers int) {
	b.Helper()
	var pushes, deltas []time.Duration
	n := 0
	for b.Loop() {
		n++
		commit := newListCommit(b, h.schema, fmt.Sprintf("l%d", n), "red")
		began := time.Now()
		_, err := writer.Push(context.Background(), commit)
		pushes = append(pushes, time.Since(began))
		require.NoError(b, err)
		for range subscribers {
			deltas = append(deltas, (<-arrived).Sub(began))
		}
	}
	slices.Sort(pushes)
	slices.Sort(deltas)
	push, delta := pushes[len(pushes)/2], deltas[len(deltas)/2]
	b.ReportMetric(float64(push.Microseconds()), "push-p50-µs")
	b.ReportMetric(float64(pushes[len(pushes)*95/100].Microseconds()), "push-p95-µs")
	b.ReportMetric(float64(delta.Microseconds()), "delta-p50-µs")
	b.ReportMetric(float64(delta)/float64(push), "delta/push")
}

// listeners connects devices that acknowledge every delta, and say when it came. They
// decode nothing, since devices do not compute on the machine of the server.
func (h *harbour) listeners(n int, arrived chan<- time.Time) {
	h.t.Helper()
	h.bare(n, func(conn net.Conn) {
		r := bufio.NewReader(conn)
		ack := []byte{0x81, 0x80, 0, 0, 0, 0} // masked with zeroes, which leave it as it is
		for {
			message, err := readMessage(r)
			if err != nil {
				return
			}
			if len(message) == 0 || message[0] != byte(ssp2.TagDelta) {
				continue
			}
			arrived <- time.Now()
			// A delta ends with NextCursor, no BootstrapState, and END.
			cursor := binary.LittleEndian.Uint64(message[len(message)-14:])
			ack = fmt.Appendf(ack[:6], `{"type":"ack","cursor":%d}`, cursor)
			ack[1] = 0x80 | byte(len(ack)-6)
			if _, err := conn.Write(ack); err != nil {
				return
			}
		}
	})
}

// readMessage reads an unmasked message of one frame (RFC 6455 §5.2).
func readMessage(r *bufio.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:2]); err != nil {
		return nil, err
	}
	n := int(head[1])
	if n == 126 {
		if _, err := io.ReadFull(r, head[2:]); err != nil {
			return nil, err
		}
		n = int(binary.BigEndian.Uint16(head[2:]))
	}
	message := make([]byte, n)
	_, err := io.ReadFull(r, message)
	return message, err
}

// paced pushes a commit per interval and returns how long the pushes took, ascending.
func (h *harbour) paced(writer *client.Client, prefix string, commits int, every time.Duration) []time.Duration {
	h.t.Helper()
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	took := make([]time.Duration, 0, commits)
	for i := range commits {
		<-ticker.C
		commit := newListCommit(h.t, h.schema, fmt.Sprint(prefix, i), "red")
		began := time.Now()
		_, err := writer.Push(context.Background(), commit)
		took = append(took, time.Since(began))
		require.NoError(h.t, err)
	}
	slices.Sort(took)
	return took
}

func median(took []time.Duration) time.Duration { return took[len(took)/2] }

func p95(took []time.Duration) time.Duration { return took[len(took)*95/100] }

// turns lets two harbours have their turn, one after the other and again, so that what else
// the machine does is in both, and returns what all turns of each brought, ascending.
func turns(n int, turn func(which, n int) []time.Duration) (took [2][]time.Duration) {
	for i := range 2 * n {
		took[i%2] = append(took[i%2], turn(i%2, i/2)...)
	}
	slices.Sort(took[0])
	slices.Sort(took[1])
	return took
}

// report compares what the second of two brought with the first.
func report(b *testing.B, took [2][]time.Duration) {
	b.Helper()
	b.ReportMetric(float64(median(took[1]).Microseconds()), "push-p50-µs")
	b.ReportMetric(float64(median(took[1]))/float64(median(took[0])), "p50-ratio")
	b.ReportMetric(float64(p95(took[1]))/float64(p95(took[0])), "p95-ratio")
}

// BenchmarkPushWhileAllAcknowledge compares pushes, 20 a second, whose deltas 200
// subscribers acknowledge each, with pushes that one acknowledges, and counts the
// statements that write acknowledgements. Run it with -benchtime 1x.
func BenchmarkPushWhileAllAcknowledge(b *testing.B) {
	const times, commits, every = 8, 50, 50 * time.Millisecond
	subscribers := [2]int{1, 200}
	for b.Loop() {
		var places [2]*harbour
		var writers [2]*client.Client
		var acks [2]int
		for i, n := range subscribers {
			h := newHarbour(b, 1, nil)
			h.listeners(n, make(chan time.Time, (times*commits+10)*n))
			places[i], writers[i] = h, h.control("writer", "blue")
			h.paced(writers[i], "warm", 10, every)
			h.settle()
		}
		took := turns(times, func(i, n int) []time.Duration {
			h := places[i]
			h.counter.Reset()
			took := h.paced(writers[i], fmt.Sprint("l", n, "-"), commits, every)
			for _, sql := range h.counter.Statements() {
				if strings.Contains(sql, "sync_record_acks") {
					acks[i]++
				}
			}
			return took
		})
		for i, n := range acks {
			if n == 0 {
				b.Fatal("nobody's acknowledgements were written")
			}
			b.ReportMetric(float64(n)/(times*commits*every.Seconds()), fmt.Sprintf("acks/s-%d", subscribers[i]))
		}
		report(b, took)
	}
}

// BenchmarkPushToACrowd compares pushes, 10 a second, of which 2,000 sockets of this very
// process hear, with pushes of which nobody hears. Run it with -benchtime 1x.
func BenchmarkPushToACrowd(b *testing.B) {
	const crowd, times, commits, every = 2000, 5, 40, 100 * time.Millisecond
	for b.Loop() {
		var places [2]*harbour
		var writers [2]*client.Client
		for i := range places {
			h := newHarbour(b, 1, func(c *syncpg.Config) { c.Realtime.MaxUnacked = 1 << 20 })
			places[i], writers[i] = h, h.control("writer", "blue")
			h.paced(writers[i], "warm", 5, every)
		}
		places[1].crowd(crowd)
		report(b, turns(times, func(i, n int) []time.Duration {
			took := places[i].paced(writers[i], fmt.Sprint("l", n, "-"), commits, every)
			places[i].settle()
			return took
		}))
	}
}

// crowd connects bare sockets, whose bytes are thrown away.
func (h *harbour) crowd(n int) {
	h.t.Helper()
	h.bare(n, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
}

// bare connects sockets of devices that have pulled all there is, each with a goroutine
// that serves it from behind the upgrade on.
func (h *harbour) bare(n int, serve func(net.Conn)) {
	h.t.Helper()
	_, err := h.db.Pool.Exec(context.Background(), `
		insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		select 'acme', 'bare' || i, 'bare', 2, coalesce((select max_commit_seq from syncpg.sync_partitions where partition = 'acme'), 0),
		       jsonb_build_array(jsonb_build_object('id', 'lists', 'table', 'lists', 'schemaVersion', $2::integer, 'scopes', '{"team_id":["red"]}'::jsonb))::text,
		       0, 0
		  from generate_series(1, $1::integer) as i`, n, h.schema.Version)
	require.NoError(h.t, err)
	at, err := url.Parse(h.urls[0])
	require.NoError(h.t, err)
	const end = "\r\n\r\n"
	for i := range n {
		conn, err := net.Dial("tcp", at.Host)
		require.NoError(h.t, err)
		h.t.Cleanup(func() { _ = conn.Close() })
		_, err = fmt.Fprintf(conn, "GET /realtime?clientId=bare%d HTTP/1.1\r\nHost: x\r\nX-Actor: bare\r\nConnection: Upgrade\r\n"+
			"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="+end, i+1)
		require.NoError(h.t, err)
		answer := make([]byte, 0, 512)
		for !bytes.HasSuffix(answer, []byte(end)) {
			_, err = io.ReadFull(conn, answer[len(answer):len(answer)+1])
			require.NoError(h.t, err)
			answer = answer[:len(answer)+1]
		}
		require.Equal(h.t, "HTTP/1.1 101", string(answer[:12]))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			serve(conn)
		}()
		h.t.Cleanup(func() {
			_ = conn.Close()
			<-ended
		})
	}
	h.settle()
}
