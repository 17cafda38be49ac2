package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/retention"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// TestHorizonForcesABootstrap is scenario 8 of the protocol's appendix, with the floors of
// §4.6: a client that stayed away for longer than the active window is reset and bootstraps
// anew, while one whose cursor is the horizon goes on by increments.
func TestHorizonForcesABootstrap(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	f := newFront(t)
	var now atomic.Int64
	now.Store(1_790_000_000_000)
	cfg := worldConfig(s)
	cfg.Clock = func() time.Time { return time.UnixMilli(now.Load()) }
	f.serve(t, db.Pool, cfg)
	const partition, day = "pruned", 24 * 3_600_000
	for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} { //nolint:paralleltest // they share a clock
		t.Run(fmt.Sprint("wire version ", wire), func(t *testing.T) {
			partition := fmt.Sprint(partition, wire)
			writer := newRestoredDevice(t, s, f.url, partition, "writer", wire)
			absent := newRestoredDevice(t, s, f.url, partition, "absent", wire, "items")
			present := newRestoredDevice(t, s, f.url, partition, "present", wire, "items")
			written := 0
			push := func(n int, commit func(id string) *sentCommit) {
				for n > 0 {
					var batch []*sentCommit
					for range min(n, 500) {
						written++
						batch = append(batch, commit(fmt.Sprint("c", written)))
					}
					require.NoError(t, writer.deliver(t.Context(), batch...))
					n -= len(batch)
				}
			}
			write := func(n int) {
				push(n, func(id string) *sentCommit {
					return writer.written(t, id, fmt.Sprint("i", written%50), fmt.Sprint("title ", written))
				})
			}
			// What nobody else subscribes to makes the log long, and nobody's catch-up.
			fill := func(n int) {
				push(n, func(id string) *sentCommit {
					return writer.upserted(t, id, "vault", []ssp2.Value{textValue(fmt.Sprint("v", written%50)), textValue("ada"), textValue(id)})
				})
			}
			write(39)
			require.NoError(t, writer.deliver(t.Context(), writer.written(t, "doomed", "doomed", "to be deleted"))) // 40
			gone := &sentCommit{commit: ssp2.PushCommit{ClientCommitID: "delete", Operations: []ssp2.Operation{{Table: "items", RowID: "doomed", Op: ssp2.OpDelete}}}}
			for _, d := range []*restoredDevice{absent, present} {
				_, err := d.CatchUp(t.Context())
				require.NoError(t, err)
			}
			require.Contains(t, absent.titles(), "doomed")
			require.NoError(t, writer.deliver(t.Context(), gone)) // 41
			write(9)                                              // 50
			now.Add(15 * day)
			_, err := present.CatchUp(t.Context())
			require.NoError(t, err)
			boundary, _ := present.Cursor("items")
			require.Equal(t, int64(50), boundary)

			// The newest 1000 stay, so nothing goes yet.
			fill(940)
			prune := func() retention.Result {
				result, err := f.server.Retention().Prune(t.Context(), partition, nil)
				require.NoError(t, err)
				return result
			}
			require.Zero(t, prune().Horizon)
			// Then the cursor of the client that is there holds what it has not pulled.
			fill(550)
			write(50)
			require.Equal(t, boundary, prune().Horizon)

			p, err := present.CatchUp(t.Context())
			require.NoError(t, err)
			require.Zero(t, p.Segments, "increments from the horizon on")
			require.Positive(t, p.Commits)

			before, err := absent.Pull(t.Context())
			require.NoError(t, err)
			require.Zero(t, before.Commits+before.Segments)
			cursor, _ := absent.Cursor("items")
			require.Equal(t, int64(-1), cursor, "reset")
			require.Contains(t, absent.titles(), "doomed", "which deletes nothing yet (§4.6)")
			p, err = absent.CatchUp(t.Context())
			require.NoError(t, err)
			require.Positive(t, p.Segments)
			require.Equal(t, present.titles(), absent.titles())
			require.Len(t, absent.titles(), 50)

			// A sent commit of before the horizon is known all the same (§2.3).
			require.NoError(t, writer.deliver(t.Context(), writer.sent[:20]...))
			// By force, when nobody comes for too long.
			now.Add(31 * day)
			require.Equal(t, int64(590), prune().Horizon)
			_, err = present.Pull(t.Context())
			require.NoError(t, err)
			newest, _ := present.Cursor("items")
			require.Equal(t, int64(1590), newest, "one at the newest commit is never reset")
		})
	}
}

