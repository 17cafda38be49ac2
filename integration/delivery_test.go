package integration_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"

	"github.com/syncpg/syncpg/pullsvc/segment"
	"github.com/syncpg/syncpg/ssp2"
)

// answered is what a subscription was answered with.
type answered struct {
	refs    []*ssp2.SegmentRef
	commits int
	end     *ssp2.SubEnd
}

// lists pulls the lists of a team with two rows to a page.
func (d *deposit) lists(t *testing.T, epoch *string, client string, accept ssp2.Accept, pages int32, sub ssp2.Subscription) (a answered) {
	t.Helper()
	req := d.request(epoch)
	req.Header.ClientID = client
	req.Pull = &ssp2.PullHeader{Accept: accept, LimitSnapshotRows: 2, MaxSnapshotPages: pages}
	req.Subscriptions = []ssp2.Subscription{sub}
	for _, f := range d.sync(t, req) {
		switch f := f.(type) {
		case *ssp2.SegmentRef:
			a.refs = append(a.refs, f)
		case *ssp2.Commit:
			a.commits++
		case *ssp2.SubEnd:
			a.end = f
		}
	}
	return a
}

// versions are the rows of downloaded segments: their versions by id.
func (d *deposit) versions(t *testing.T, refs []*ssp2.SegmentRef, fetch func(*ssp2.SegmentRef) reply) map[string]int64 {
	t.Helper()
	table, _ := d.schema.Table("lists")
	into := map[string]int64{}
	for _, ref := range refs {
		r := fetch(ref)
		require.Equal(t, http.StatusOK, r.status, "%s", r.body)
		require.Equal(t, ref.SegmentID, segment.ID(r.body))
		if ref.MediaType == ssp2.MediaSQLite {
			path := filepath.Join(t.TempDir(), "image")
			require.NoError(t, os.WriteFile(path, r.body, 0o600))
			conn, err := sqlite.OpenConn(path, sqlite.OpenReadOnly)
			require.NoError(t, err)
			require.NoError(t, sqlitex.Execute(conn, `select * from lists`, &sqlitex.ExecOptions{ResultFunc: func(s *sqlite.Stmt) error {
				into[s.ColumnText(0)] = s.ColumnInt64(len(table.Columns))
				return nil
			}}))
			require.NoError(t, conn.Close())
			continue
		}
		decoded, err := ssp2.DecodeSegment(r.body)
		require.NoError(t, err)
		for _, row := range slices.Concat(decoded.Blocks...) {
			values, err := ssp2.DecodeRow(table.Wire, row.Row, nil)
			require.NoError(t, err)
			id, _ := table.RowID(values)
			into[id] = row.ServerVersion
		}
	}
	return into
}

const (
	rowsSegments  = ssp2.AcceptInlineRows | ssp2.AcceptExternalRows
	imageSegments = rowsSegments | ssp2.AcceptSQLite
)

// TestImageBootstrap is Appendix B 10: an image has the rows and versions of the rows lane,
// is one and the same for all who ask at its pin, and hands over to the log there.
func TestImageBootstrap(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	epoch := d.fill(t)
	write := func(id, title string, rows ...string) {
		t.Helper()
		req := d.request(epoch)
		req.Commits = []ssp2.PushCommit{d.putLists(t, id, title, rows...)}
		d.sync(t, req)
	}
	write("c2", "again", "b", "d", "e")
	sub := fresh("s", "lists")
	image := d.lists(t, epoch, "image", imageSegments, 1, sub)
	require.Len(t, image.refs, 1)
	require.Equal(t, ssp2.MediaSQLite, image.refs[0].MediaType)
	require.Nil(t, image.refs[0].RowCursor)
	require.Nil(t, image.refs[0].NextRowCursor)
	require.Nil(t, image.end.BootstrapState)
	rows := d.lists(t, epoch, "rows", rowsSegments, 50, sub)
	require.Len(t, rows.refs, 3, "without bit 2 the table comes in pages")
	require.Equal(t, rows.end.NextCursor, image.end.NextCursor)
	direct := func(ref *ssp2.SegmentRef) reply { return d.download(t, ref.SegmentID, "ada", "team-1") }
	require.Equal(t, map[string]int64{"a": 1, "b": 2, "c": 1, "d": 1, "e": 1}, d.versions(t, image.refs, direct))
	require.Equal(t, d.versions(t, rows.refs, direct), d.versions(t, image.refs, direct))
	require.Equal(t, image.refs[0].SegmentID, d.lists(t, epoch, "image 2", imageSegments, 1, sub).refs[0].SegmentID)

	// A bootstrap that began on the rows lane stays there.
	first := d.lists(t, epoch, "resumed", rowsSegments, 1, sub)
	resumed := sub
	resumed.Cursor, resumed.BootstrapState = first.end.NextCursor, first.end.BootstrapState
	rest := d.lists(t, epoch, "resumed", imageSegments, 50, resumed)
	require.Len(t, rest.refs, 2)
	require.Equal(t, d.versions(t, rows.refs, direct), d.versions(t, append(first.refs, rest.refs...), direct))

	write("c3", "more", "f")
	sub.Cursor = image.end.NextCursor
	require.Equal(t, 1, d.lists(t, epoch, "image", imageSegments, 1, sub).commits)
}

