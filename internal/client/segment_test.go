package client_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/ssp2"
)

// lanes is a fake server, and a client that takes everything it may offer.
type lanes struct {
	*fake
	client *client.Client
	image  *client.Image // what any image opens as; nil: it does not
	now    time.Time
	hosted map[string][]byte // of the host of URLs, by path
	host   *httptest.Server
	asked  []*http.Request // of it
}

func newLanes(t *testing.T) *lanes {
	t.Helper()
	f, _ := setup(t)
	l := &lanes{fake: f, now: time.UnixMilli(1_000_000), hosted: map[string][]byte{}}
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	l.host = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.asked = append(l.asked, r)
		body, ok := l.hosted[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(body)
	}))
	t.Cleanup(l.host.Close)
	var err error
	l.client, err = client.New(client.Config{
		URL: server.URL + "/mount", Header: http.Header{"Authorization": {"Bearer x"}}, ClientID: "c1", Schema: f.schema, Wire: ssp2.WireV2,
		HTTP: server.Client(), Accept: 15, Clock: func() time.Time { return l.now },
		OpenImage: func([]byte, string) (*client.Image, error) {
			if l.image == nil {
				return nil, errors.New("not a database")
			}
			return l.image, nil
		},
	})
	require.NoError(t, err)
	f.acquire(l.client)
	require.NoError(t, l.client.Subscribe("s", "notes", ok7))
	return l
}

// describe stores a segment and returns its descriptor, as the only one of a bootstrap.
func (l *lanes) describe(media ssp2.MediaType, body []byte, rows int64) *ssp2.SegmentRef {
	sum := sha256.Sum256(body)
	ref := &ssp2.SegmentRef{
		SegmentID: "sha256:" + hex.EncodeToString(sum[:]), MediaType: media, Table: "notes", ByteLength: int64(len(body)),
		RowCount: rows, AsOfCommitSeq: 5, ScopeDigest: ssp2.ScopeDigest(ok7),
	}
	l.segments[ref.SegmentID] = body
	return ref
}

// signed moves a segment to the host of URLs, until 1_000_100 ms.
func (l *lanes) signed(ref *ssp2.SegmentRef) *ssp2.SegmentRef {
	l.hosted["/s"] = l.segments[ref.SegmentID]
	delete(l.segments, ref.SegmentID)
	ref.URL, ref.URLExpiresAtMs = new(l.host.URL+"/s?st=token"), new(int64(1_000_100))
	return ref
}

func (l *lanes) pull(frames ...ssp2.Frame) (client.Progress, error) {
	l.t.Helper()
	l.respond(ssp2.WireV2, append([]ssp2.Frame{header, active(true)}, append(frames, &ssp2.SubEnd{NextCursor: 5})...)...)
	return l.client.Pull(l.t.Context())
}

// aborted checks that nothing of a pull was kept.
func (l *lanes) aborted() {
	l.t.Helper()
	require.Empty(l.t, l.client.Rows("notes"))
	cursor, _ := l.client.Cursor("s")
	require.Equal(l.t, int64(-1), cursor)
}

func (l *lanes) goodImage() *client.Image {
	return &client.Image{
		Tables: []string{"notes", "_syncular_segment"},
		Segment: []map[string]any{{
			"format": int64(1), "table": "notes", "schemaVersion": int64(4), "asOfCommitSeq": int64(5),
			"scopeDigest": ssp2.ScopeDigest(ok7), "rowCount": int64(1),
		}},
		Columns: []string{"id", "team", "text", "_syncular_version"},
		Rows:    [][]any{{"a", int64(7), nil, int64(3)}},
	}
}

func TestImageIsImported(t *testing.T) {
	t.Parallel()
	l := newLanes(t)
	l.image = l.goodImage()
	p, err := l.pull(l.describe(ssp2.MediaSQLite, []byte("image"), 1))
	require.NoError(t, err)
	require.Equal(t, client.Progress{Rounds: 1, Segments: 1, SegmentRows: 1, Images: 1, Downloads: 1}, p)
	row := l.client.Rows("notes")["a"]
	require.Equal(t, int64(3), row.Version)
	require.Equal(t, int64(7), row.Values[1].Int)
	require.True(t, row.Values[2].Null)
}

