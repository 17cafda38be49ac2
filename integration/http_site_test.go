package integration_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
	"github.com/syncpg/syncpg/scope"
	"github.com/syncpg/syncpg/ssp2"
)

const contentType = "application/vnd.syncular.sync.v2"

// patience bounds what a test waits for; nothing takes that long.
const patience = time.Minute

// site is a server over HTTP on a database of its own. Every actor of its one
// partition holds every scope.
type site struct {
	url    string
	db     *pgtest.DB
	schema *syncpg.Schema
	client *http.Client
}

func newSite(t *testing.T, change func(*syncpg.Config)) *site {
	t.Helper()
	return newSiteOn(t, pgtest.Options{}, change)
}

// newSiteOn is newSite with a database that has some more options.
func newSiteOn(t *testing.T, options pgtest.Options, change func(*syncpg.Config)) *site {
	t.Helper()
	s, err := syncpg.ParseSchema(sample.IR())
	require.NoError(t, err)
	options.TemplateKey = "the sample schema"
	options.Setup = func(ctx context.Context, conn *pgx.Conn) error {
		return schemaddl.Install(ctx, conn, s, schemaddl.Options{})
	}
	db := pgtest.New(t, options)
	cfg := syncpg.Config{
		Schema: s,
		Authenticate: func(r *http.Request) (syncpg.Identity, error) {
			actor := r.Header.Get("X-Actor")
			if actor == "" {
				return syncpg.Identity{}, errors.New("no actor")
			}
			return syncpg.Identity{Actor: actor, Partition: "acme"}, nil
		},
		ResolveScopes: func(context.Context, syncpg.ScopeRequest) (scope.Allowed, error) {
			return scope.Allowed{"team_id": {"*"}}, nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	server, err := syncpg.New(db.Pool, cfg)
	require.NoError(t, err)
	require.NoError(t, server.Ready(t.Context()))
	site := &site{db: db, schema: s, client: &http.Client{Transport: &http.Transport{DisableCompression: true}}}
	mux := http.NewServeMux()
	mux.Handle("/api/", http.StripPrefix("/api", server.Handler()))
	listener := httptest.NewServer(mux)
	t.Cleanup(func() {
		site.client.CloseIdleConnections()
		listener.Close()
		server.Push().Wait()
	})
	site.url = listener.URL + "/api"
	return site
}

// send posts a body as it is. The caller's header comes on top of the usual one.
func (s *site) send(ctx context.Context, body io.Reader, header http.Header) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/sync", body)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("X-Actor", "ada")
	maps.Copy(r.Header, header)
	return s.client.Do(r)
}

// reply is a whole answer, compressed as it came.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (s *site) post(t *testing.T, body io.Reader, header http.Header) reply {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	res, err := s.send(ctx, body, header)
	require.NoError(t, err)
	answer, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	return reply{res.StatusCode, res.Header, answer}
}

// requireError posts a body that must be refused, and returns the message.
func (s *site) requireError(t *testing.T, body io.Reader, header http.Header, status int, code ssp2.Code) string {
	t.Helper()
	return s.post(t, body, header).requireError(t, status, code)
}

// requireError checks an answer against §10.1 and the catalogue, and returns the
// message.
func (r reply) requireError(t *testing.T, status int, code ssp2.Code) string {
	t.Helper()
	require.Equal(t, status, r.status, "body: %.500q", r.body)
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	var e struct {
		Code, Category, RecommendedAction, Message string
		Retryable                                  bool
		Details                                    json.RawMessage
	}
	require.NoError(t, json.Unmarshal(r.body, &e))
	info, ok := ssp2.Lookup(code)
	require.True(t, ok)
	require.Equal(t, ssp2.CodeInfo{
		Code: ssp2.Code(e.Code), Category: ssp2.Category(e.Category), Retryable: e.Retryable,
		Action: ssp2.Action(e.RecommendedAction), HTTPStatus: info.HTTPStatus,
	}, info)
	require.NotEmpty(t, e.Message)
	return e.Message
}

// epoch acquires the log epoch.
func (s *site) epoch(t *testing.T) *string {
	t.Helper()
	req := s.request(nil)
	req.Pull = rowsPull()
	frames := s.sync(t, req)
	header, ok := frames[0].(*ssp2.ResponseHeader)
	require.True(t, ok)
	require.True(t, header.ResetRequired)
	return &header.LogEpoch
}

// request is a request of the running schema version, without content.
func (s *site) request(epoch *string) *ssp2.Request {
	return &ssp2.Request{
		WireVersion: ssp2.WireV2,
		Header:      ssp2.RequestHeader{ClientID: "device", SchemaVersion: s.schema.Version, LogEpoch: epoch},
	}
}

func rowsPull() *ssp2.PullHeader {
	return &ssp2.PullHeader{Accept: ssp2.AcceptInlineRows | ssp2.AcceptExternalRows}
}

// fresh subscribes to a table from the beginning, for one team.
func fresh(id, table string) ssp2.Subscription {
	return ssp2.Subscription{ID: id, Table: table, Scopes: ssp2.ScopeMap{"team_id": {"team-1"}}, Cursor: -1}
}

// sync runs a round that must be answered, and returns the frames.
func (s *site) sync(t *testing.T, req *ssp2.Request) []ssp2.Frame {
	t.Helper()
	r := s.post(t, bytes.NewReader(encode(t, req)), nil)
	require.Equal(t, http.StatusOK, r.status, "body: %.500q", r.body)
	m, err := ssp2.DecodeMessage(r.body)
	require.NoError(t, err)
	return m.Frames
}

func encode(t *testing.T, req *ssp2.Request) []byte {
	t.Helper()
	b, err := ssp2.AppendMessage(nil, req.Message())
	require.NoError(t, err)
	return b
}

// putLists is a commit that writes rows of the table lists, with the given title.
func (s *site) putLists(t *testing.T, commitID, title string, ids ...string) ssp2.PushCommit {
	t.Helper()
	table, ok := s.schema.Table("lists")
	require.True(t, ok)
	commit := ssp2.PushCommit{ClientCommitID: commitID}
	for _, id := range ids {
		row, err := ssp2.AppendRow(nil, table.Wire, []ssp2.Value{
			{Bytes: []byte(id)}, {Bytes: []byte("team-1")}, {Bytes: []byte(title)}, {Null: true}, {Float: 1}, {Int: 0},
		})
		require.NoError(t, err)
		commit.Operations = append(commit.Operations,
			ssp2.Operation{Table: "lists", RowID: id, Op: ssp2.OpUpsert, Payload: row})
	}
	return commit
}

// count runs a query of one number.
func (s *site) count(t *testing.T, sql string) (n int) {
	t.Helper()
	require.NoError(t, s.db.Pool.QueryRow(t.Context(), sql).Scan(&n))
	return n
}

// lock keeps everybody else out of a table until unlock is called.
func (s *site) lock(t *testing.T, table string) (unlock func()) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.db.DSN)
	require.NoError(t, err)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "lock table "+table+" in access exclusive mode")
	require.NoError(t, err)
	unlock = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		require.NoError(t, conn.Close(ctx))
	}
	return unlock
}

// blocked reports whether a session waits for a lock.
const blocked = `select exists (
	select from pg_catalog.pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`

func gz(t *testing.T, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := w.Write(b)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return buf.Bytes()
}
