package host_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/integration/conformance/host"
	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const startMs = 1_750_000_000_000

// tasks is the schema of most tests, as a create request spells it.
const tasks = `{"version": 1, "tables": [{
	"name": "tasks", "primaryKey": "id",
	"columns": [
		{"name": "id", "type": "string", "nullable": false},
		{"name": "project_id", "type": "string", "nullable": false},
		{"name": "title", "type": "string", "nullable": true}
	],
	"scopes": [{"pattern": "project:{project_id}"}]
}]}`

// testHost is a served host.
type testHost struct {
	t   *testing.T
	url string
	dsn string // of a database on its server
}

func newHost(t *testing.T) *testHost {
	t.Helper()
	dsn := pgtest.DSN(t)
	h, err := host.New(t.Context(), host.Config{DatabaseURL: dsn})
	require.NoError(t, err)
	server := httptest.NewServer(h.Handler())
	t.Cleanup(func() {
		server.Close()
		require.NoError(t, h.Close(context.WithoutCancel(t.Context())))
	})
	return &testHost{t: t, url: server.URL, dsn: dsn}
}

// create starts an instance and returns its base URL.
func (h *testHost) create(fields string) string {
	h.t.Helper()
	body := fmt.Sprintf(`{"partition": "part-1", "nowMs": %d, %s}`, startMs, fields)
	status, answer := h.post(h.url+"/control/instances", body)
	require.Equal(h.t, http.StatusOK, status, answer)
	var created struct {
		Result struct {
			InstanceID string `json:"instanceId"`
			BaseURL    string `json:"baseUrl"`
		} `json:"result"`
	}
	require.NoError(h.t, json.Unmarshal([]byte(answer), &created))
	require.NotEmpty(h.t, created.Result.InstanceID)
	require.True(h.t, strings.HasPrefix(created.Result.BaseURL, h.url+"/"), created.Result.BaseURL)
	return created.Result.BaseURL
}

func (h *testHost) post(url, body string) (status int, answer string) {
	h.t.Helper()
	return h.send(http.MethodPost, url, "application/json", body)
}

func (h *testHost) send(method, url, contentType, body string) (status int, answer string) {
	h.t.Helper()
	request, err := http.NewRequestWithContext(h.t.Context(), method, url, strings.NewReader(body))
	require.NoError(h.t, err)
	request.Header.Set("Content-Type", contentType)
	response, err := http.DefaultClient.Do(request)
	require.NoError(h.t, err)
	defer response.Body.Close()
	read, err := io.ReadAll(response.Body)
	require.NoError(h.t, err)
	require.Equal(h.t, "application/json", response.Header.Get("Content-Type"))
	return response.StatusCode, string(read)
}

// call makes a control call that has to succeed and returns its result as JSON.
func (h *testHost) call(base, method, body string) string {
	h.t.Helper()
	status, answer := h.post(base+"/control/"+method, body)
	require.Equal(h.t, http.StatusOK, status, answer)
	var result struct {
		Result json.RawMessage `json:"result"`
	}
	require.NoError(h.t, json.Unmarshal([]byte(answer), &result))
	var compact bytes.Buffer
	require.NoError(h.t, json.Compact(&compact, result.Result))
	return compact.String()
}

// client returns a device of the actor that has acquired the log epoch.
func (h *testHost) client(base, actor, clientID, schemaSpec string) *client.Client {
	h.t.Helper()
	c, err := client.New(client.Config{
		URL: base, ClientID: clientID, Wire: ssp2.WireV2, Schema: compile(h.t, schemaSpec),
		Header: http.Header{"X-Syncpg-Actor": {actor}},
	})
	require.NoError(h.t, err)
	require.NoError(h.t, c.Acquire(h.t.Context()))
	return c
}

// compile turns a spec into a compiled schema. Only its version and its other
// head differ from the IR.
func compile(t *testing.T, spec string) *schema.Schema {
	t.Helper()
	var doc map[string]any
	require.NoError(t, json.Unmarshal([]byte(spec), &doc))
	doc["irVersion"], doc["schemaVersion"] = 1, doc["version"]
	delete(doc, "version")
	ir, err := json.Marshal(doc)
	require.NoError(t, err)
	compiled, err := schema.Parse(ir)
	require.NoError(t, err)
	return compiled
}

