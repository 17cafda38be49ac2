package client_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const notesIR = `{
  "irVersion": 1, "schemaVersion": 4,
  "tables": [{
    "name": "notes", "primaryKey": "id",
    "columns": [
      {"name": "id", "type": "string", "nullable": false},
      {"name": "team", "type": "integer", "nullable": false},
      {"name": "text", "type": "string", "nullable": true}
    ],
    "scopes": [{"pattern": "team:{team_id}", "column": "team"}]
  }]
}`

// fake is a server whose answers a test writes.
type fake struct {
	t        *testing.T
	schema   *schema.Schema
	notes    *schema.Table
	requests []*ssp2.Request
	headers  []http.Header
	answers  []func(w http.ResponseWriter) // of POST /sync, in order
	segments map[string][]byte             // of GET /segments
	encoding string
}

func setup(t *testing.T) (*fake, *client.Client) {
	t.Helper()
	return setupWire(t, ssp2.WireV2)
}

func setupWire(t *testing.T, wire ssp2.WireVersion) (*fake, *client.Client) {
	t.Helper()
	s, err := schema.Parse([]byte(notesIR))
	require.NoError(t, err)
	f := &fake{t: t, schema: s, segments: map[string][]byte{}}
	f.notes, _ = s.Table("notes")
	server := httptest.NewServer(f)
	t.Cleanup(server.Close)
	c, err := client.New(client.Config{
		URL: server.URL + "/mount/", Header: http.Header{"Authorization": {"Bearer x"}}, ClientID: "c1", Schema: s,
		Wire: wire, HTTP: server.Client(), LimitSnapshotRows: 2, MaxSnapshotPages: 1,
	})
	require.NoError(t, err)
	return f, c
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.headers = append(f.headers, r.Header)
	if id, ok := strings.CutPrefix(r.URL.Path, "/mount/segments/"); ok {
		w.Header().Set("Content-Type", "application/octet-stream")
		_, _ = w.Write(f.segments[id])
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil || r.URL.Path != "/mount/sync" || r.Header.Get("Content-Type") != "application/vnd.syncular.sync.v2" {
		f.t.Errorf("unexpected request %s %s: %v", r.Method, r.URL, err)
		return
	}
	m, err := ssp2.DecodeMessage(body)
	if err != nil {
		f.t.Errorf("decode the request: %v", err)
		return
	}
	req, err := m.Request()
	if err != nil || len(f.answers) == 0 {
		f.t.Errorf("unexpected request %+v: %v", m, err)
		return
	}
	f.requests = append(f.requests, req)
	answer := f.answers[0]
	f.answers = f.answers[1:]
	answer(w)
}

// respond queues a response of the frames.
func (f *fake) respond(wire ssp2.WireVersion, frames ...ssp2.Frame) {
	f.t.Helper()
	body, err := ssp2.AppendMessage(nil, &ssp2.Message{WireVersion: wire, Kind: ssp2.KindResponse, Frames: frames})
	require.NoError(f.t, err)
	f.raw(http.StatusOK, "application/vnd.syncular.sync.v2", body)
}

func (f *fake) raw(status int, contentType string, body []byte) {
	f.answers = append(f.answers, func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", contentType)
		switch f.encoding {
		case "gzip":
			w.Header().Set("Content-Encoding", "gzip")
			var buf bytes.Buffer
			z := gzip.NewWriter(&buf)
			_, _ = z.Write(body)
			_ = z.Close()
			body = buf.Bytes()
		case "zstd":
			w.Header().Set("Content-Encoding", "zstd")
			z, _ := zstd.NewWriter(nil)
			body = z.EncodeAll(body, nil)
			_ = z.Close()
		case "br":
			w.Header().Set("Content-Encoding", "br")
		}
		w.WriteHeader(status)
		_, _ = w.Write(body)
	})
}

// acquire gives the client its epoch.
func (f *fake) acquire(c *client.Client) {
	f.t.Helper()
	f.respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "e1", ResetRequired: true})
	require.NoError(f.t, c.Acquire(f.t.Context()))
}

