package smoke_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg/internal/smoke"
	"github.com/syncpg/syncpg/schema"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/ssp2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parse(t *testing.T, ir string) *schema.Schema {
	t.Helper()
	s, err := schema.Parse([]byte(ir))
	require.NoError(t, err)
	return s
}

// oneTable is a schema of one table with a column list and a scope column.
func oneTable(columns string) string {
	return `{"irVersion": 1, "schemaVersion": 1, "tables": [{
	  "name": "things", "primaryKey": "id", "columns": [` + columns + `],
	  "scopes": [{"pattern": "team:{team_id}", "column": "team"}]}]}`
}

const (
	stringID = `{"name": "id", "type": "string", "nullable": false},`
	teamText = `{"name": "team", "type": "string", "nullable": false},`
	title    = `{"name": "title", "type": "string", "nullable": false}`
)

func run(t *testing.T, o smoke.Options) ([]smoke.Step, error) {
	t.Helper()
	var steps []smoke.Step
	err := smoke.Run(t.Context(), o, func(s smoke.Step) { steps = append(steps, s) })
	return steps, err
}

func TestRunPassesAgainstACorrectServer(t *testing.T) {
	t.Parallel()
	const shared = `"irVersion": 1, "schemaVersion": 1, "tables": [`
	for name, ir := range map[string]string{
		"sample":                    string(sample.IR()),
		"integer key and scope":     oneTable(`{"name": "id", "type": "integer", "nullable": false}, {"name": "team", "type": "integer", "nullable": false}, ` + title),
		"float key, boolean scope":  oneTable(`{"name": "id", "type": "float", "nullable": false}, {"name": "team", "type": "boolean", "nullable": false}, ` + title),
		"json key and scope":        oneTable(`{"name": "id", "type": "json", "nullable": false}, {"name": "team", "type": "json", "nullable": false}, ` + title),
		"one boolean to change":     oneTable(stringID + teamText + `{"name": "done", "type": "boolean", "nullable": false}`),
		"one nullable boolean":      oneTable(stringID + teamText + `{"name": "done", "type": "boolean", "nullable": true}`),
		"encrypted column":          oneTable(stringID + teamText + `{"name": "s", "type": "bytes", "nullable": false, "encrypted": true, "declaredType": "string"}`),
		"crdt and blob may be NULL": oneTable(stringID + teamText + title + `, {"name": "b", "type": "blob_ref", "nullable": true}, {"name": "c", "type": "crdt", "nullable": true, "crdtType": "yjs-doc"}`),
		"the key is the scope": `{` + shared + `{"name": "users", "primaryKey": "id", "columns": [` + stringID + title + `],
			"scopes": [{"pattern": "user:{user_id}", "column": "id"}]}]}`,
		"the parent's key is the scope": `{` + shared + `
			{"name": "teams", "primaryKey": "id", "columns": [` + stringID + title + `], "scopes": [{"pattern": "team:{team_id}", "column": "id"}]},
			{"name": "posts", "primaryKey": "id", "columns": [` + stringID + teamText + title + `, {"name": "n", "type": "integer", "nullable": false}],
			 "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
			 "references": [{"column": "team", "parentTable": "teams", "onDelete": "CASCADE"}]}]}`,
		"grandparents": `{` + shared + `
			{"name": "a", "primaryKey": "id", "columns": [` + stringID + teamText + title + `], "scopes": [{"pattern": "team:{team_id}", "column": "team"}]},
			{"name": "b", "primaryKey": "id", "columns": [` + stringID + teamText + title + `, {"name": "a_id", "type": "string", "nullable": false}],
			 "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
			 "references": [{"column": "a_id", "parentTable": "a", "onDelete": "RESTRICT"}]},
			{"name": "c", "primaryKey": "id", "columns": [` + stringID + teamText + title + `, {"name": "n", "type": "integer", "nullable": true},
			  {"name": "b_id", "type": "string", "nullable": false}, {"name": "c_id", "type": "string", "nullable": true}],
			 "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
			 "references": [{"column": "b_id", "parentTable": "b", "onDelete": "RESTRICT"}, {"column": "c_id", "parentTable": "c", "onDelete": "SET NULL"}]}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := parse(t, ir)
			m, server := newModel(t, s)
			steps, err := run(t, smoke.Options{URL: server.URL + "/", Schema: s, HTTP: server.Client()})
			require.NoError(t, err)
			passed := map[ssp2.WireVersion]int{}
			for _, step := range steps {
				require.NoError(t, step.Err)
				passed[step.Wire]++
			}
			require.Equal(t, 1, passed[0])
			require.GreaterOrEqual(t, passed[ssp2.WireV2], 11)
			require.GreaterOrEqual(t, passed[ssp2.WireV3], 11)
			for table, rows := range m.rows {
				require.Empty(t, rows, "rows left in %s", table)
			}
		})
	}
}

func TestRunFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	// Each server is correct but for one thing.
	type frames = []ssp2.Frame
	each := func(change func(f ssp2.Frame) ssp2.Frame) func(int, *ssp2.Request, frames) frames {
		return func(_ int, _ *ssp2.Request, in frames) frames {
			var out frames
			for _, f := range in {
				if f = change(f); f != nil {
					out = append(out, f)
				}
			}
			return out
		}
	}
	for _, tc := range []struct {
		name   string
		tamper func(request int, req *ssp2.Request, frames frames) frames
		step   string
		want   string
	}{
		{"no reset on acquisition", each(func(f ssp2.Frame) ssp2.Frame {
			if h, ok := f.(*ssp2.ResponseHeader); ok {
				h.ResetRequired = false
			}
			return f
		}), "acquire the log epoch", "log epoch"},
		{"a commit is lost from the log", each(func(f ssp2.Frame) ssp2.Frame {
			if c, ok := f.(*ssp2.Commit); ok && c.CommitSeq == 2 {
				return nil
			}
			return f
		}), "pull the log with the first client", "the version is 1, should be 2"},
		{"a delete is lost from the log", each(func(f ssp2.Frame) ssp2.Frame {
			if c, ok := f.(*ssp2.Commit); ok && c.Changes[0].Op == ssp2.OpDelete {
				return nil
			}
			return f
		}), "pull the log with the first client", "which should not be there"},
		{"versions of changes are off by one", each(func(f ssp2.Frame) ssp2.Frame {
			if c, ok := f.(*ssp2.Commit); ok {
				copied := *c
				copied.Changes = append([]ssp2.Change{}, c.Changes...)
				for i := range copied.Changes {
					if v := copied.Changes[i].RowVersion; v != nil {
						next := *v + 1
						copied.Changes[i].RowVersion = &next
					}
				}
				return &copied
			}
			return f
		}), "pull the log with the first client", "the version is"},
		{"a bootstrap stops early", each(func(f ssp2.Frame) ssp2.Frame {
			if e, ok := f.(*ssp2.SubEnd); ok {
				e.BootstrapState = nil
			}
			return f
		}), "bootstrap a second client", "the client lacks row"},
		{"a bootstrap never ends", each(func(f ssp2.Frame) ssp2.Frame {
			if e, ok := f.(*ssp2.SubEnd); ok {
				start := `""`
				e.BootstrapState = &start
			}
			return f
		}), "bootstrap the first client", "no end after"},
		{"a stale update is applied", each(func(f ssp2.Frame) ssp2.Frame {
			if r, ok := f.(*ssp2.PushResult); ok && r.Status == ssp2.PushRejected {
				seq := int64(99)
				return &ssp2.PushResult{
					ClientCommitID: r.ClientCommitID, Status: ssp2.PushApplied, CommitSeq: &seq,
					Results: []ssp2.OpResult{{Status: ssp2.OpApplied}},
				}
			}
			return f
		}), "push an update of an old version", "the commit is applied as commit 99, should be rejected for a conflict"},
		{"a conflict shows another version", each(func(f ssp2.Frame) ssp2.Frame {
			if r, ok := f.(*ssp2.PushResult); ok && r.Status == ssp2.PushRejected {
				r.Results[0].ServerVersion++
			}
			return f
		}), "push an update of an old version", "the conflict shows another row"},
		{"a replay is applied again", each(func(f ssp2.Frame) ssp2.Frame {
			if r, ok := f.(*ssp2.PushResult); ok && r.Status == ssp2.PushCached {
				r.Status = ssp2.PushApplied
			}
			return f
		}), "push both commits again", "is answered applied as commit 1"},
		{"a replay gets another message", func(request int, _ *ssp2.Request, in frames) frames {
			for i, f := range in {
				if r, ok := f.(*ssp2.PushResult); ok && r.Status == ssp2.PushRejected && request > 1 {
					copied := *r
					copied.Results = append([]ssp2.OpResult{}, r.Results...)
					copied.Results[0].Message = strings.Repeat("x", request)
					in[i] = &copied
				}
			}
			return in
		}, "push both commits again", "the replay of a commit"},
		{"seqs do not grow", each(func(f ssp2.Frame) ssp2.Frame {
			if r, ok := f.(*ssp2.PushResult); ok && r.CommitSeq != nil {
				one := int64(1)
				r.CommitSeq = &one
			}
			return f
		}), "push an update of the version", "seq 1 after seq 1"},
		{"inserts are refused", each(func(f ssp2.Frame) ssp2.Frame {
			if r, ok := f.(*ssp2.PushResult); ok {
				return &ssp2.PushResult{ClientCommitID: r.ClientCommitID, Status: ssp2.PushRejected, Results: []ssp2.OpResult{
					{Status: ssp2.OpError, Code: "sync.forbidden", Message: "not allowed"},
				}}
			}
			return f
		}), "push a commit of inserts", "rejected, operation 0: sync.forbidden (not allowed), should be applied"},
		{"json is written anew", each(func(f ssp2.Frame) ssp2.Frame {
			if c, ok := f.(*ssp2.Commit); ok {
				for i := range c.Changes {
					if row := c.Changes[i].Row; row != nil {
						// Same length, so that the row stays well formed.
						c.Changes[i].Row = []byte(strings.ReplaceAll(string(row), `": "`, `" :"`))
					}
				}
			}
			return f
		}), "pull the log with the first client", `column "labels" is`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := parse(t, string(sample.IR()))
			m, server := newModel(t, s)
			m.tamper = tc.tamper
			steps, err := run(t, smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client()})
			var failure *smoke.StepError
			require.ErrorAs(t, err, &failure)
			last := steps[len(steps)-1]
			require.Equal(t, last, failure.Step)
			require.Contains(t, last.Name, tc.step)
			require.ErrorContains(t, err, tc.want)
			for _, s := range steps[:len(steps)-1] {
				require.NoError(t, s.Err)
			}
		})
	}
}

func TestWireVersion3MarksExactlyTheConflictingColumns(t *testing.T) {
	t.Parallel()
	s := parse(t, string(sample.IR()))
	m, server := newModel(t, s)
	m.tamper = func(_ int, _ *ssp2.Request, frames []ssp2.Frame) []ssp2.Frame {
		for _, f := range frames {
			if r, ok := f.(*ssp2.PushResult); ok && r.Status == ssp2.PushRejected {
				ssp2.Bitmap(r.Results[0].ConflictColumns).Set(0)
			}
		}
		return frames
	}
	_, err := run(t, smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client(), Wires: []ssp2.WireVersion{ssp2.WireV3}})
	require.ErrorContains(t, err, "the conflict marks the columns [id title], not title alone")
}

func TestFailuresSayWhatToLookAt(t *testing.T) {
	t.Parallel()
	json := func(status int, body string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return true
		}
	}
	onSync := func(f func(http.ResponseWriter, *http.Request) bool) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			return strings.HasSuffix(r.URL.Path, "/sync") && f(w, r)
		}
	}
	for _, tc := range []struct {
		name      string
		intercept func(http.ResponseWriter, *http.Request) bool
		change    func(o *smoke.Options, m *model)
		err, look string
	}{
		{
			name:      "not ready",
			intercept: json(503, `{"status":"unavailable","checks":[{"name":"database","status":"ok"},{"name":"schema","status":"failed","help":"run x"}]}`),
			err:       "not ready: schema failed: run x", look: "syncpg migrate status",
		},
		{
			name:      "no database",
			intercept: json(503, `{"status":"unavailable","checks":[{"name":"database","status":"failed","help":"check it"}]}`),
			err:       "not ready: database failed: check it", look: "is the server's database running",
		},
		{
			name:      "no HTTP",
			intercept: func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) },
			err:       "EOF", look: "does this port speak HTTP?",
		},
		{name: "an unready proxy", intercept: json(502, `oops`), err: "answered HTTP 502", look: "perhaps a proxy"},
		{
			name:      "wrong path",
			intercept: func(w http.ResponseWriter, r *http.Request) bool { http.NotFound(w, r); return true },
			err:       "HTTP 404", look: "without /sync",
		},
		{
			name:      "wrong token",
			intercept: onSync(json(401, `{"code":"sync.auth_required","message":"no"}`)),
			err:       "sync.auth_required (HTTP 401)", look: "--token",
		},
		{
			name:      "server failure",
			intercept: onSync(json(500, `{"code":"sync.internal_error","message":"no"}`)),
			err:       "sync.internal_error", look: "the server's log",
		},
		{
			name: "another schema version",
			change: func(o *smoke.Options, _ *model) {
				o.Schema, _ = schema.Parse([]byte(strings.ReplaceAll(oneTable(stringID+teamText+title), `"schemaVersion": 1`, `"schemaVersion": 2`)))
			},
			err: "the server serves schema version 1, not 2", look: "--schema FILE",
		},
		{
			name:   "nothing listens",
			change: func(o *smoke.Options, _ *model) { o.URL = "http://127.0.0.1:1" },
			err:    "connect", look: "is the server running",
		},
		{
			name:   "TLS to a plain port",
			change: func(o *smoke.Options, _ *model) { o.URL = strings.Replace(o.URL, "http:", "https:", 1) },
			err:    "HTTP response to HTTPS client", look: "use http://",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := parse(t, string(sample.IR()))
			m, server := newModel(t, s)
			m.intercept = tc.intercept
			o := smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client()}
			if tc.change != nil {
				tc.change(&o, m)
			}
			_, err := run(t, o)
			var failure *smoke.StepError
			require.ErrorAs(t, err, &failure)
			require.ErrorContains(t, err, tc.err)
			require.Contains(t, failure.Step.Look, tc.look)
		})
	}
}

func TestSocketsAreFollowed(t *testing.T) {
	t.Parallel()
	wakeUp := `{"event":"sync","data":{"cursor":9,"requiresPull":true,"reason":"catchup-required","timestamp":1}}`
	for _, tc := range []struct {
		name   string
		change func(m *model, o *smoke.Options)
		detail string // of the step
		err    string // "": the run passes
	}{
		{name: "a delta", detail: "1 commit by delta"},
		{name: "a wake-up instead", detail: "woken up to pull", change: func(m *model, _ *smoke.Options) {
			m.onSocket = func(string) string { return wakeUp }
		}},
		{name: "a greeting that asks for a pull", detail: "1 commit by delta", change: func(m *model, _ *smoke.Options) {
			m.hello = func(hello string) string { return strings.Replace(hello, "false", "true", 1) }
		}},
		{name: "no channel", detail: "not asked: there is no /realtime here", change: func(m *model, _ *smoke.Options) {
			m.intercept = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path != "/realtime" {
					return false
				}
				http.NotFound(w, r)
				return true
			}
		}},
		{name: "sockets refused", err: "HTTP 502", change: func(m *model, _ *smoke.Options) {
			m.intercept = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path != "/realtime" {
					return false
				}
				w.WriteHeader(http.StatusBadGateway)
				return true
			}
		}},
		{name: "nothing arrives", err: "nothing on the socket of a commit that was pushed within 10ms", change: func(m *model, o *smoke.Options) {
			m.onSocket, o.DeltaWithin = func(string) string { return "" }, 10*time.Millisecond
		}},
		{name: "a delta of another subscription", err: "which is not to follow the log", change: func(m *model, _ *smoke.Options) {
			m.onSocket = func(delta string) string { return strings.ReplaceAll(delta, "smoke-", "SMOKE-") }
		}},
		{name: "no greeting", err: "no hello", change: func(m *model, _ *smoke.Options) {
			m.hello = func(string) string { return wakeUp }
		}},
		{name: "somebody else's greeting", err: `for client "x`, change: func(m *model, _ *smoke.Options) {
			m.hello = func(hello string) string { return strings.Replace(hello, `"clientId":"`, `"clientId":"x`, 1) }
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := parse(t, string(sample.IR()))
			m, server := newModel(t, s)
			o := smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client(), Wires: []ssp2.WireVersion{ssp2.WireV3}}
			if tc.change != nil {
				tc.change(m, &o)
			}
			steps, err := run(t, o)
			at := slices.IndexFunc(steps, func(s smoke.Step) bool { return strings.HasPrefix(s.Name, "follow an update over a socket") })
			require.GreaterOrEqual(t, at, 0)
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.Equal(t, len(steps)-1, at)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tc.detail, steps[at].Detail)
		})
	}
}