// TestBootstrapResumesElsewhere is scenario 5, on every lane: a bootstrap of many pages and
// tables is cut in the middle of one, or of a download, and goes on at another instance from
// the pin that it had, while rows are written, deleted and moved, and the log is pruned as
// far as the protocol allows. It ends as one that nothing interrupts.
func TestBootstrapResumesElsewhere(t *testing.T) {
	t.Parallel()
	for _, lane := range lanes {
		t.Run(lane.name, func(t *testing.T) {
			t.Parallel()
			w := newSea(t)
			// Keeps nothing but what the cursors of clients hold.
			pruner, err := retention.New(w.db.Pool, retention.Config{Policy: retention.Policy{KeepCommits: -1}, Clock: w.clock})
			require.NoError(t, err)
			h := &history{pool: w.db.Pool, schema: w.schema, partition: "sea", places: w.places}
			a := newAudit(w.schema, "sea")
			d := w.device(t, "sea", "interrupted", lane.accept)
			pins := map[string]int64{}
			rounds, resumed := 0, 0
			for open := true; open; rounds++ {
				require.Less(t, rounds, 200)
				n := d.network
				n.to, n.cdn, n.skip, n.after = rounds%len(w.all), (rounds+1)%len(w.all), 0, -1
				switch w.roll(3) {
				case 0:
					n.path, n.after = "/sync", 200+w.roll(600)
				case 1:
					n.path, n.after, n.skip = "/segments/", w.roll(200), w.roll(2)
				}
				if _, err := d.Pull(t.Context()); err != nil {
					require.True(t, tolerable(err) || errors.Is(err, errCut), "%v", err)
				}
				open = false
				for _, table := range w.schema.Tables {
					cursor, complete := d.Cursor(table.Name)
					open = open || !complete
					pin, begun := pins[table.Name]
					if begun && !complete {
						require.Equal(t, pin, cursor, "the pin of %s", table.Name)
						resumed++
					}
					if !begun && cursor >= 0 {
						pins[table.Name] = cursor
					}
				}
				if rounds < 20 {
					w.write(1)
					require.NoError(t, h.move(t.Context(), w.roll))
					require.NoError(t, a.read(t.Context(), w.db.Pool))
					_, err = pruner.Prune(t.Context(), "sea", nil)
					require.NoError(t, err)
				}
				w.restart((rounds + 1) % len(w.all)) // which then remembers nothing
			}
			if lane.accept&ssp2.AcceptSQLite == 0 {
				require.Positive(t, resumed)
			}
			d.network.after = -1
			smooth := w.device(t, "sea", "uninterrupted", lane.accept)
			require.NoError(t, a.read(t.Context(), w.db.Pool))
			for _, d := range []*historyDevice{d, smooth} {
				_, err = d.CatchUp(t.Context())
				require.NoError(t, err)
				for _, table := range w.schema.Tables {
					require.NoError(t, a.replica(d.device, table.Name, nil))
					cursor, _ := d.Cursor(table.Name)
					require.Equal(t, a.maxSeq, cursor)
				}
			}
			t.Logf("%d rounds, %d moves, horizon %d", rounds, h.moves, a.horizon)
		})
	}
}

