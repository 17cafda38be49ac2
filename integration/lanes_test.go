package integration_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

// lanes are the ways that a large scope comes to a client (§4.2).
var lanes = []struct {
	name   string
	accept ssp2.Accept
}{
	{"rows, inline", ssp2.AcceptInlineRows},
	{"rows, by id", ssp2.AcceptExternalRows},
	{"rows, by URL", ssp2.AcceptExternalRows | ssp2.AcceptSignedURLs},
	{"images, by id", imageSegments},
	{"images, by URL", imageSegments | ssp2.AcceptSignedURLs},
}

// sea is places over a database, with a writer.
type sea struct {
	*places
	t      *testing.T
	db     *pgtest.DB
	schema *schema.Schema
	writer *historyDevice
	roll   dice
}

func newSea(t *testing.T) *sea {
	t.Helper()
	s := worldSchema(t)
	db := pgtest.New(t, pgtest.Options{Setup: installWorld(s), TemplateKey: "the schema of the world"})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := &sea{places: newPlaces(t, db.DSN, s), t: t, db: db, schema: s, roll: rand.New(rand.NewPCG(seed, 1)).IntN}
	w.writer = w.device(t, "sea", "writer", rowsSegments)
	w.write(60)
	for i := range 7 {
		require.NoError(t, w.writer.deliver(t.Context(), w.writer.written(t, fmt.Sprint("item ", i), fmt.Sprint("item ", i), "x")))
	}
	return w
}

// write pushes commits of whatever.
func (w *sea) write(n int) {
	w.t.Helper()
	for range n {
		c, err := w.writer.newCommit(w.roll)
		require.NoError(w.t, err)
		require.NoError(w.t, w.writer.deliver(w.t.Context(), c))
	}
}

// equal says that devices have the rows of the server at their versions.
func (w *sea) equal(t *testing.T, devices ...*historyDevice) {
	t.Helper()
	a, err := auditPartition(t.Context(), w.db.Pool, w.schema, "sea")
	require.NoError(t, err)
	for _, d := range devices {
		for _, table := range w.schema.Tables {
			require.NoError(t, a.replica(d.device, table.Name, nil))
			cursor, complete := d.Cursor(table.Name)
			require.True(t, complete)
			require.Equal(t, a.maxSeq, cursor)
		}
	}
}

// TestEveryLaneIsTheSame is Appendix B 9, 10 (a), (b), (d) and 12 (a): on each lane a client
// ends with the rows of the server at their versions, goes on by increments from the pin, and
// may push on top of the versions that it was sent. An image is one for all who ask at its
// pin, at any server, and its table one answer.
func TestEveryLaneIsTheSame(t *testing.T) {
	t.Parallel()
	w := newSea(t)
	// Servers that count alike take the same segments of earlier lanes for too old.
	w.all[1].cfg.CatchUpChanges = w.all[0].cfg.CatchUpChanges
	w.restart(1)
	for i, lane := range lanes { //nolint:paralleltest // each writes, and expects nothing else to be written
		t.Run(lane.name, func(t *testing.T) {
			d, other := w.device(t, "sea", fmt.Sprint("device ", i), lane.accept), w.device(t, "sea", fmt.Sprint("other ", i), lane.accept)
			other.network.to, other.network.cdn = 1, 2
			images, urls := lane.accept&ssp2.AcceptSQLite != 0, lane.accept&ssp2.AcceptSignedURLs != 0
			p, err := d.Pull(t.Context())
			require.NoError(t, err)
			_, complete := d.Cursor("items")
			require.Equal(t, images, complete, "an image is a table, and pages are two rows of it")
			p2, err := d.CatchUp(t.Context())
			require.NoError(t, err)
			w.equal(t, d)
			require.Equal(t, images, p.Images+p2.Images > 0)
			require.Equal(t, urls, p.Fetches+p2.Fetches > 0)
			require.Equal(t, lane.accept == ssp2.AcceptExternalRows || lane.accept == imageSegments, p.Downloads+p2.Downloads > 0)

			_, err = other.CatchUp(t.Context())
			require.NoError(t, err)
			if lane.accept != ssp2.AcceptInlineRows {
				require.NotEmpty(t, other.network.asked)
				require.Subset(t, d.network.asked, other.network.asked, "one segment for all; the other place has more of them inline")
			}

			// Versions are as good for baseVersion as those of commits.
			version := d.Rows("items")["item 1"].Version
			push := func(id string, base int64) ssp2.PushResult {
				c := d.written(t, id, "item 1", id)
				c.commit.Operations[0].BaseVersion = &base
				require.NoError(t, d.deliver(t.Context(), c))
				return *c.answer
			}
			require.Equal(t, ssp2.PushApplied, push("fits", version).Status)
			stale := push("stale", version-1)
			require.Equal(t, ssp2.PushRejected, stale.Status)
			require.Equal(t, string(ssp2.CodeVersionConflict), stale.Results[0].Code)
			require.Equal(t, version+1, stale.Results[0].ServerVersion)

			w.write(5)
			for _, d := range []*historyDevice{d, other} {
				p, err = d.CatchUp(t.Context())
				require.NoError(t, err)
				require.Positive(t, p.Commits)
				require.Zero(t, p.Segments)
			}
			w.equal(t, d, other)
		})
	}
}

