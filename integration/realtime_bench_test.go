package integration_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
			for i := range subscribers {
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