func (f *fake) row(id string, team int64, text string) []byte {
	f.t.Helper()
	row, err := ssp2.AppendRow(nil, f.notes.Wire, values(id, team, text))
	require.NoError(f.t, err)
	return row
}

func values(id string, team int64, text string) []ssp2.Value {
	return []ssp2.Value{{Bytes: []byte(id)}, {Int: team}, {Bytes: []byte(text)}}
}

func (f *fake) segment(rows ...ssp2.SegmentRow) []byte {
	f.t.Helper()
	s := &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{Table: "notes", SchemaVersion: 4, Columns: f.notes.Wire}}
	if len(rows) > 0 {
		s.Blocks = [][]ssp2.SegmentRow{rows}
	}
	b, err := ssp2.AppendSegment(nil, s)
	require.NoError(f.t, err)
	return b
}

var (
	ok7     = ssp2.ScopeMap{"team_id": {"7"}}
	header  = &ssp2.ResponseHeader{LogEpoch: "e1"}
	teamOf7 = map[string]string{"team_id": "7"}
)

func active(bootstrap bool) *ssp2.SubStart {
	return &ssp2.SubStart{ID: "s", Status: ssp2.SubActive, EffectiveScopes: ok7, Bootstrap: bootstrap}
}

func (f *fake) upsert(id, text string, version int64) ssp2.Change {
	return ssp2.Change{RowID: id, Op: ssp2.OpUpsert, RowVersion: &version, Scopes: teamOf7, Row: f.row(id, 7, text)}
}

func commit(seq int64, changes ...ssp2.Change) *ssp2.Commit {
	return &ssp2.Commit{CommitSeq: seq, CreatedAtMs: 1, ActorID: "a", Tables: []string{"notes"}, Changes: changes}
}

func TestAcquireTakesTheEpochOfAnEmptyRequest(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.Equal(t, "e1", c.Epoch())
	require.Nil(t, f.requests[0].Header.LogEpoch)
	require.Equal(t, int32(4), f.requests[0].Header.SchemaVersion)
	require.Equal(t, "c1", f.requests[0].Header.ClientID)
	require.Empty(t, f.requests[0].Commits)
	require.Equal(t, "Bearer x", f.headers[0].Get("Authorization"))

	f.respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "e1"})
	require.ErrorIs(t, c.Acquire(t.Context()), client.ErrProtocol)
}

func TestWireVersion1HasNoEpoch(t *testing.T) {
	t.Parallel()
	f, c := setupWire(t, ssp2.WireV1)
	require.NoError(t, c.Acquire(t.Context()))
	require.Empty(t, f.requests)
	f.respond(ssp2.WireV1, &ssp2.ResponseHeader{})
	_, err := c.Pull(t.Context())
	require.NoError(t, err)
}

func TestBootstrapIsPagedAndThenFollowsTheLog(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	resume := `{"rowCursor":"b"}`
	f.respond(ssp2.WireV2, header, active(true),
		&ssp2.SegmentInline{Payload: f.segment(
			ssp2.SegmentRow{ServerVersion: 3, Row: f.row("a", 7, "A")}, ssp2.SegmentRow{ServerVersion: 1, Row: f.row("b", 7, "B")},
		)},
		&ssp2.SubEnd{NextCursor: 9, BootstrapState: &resume})
	f.respond(ssp2.WireV2, header, active(true),
		&ssp2.SegmentInline{Payload: f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("c", 7, "C")})},
		&ssp2.SubEnd{NextCursor: 9})
	f.respond(ssp2.WireV2, header, active(false),
		commit(10, f.upsert("a", "A2", 4), ssp2.Change{RowID: "b", Op: ssp2.OpDelete, Scopes: teamOf7}),
		commit(11, f.upsert("d", "D", 1)),
		&ssp2.SubEnd{NextCursor: 11})
	f.respond(ssp2.WireV2, header, active(false), &ssp2.SubEnd{NextCursor: 11})

	p, err := c.CatchUp(t.Context())
	require.NoError(t, err)
	require.Equal(t, client.Progress{Rounds: 4, Commits: 2, Changes: 3, Segments: 2, SegmentRows: 3}, p)
	require.Empty(t, cmp.Diff(map[string]client.Row{
		"a": {Version: 4, Values: values("a", 7, "A2")},
		"c": {Version: 1, Values: values("c", 7, "C")},
		"d": {Version: 1, Values: values("d", 7, "D")},
	}, c.Rows("notes")))
	cursor, complete := c.Cursor("s")
	require.True(t, complete)
	require.Equal(t, int64(11), cursor)

	pulls := f.requests[1:]
	require.Equal(t, int64(-1), pulls[0].Subscriptions[0].Cursor)
	require.Equal(t, int64(9), pulls[1].Subscriptions[0].Cursor)
	require.Equal(t, &resume, pulls[1].Subscriptions[0].BootstrapState)
	require.Nil(t, pulls[2].Subscriptions[0].BootstrapState)
	require.Equal(t, int64(11), pulls[3].Subscriptions[0].Cursor)
	require.Equal(t, ssp2.PullHeader{
		LimitSnapshotRows: 2, MaxSnapshotPages: 1, Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows,
	}, *pulls[0].Pull)
	require.Equal(t, "e1", *pulls[0].Header.LogEpoch)
}

