package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/ssp2"
)

// soakFor is the environment variable that lets the test below go on for a time, such as
// 30s, with 200 devices.
const soakFor = "SYNCPG_REALTIME_RACE_FOR"

// TestDevicesAtRandom push, pull, acknowledge, ask for more, are present, leave without a
// word and come back to another server. All converge.
func TestDevicesAtRandom(t *testing.T) {
	t.Parallel()
	devices, steps := 30, 100
	var until time.Time
	if long := os.Getenv(soakFor); long != "" {
		d, err := time.ParseDuration(long)
		require.NoError(t, err)
		devices, steps, until = 200, 1<<30, time.Now().Add(d)
	}
	h := newHarbour(t, 2, nil)
	teams := []string{"red", "blue", "green"}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	boats := make([]*boat, devices)
	asked := make([][]string, devices) // teams
	var pushed, deltas atomic.Int64
	var group sync.WaitGroup
	for i := range devices {
		group.Go(func() {
			roll := rand.New(rand.NewPCG(seed, uint64(i))).IntN
			b := h.device(0, fmt.Sprint("device ", i))
			boats[i] = b
			ask := func() {
				if n := len(asked[i]); n < len(teams) {
					team := teams[(i+n)%len(teams)]
					asked[i] = append(asked[i], team)
					assertNoError(t, b.Subscribe(team, "lists", ssp2.ScopeMap{"team_id": {team}}))
				}
			}
			ask()
			b.connect(roll(2))
			b.sync()
			for step := 0; step < steps && !t.Failed() && (until.IsZero() || time.Now().Before(until)); step++ {
				switch roll(64) {
				case 0, 1:
					team := teams[roll(len(teams))]
					c := newListCommit(t, h.schema, fmt.Sprint(team, roll(20)), team)
					c.ClientCommitID = fmt.Sprint("step ", step)
					results, err := b.Push(t.Context(), c)
					assertNoError(t, err)
					if err == nil && results[0].Status != ssp2.PushApplied {
						t.Errorf("%s: %v", b.name, results[0])
					}
					pushed.Add(1)
				case 2:
					ask()
					b.behind = true
				case 3, 4:
					assertNoError(t, b.send(&ssp2.PresencePublish{ScopeKey: "team:" + asked[i][0], Doc: []byte(`{}`)}))
				case 5:
					if roll(2) == 0 {
						b.cut()
					} else {
						b.leave()
					}
					b.connect(roll(2)) // what had arrived is lost
				default:
					assertNoError(t, b.ws.Ping(t.Context()))
					b.drain()
				}
				if b.behind {
					_, err := b.Pull(t.Context())
					assertNoError(t, err)
					if cursor, ok := b.Floor(); ok {
						assertNoError(t, b.send(&ssp2.Ack{Cursor: cursor}))
					}
				}
			}
		})
	}
	group.Wait()
	require.False(t, t.Failed())
	for i, b := range boats {
		b.behind = true
		b.idle()
		rows := map[string]int64{}
		for id, row := range b.Rows("lists") {
			rows[id] = row.Version
		}
		require.Equal(t, h.versions(asked[i]), rows, b.name)
		for _, p := range b.past {
			if p[:5] == "delta" {
				deltas.Add(1)
			}
		}
	}
	t.Logf("%d commits, %d deltas", pushed.Load(), deltas.Load())
	require.Positive(t, deltas.Load())
}

func assertNoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// drain handles what has arrived.
func (b *boat) drain() {
	for {
		select {
		case a := <-b.arrive:
			assertNoError(b.h.t.(*testing.T), b.take(a))
		default:
			return
		}
	}
}

// versions are those of the lists of teams.
func (h *harbour) versions(teams []string) map[string]int64 {
	h.t.Helper()
	rows, err := h.db.Pool.Query(context.Background(), `select _sync_row_id, _sync_server_version from public.lists where team_id = any ($1)`, teams)
	require.NoError(h.t, err)
	versions := map[string]int64{}
	var id string
	var version int64
	for rows.Next() {
		require.NoError(h.t, rows.Scan(&id, &version))
		versions[id] = version
	}
	require.NoError(h.t, rows.Err())
	return versions
}