// upsert is a commit of one operation that writes a whole row.
func upsert(t *testing.T, s *schema.Schema, commitID, rowID string, values ...ssp2.Value) ssp2.PushCommit {
	t.Helper()
	payload, err := ssp2.AppendRow(nil, s.Tables[0].Wire, values)
	require.NoError(t, err)
	return ssp2.PushCommit{ClientCommitID: commitID, Operations: []ssp2.Operation{{
		Table: s.Tables[0].Name, RowID: rowID, Op: ssp2.OpUpsert, Payload: payload,
	}}}
}

func text(s string) ssp2.Value { return ssp2.Value{Bytes: []byte(s)} }

// task is a commit that writes a row of tasks.
func task(t *testing.T, commitID, rowID, project, title string) ssp2.PushCommit {
	t.Helper()
	return upsert(t, compile(t, tasks), commitID, rowID, text(rowID), text(project), text(title))
}

func TestControlCallsThatAreRefused(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	create := h.url + "/control/instances"
	spec := func(fields string) string {
		return fmt.Sprintf(`{"partition": "p", "nowMs": 1, "schema": %s, %s}`, tasks, fields)
	}
	for name, test := range map[string]struct {
		url, contentType, body string
		status                 int
		code                   string
	}{
		"unknown method":         {url: base + "/control/fly", status: 404, code: "sync.not_found"},
		"unknown instance":       {url: h.url + "/instances/77/control/nowMs", status: 404, code: "sync.not_found"},
		"unknown instance, sync": {url: h.url + "/instances/77/sync", status: 404, code: "sync.not_found"},
		"unknown path":           {url: h.url + "/elsewhere", status: 404, code: "sync.not_found"},
		"other content type":     {url: base + "/control/nowMs", contentType: "text/plain", status: 415, code: "sync.invalid_request"},
		"not JSON":               {url: base + "/control/nowMs", body: `{`, status: 400, code: "sync.invalid_request"},
		"unknown field":          {url: base + "/control/nowMs", body: `{"a": 1}`, status: 400, code: "sync.invalid_request"},
		"two objects":            {url: base + "/control/nowMs", body: `{} {}`, status: 400, code: "sync.invalid_request"},
		"unknown table":          {url: base + "/control/readRows", body: `{"table": "nope"}`, status: 400, code: "sync.invalid_request"},
		"no actor":               {url: base + "/control/setAllowedScopes", body: `{"allowed": {}}`, status: 400, code: "sync.invalid_request"},
		"clock backwards":        {url: base + "/control/advanceClock", body: `{"ms": -1}`, status: 400, code: "sync.invalid_request"},
		"negative connections":   {url: base + "/control/quiesce", body: `{"connections": -1}`, status: 400, code: "sync.invalid_request"},
		"unknown lease":          {url: base + "/control/revokeLease", body: `{"leaseId": "nope"}`, status: 500, code: "host.failed"},
		"later feature, method":  {url: base + "/control/fetchBlobUrl", status: 501, code: "host.not_supported"},
		"later feature, path":    {url: base + "/blobs/sha256%3Aab", status: 501, code: "host.not_supported"},
		"create without a partition": {
			url: create, body: `{"schema": ` + tasks + `, "nowMs": 1}`, status: 400, code: "sync.invalid_request",
		},
		"create with a bad schema": {
			url: create, body: `{"partition": "p", "nowMs": 1, "schema": {"version": 1, "tables": []}}`,
			status: 400, code: "sync.invalid_request",
		},
		"create with a lease of no time": {url: create, body: spec(`"leases": {"ttlMs": 1}`), status: 500, code: "host.failed"},
		"create with long-lived URLs":    {url: create, body: spec(`"signedUrls": {"ttlSeconds": 901}`), status: 400, code: "sync.invalid_request"},
		"create with negative life":      {url: create, body: spec(`"limits": {"segmentTtlMs": 0}`), status: 400, code: "sync.invalid_request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			h := &testHost{t: t, url: h.url}
			contentType, body := test.contentType, test.body
			if contentType == "" {
				contentType = "application/json; charset=utf-8"
			}
			if body == "" {
				body = "{}"
			}
			status, answer := h.send(http.MethodPost, test.url, contentType, body)
			require.Equal(t, test.status, status, answer)
			var failure struct {
				Code    string `json:"code"`
				Message string `json:"message"`
			}
			require.NoError(t, json.Unmarshal([]byte(answer), &failure))
			require.Equal(t, test.code, failure.Code)
			require.NotEmpty(t, failure.Message)
		})
	}
}

