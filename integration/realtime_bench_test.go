package integration_test

import (
	"context"
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

// listeners connects devices that acknowledge every delta, and say when it came.
func (h *harbour) listeners(n int, arrived chan<- time.Time) {
	h.t.Helper()
	for i := range n {
		boat := h.device(0, fmt.Sprintf("c%d", i), "red").connect(0)
		boat.sync()
		go func() {
			for a := range boat.arrive {
				switch {
				case a.err != nil:
					return
				case a.delta != nil:
					arrived <- time.Now()
					m, err := ssp2.DecodeMessage(a.delta)
					if err != nil {
						return
					}
					end, _ := m.Frames[len(m.Frames)-1].(*ssp2.SubEnd)
					_ = boat.send(&ssp2.Ack{Cursor: end.NextCursor})
				}
			}
		}()
	}
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

// BenchmarkPushWhileAllAcknowledge compares pushes, 20 a second, whose deltas 200
// subscribers acknowledge each, with pushes that one acknowledges, and counts the
// statements that write acknowledgements. Run it with -benchtime 1x.
func BenchmarkPushWhileAllAcknowledge(b *testing.B) {
	const commits, every = 120, 50 * time.Millisecond
	for b.Loop() {
		var took [2][]time.Duration
		for i, subscribers := range []int{1, 200} {
			h := newHarbour(b, 1, nil)
			h.listeners(subscribers, make(chan time.Time, (commits+10)*subscribers))
			writer := h.control("writer", "blue")
			h.paced(writer, "warm", 10, every)
			h.settle()
			h.counter.Reset()
			took[i] = h.paced(writer, "l", commits, every)
			acks := 0
			for _, sql := range h.counter.Statements() {
				if strings.Contains(sql, "sync_record_acks") {
					acks++
				}
			}
			if acks == 0 {
				b.Fatal("nobody's acknowledgements were written")
			}
			b.ReportMetric(float64(acks)/(commits*every.Seconds()), fmt.Sprintf("acks/s-%d", subscribers))
		}
		b.ReportMetric(float64(median(took[1]).Microseconds()), "push-p50-µs")
		b.ReportMetric(float64(median(took[1]))/float64(median(took[0])), "p50-ratio")
		b.ReportMetric(float64(p95(took[1]))/float64(p95(took[0])), "p95-ratio")
	}
}

// BenchmarkPushToACrowd compares pushes, 5 a second, of which 2,000 sockets of this very
// process hear, with pushes of which nobody hears. Run it with -benchtime 1x.
func BenchmarkPushToACrowd(b *testing.B) {
	const crowd, commits, every = 2000, 30, 200 * time.Millisecond
	for b.Loop() {
		h := newHarbour(b, 1, func(c *syncpg.Config) { c.Realtime.MaxUnacked = 1 << 20 })
		writer := h.control("writer", "blue")
		h.paced(writer, "warm", 5, every)
		alone := h.paced(writer, "alone", commits, every)
		h.crowd(crowd)
		h.paced(writer, "again", 2, every)
		h.settle()
		heard := h.paced(writer, "heard", commits, every)
		b.ReportMetric(float64(median(heard).Microseconds()), "push-p50-µs")
		b.ReportMetric(float64(median(heard))/float64(median(alone)), "p50-ratio")
		b.ReportMetric(float64(p95(heard))/float64(p95(alone)), "p95-ratio")
	}
}

// crowd connects bare sockets, whose bytes are thrown away.
func (h *harbour) crowd(n int) {
	h.t.Helper()
	_, err := h.db.Pool.Exec(context.Background(), `
		insert into syncpg.sync_clients (partition, client_id, actor_id, wire_version, cursor, subscriptions, created_at_ms, updated_at_ms)
		select 'acme', 'bare' || i, 'bare', 2, (select max_commit_seq from syncpg.sync_partitions where partition = 'acme'),
		       '[{"id":"lists","table":"lists","scopes":{"team_id":["red"]}}]', 0, 0
		  from generate_series(1, $1::integer) as i`, n)
	require.NoError(h.t, err)
	at, err := url.Parse(h.urls[0])
	require.NoError(h.t, err)
	for i := range n {
		conn, err := net.Dial("tcp", at.Host)
		require.NoError(h.t, err)
		h.t.Cleanup(func() { _ = conn.Close() })
		_, err = fmt.Fprintf(conn, "GET /realtime?clientId=bare%d HTTP/1.1\r\nHost: x\r\nX-Actor: bare\r\nConnection: Upgrade\r\n"+
			"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", i+1)
		require.NoError(h.t, err)
		status := make([]byte, len("HTTP/1.1 101"))
		_, err = io.ReadFull(conn, status)
		require.NoError(h.t, err)
		require.Equal(h.t, "HTTP/1.1 101", string(status))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, conn)
		}()
		h.t.Cleanup(func() {
			_ = conn.Close()
			<-ended
		})
	}
}