// TestSpoiledSegments is Appendix B 10 (c) and 12 (b), (c): bytes that are not those of the
// descriptor, and URLs that have ended or lead to nothing, end the pull without anything
// kept; nothing is tried another way, and the next pull converges.
func TestSpoiledSegments(t *testing.T) {
	t.Parallel()
	w := newSea(t)
	for i, lane := range lanes[1:] {
		t.Run(lane.name, func(t *testing.T) {
			t.Parallel()
			d := w.device(t, "sea", fmt.Sprint("spoiled ", i), lane.accept)
			aborted := func(err, want error, requests int) {
				t.Helper()
				require.ErrorIs(t, err, want)
				require.Len(t, d.network.asked, requests)
				for _, table := range w.schema.Tables {
					require.Empty(t, d.Rows(table.Name))
					cursor, _ := d.Cursor(table.Name)
					require.Equal(t, int64(-1), cursor)
				}
			}
			d.network.spoil = true
			_, err := d.Pull(t.Context())
			aborted(err, client.ErrProtocol, 1)
			d.network.spoil = false
			d.network.after, d.network.skip = 20, 0
			_, err = d.Pull(t.Context())
			aborted(err, errCut, 2)
			d.network.after = -1
			if lane.accept&ssp2.AcceptSignedURLs != 0 {
				// The clock of the device is ahead by as much as a URL lives.
				cfg := d.cfg
				cfg.clock = func() time.Time { return w.clock().Add(15 * time.Minute) }
				kept := d.device
				d.device, err = newDevice(w.schema, cfg)
				require.NoError(t, err)
				require.NoError(t, d.subscribeAll())
				require.NoError(t, d.Acquire(t.Context()))
				_, err = d.Pull(t.Context())
				aborted(err, client.ErrURLEnded, 2)
				d.device = kept
			}
			_, err = d.CatchUp(t.Context())
			require.NoError(t, err)
			w.equal(t, d)
			for _, asked := range d.network.asked {
				require.Equal(t, lane.accept&ssp2.AcceptSignedURLs != 0, "http://"+asked[:len("cdn.test")] == cdn, asked)
			}
		})
	}
}

// TestReconnectIsCaughtUpBySegments is Appendix B 7: the log went on far past limitCommits
// while a client was away, though the horizon did not; its socket says that it must sync, the
// round over it brings segments at a new pin instead of the log, and deltas go on from there.
func TestReconnectIsCaughtUpBySegments(t *testing.T) {
	t.Parallel()
	h := newHarbour(t, 2, func(cfg *syncpg.Config) { cfg.CatchUpChanges, cfg.InlineSegmentMaxBytes = 20, -1 })
	a, b := h.device(0, "a", "red").connect(0), h.device(1, "b", "red").connect(1)
	a.sync()
	b.sync()
	a.push("l1", "l2", "doomed")
	a.idle()
	b.idle()
	h.sameRows(a, b)
	b.leave()
	again := func(i int, id string) ssp2.PushCommit {
		c := newListCommit(t, h.schema, id, "red")
		c.ClientCommitID = fmt.Sprint(id, " again ", i)
		return c
	}
	gone := ssp2.PushCommit{ClientCommitID: "gone", Operations: []ssp2.Operation{{Table: "lists", RowID: "doomed", Op: ssp2.OpDelete}}}
	commits := []ssp2.PushCommit{gone}
	for i := range 30 {
		commits = append(commits, again(i, "l1"), again(i, "l2"))
	}
	results, err := a.Push(t.Context(), commits...)
	require.NoError(t, err)
	for _, r := range results {
		require.Equal(t, ssp2.PushApplied, r.Status)
	}
	a.idle()
	pinned := h.head()

	b.connect(1)
	require.True(t, b.hello.RequiresSync)
	b.past = nil
	a.push("during")
	require.Equal(t, []string{"wake catchup-required"}, b.calm())
	b.behind = false
	p, err := b.CatchUp(t.Context())
	require.NoError(t, err)
	require.Positive(t, p.Segments)
	require.Positive(t, p.Downloads)
	require.Zero(t, p.Commits, "none of the log")
	a.idle()
	h.sameRows(a, b)
	require.NotContains(t, b.Rows("lists"), "doomed")
	cursor, _ := b.Floor()
	require.Equal(t, pinned+1, cursor)
	require.NoError(t, b.send(&ssp2.Ack{Cursor: cursor}))
	b.calm()
	b.past = nil
	a.push("after", "and after")
	require.Equal(t, []string{fmt.Sprint("delta ", pinned+2), fmt.Sprint("delta ", pinned+3)}, b.calm())
	a.idle()
	h.sameRows(a, b)
}