func TestCapabilitiesAreAList(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	status, answer := h.send(http.MethodGet, h.url+"/control/capabilities", "", "")
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"result": ["backup-restore", "idempotency-fault", "leases", "signed-urls", "validators", "commit-validators"]}`, answer)
}

func TestTheClockMovesOnlyWhenTold(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	require.Equal(t, "1750000000000", h.call(base, "nowMs", "{}"))
	require.Equal(t, "null", h.call(base, "advanceClock", `{"ms": 1500}`))
	require.Equal(t, "1750000001500", h.call(base, "nowMs", "{}"))

	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", tasks)
	_, err := ada.Push(t.Context(), task(t, "c1", "t1", "p1", "one"))
	require.NoError(t, err)

	conn := connectTo(t, h.dsn, database(base))
	var createdAt int64
	require.NoError(t, conn.QueryRow(t.Context(), `select created_at_ms from syncpg.sync_commits`).Scan(&createdAt))
	require.Equal(t, int64(startMs+1500), createdAt)
}

func TestInstancesShareNothing(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	one := h.create(`"schema": ` + tasks)
	two := h.create(`"schema": ` + tasks)
	require.NotEqual(t, one, two)

	h.call(one, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	h.call(one, "advanceClock", `{"ms": 1}`)
	ada := h.client(one, "ada", "device-1", tasks)
	results, err := ada.Push(t.Context(), task(t, "c1", "t1", "p1", "one"))
	require.NoError(t, err)
	require.Equal(t, ssp2.PushApplied, results[0].Status)

	require.Equal(t, "1", h.call(one, "getMaxCommitSeq", "{}"))
	require.Equal(t, "0", h.call(two, "getMaxCommitSeq", "{}"))
	require.Equal(t, "0", h.call(one, "getHorizonSeq", "{}"))
	require.Equal(t, "[]", h.call(two, "readRows", `{"table": "tasks"}`))
	require.Equal(t, "1750000000000", h.call(two, "nowMs", "{}"))

	// The same actor holds nothing there.
	other := h.client(two, "ada", "device-1", tasks)
	results, err = other.Push(t.Context(), task(t, "c1", "t1", "p1", "one"))
	require.NoError(t, err)
	require.Equal(t, ssp2.PushRejected, results[0].Status)
	require.Equal(t, "sync.forbidden", results[0].Results[0].Code)
}

func TestARequestWithoutAnActorIsNotAuthenticated(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	status, answer := h.send(http.MethodPost, base+"/sync", "application/vnd.syncular.sync.v2", "")
	require.Equal(t, http.StatusUnauthorized, status)
	require.Contains(t, answer, `"code":"sync.auth_required"`)
}

func TestScopesAndFailuresOfTheResolverCountForTheNextRound(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	ada := h.client(base, "ada", "device-1", tasks)
	push := func(id string) ssp2.PushResult {
		results, err := ada.Push(t.Context(), task(t, id, id, "p1", "title"))
		require.NoError(t, err)
		return results[0].PushResult
	}
	require.Equal(t, ssp2.PushRejected, push("c1").Status)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["p1"]}}`)
	require.Equal(t, ssp2.PushApplied, push("c2").Status)
	h.call(base, "setResolverFailing", `{"failing": true}`)
	require.Equal(t, "sync.forbidden", push("c3").Results[0].Code)
	h.call(base, "setResolverFailing", `{"failing": false}`)
	require.Equal(t, ssp2.PushApplied, push("c4").Status)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["p2"]}}`)
	require.Equal(t, "sync.forbidden", push("c5").Results[0].Code)
	require.Equal(t, "2", h.call(base, "getMaxCommitSeq", "{}"))
}

// everything has a column of each type that can be pushed, and two scopes.
const everything = `{"version": 3, "tables": [{
	"name": "Every Thing", "primaryKey": "id",
	"columns": [
		{"name": "id", "type": "string", "nullable": false},
		{"name": "Org", "type": "integer", "nullable": false},
		{"name": "open", "type": "boolean", "nullable": false},
		{"name": "n", "type": "integer", "nullable": true},
		{"name": "f", "type": "float", "nullable": true},
		{"name": "j", "type": "json", "nullable": true},
		{"name": "b", "type": "bytes", "nullable": true},
		{"name": "doc", "type": "crdt", "nullable": true, "crdtType": "yjs-doc"},
		{"name": "secret", "type": "bytes", "nullable": true, "encrypted": true, "declaredType": "string"}
	],
	"scopes": [{"pattern": "org:{orgId}", "column": "Org"}, {"pattern": "open:{open}"}]
}]}`

func TestReadRowsShowsWhatIsStored(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + everything)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"orgId": ["*"], "open": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", everything)
	compiled := compile(t, everything)
	null := ssp2.Value{Null: true}
	// Byte order differs from what a natural language says, and from UTF-16.
	results, err := ada.Push(t.Context(),
		upsert(t, compiled, "c1", "\U0001F600", text("\U0001F600"), ssp2.Value{Int: 7}, ssp2.Value{}, null, null, null, null, null, null),
		upsert(t, compiled, "c2", "\uFF5E", text("\uFF5E"), ssp2.Value{Int: 7}, ssp2.Value{}, null, null, null, null, null, null),
		upsert(t, compiled, "c3", "a", text("a"), ssp2.Value{Int: -7}, ssp2.Value{Int: 1},
			ssp2.Value{Int: 9007199254740991}, ssp2.Value{Float: 1.5}, text(`{"k":  [1]}`),
			ssp2.Value{Bytes: []byte{0x0a, 0xff}}, null, ssp2.Value{Bytes: []byte{1, 2}}),
		upsert(t, compiled, "c4", "B", text("B"), ssp2.Value{Int: 7}, ssp2.Value{}, null, null, null, null, null, null),
		upsert(t, compiled, "c5", "a", text("a"), ssp2.Value{Int: 0}, ssp2.Value{Int: 0},
			null, ssp2.Value{Float: 2}, text(`{"k":  [1]}`), ssp2.Value{Bytes: []byte{}}, null, null),
	)
	require.NoError(t, err)
	for _, result := range results {
		require.Equal(t, ssp2.PushApplied, result.Status, result.Results)
	}

	var rows []map[string]any
	require.NoError(t, json.Unmarshal([]byte(h.call(base, "readRows", `{"table": "Every Thing"}`)), &rows))
	ids := make([]any, len(rows))
	for i, row := range rows {
		ids[i] = row["rowId"]
	}
	require.Equal(t, []any{"B", "a", "\uFF5E", "\U0001F600"}, ids)
	want := map[string]any{
		"rowId": "a", "version": 2.0,
		"scopes": map[string]any{"orgId": "-7", "open": "true"},
		"values": map[string]any{
			"id": "a", "Org": -7.0, "open": true, "n": nil, "f": 2.0, "j": `{"k":  [1]}`,
			"b": map[string]any{"$bytes": ""}, "doc": nil, "secret": nil,
		},
	}
	require.Empty(t, cmp.Diff(want, rows[1]))
}

func TestLimitsReachTheServer(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"limits": {"maxOperationsPerRequest": 1}, "schema": ` + tasks)
	ada := h.client(base, "ada", "device-1", tasks)
	_, err := ada.Push(t.Context(), task(t, "c1", "t1", "p1", "one"), task(t, "c2", "t2", "p1", "two"))
	var refused *client.ServerError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, ssp2.CodeTooManyOperations, refused.Code)
}

