package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/ssp2"
)

var sampleFile = filepath.Join("..", "..", "schema", "sample", "sample.ir.json")

func TestServeRefusesADatabaseThatIsNotReady(t *testing.T) {
	t.Parallel()
	url := emptyDatabase(t)
	serve := []string{"serve", "--dev-auth", "--listen", "127.0.0.1:0", "--schema", sampleFile, "--database-url", url}

	r := runCommand(t, serve...)
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "migrations: the database schema is too old")
	require.Equal(t, 1, strings.Count(r.stderr, "run `syncpg migrate up`"), r.stderr)

	require.Zero(t, runCommand(t, "migrate", "up", "--database-url", url).code)
	r = runCommand(t, serve...)
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "run: syncpg schema apply --schema "+sampleFile)

	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	s := startServe(t, append(serve[1:], "--max-compressed=-1", "--max-builds=1", "--image-dir", t.TempDir())...)
	s.smoke(t)
	require.Zero(t, s.stop().code)

	other := writeFile(t, "small.json", smallSchema)
	r = runCommand(t, "serve", "--dev-auth", "--listen", "127.0.0.1:0", "--schema", other, "--database-url", url)
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "sync.storage.stored_layout_mismatch")
	require.NotContains(t, r.stderr, "syncpg schema apply", "which would refuse the same")
}

// smallSchemas writes smallSchema as version 1, and version 2 of it with a nullable column and a table more.
func smallSchemas(t *testing.T) (first, second string) {
	t.Helper()
	text := strings.NewReplacer(
		`"schemaVersion": 1`, `"schemaVersion": 2`,
		`{"name": "text", "type": "string", "nullable": true}`,
		`{"name": "color", "type": "string", "nullable": true}, {"name": "text", "type": "string", "nullable": true}`,
		`"tables": [`, `"tables": [{
			"name": "tags", "primaryKey": "id", "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
			"columns": [{"name": "id", "type": "string", "nullable": false}, {"name": "team", "type": "string", "nullable": false}]
		},`,
	).Replace(smallSchema)
	return writeFile(t, "v1.json", smallSchema), writeFile(t, "v2.json", text)
}

// §9, §1.6: devices that are not updated yet are served as long as their version is named, and told to upgrade after that.
func TestServeServesTheOlderVersionsItIsGiven(t *testing.T) {
	t.Parallel()
	first, second := smallSchemas(t)
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", first, "--database-url", url).code)
	early := runCommand(t, "serve", "--listen", "127.0.0.1:0", "--dev-auth", "--schema", second, "--database-url", url)
	require.Equal(t, exitState, early.code)
	require.Contains(t, early.stderr, "`syncpg schema apply` does it\n")
	require.NotContains(t, early.stderr, "compare with", "it is clear what to run")
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", second, "--database-url", url).code)
	common := []string{"--dev-auth", "--schema", second, "--database-url", url}

	alone := startServe(t, common...)
	alone.smoke(t, "--schema", second)
	r := runCommand(t, "smoke", "--url", alone.url, "--schema", first)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stdout, "the server serves schema version 2, not 1")
	require.Zero(t, alone.stop().code)

	for name, args := range map[string][]string{
		"by the flag": {"--older-schema", first},
		"by the file": {"--config", writeFile(t, "syncpg.yaml", "older-schema:\n  - "+first+"\n")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			both := startServe(t, append(args, common...)...)
			both.smoke(t, "--schema", second)
			both.smoke(t, "--schema", first)
			require.Contains(t, both.logs.String(), "older_versions=1")
			require.Zero(t, both.stop().code)
		})
	}
}

func TestOlderVersionsThatCannotBeServedAreRefused(t *testing.T) {
	t.Parallel()
	first, second := smallSchemas(t)
	another := writeFile(t, "also1.json", smallSchema)
	other := changed(t, `{"name": "text", "type": "string", "nullable": true}`, `{"name": "text", "type": "integer", "nullable": true}`)
	for name, tc := range map[string]struct {
		older []string
		want  string
	}{
		"missing":           {[]string{"none.json"}, "--older-schema: read the schema: open none.json"},
		"no schema":         {[]string{writeFile(t, "broken.json", `{}`)}, "broken.json: schema: "},
		"the newest itself": {[]string{second}, "v2.json is of version 2, and so is "},
		"the same twice":    {[]string{first, another}, "also1.json is of version 1, and so is "},
		"another type": {
			[]string{other}, `changed.json: schema: version 1 cannot be served from version 2: table "notes": column "text": its type was integer and is string; leave it out when its devices may be told to upgrade, or give version 2 what they need`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var flags []string
			for _, file := range tc.older {
				flags = append(flags, "--older-schema", file)
			}
			for _, command := range [][]string{
				{"serve", "--dev-auth", "--schema", second}, {"dev", "--schema", second}, {"schema", "check", "--schema", second},
			} {
				r := runCommand(t, append(command, flags...)...)
				require.Equal(t, exitUsage, r.code, r.stderr)
				require.Contains(t, r.stderr, tc.want)
			}
		})
	}
	newer := runCommand(t, "schema", "check", "--schema", first, "--older-schema", second)
	require.Equal(t, exitUsage, newer.code)
	require.Contains(t, newer.stderr, "v2.json: schema: version 2 is not older than version 1\n")

	fine := runCommand(t, "schema", "check", "--schema", second, "--older-schema", first)
	require.Zero(t, fine.code, fine.stderr)
	require.Contains(t, fine.stdout, "clients of 1 older version can be served, too: 1\n")
	require.Contains(t, fine.stdout, "only the files were checked")
}

func TestListenErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	l, err := listenFlags{Listen: "127.0.0.1:0"}.listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	for listen, want := range map[string]string{
		l.Addr().String(): "is another server running there?",
		"192.0.2.1:0":     "no network interface here has this address",
		"127.0.0.1:80000": "--listen: ",
		"127.0.0.1":       "--listen: ",
	} {
		_, err := listenFlags{Listen: listen}.listen(t.Context())
		require.ErrorContains(t, err, want, listen)
		require.Equal(t, want == "--listen: ", errors.As(err, new(usageError)), listen)
	}
	require.ErrorContains(t, listenError(syscall.EACCES, "--listen"), "needs more rights")
}

func TestServeBehindAProxyThatAuthenticates(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	s := startServe(t, "--schema", sampleFile, "--database-url", url,
		"--auth-header-actor", "X-Actor", "--auth-header-partition", "X-Partition", "--auth-header-scopes", "X-Scopes")
	headers := []string{
		"--header", "X-Actor: alice", "--header", "X-Partition: home", "--header", `X-Scopes: {"team_id": ["red"]}`,
	}
	s.smoke(t, append(headers, "--scope", "team_id=red")...)

	r := runCommand(t, append([]string{"smoke", "--url", s.url}, headers...)...)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stdout, "the actor may not read these scopes: give values it is allowed with --scope VARIABLE=VALUE")

	r = runCommand(t, "smoke", "--url", s.url)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stdout, "sync.auth_required (HTTP 401)")
	require.Contains(t, r.stdout, "give others with --token or --header")
}

// §7.3: while the proxy says that there is an outage, devices go on with their leases, and the others are told that they
// have none.
func TestServeGoesOnWithLeasesWhileTheProxyTellsOfAnOutage(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	s := startServe(t, "--schema", sampleFile, "--database-url", url, "--lease-key", base64.StdEncoding.EncodeToString(make([]byte, 32)),
		"--auth-header-actor", "X-Actor", "--auth-header-partition", "X-Partition", "--auth-header-scopes", "X-Scopes")
	headers := http.Header{"X-Actor": {"alice"}, "X-Partition": {"home"}, "X-Scopes": {`{"team_id": ["red"]}`}}
	require.Equal(t, http.StatusSwitchingProtocols, upgrade(t, s.url, headers))
	known := newDevice(t, s.url, "known", headers)
	require.NoError(t, known.Acquire(t.Context()))
	_, err := known.CatchUp(t.Context())
	require.NoError(t, err)

	headers.Set("X-Scopes", "outage")
	_, err = known.CatchUp(t.Context())
	require.NoError(t, err)
	stranger := newDevice(t, s.url, "stranger", headers)
	require.NoError(t, stranger.Acquire(t.Context()))
	_, err = stranger.CatchUp(t.Context())
	var refused *client.ServerError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, ssp2.CodeAuthLeaseRequired, refused.Code)
	require.Equal(t, http.StatusServiceUnavailable, upgrade(t, s.url, headers), "it would go on with the outage when that is over")
	r := runCommand(t, "smoke", "--url", s.url, "--header", "X-Actor: a", "--header", "X-Partition: p", "--header", "X-Scopes: outage")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stdout, "is the directory behind the server or its proxy there?")
}

