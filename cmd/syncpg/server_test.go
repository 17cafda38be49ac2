package main

import (
	"bufio"
	"context"
	"io"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/client"
	"github.com/syncpg/syncpg/ssp2"
)

// server is a run of the command that serves until it is stopped.
type server struct {
	url    string
	cancel context.CancelFunc
	done   chan result
	logs   *logs
}

// logs collects lines while they may be read.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logs) add(line string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.WriteString(line + "\n")
	return l.text.String()
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

var urlInOutput = regexp.MustCompile(`http://[0-9.]+:\d+`)

// startServer runs the command and returns once its output shows the line that says that it serves.
func startServer(t *testing.T, line string, args ...string) *server {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var stdout, stderr logs
	s := &server{cancel: cancel, done: make(chan result, 1), logs: &stderr}
	ready := make(chan string, 1)
	var output sync.WaitGroup
	watch := func(into *logs) io.WriteCloser {
		r, w := io.Pipe()
		output.Go(func() {
			seen := false
			for lines := bufio.NewScanner(r); lines.Scan(); {
				text := into.add(lines.Text())
				if !seen && strings.Contains(lines.Text(), line) {
					seen = true
					ready <- urlInOutput.FindString(text)
				}
			}
		})
		return w
	}
	outWriter, errWriter := watch(&stdout), watch(&stderr)
	go func() {
		code := run(ctx, args, nil, strings.NewReader(""), outWriter, errWriter)
		_ = outWriter.Close()
		_ = errWriter.Close()
		output.Wait()
		s.done <- result{code, stdout.String(), stderr.String()}
	}()
	select {
	case s.url = <-ready:
		t.Cleanup(func() {
			cancel()
			<-s.done
		})
		return s
	case r := <-s.done:
		cancel()
		require.FailNow(t, "the command has ended", "%+v", r)
		return nil
	}
}

// smoke checks the server and fails t, with the server's log, unless every step passes.
func (s *server) smoke(t *testing.T, args ...string) result {
	t.Helper()
	r := runCommand(t, append([]string{"smoke", "--url", s.url}, args...)...)
	require.Zero(t, r.code, "%s%s\n%s", r.stdout, r.stderr, s.logs)
	return r
}

// stop ends the run as Ctrl-C does.
func (s *server) stop() result {
	s.cancel()
	return s.wait()
}

func (s *server) wait() result {
	r := <-s.done
	s.done <- r // for the cleanup
	return r
}

func startDev(t *testing.T, args ...string) *server {
	t.Helper()
	return startServer(t, "Ctrl-C stops everything.", append([]string{"dev", "--listen", "127.0.0.1:0"}, args...)...)
}

func startServe(t *testing.T, args ...string) *server {
	t.Helper()
	return startServer(t, "msg=serving", append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
}

var durations = regexp.MustCompile(` +[0-9.]+ m?s`)

// withoutDurations makes the output of smoke comparable.
func withoutDurations(s string) string { return durations.ReplaceAllString(s, " TIME") }

// device is a client of the sample schema in a partition that outlives it.
func device(t *testing.T, url, id string) *client.Client {
	t.Helper()
	c := newDevice(t, url, id, http.Header{"Authorization": {"Bearer dev:alice:home"}})
	require.NoError(t, c.Acquire(t.Context()))
	return c
}

// newDevice is a client that has not asked anything yet, and sends the headers as they are at each request.
func newDevice(t *testing.T, url, id string, headers http.Header) *client.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	c, err := client.New(client.Config{
		URL: url, Header: headers, ClientID: id, Schema: sampleSchema(t),
		Wire: ssp2.WireV2, HTTP: &http.Client{Transport: transport},
	})
	require.NoError(t, err)
	require.NoError(t, c.Subscribe("lists", "lists", ssp2.ScopeMap{"team_id": {"red"}}))
	return c
}

// upgrade asks for a socket, and returns the status of the answer.
func upgrade(t *testing.T, url string, header http.Header) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/realtime?clientId=a", nil)
	require.NoError(t, err)
	r.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
	}
	maps.Copy(r.Header, header)
	answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	return answer.StatusCode
}