func TestServerWithoutReadyzIsChecked(t *testing.T) {
	t.Parallel()
	s := parse(t, string(sample.IR()))
	m, server := newModel(t, s)
	m.intercept = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != "/readyz" {
			return false
		}
		http.NotFound(w, r)
		return true
	}
	steps, err := run(t, smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client()})
	require.NoError(t, err)
	require.Contains(t, steps[0].Detail, "no /readyz")
}

func TestOptionsChooseTableScopesAndWires(t *testing.T) {
	t.Parallel()
	s := parse(t, string(sample.IR()))
	m, server := newModel(t, s)
	seen := map[string]bool{}
	m.tamper = func(_ int, req *ssp2.Request, frames []ssp2.Frame) []ssp2.Frame {
		for _, sub := range req.Subscriptions {
			seen[sub.Table] = true
			require.Equal(t, ssp2.ScopeMap{"team_id": {"blue"}}, sub.Scopes)
		}
		return frames
	}
	_, err := run(t, smoke.Options{
		URL: server.URL, Schema: s, HTTP: server.Client(), Table: "members", Scopes: map[string]string{"team_id": "blue"},
		Wires: []ssp2.WireVersion{ssp2.WireV2},
	})
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"members": true}, seen)
	require.Zero(t, m.wires[ssp2.WireV3])
}

