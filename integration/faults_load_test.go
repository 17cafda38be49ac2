package integration_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

// Two hundred devices on twenty partitions share four connections: everything is
// answered, what a wave of them took is given back, and the next one takes no more.
// Not parallel: it counts goroutines and bytes of the process.
func TestManyDevicesShareFewConnections(t *testing.T) { //nolint:paralleltest // see above
	const waves, devicesEach, partitions, stepsEach = 2, 200, 20, 4
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	n, err := startNode(db.DSN, 4, worldConfig(s))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.stop()) })
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)

	goroutines, heaps := runtime.NumGoroutine(), []uint64{}
	for wave := range waves {
		transport := &http.Transport{MaxIdleConnsPerHost: devicesEach}
		var devices []*device
		for i := range devicesEach {
			d, err := newDevice(s, deviceConfig{
				url: "http://" + n.addr, partition: fmt.Sprint("partition ", i%partitions), actor: fmt.Sprint("actor ", i),
				id: fmt.Sprint("device ", wave, " ", i), wire: ssp2.WireVersion(1 + i%3), transport: transport,
			})
			require.NoError(t, err)
			require.NoError(t, d.subscribeAll())
			devices = append(devices, d)
		}
		var mu sync.Mutex
		var took []time.Duration
		var all sync.WaitGroup
		start := time.Now()
		for i, d := range devices {
			roll := rand.New(rand.NewPCG(seed, uint64(i))).IntN
			all.Go(func() {
				for step := range 1 + stepsEach {
					begin := time.Now()
					do := func() error { return d.syncOnce(t.Context(), roll) }
					if step == 0 {
						do = func() error { return d.Acquire(t.Context()) }
					}
					if err := do(); err != nil {
						t.Errorf("device %s: %v", d.id, err)
						return
					}
					mu.Lock()
					took = append(took, time.Since(begin))
					mu.Unlock()
				}
			})
		}
		all.Wait()
		require.False(t, t.Failed())
		slices.Sort(took)
		t.Logf("wave %d: %d requests in %s, half of them within %s, 95 of 100 within %s",
			wave, len(took), time.Since(start), took[len(took)/2], took[len(took)*95/100])
		require.NoError(t, n.atRest())

		for i := range partitions {
			a, err := auditPartition(t.Context(), db.Pool, s, fmt.Sprint("partition ", i))
			require.NoError(t, err)
			for _, d := range devices {
				if d.partition == a.partition {
					require.NoError(t, a.device(d))
				}
			}
		}
		devices = nil
		transport.CloseIdleConnections()
		require.NoError(t, await(func() error {
			// The pools of node and test have some of their own.
			if now := runtime.NumGoroutine(); now > goroutines+10 {
				return fmt.Errorf("%d goroutines before, %d after", goroutines, now)
			}
			return nil
		}))
		for range 2 { // what is in a sync.Pool outlives one collection
			runtime.GC()
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		heaps = append(heaps, m.HeapAlloc)
	}
	require.Less(t, heaps[1], heaps[0]+8<<20)
}