func TestOnlyTheNextLookupOfAnOutcomeFails(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", tasks)
	known, fresh := task(t, "known", "t1", "p1", "one"), task(t, "fresh", "t2", "p1", "two")
	push := func(commit ssp2.PushCommit) client.Result {
		results, err := ada.Push(t.Context(), commit)
		require.NoError(t, err)
		return results[0]
	}
	stored := push(known)
	require.Equal(t, ssp2.PushApplied, stored.Status)

	for _, commit := range []ssp2.PushCommit{known, fresh} {
		h.call(base, "failNextIdempotencyLookup", "{}")
		_, err := ada.Pull(t.Context()) // looks nothing up
		require.NoError(t, err)
		missed := push(commit)
		require.Equal(t, ssp2.PushRejected, missed.Status)
		require.Equal(t, string(ssp2.CodeIdempotencyCacheMiss), missed.Results[0].Code)
		require.True(t, missed.Results[0].Retryable)
		require.Equal(t, "1", h.call(base, "getMaxCommitSeq", "{}"))
	}
	require.Equal(t, ssp2.PushCached, push(known).Status)
	require.Equal(t, stored.Results, push(known).Results)
	require.Equal(t, ssp2.PushApplied, push(fresh).Status)
}

func TestPrunePassesThePolicyOn(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", tasks)
	for _, id := range []string{"c1", "c2", "c3"} {
		_, err := ada.Push(t.Context(), task(t, id, id, "p1", "one"))
		require.NoError(t, err)
	}
	require.NoError(t, ada.Subscribe("tasks", "tasks", ssp2.ScopeMap{"project_id": {"p1"}}))
	_, err := ada.CatchUp(t.Context())
	require.NoError(t, err)
	_, err = ada.Push(t.Context(), task(t, "c4", "c4", "p1", "one"))
	require.NoError(t, err)
	require.Equal(t, "0", h.call(base, "prune", "{}"))
	require.Equal(t, "3", h.call(base, "prune", `{"minRetainedCommits": 0}`), "the client's cursor holds the rest")
	h.call(base, "advanceClock", `{"ms": 1000}`)
	require.Equal(t, "3", h.call(base, "prune", `{"minRetainedCommits": 1, "activeWindowMs": 0, "ageForceMs": 0}`))
	require.Equal(t, "4", h.call(base, "prune", `{"minRetainedCommits": 0, "ageForceMs": 0}`))
	require.Equal(t, "4", h.call(base, "getHorizonSeq", "{}"))
}