func TestFreshBootstrapReplacesTheRowsOfTheScope(t *testing.T) {
	t.Parallel()
	for name, segments := range map[string]func(f *fake) []ssp2.Frame{
		"by its first page": func(f *fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.SegmentInline{Payload: f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("new", 7, "")})}}
		},
		"also when there are no rows": func(*fake) []ssp2.Frame { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, c := setup(t)
			f.acquire(c)
			require.NoError(t, c.Subscribe("s", "notes", ok7))
			f.respond(ssp2.WireV2, header, active(true),
				&ssp2.SegmentInline{Payload: f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("old", 7, "")})},
				&ssp2.SubEnd{NextCursor: 5})
			_, err := c.Pull(t.Context())
			require.NoError(t, err)

			f.respond(ssp2.WireV2, header,
				&ssp2.SubStart{ID: "s", Status: ssp2.SubReset, ReasonCode: "sync.cursor_expired"}, &ssp2.SubEnd{NextCursor: 5})
			_, err = c.Pull(t.Context())
			require.NoError(t, err)
			require.Contains(t, c.Rows("notes"), "old", "a reset is no purge")
			cursor, complete := c.Cursor("s")
			require.False(t, complete)
			require.Equal(t, int64(-1), cursor)

			frames := append([]ssp2.Frame{header, active(true)}, segments(f)...)
			f.respond(ssp2.WireV2, append(frames, &ssp2.SubEnd{NextCursor: 8})...)
			_, err = c.Pull(t.Context())
			require.NoError(t, err)
			require.NotContains(t, c.Rows("notes"), "old")
		})
	}
}

func TestExternalSegmentIsDownloadedAndVerified(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	payload := f.segment(ssp2.SegmentRow{ServerVersion: 2, Row: f.row("a", 7, "A")})
	sum := sha256.Sum256(payload)
	ref := &ssp2.SegmentRef{
		SegmentID: "sha256:" + hex.EncodeToString(sum[:]), MediaType: ssp2.MediaRows, Table: "notes",
		ByteLength: int64(len(payload)), RowCount: 1, AsOfCommitSeq: 5, ScopeDigest: ssp2.ScopeDigest(ok7),
	}
	f.segments[ref.SegmentID] = payload
	f.respond(ssp2.WireV2, header, active(true), ref, &ssp2.SubEnd{NextCursor: 5})
	_, err := c.Pull(t.Context())
	require.NoError(t, err)
	require.Contains(t, c.Rows("notes"), "a")
	last := f.headers[len(f.headers)-1]
	require.Equal(t, string(ssp2.AppendCanonicalScopes(nil, ok7)), last.Get("X-Syncular-Scopes"))
	require.Equal(t, "Bearer x", last.Get("Authorization"))

	f.segments[ref.SegmentID] = append(payload[:len(payload)-4], 1, 0, 0, 0)
	f.respond(ssp2.WireV2, header, active(true), ref, &ssp2.SubEnd{NextCursor: 6})
	_, err = c.Pull(t.Context())
	require.ErrorIs(t, err, client.ErrProtocol)
	cursor, _ := c.Cursor("s")
	require.Equal(t, int64(5), cursor, "SUB_END is not persisted after an abort")
}