func TestRunNeverWritesARowThatIsThere(t *testing.T) {
	t.Parallel()
	s := parse(t, `{"irVersion": 1, "schemaVersion": 1, "tables": [
		{"name": "teams", "primaryKey": "id", "columns": [`+stringID+title+`], "scopes": [{"pattern": "team:{team_id}", "column": "id"}]},
		{"name": "posts", "primaryKey": "id", "columns": [`+stringID+teamText+title+`, {"name": "n", "type": "integer", "nullable": false}],
		 "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
		 "references": [{"column": "team", "parentTable": "teams", "onDelete": "CASCADE"}]}]}`)
	m, server := newModel(t, s)
	m.rows["teams"]["blue"] = stored{version: 3, columns: []int64{1, 3}, values: []ssp2.Value{{Bytes: []byte("blue")}, {Bytes: []byte("Blue")}}}
	_, err := run(t, smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client(), Scopes: map[string]string{"team_id": "blue"}})
	var outcome *smoke.OutcomeError
	require.ErrorAs(t, err, &outcome)
	require.ErrorContains(t, err, "sync.version_conflict")
	require.Equal(t, int64(3), m.rows["teams"]["blue"].version)
}

func TestUnsuitableOptionsAreRefusedBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		ir     string
		change func(o *smoke.Options)
		want   string
	}{
		{"no such table", string(sample.IR()), func(o *smoke.Options) { o.Table = "none" }, `no table "none"`},
		{"no such variable", string(sample.IR()), func(o *smoke.Options) { o.Scopes = map[string]string{"x": "y"} }, `no scope variable "x" in the tables written to; there are team_id`},
		{"value of another type", oneTable(stringID + `{"name": "team", "type": "integer", "nullable": false}, ` + title), func(o *smoke.Options) { o.Scopes = map[string]string{"team_id": "blue"} }, `the scope variable "team_id" has no value that suits`},
		{"boolean key", oneTable(`{"name": "id", "type": "boolean", "nullable": false},` + teamText + title), nil, "its primary key is a boolean"},
		{"blob needed", oneTable(stringID + teamText + title + `, {"name": "b", "type": "blob_ref", "nullable": false}`), nil, `column "b" is a blob_ref that is not nullable`},
		{"crdt needed", oneTable(stringID + teamText + title + `, {"name": "c", "type": "crdt", "nullable": false, "crdtType": "yjs-doc"}`), func(o *smoke.Options) { o.Table = "things" }, `column "c" is a crdt that is not nullable`},
		{"nothing to change", oneTable(stringID + strings.TrimSuffix(teamText, ",")), nil, "none to change"},
		{"nothing to change in the named table", oneTable(stringID + strings.TrimSuffix(teamText, ",")), func(o *smoke.Options) { o.Table = "things" }, "no column that an update could change"},
		{"the key is the scope", `{"irVersion": 1, "schemaVersion": 1, "tables": [{"name": "users", "primaryKey": "id", "columns": [` + stringID + title + `], "scopes": [{"pattern": "user:{user_id}", "column": "id"}]}]}`, func(o *smoke.Options) { o.Scopes = map[string]string{"user_id": "me"} }, `is the primary key of table "users"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			o := smoke.Options{URL: "http://127.0.0.1:1", Schema: parse(t, tc.ir)}
			if tc.change != nil {
				tc.change(&o)
			}
			steps, err := run(t, o)
			require.ErrorContains(t, err, tc.want)
			require.Empty(t, steps)
		})
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := parse(t, string(sample.IR()))
	m, server := newModel(t, s)
	ctx, cancel := context.WithCancelCause(t.Context())
	m.tamper = func(request int, _ *ssp2.Request, frames []ssp2.Frame) []ssp2.Frame {
		if request == 4 {
			cancel(nil)
		}
		return frames
	}
	err := smoke.Run(ctx, smoke.Options{URL: server.URL, Schema: s, HTTP: server.Client()}, func(smoke.Step) {})
	require.ErrorIs(t, err, context.Canceled)
}