func TestARestoredBackupIsAnotherLog(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	h.call(base, "setAllowedScopes", `{"actorId": "ada", "allowed": {"project_id": ["*"]}}`)
	ada := h.client(base, "ada", "device-1", tasks)
	lost := task(t, "lost", "t2", "p1", "after the backup")
	_, err := ada.Push(t.Context(), task(t, "kept", "t1", "p1", "before the backup"))
	require.NoError(t, err)
	h.call(base, "captureBackup", "{}")
	_, err = ada.Push(t.Context(), lost)
	require.NoError(t, err)
	h.call(base, "restoreBackup", "{}")
	require.Equal(t, "1", h.call(base, "getMaxCommitSeq", "{}"))
	_, err = ada.Push(t.Context(), lost)
	require.ErrorIs(t, err, client.ErrReset)
	results, err := ada.Push(t.Context(), lost)
	require.NoError(t, err)
	require.Equal(t, ssp2.PushApplied, results[0].Status)
	require.Equal(t, "2", h.call(base, "getMaxCommitSeq", "{}"))
}

func TestQuiesceAnswersAtOnceWithoutConnections(t *testing.T) {
	t.Parallel()

	h := newHost(t)
	base := h.create(`"schema": ` + tasks)
	require.Equal(t, "null", h.call(base, "quiesce", `{"connections": 0}`))
}

func TestCloseDiscardsTheDatabase(t *testing.T) {
	t.Parallel()

	dsn := pgtest.DSN(t)
	h, err := host.New(t.Context(), host.Config{DatabaseURL: dsn})
	require.NoError(t, err)
	server := httptest.NewServer(h.Handler())
	defer server.Close()
	served := &testHost{t: t, url: server.URL, dsn: dsn}
	closed := served.create(`"schema": ` + tasks)
	abandoned := served.create(`"schema": ` + tasks)
	closedDatabase, abandonedDatabase := database(closed), database(abandoned)
	conn := connect(t, dsn)
	exists := func(database string) bool {
		var found bool
		require.NoError(t, conn.QueryRow(t.Context(),
			`select exists (select from pg_catalog.pg_database where datname = $1)`, database).Scan(&found))
		return found
	}
	require.True(t, exists(closedDatabase))

	require.Equal(t, "null", served.call(closed, "close", "{}"))
	require.False(t, exists(closedDatabase))
	status, _ := served.post(closed+"/control/nowMs", "{}")
	require.Equal(t, http.StatusNotFound, status)

	require.True(t, exists(abandonedDatabase))
	require.NoError(t, h.Close(t.Context()))
	require.False(t, exists(abandonedDatabase))
	var left int
	require.NoError(t, conn.QueryRow(t.Context(),
		`select count(*) from pg_catalog.pg_database where starts_with(datname, $1)`,
		strings.TrimSuffix(abandonedDatabase, "_2")).Scan(&left))
	require.Zero(t, left)
}

// database is the name of an instance's database, which is its id.
func database(base string) string { return base[strings.LastIndex(base, "/")+1:] }

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	return connectTo(t, dsn, "")
}

// connectTo connects to another database of the same server.
func connectTo(t *testing.T, dsn, database string) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	require.NoError(t, err)
	if database != "" {
		config.Database = database
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	return conn
}