func TestPushReturnsOneOutcomePerCommit(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	commits := []ssp2.PushCommit{
		{ClientCommitID: "1", Operations: []ssp2.Operation{{Table: "notes", RowID: "a", Op: ssp2.OpUpsert, Payload: f.row("a", 7, "")}}},
		{ClientCommitID: "2", Operations: []ssp2.Operation{{Table: "notes", RowID: "a", Op: ssp2.OpDelete}}},
	}
	applied := &ssp2.PushResult{
		ClientCommitID: "1", Status: ssp2.PushApplied, CommitSeq: new(int64(1)),
		Results: []ssp2.OpResult{{Status: ssp2.OpApplied}},
	}
	rejected := &ssp2.PushResult{
		ClientCommitID: "2", Status: ssp2.PushRejected,
		Results: []ssp2.OpResult{{Status: ssp2.OpError, Code: "sync.forbidden", Message: "no"}},
	}
	details := &ssp2.PushResultDetails{ClientCommitID: "2", Entries: []ssp2.DetailEntry{{DetailsJSON: `{"reason":"x"}`}}}
	f.respond(ssp2.WireV2, header, applied, rejected, details)
	results, err := c.Push(t.Context(), commits...)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff([]client.Result{{PushResult: *applied}, {PushResult: *rejected, Details: details}}, results))
	require.Empty(t, cmp.Diff(commits, f.requests[1].Commits))

	for name, frames := range map[string][]ssp2.Frame{
		"too few results":   {header, applied},
		"too many results":  {header, applied, rejected, rejected},
		"another order":     {header, rejected, applied},
		"a commit not sent": {header, applied, &ssp2.PushResult{ClientCommitID: "3", Status: ssp2.PushRejected, Results: rejected.Results}},
		"applied, results missing": {header, &ssp2.PushResult{
			ClientCommitID: "1", Status: ssp2.PushApplied, CommitSeq: new(int64(1)),
		}, rejected},
		"applied with an error": {header, &ssp2.PushResult{
			ClientCommitID: "1", Status: ssp2.PushApplied, CommitSeq: new(int64(1)), Results: rejected.Results,
		}, rejected},
		"rejected without a reason": {header, applied, &ssp2.PushResult{ClientCommitID: "2", Status: ssp2.PushRejected}},
		"rejected at an operation there is not": {header, applied, &ssp2.PushResult{
			ClientCommitID: "2", Status: ssp2.PushRejected, Results: []ssp2.OpResult{{OpIndex: 1, Status: ssp2.OpError, Code: "x"}},
		}},
	} {
		f.respond(ssp2.WireV2, frames...)
		_, err := c.Push(t.Context(), commits...)
		require.ErrorIs(t, err, client.ErrProtocol, name)
	}
}

func TestResetDropsWhatWasSynced(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	f.respond(ssp2.WireV2, header, active(true),
		&ssp2.SegmentInline{Payload: f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("a", 7, "")})}, &ssp2.SubEnd{NextCursor: 5})
	_, err := c.Pull(t.Context())
	require.NoError(t, err)

	f.respond(ssp2.WireV2, &ssp2.ResponseHeader{LogEpoch: "e2", ResetRequired: true})
	_, err = c.Push(t.Context(), ssp2.PushCommit{
		ClientCommitID: "1", Operations: []ssp2.Operation{{Table: "notes", RowID: "a", Op: ssp2.OpDelete}},
	})
	require.ErrorIs(t, err, client.ErrReset)
	require.Equal(t, "e2", c.Epoch())
	require.Empty(t, c.Rows("notes"))
	cursor, _ := c.Cursor("s")
	require.Equal(t, int64(-1), cursor)
}