// TestPruningPastABootstrap: a bootstrap that stopped between two pages, and whose pin is
// below the horizon when it goes on, has to begin anew (§4.7) in a way that makes the client
// clear what it has (§5.6): a row of the first page was deleted, and no commit tells.
func TestPruningPastABootstrap(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	pruner, err := retention.New(db.Pool, retention.Config{Policy: retention.Policy{KeepCommits: -1, ActiveWindow: -1}})
	require.NoError(t, err)
	for name, change := range map[string]func(*syncpg.Config){
		"with a store": func(*syncpg.Config) {}, "without": func(c *syncpg.Config) { c.SegmentTTL = -1 },
	} {
		f := newFront(t)
		cfg := worldConfig(s)
		change(&cfg)
		f.serve(t, db.Pool, cfg)
		for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} {
			t.Run(fmt.Sprint("wire version ", wire, " ", name), func(t *testing.T) {
				t.Parallel()
				partition := fmt.Sprint("passed ", wire, name)
				writer := newRestoredDevice(t, s, f.url, partition, "writer", wire)
				for i := range 6 {
					require.NoError(t, writer.deliver(t.Context(), writer.written(t, fmt.Sprint("c", i), fmt.Sprint("i", i), "title")))
				}
				d, err := newDevice(s, deviceConfig{url: f.url, partition: partition, actor: "ada", id: "slow", wire: wire, limits: [3]int32{100, 2, 1}})
				require.NoError(t, err)
				require.NoError(t, d.Acquire(t.Context()))
				require.NoError(t, d.Subscribe("items", "items", ssp2.ScopeMap{"team": {"red"}}))
				_, err = d.Pull(t.Context())
				require.NoError(t, err)
				require.Len(t, d.Rows("items"), 2)
				for id := range d.Rows("items") {
					require.NoError(t, writer.deliver(t.Context(), &sentCommit{commit: ssp2.PushCommit{
						ClientCommitID: "delete " + id, Operations: []ssp2.Operation{{Table: "items", RowID: id, Op: ssp2.OpDelete}},
					}}))
				}
				result, err := pruner.Prune(t.Context(), partition, nil)
				require.NoError(t, err)
				require.Equal(t, int64(8), result.Horizon)
				_, err = d.CatchUp(t.Context())
				require.NoError(t, err)
				require.Len(t, d.Rows("items"), 4)
			})
		}
	}
}

// TestBootstrapSeedsVersions is scenario 9: versions that came in segments are as good for
// baseVersion as those of commits (§5.6, §6.2), also when the commits that made them are
// pruned.
func TestBootstrapSeedsVersions(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	f := newFront(t)
	f.serve(t, db.Pool, worldConfig(s))
	pruner, err := retention.New(db.Pool, retention.Config{Policy: retention.Policy{KeepCommits: -1, ActiveWindow: -1}})
	require.NoError(t, err)
	for _, wire := range []ssp2.WireVersion{ssp2.WireV1, ssp2.WireV2, ssp2.WireV3} {
		t.Run(fmt.Sprint("wire version ", wire), func(t *testing.T) {
			t.Parallel()
			partition := fmt.Sprint("seeded", wire)
			writer := newRestoredDevice(t, s, f.url, partition, "writer", wire)
			for i := range 3 {
				require.NoError(t, writer.deliver(t.Context(), writer.written(t, fmt.Sprint("c", i), "i", fmt.Sprint("title ", i))))
			}
			result, err := pruner.Prune(t.Context(), partition, nil)
			require.NoError(t, err)
			require.Equal(t, int64(3), result.Horizon)

			fresh := newRestoredDevice(t, s, f.url, partition, "fresh", wire)
			p, err := fresh.CatchUp(t.Context())
			require.NoError(t, err)
			require.Zero(t, p.Commits)
			version := fresh.Rows("items")["i"].Version
			require.Equal(t, int64(3), version)
			push := func(id string, base int64) ssp2.PushResult {
				c := fresh.written(t, id, "i", id)
				c.commit.Operations[0].BaseVersion = &base
				require.NoError(t, fresh.deliver(t.Context(), c))
				return *c.answer
			}
			require.Equal(t, ssp2.PushApplied, push("fits", version).Status)
			stale := push("stale", version-1)
			require.Equal(t, ssp2.PushRejected, stale.Status)
			require.Equal(t, string(ssp2.CodeVersionConflict), stale.Results[0].Code)
			require.Equal(t, version+1, stale.Results[0].ServerVersion)
			require.NotEmpty(t, stale.Results[0].ServerRow)
		})
	}
}