func TestSmokePrintsJSON(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	s := startServe(t, "--dev-auth", "--schema", sampleFile, "--database-url", url)

	r := s.smoke(t, "--json")
	var report smokeReport
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report))
	require.True(t, report.OK)
	require.Equal(t, s.url, report.URL)
	for _, step := range report.Steps {
		require.True(t, step.OK, step.Name)
		require.LessOrEqual(t, len(step.Name), stepNameWidth)
	}

	r = runCommand(t, "smoke", "--json", "--url", s.url, "--token", "wrong")
	require.Equal(t, exitFailed, r.code)
	report = smokeReport{}
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report))
	require.False(t, report.OK)
	last := report.Steps[len(report.Steps)-1]
	require.False(t, last.OK)
	require.Contains(t, last.Error, "sync.auth_required")
	require.Contains(t, last.Look, "--token")
}

// httpServer runs listenFlags.serve with a handler.
func httpServer(t *testing.T, f listenFlags, h http.HandlerFunc) (url string, stop context.CancelFunc, done chan error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	f.Listen = "127.0.0.1:0"
	l, err := f.listen(ctx)
	require.NoError(t, err)
	done = make(chan error, 1)
	go func() { done <- f.serve(ctx, &program{log: slog.New(slog.DiscardHandler)}, l, h) }()
	return "http://" + l.Addr().String(), cancel, done
}

type answer struct {
	body string
	err  error
}

func get(t *testing.T, url string) chan answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	got := make(chan answer, 1)
	go func() {
		res, err := transport.RoundTrip(req)
		if err != nil {
			got <- answer{err: err}
			return
		}
		defer func() { _ = res.Body.Close() }()
		body, err := io.ReadAll(res.Body)
		got <- answer{string(body), err}
	}()
	return got
}

func TestShutdownLetsRequestsFinish(t *testing.T) {
	t.Parallel()
	entered, release := make(chan struct{}), make(chan struct{})
	url, stop, done := httpServer(t, listenFlags{ShutdownTimeout: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-release
		if r.Context().Err() == nil {
			_, _ = io.WriteString(w, "finished")
		}
	})
	got := get(t, url)
	<-entered
	stop()
	close(release)
	require.NoError(t, <-done)
	require.Equal(t, answer{body: "finished"}, <-got)
}

func TestShutdownCutsRequestsOffAfterItsDeadline(t *testing.T) {
	t.Parallel()
	entered, ended := make(chan struct{}), make(chan struct{})
	url, stop, done := httpServer(t, listenFlags{ShutdownTimeout: time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done()
		close(ended)
	})
	got := get(t, url)
	<-entered
	stop()
	require.NoError(t, <-done)
	<-ended
	require.Error(t, (<-got).err)
}

func TestBodiesThatDoNotComeAreGivenUp(t *testing.T) {
	t.Parallel()
	for name, read := range map[string]bool{"read": true, "not read": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(boundBodies(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if !read {
					return
				}
				_, _ = io.ReadAll(r.Body)
				w.WriteHeader(http.StatusBadRequest)
			}), 50*time.Millisecond))
			defer server.Close()
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			defer func() { require.NoError(t, conn.Close()) }()
			_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nhalf")
			require.NoError(t, err)
			answer, err := io.ReadAll(conn) // up to the server's end of the connection
			require.NoError(t, err)
			if read {
				require.Empty(t, answer)
			} else {
				require.Contains(t, string(answer), "HTTP/1.1 200 OK")
			}
		})
	}
}

// deadlines records the deadlines that a handler sets.
type deadlines struct {
	*httptest.ResponseRecorder
	set []time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.set = append(d.set, t)
	return nil
}

func TestEveryReadOfABodyHasItsOwnTimeAndTheEndHasNone(t *testing.T) {
	t.Parallel()
	d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	body := iotest.OneByteReader(strings.NewReader("abc"))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", body)
	begin := time.Now()
	var got []byte
	var err error
	boundBodies(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got, err = io.ReadAll(r.Body)
	}), time.Minute).ServeHTTP(d, r)
	require.NoError(t, err)
	require.Equal(t, "abc", string(got))
	require.Len(t, d.set, 1+4+1) // before it, for three bytes and the end, and after it
	last := begin
	for _, one := range d.set[:5] {
		require.WithinRange(t, one, last.Add(time.Minute), time.Now().Add(time.Minute))
		last = one.Add(-time.Minute)
	}
	require.Zero(t, d.set[5])
}

// The modes that poolers in transaction mode ask for, and the smallest pool.
func TestServeWorksInEveryModeOfTheDriver(t *testing.T) {
	t.Parallel()
	base := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", base).code)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			u, err := url.Parse(base)
			require.NoError(t, err)
			q := u.Query()
			q.Set("default_query_exec_mode", mode)
			q.Set("pool_max_conns", "1")
			u.RawQuery = q.Encode()
			s := startServe(t, "--dev-auth", "--schema", sampleFile, "--database-url", u.String())
			s.smoke(t)
			require.Zero(t, s.stop().code)
		})
	}
}