func TestRevokedSubscriptionIsPurgedAndLeftOut(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	f.respond(ssp2.WireV2, header, active(true),
		&ssp2.SegmentInline{Payload: f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("a", 7, "")})}, &ssp2.SubEnd{NextCursor: 5})
	_, err := c.Pull(t.Context())
	require.NoError(t, err)

	f.respond(ssp2.WireV2, header,
		&ssp2.SubStart{ID: "s", Status: ssp2.SubRevoked, ReasonCode: "sync.scope_revoked"}, &ssp2.SubEnd{NextCursor: 5})
	_, err = c.Pull(t.Context())
	var revoked *client.RevokedError
	require.ErrorAs(t, err, &revoked)
	require.Equal(t, client.RevokedError{Subscription: "s", Reason: ssp2.CodeScopeRevoked}, *revoked)
	require.Empty(t, c.Rows("notes"))

	f.respond(ssp2.WireV2, header)
	_, err = c.Pull(t.Context())
	require.NoError(t, err)
	require.Empty(t, f.requests[len(f.requests)-1].Subscriptions)
}

func TestAnswersThatBreakTheProtocolAreRefused(t *testing.T) {
	t.Parallel()
	inline := func(b []byte) ssp2.Frame { return &ssp2.SegmentInline{Payload: b} }
	for _, tc := range []struct {
		name   string
		frames func(f *fake) []ssp2.Frame
		want   string
	}{
		{"row outside the scopes, by commit", func(f *fake) []ssp2.Frame {
			c := f.upsert("a", "", 1)
			c.Row, c.Scopes = f.row("a", 8, ""), map[string]string{"team_id": "8"}
			return []ssp2.Frame{active(false), commit(1, c)}
		}, "outside the effective scopes"},
		{"row outside the scopes, under stored scopes inside", func(f *fake) []ssp2.Frame {
			c := f.upsert("a", "", 1)
			c.Row = f.row("a", 8, "")
			return []ssp2.Frame{active(false), commit(1, c)}
		}, "outside the effective scopes"},
		{"row outside the scopes, by segment", func(f *fake) []ssp2.Frame {
			return []ssp2.Frame{active(true), inline(f.segment(ssp2.SegmentRow{ServerVersion: 1, Row: f.row("a", 8, "")}))}
		}, "outside the effective scopes"},
		{"stored scopes the table does not declare", func(f *fake) []ssp2.Frame {
			c := f.upsert("a", "", 1)
			c.Scopes = map[string]string{"team_id": "7", "x": "y"}
			return []ssp2.Frame{active(false), commit(1, c)}
		}, "is sent with 2 scopes"},
		{"another row than announced", func(f *fake) []ssp2.Frame {
			c := f.upsert("a", "", 1)
			c.RowID = "b"
			return []ssp2.Frame{active(false), commit(1, c)}
		}, `row "b" of table "notes" has "a" as its primary key`},
		{"row that cannot be read", func(f *fake) []ssp2.Frame {
			c := f.upsert("a", "", 1)
			c.Row = c.Row[:len(c.Row)-1]
			return []ssp2.Frame{active(false), commit(1, c)}
		}, "cannot be read"},
		{"change of another table", func(f *fake) []ssp2.Frame {
			c := commit(1, f.upsert("a", "", 1))
			c.Tables = []string{"other"}
			return []ssp2.Frame{active(false), c}
		}, `change of table "other"`},
		{"segment of another table", func(f *fake) []ssp2.Frame {
			b, err := ssp2.AppendSegment(nil, &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{
				Table: "other", SchemaVersion: 4, Columns: f.notes.Wire,
			}})
			require.NoError(f.t, err)
			return []ssp2.Frame{active(true), inline(b)}
		}, `a segment of table "other"`},
		{"segment with other columns", func(f *fake) []ssp2.Frame {
			b, err := ssp2.AppendSegment(nil, &ssp2.Segment{SegmentHeader: ssp2.SegmentHeader{
				Table: "notes", SchemaVersion: 4, Columns: f.notes.Wire[:2],
			}})
			require.NoError(f.t, err)
			return []ssp2.Frame{active(true), inline(b)}
		}, "sync.schema_mismatch"},
		{"segment without bootstrap", func(f *fake) []ssp2.Frame {
			return []ssp2.Frame{active(false), inline(f.segment())}
		}, "does not bootstrap"},
		{"commit of a revoked subscription", func(f *fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.SubStart{ID: "s", Status: ssp2.SubRevoked, ReasonCode: "x"}, commit(1)}
		}, "which is revoked"},
		{"another subscription", func(*fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.SubStart{ID: "z", Status: ssp2.SubActive, EffectiveScopes: ok7}}
		}, "out of order"},
		{"more scopes than asked for", func(*fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.SubStart{ID: "s", Status: ssp2.SubActive, EffectiveScopes: ssp2.ScopeMap{"team_id": {"7", "8"}}}}
		}, `team_id="8", which it did not ask for`},
		{"active without its scopes", func(*fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.SubStart{ID: "s", Status: ssp2.SubActive}}
		}, "without all of its scopes"},
		{"sqlite segment", func(*fake) []ssp2.Frame {
			return []ssp2.Frame{active(true), &ssp2.SegmentRef{SegmentID: "x", MediaType: ssp2.MediaSQLite, Table: "notes"}}
		}, "did not accept"},
		{"another epoch without reset", func(*fake) []ssp2.Frame { return []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: "e9"}} }, `log epoch "e9"`},
		{"frames after a reset", func(*fake) []ssp2.Frame {
			return []ssp2.Frame{&ssp2.ResponseHeader{LogEpoch: "e9", ResetRequired: true}, active(false)}
		}, "after a RESP_HEADER with resetRequired"},
		{"no answer to the subscription", func(*fake) []ssp2.Frame { return []ssp2.Frame{header} }, "1 subscriptions were pulled, 0 were answered"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, c := setup(t)
			f.acquire(c)
			require.NoError(t, c.Subscribe("s", "notes", ok7))
			frames := tc.frames(f)
			if frames[0].FrameType() != ssp2.FrameRespHeader {
				frames = append([]ssp2.Frame{header}, frames...)
			}
			last := frames[len(frames)-1].FrameType()
			if last != ssp2.FrameRespHeader {
				frames = append(frames, &ssp2.SubEnd{NextCursor: 1})
			}
			f.respond(ssp2.WireV2, frames...)
			_, err := c.Pull(t.Context())
			require.ErrorIs(t, err, client.ErrProtocol)
			require.ErrorContains(t, err, tc.want)
		})
	}
}

