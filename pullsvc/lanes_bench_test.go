package pullsvc_test

import (
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/pullsvc"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// lanes is a bundle of 100,000 rows in scope y whose service delivers by descriptor, from
// a store that begins anew with every call.
type lanes struct {
	*bundle
	own   *pullsvc.Service // delivers inline, without a store
	store segment.Store
	make  func() segment.Store
}

func newLanes(b *testing.B, kind string) *lanes {
	b.Helper()
	l := &lanes{bundle: load(b, 110_000)}
	l.own = l.Service
	l.make = func() segment.Store {
		if kind == "memory" {
			store, err := segment.NewMemory(segment.MemoryConfig{})
			require.NoError(b, err)
			return store
		}
		l.exec(b, `truncate syncpg.sync_segments, syncpg.sync_segment_chunks`)
		store, err := segment.NewPostgres(l.db.Pool, segment.PostgresConfig{})
		require.NoError(b, err)
		return store
	}
	return l
}

// cold gives the service an empty store, and nothing to remember.
func (l *lanes) cold(b *testing.B) {
	b.Helper()
	l.store = l.make()
	s, err := pullsvc.New(l.db.Pool, pullsvc.Config{Schema: l.schema, Segments: l.store, InlineSegmentMaxBytes: -1})
	require.NoError(b, err)
	l.Service = s
}

func (l *lanes) request(client string, accept ssp2.Accept) pullsvc.Request {
	req := request(sub("s", "items", -1, project("y")))
	req.ClientID, req.Header.Accept, req.Header.LimitSnapshotRows, req.Header.MaxSnapshotPages = client, accept, 50000, 50
	return req
}

// pullRefs bootstraps and returns the descriptors.
func (l *lanes) pullRefs(b *testing.B, client string, accept ssp2.Accept) []ssp2.SegmentRef {
	b.Helper()
	got := l.pull(b, l.request(client, accept))[0]
	require.Nil(b, got.End.BootstrapState)
	require.NotEmpty(b, got.Refs)
	return got.Refs
}

// download reads segments from the store.
func (l *lanes) download(b *testing.B, refs []ssp2.SegmentRef) {
	b.Helper()
	for _, ref := range refs {
		_, body, err := l.store.Open(b.Context(), segment.Ref{Partition: partition, LogEpoch: epoch, ID: ref.SegmentID, ScopeDigest: ref.ScopeDigest})
		require.NoError(b, err)
		n, err := io.Copy(io.Discard, body)
		require.NoError(b, err)
		require.Equal(b, ref.ByteLength, n)
		require.NoError(b, body.Close())
	}
}

// BenchmarkLanes compares both lanes, cold and warm, with the rows lane that keeps
// nothing, and with COPY, which stores nothing either. A warm one is compared with reading
// the store, which it includes.
func BenchmarkLanes(b *testing.B) {
	for _, kind := range []string{"memory", "postgres"} {
		b.Run(kind, func(b *testing.B) {
			l := newLanes(b, kind)
			rows, image := rowsLane, imageLane
			conn, err := l.db.Pool.Acquire(b.Context())
			require.NoError(b, err)
			defer conn.Release()
			var copying, inline, coldRows, coldImage, warmRows, warmImage, readRows, readImage time.Duration
			took := func(into *time.Duration, run func()) {
				start := time.Now()
				run()
				*into += time.Since(start)
			}
			warm := func(accept ssp2.Accept, all, read *time.Duration) {
				var refs []ssp2.SegmentRef
				took(all, func() {
					refs = l.pullRefs(b, "warm", accept)
					took(read, func() { l.download(b, refs) })
				})
			}
			l.cold(b)
			for b.Loop() {
				took(&copying, func() { copyPayloads(b, conn) })
				shared := l.Service
				l.Service = l.own
				took(&inline, func() { bootstrap(b, l.bundle, l.request("inline", rows)) })
				l.Service = shared
				l.cold(b)
				took(&coldRows, func() { l.pullRefs(b, "cold", rows) })
				warm(rows, &warmRows, &readRows)
				took(&coldImage, func() { l.pullRefs(b, "cold", image) })
				warm(image, &warmImage, &readImage)
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(inline.Milliseconds())/float64(b.N), "inline-ms")
			b.ReportMetric(float64(coldRows)/float64(inline), "cold-rows/inline")
			b.ReportMetric(float64(coldRows)/float64(copying), "cold-rows/COPY")
			b.ReportMetric(float64(coldImage)/float64(inline), "cold-image/inline")
			b.ReportMetric(float64(coldImage)/float64(coldRows), "cold-image/cold-rows")
			b.ReportMetric(float64(warmRows.Milliseconds())/float64(b.N), "warm-rows-ms")
			b.ReportMetric(float64(readRows.Milliseconds())/float64(b.N), "of-which-store-ms")
			b.ReportMetric(float64(warmImage)/float64(inline), "warm-image/inline")
			b.ReportMetric(float64(readImage)/float64(inline), "of-which-store")
		})
	}
}

// BenchmarkWarmClients is the memory that eight clients take who bootstrap 100,000 rows
// each at once, from the store of the database to the last byte.
func BenchmarkWarmClients(b *testing.B) {
	const clients = 8
	l := newLanes(b, "postgres")
	for name, accept := range map[string]ssp2.Accept{"rows": rowsLane, "image": imageLane} {
		b.Run(name, func(b *testing.B) {
			l.cold(b)
			l.pullRefs(b, "cold", accept)
			peak(b, func() {
				for b.Loop() {
					var all sync.WaitGroup
					for i := range clients {
						all.Go(func() { l.download(b, l.pullRefs(b, fmt.Sprint("c", i), accept)) })
					}
					all.Wait()
				}
			})
		})
	}
}
