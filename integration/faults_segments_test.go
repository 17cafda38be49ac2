//go:build unix

package integration_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/devpg"
	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// restart ends the server the way an operator does, and starts it again.
func (c *cluster) restart(ctx context.Context) error {
	if err := c.server.Stop(ctx); err != nil {
		return err
	}
	var err error
	c.server, err = devpg.Start(ctx, c.opts)
	return err
}

// TestSegmentsAndTheDatabase: the segments of the database outlive its restart, and are
// served by any server as they were; its crash takes them away, for they are not logged.
// Then nobody is served half of something: who holds a descriptor is told that there is no
// such segment, by id or by URL, and the next pull brings segments that are built anew.
func TestSegmentsAndTheDatabase(t *testing.T) {
	t.Parallel()
	s := worldSchema(t)
	c := newCluster(t, s)
	p := newPlaces(t, c.dsn, s)
	const partition = "crashed"
	devices := 0
	start := func(accept ssp2.Accept) *historyDevice {
		devices++
		d := p.device(t, partition, fmt.Sprint("device ", devices), accept)
		d.network.to, d.network.cdn = devices%2, (devices+1)%2
		return d
	}
	// look is everything that a connection sees after the last restart.
	look := func(see func(conn *pgx.Conn) error) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), c.dsn)
		require.NoError(t, err)
		require.NoError(t, errors.Join(see(conn), conn.Close(t.Context())))
	}
	stored := func() (n int) {
		t.Helper()
		look(func(conn *pgx.Conn) error {
			return conn.QueryRow(t.Context(), `select count(*) from syncpg.sync_segments`).Scan(&n)
		})
		return n
	}
	// held has a device get descriptors, and returns the request that it would download by.
	held := func(d *historyDevice) *http.Request {
		t.Helper()
		d.network.after = 0
		_, err := d.Pull(t.Context())
		require.ErrorIs(t, err, errCut)
		d.network.after = -1
		for _, at := range p.all {
			require.NoError(t, await(func() error {
				if used := at.pool.Stat().AcquiredConns(); used > 0 {
					return fmt.Errorf("%d connections are in use", used)
				}
				return nil
			}))
		}
		return d.network.last
	}
	// download sends the request to every server.
	download := func(d *historyDevice, r *http.Request) (replies []reply) {
		t.Helper()
		for i := range p.all {
			d.network.to, d.network.cdn = i, i
			r.Header.Set("Accept-Encoding", "identity")
			res, err := d.network.RoundTrip(r)
			require.NoError(t, err)
			body, err := io.ReadAll(res.Body)
			require.NoError(t, errors.Join(err, res.Body.Close()))
			replies = append(replies, reply{res.StatusCode, res.Header, body})
		}
		return replies
	}
	// broken breaks the database, and has the servers connect anew.
	broken := func(how func(context.Context) error) {
		t.Helper()
		require.NoError(t, how(t.Context()))
		for _, at := range p.all {
			at.pool.Reset()
		}
	}
	writer := start(rowsSegments)
	for i := range 9 {
		require.NoError(t, writer.deliver(t.Context(), writer.written(t, fmt.Sprint("c", i), fmt.Sprint("i", i), fmt.Sprint("title ", i))))
	}
	for _, lane := range []struct { //nolint:paralleltest // they share a database, and break it
		name   string
		accept ssp2.Accept
	}{
		{"rows", ssp2.AcceptExternalRows},
		{"rows by URL", ssp2.AcceptExternalRows | ssp2.AcceptSignedURLs},
		{"images", ssp2.AcceptExternalRows | ssp2.AcceptSQLite},
		{"images by URL", ssp2.AcceptExternalRows | ssp2.AcceptSQLite | ssp2.AcceptSignedURLs},
	} {
		t.Run(lane.name, func(t *testing.T) {
			first, second, third := start(lane.accept), start(lane.accept), start(lane.accept)
			_, err := first.CatchUp(t.Context())
			require.NoError(t, err)
			before := stored()
			require.Positive(t, before)

			request := held(second)
			broken(c.restart)
			for _, r := range download(second, request) {
				require.Equal(t, http.StatusOK, r.status)
				require.Equal(t, path.Base(request.URL.Path), segment.ID(r.body))
			}
			progress, err := second.CatchUp(t.Context())
			require.NoError(t, err)
			require.Positive(t, progress.Downloads+progress.Fetches)
			require.Equal(t, before, stored(), "nothing is built again")

			request = held(third)
			broken(c.crash)
			require.Zero(t, stored(), "the tables are unlogged")
			for _, r := range download(third, request) {
				r.requireError(t, http.StatusNotFound, ssp2.CodeNotFound)
			}
			_, err = third.CatchUp(t.Context())
			require.NoError(t, err)
			require.Positive(t, stored())
			require.NoError(t, writer.deliver(t.Context(), writer.written(t, lane.name, "after", lane.name)))
			a := newAudit(s, partition)
			look(func(conn *pgx.Conn) error { return a.read(t.Context(), conn) })
			for _, d := range []*historyDevice{first, second, third} {
				_, err := d.CatchUp(t.Context())
				require.NoError(t, err)
				for _, table := range s.Tables {
					require.NoError(t, a.replica(d.device, table.Name, nil))
				}
			}
		})
	}
}