func TestUnreadableAnswersAreToldApart(t *testing.T) {
	t.Parallel()
	const ssp2Type, jsonType = "application/vnd.syncular.sync.v2", "application/json; charset=utf-8"
	for _, tc := range []struct {
		name     string
		status   int
		typ      string
		body     string
		encoding string
		check    func(t *testing.T, err error)
	}{
		{"JSON error", 403, jsonType, `{"code":"sync.forbidden","message":"no","retryable":false,"recommendedAction":"checkPermissions"}`, "", func(t *testing.T, err error) {
			var e *client.ServerError
			require.ErrorAs(t, err, &e)
			require.Equal(t, client.ServerError{Status: 403, Code: "sync.forbidden", Message: "no", Action: "checkPermissions"}, *e)
		}},
		{"compressed JSON error", 403, jsonType, `{"code":"sync.forbidden","message":"no"}`, "gzip", func(t *testing.T, err error) {
			var e *client.ServerError
			require.ErrorAs(t, err, &e)
		}},
		{"page of a proxy", 502, "text/html", "<html>bad gateway", "", func(t *testing.T, err error) {
			var e *client.StatusError
			require.ErrorAs(t, err, &e)
			require.ErrorContains(t, err, `/mount/sync answered HTTP 502 with content type "text/html"`)
			require.ErrorContains(t, err, "bad gateway")
		}},
		{"JSON of another service", 200, jsonType, `{"hello":1}`, "", func(t *testing.T, err error) {
			var e *client.StatusError
			require.ErrorAs(t, err, &e)
		}},
		{"not SSP2", 200, ssp2Type, "hello, world", "", func(t *testing.T, err error) { require.ErrorIs(t, err, client.ErrProtocol) }},
		{"truncated", 200, ssp2Type, "SSP2\x02\x00\x02\x00", "", func(t *testing.T, err error) { require.ErrorIs(t, err, client.ErrProtocol) }},
		{"request", 200, ssp2Type, "SSP2\x02\x00\x01\x00", "", func(t *testing.T, err error) { require.ErrorIs(t, err, client.ErrProtocol) }},
		{"another wire version", 200, ssp2Type, "SSP2\x03\x00\x02\x00", "", func(t *testing.T, err error) { require.ErrorIs(t, err, client.ErrProtocol) }},
		{"unasked encoding", 200, ssp2Type, "x", "br", func(t *testing.T, err error) { require.ErrorIs(t, err, client.ErrProtocol) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f, c := setup(t)
			f.encoding = tc.encoding
			f.raw(tc.status, tc.typ, []byte(tc.body))
			_, err := c.Pull(t.Context())
			tc.check(t, err)
		})
	}
}