func TestImageIsCheckedAgainstItsDescriptor(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*client.Image, *ssp2.SegmentRef){
		"has the tables":       func(i *client.Image, _ *ssp2.SegmentRef) { i.Tables = append(i.Tables, "more") },
		"says of itself":       func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment = append(i.Segment, i.Segment[0]) },
		"as format":            func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment[0]["format"] = int64(2) },
		"as schemaVersion":     func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment[0]["schemaVersion"] = int64(3) },
		"as asOfCommitSeq":     func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment[0]["asOfCommitSeq"] = int64(4) },
		"as scopeDigest":       func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment[0]["scopeDigest"] = "x" },
		"as rowCount":          func(i *client.Image, _ *ssp2.SegmentRef) { i.Segment[0]["rowCount"] = int64(2) },
		"schema_mismatch":      func(i *client.Image, _ *ssp2.SegmentRef) { i.Columns[0], i.Columns[1] = "team", "id" },
		"has 0 rows":           func(i *client.Image, _ *ssp2.SegmentRef) { i.Rows = nil },
		"has the row [a 7":     func(i *client.Image, _ *ssp2.SegmentRef) { i.Rows[0][1] = "7" },
		"has the row [<nil>":   func(i *client.Image, _ *ssp2.SegmentRef) { i.Rows[0][0] = nil },
		"has the row [a 7 <ni": func(i *client.Image, _ *ssp2.SegmentRef) { i.Rows[0][3] = int64(0) },
		"outside":              func(i *client.Image, _ *ssp2.SegmentRef) { i.Rows[0][1] = int64(8) },
		"with a row cursor":    func(_ *client.Image, f *ssp2.SegmentRef) { f.NextRowCursor = new("x") },
		"or of other scopes": func(_ *client.Image, f *ssp2.SegmentRef) {
			f.ScopeDigest = ssp2.ScopeDigest(ssp2.ScopeMap{"team_id": {"8"}})
		},
		"behind a segment": func(i *client.Image, f *ssp2.SegmentRef) {
			i.Segment[0]["asOfCommitSeq"], f.AsOfCommitSeq = int64(4), 4
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			l := newLanes(t)
			l.image = l.goodImage()
			ref := l.describe(ssp2.MediaSQLite, []byte("image"), 1)
			change(l.image, ref)
			_, err := l.pull(ref)
			require.ErrorIs(t, err, client.ErrProtocol)
			require.ErrorContains(t, err, want)
			cursor, _ := l.client.Cursor("s")
			require.Equal(t, int64(-1), cursor)
		})
	}
	l := newLanes(t)
	_, err := l.pull(l.describe(ssp2.MediaSQLite, []byte("image"), 1))
	require.ErrorIs(t, err, client.ErrProtocol)
	l.aborted()
}

func TestURLIsTheWholeGrant(t *testing.T) {
	t.Parallel()
	l := newLanes(t)
	ref := l.signed(l.describe(ssp2.MediaRows, l.segment(ssp2.SegmentRow{ServerVersion: 2, Row: l.row("a", 7, "A")}), 1))
	requests := len(l.headers)
	// Ended: it is not fetched.
	l.now = time.UnixMilli(*ref.URLExpiresAtMs)
	_, err := l.pull(ref)
	require.ErrorIs(t, err, client.ErrURLEnded)
	require.Empty(t, l.asked)
	l.aborted()
	// Other bytes, and none: the pull ends there, and the server is not asked instead.
	l.now = time.UnixMilli(*ref.URLExpiresAtMs - 1)
	body := l.hosted["/s"]
	l.hosted["/s"] = append([]byte{0}, body[1:]...)
	_, err = l.pull(ref)
	require.ErrorIs(t, err, client.ErrProtocol)
	l.aborted()
	delete(l.hosted, "/s")
	_, err = l.pull(ref)
	require.ErrorAs(t, err, new(*client.StatusError))
	l.aborted()
	l.hosted["/s"] = body
	p, err := l.pull(ref)
	require.NoError(t, err)
	require.Equal(t, 1, p.Fetches)
	require.Zero(t, p.Downloads)
	require.Contains(t, l.client.Rows("notes"), "a")
	require.Len(t, l.headers, requests+4, "the rounds, and nothing else")
	require.Len(t, l.asked, 3)
	for _, r := range l.asked {
		require.Empty(t, r.Header.Get("Authorization"))
		require.Empty(t, r.Header.Get("X-Syncular-Scopes"))
	}
}

func TestSegmentsOfABootstrapFollowEachOther(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(first, second *ssp2.SegmentRef){
		"a bootstrap begins in the middle": func(first, _ *ssp2.SegmentRef) { first.RowCursor = new("x") },
		"a page is missing":                func(_, second *ssp2.SegmentRef) { second.RowCursor = new("z") },
		"a page is of another pin":         func(_, second *ssp2.SegmentRef) { second.AsOfCommitSeq = 6 },
		"the last page is not the end":     func(_, second *ssp2.SegmentRef) { second.NextRowCursor = new("z") },
		"a page says other rows":           func(_, second *ssp2.SegmentRef) { second.RowCount = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLanes(t)
			first := l.describe(ssp2.MediaRows, l.segment(ssp2.SegmentRow{ServerVersion: 2, Row: l.row("a", 7, "A")}), 1)
			second := l.describe(ssp2.MediaRows, l.segment(ssp2.SegmentRow{ServerVersion: 2, Row: l.row("b", 7, "B")}), 1)
			first.NextRowCursor, second.RowCursor = new("y"), new("y")
			change(first, second)
			_, err := l.pull(first, second)
			require.ErrorIs(t, err, client.ErrProtocol)
			cursor, _ := l.client.Cursor("s")
			require.Equal(t, int64(-1), cursor)
		})
	}
}

func TestLeaseIsKept(t *testing.T) {
	t.Parallel()
	l := newLanes(t)
	require.Nil(t, l.client.Lease())
	l.respond(ssp2.WireV2, header, &ssp2.Lease{LeaseID: "l1", ExpiresAtMs: 9}, active(false), &ssp2.SubEnd{NextCursor: 5})
	_, err := l.client.Pull(t.Context())
	require.NoError(t, err)
	require.Equal(t, &ssp2.Lease{LeaseID: "l1", ExpiresAtMs: 9}, l.client.Lease())
	l.respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "e2", ResetRequired: true})
	_, err = l.client.Pull(t.Context())
	require.ErrorIs(t, err, client.ErrReset)
	require.Equal(t, "l1", l.client.Lease().LeaseID)
}