// TestSignedDelivery is Appendix B 12, the server's part: with bit 3 descriptors carry URLs
// that need no credentials and end when they say, and a new key takes the place of an old
// one without a URL failing.
func TestSignedDelivery(t *testing.T) {
	t.Parallel()
	d := newDeposit(t)
	epoch := d.fill(t)
	sub := fresh("s", "lists")
	want := map[string]int64{"a": 1, "b": 1, "c": 1}
	byURL := func(ref *ssp2.SegmentRef) reply { return d.get(t, *ref.URL, nil) }
	for _, accept := range []ssp2.Accept{rowsSegments, imageSegments} {
		client := fmt.Sprint("client ", accept)
		for _, ref := range d.lists(t, epoch, client, accept, 50, sub).refs {
			require.Nil(t, ref.URL)
			require.Nil(t, ref.URLExpiresAtMs)
		}
		got := d.lists(t, epoch, client, accept|ssp2.AcceptSignedURLs, 50, sub)
		require.Equal(t, want, d.versions(t, got.refs, byURL))
		for _, ref := range got.refs {
			require.Equal(t, d.now.Load()+segment.DefaultURLTTL.Milliseconds(), *ref.URLExpiresAtMs)
		}
	}

	old := d.lists(t, epoch, "client", rowsSegments|ssp2.AcceptSignedURLs, 50, sub).refs
	base, _, _ := strings.Cut(*old[0].URL, "/segments/")
	rotate := func(previous []byte) {
		t.Helper()
		signer, err := segment.NewSigner(segment.SignerConfig{
			BaseURL: base, Key: bytes.Repeat([]byte("n"), 32), PreviousKey: previous, Clock: d.cfg.Clock,
		})
		require.NoError(t, err)
		d.cfg.SegmentURLs = signer
		d.restart(t)
	}
	rotate(depositKey)
	require.Equal(t, want, d.versions(t, old, byURL))
	d.now.Add((segment.DefaultURLTTL + 2*time.Minute).Milliseconds())
	for _, ref := range old {
		byURL(ref).requireError(t, http.StatusForbidden, ssp2.CodeForbidden)
	}
	again := d.lists(t, epoch, "client", rowsSegments|ssp2.AcceptSignedURLs, 50, sub).refs
	require.Equal(t, old[0].SegmentID, again[0].SegmentID)
	rotate(nil)
	require.Equal(t, want, d.versions(t, again, byURL), "the key that signs now is the new one")
	// The path is the id, whatever way it is written; anything else is nothing.
	id := again[0].SegmentID
	_, query, _ := strings.Cut(*again[0].URL, "?")
	require.Equal(t, http.StatusOK, d.get(t, base+"/segments/"+strings.ReplaceAll(id, ":", "%3A")+"?"+query, nil).status)
	for _, other := range []string{"..%2F" + id, id + "%00", id + "%2F", strings.ToUpper(id), url.PathEscape("../" + id), "%20" + id} {
		d.get(t, base+"/segments/"+other+"?"+query, nil).requireError(t, http.StatusForbidden, ssp2.CodeForbidden)
		d.get(t, base+"/segments/"+other, as("ada", "team-1")).requireError(t, http.StatusNotFound, ssp2.CodeNotFound)
	}
	// A range is not served in part, and HEAD tells what GET would.
	header := as("ada", "team-1")
	header.Set("Range", "bytes=0-1")
	require.Equal(t, http.StatusOK, d.get(t, base+"/segments/"+id, header).status)
}