func TestCompressedAnswers(t *testing.T) {
	t.Parallel()
	for _, encoding := range []string{"", "gzip", "zstd"} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			f, c := setup(t)
			f.encoding = encoding
			f.acquire(c)
			require.Equal(t, "zstd, gzip", f.headers[0].Get("Accept-Encoding"))
		})
	}
}

func TestSchemaFloorIsAnError(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.respond(ssp2.WireV2, &ssp2.ResponseHeader{
		RequiredSchemaVersion: new(int32(5)), LatestSchemaVersion: new(int32(6)), LogEpoch: "e1", ResetRequired: true,
	})
	err := c.Acquire(t.Context())
	var floor *client.FloorError
	require.ErrorAs(t, err, &floor)
	require.Equal(t, client.FloorError{Version: 4, Required: 5, Latest: 6}, *floor)
	require.Empty(t, c.Epoch())
}

func TestErrorInsideAResponseKeepsWhatIsDone(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	f.acquire(c)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	require.NoError(t, c.Subscribe("s2", "notes", ok7))
	second := active(false)
	second.ID = "s2"
	f.respond(ssp2.WireV2, header, active(false), commit(1, f.upsert("a", "", 1)), &ssp2.SubEnd{NextCursor: 1},
		second, commit(1, f.upsert("b", "", 1)),
		&ssp2.ErrorFrame{Code: "sync.internal_error", Message: "m", Category: "internal", Retryable: true, RecommendedAction: "retryLater"})
	_, err := c.Pull(t.Context())
	var e *client.ServerError
	require.ErrorAs(t, err, &e)
	require.Equal(t, 200, e.Status)
	require.True(t, e.Retryable)
	first, _ := c.Cursor("s")
	other, _ := c.Cursor("s2")
	require.Equal(t, []int64{1, -1}, []int64{first, other})
	require.Len(t, c.Rows("notes"), 2, "committed frames stay (§1.4 rule 5)")
}

func TestCancelledContextEndsARound(t *testing.T) {
	t.Parallel()
	f, c := setup(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.answers = append(f.answers, func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/vnd.syncular.sync.v2")
		_, _ = w.Write([]byte("SSP2\x02\x00\x02\x00"))
		_ = http.NewResponseController(w).Flush()
		cancel()
	})
	require.ErrorIs(t, c.Acquire(ctx), context.Canceled)
}

func TestWrongConfigIsRefused(t *testing.T) {
	t.Parallel()
	s, err := schema.Parse([]byte(notesIR))
	require.NoError(t, err)
	good := client.Config{URL: "http://h", ClientID: "c", Schema: s, Wire: ssp2.WireV3}
	for name, change := range map[string]func(*client.Config){
		"URL":          func(c *client.Config) { c.URL = "" },
		"client id":    func(c *client.Config) { c.ClientID = "" },
		"schema":       func(c *client.Config) { c.Schema = nil },
		"wire version": func(c *client.Config) { c.Wire = 4 },
		"opens them":   func(c *client.Config) { c.Accept = ssp2.AcceptInlineRows | ssp2.AcceptSQLite },
	} {
		cfg := good
		change(&cfg)
		_, err := client.New(cfg)
		require.ErrorContains(t, err, name)
	}
	c, err := client.New(good)
	require.NoError(t, err)
	require.ErrorContains(t, c.Subscribe("s", "none", ok7), `no table "none"`)
	require.NoError(t, c.Subscribe("s", "notes", ok7))
	require.ErrorContains(t, c.Subscribe("s", "notes", ok7), "exists")
}