// auditRows audits a partition whose log is not whole: rows against their columns, and the
// scope index against what is left of the log.
func auditRows(t *testing.T, pool *pgxpool.Pool, s *schema.Schema, partition string) *audit {
	t.Helper()
	a := &audit{schema: s, partition: partition, rows: map[rowRef]logRow{}, folded: map[rowRef]logRow{}}
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, a.tables(t.Context(), tx))
	a.problems = nil // that the log does not have all of them
	require.NoError(t, a.index(t.Context(), tx))
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, errors.Join(a.problems...))
	return a
}

// TestPruningUnderRunningClients: logs that are pruned and compacted all the time, further
// than the protocol allows, while clients of all wire versions push and pull. They are reset
// now and then, and end with the rows of the server.
func TestPruningUnderRunningClients(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	n, err := startNode(db.DSN, 4, worldConfig(s))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.stop()) })
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	const partition, commits = "pruned all the time", 25
	var devices []*device
	for i := range 6 {
		d, err := newDevice(s, deviceConfig{
			url: "http://" + n.addr, partition: partition, actor: fmt.Sprint("actor ", i), id: fmt.Sprint("device ", i),
			wire: ssp2.WireVersion(1 + i%3), transport: transport,
		})
		require.NoError(t, err)
		require.NoError(t, d.subscribeAll())
		require.NoError(t, d.Acquire(t.Context()))
		devices = append(devices, d)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	// A clock in the future makes every commit old.
	keeper, err := retention.New(db.Pool, retention.Config{
		Policy: retention.Policy{KeepCommits: 3, ActiveWindow: -1, CompactAfter: time.Minute}, BatchRows: 5,
		Clock: func() time.Time { return time.Now().Add(time.Hour) },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	errs := make(chan error, len(devices)+1)
	var wg sync.WaitGroup
	var answered, resets, prunes atomic.Int64
	turn := make(chan struct{}, 1)
	for i, d := range devices {
		roll := rand.New(rand.NewPCG(seed, uint64(i))).IntN
		wg.Go(func() {
			for len(d.sent) < commits || len(d.unanswered()) > 0 || prunes.Load() < 3 {
				if err := d.syncOnce(ctx, roll); err != nil && !errors.Is(err, client.ErrReset) {
					errs <- fmt.Errorf("device %s: %w", d.id, err)
					cancel()
					return
				}
				if c, _ := d.Cursor("items"); c < 0 {
					resets.Add(1)
				}
				answered.Add(1)
				select {
				case turn <- struct{}{}:
				default:
				}
			}
		})
	}
	done := make(chan struct{})
	var total retention.Result
	go func() {
		defer close(done)
		for {
			select {
			case <-turn:
			case <-ctx.Done():
				return
			}
			r, err := keeper.Prune(ctx, partition, nil)
			if err != nil {
				if ctx.Err() == nil {
					errs <- err
					cancel()
				}
				return
			}
			total.Commits += r.Commits
			total.Compacted += r.Compacted
			if r.Commits > 0 {
				prunes.Add(1)
			}
		}
	}()
	wg.Wait()
	cancel()
	<-done
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	require.False(t, t.Failed())

	a := auditRows(t, db.Pool, s, partition)
	for _, d := range devices {
		for rounds := 0; ; rounds++ { // a reset counts as a round that brought nothing
			require.Less(t, rounds, 5)
			_, err := d.CatchUp(t.Context())
			require.NoError(t, err)
			if c, complete := d.Cursor("items"); complete && c >= 0 {
				break
			}
		}
		for _, table := range s.Tables {
			require.NoError(t, a.replica(d, table.Name, nil))
		}
	}
	t.Logf("%d rounds, %d commits pruned, %d changes compacted, %d rounds before a bootstrap", answered.Load(), total.Commits, total.Compacted, resets.Load())
}
