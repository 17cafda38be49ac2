package main

import (
	"io"
	"net/http"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

// fetch returns the status and the body of a page.
func fetch(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	r.Close = true // leave no connection behind
	res, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(body)
}

func TestServeShowsMetricsAndLogsEvents(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url).code)
	serve := []string{"--dev-auth", "--schema", sampleFile, "--database-url", url}
	s := startServe(t, append(serve, "--metrics-listen", "127.0.0.1:0", "--log-events")...)
	s.smoke(t)
	metrics := regexp.MustCompile(`metrics=(\S+)`).FindStringSubmatch(s.logs.String())
	require.Len(t, metrics, 2, s.logs)

	status, body := fetch(t, metrics[1])
	require.Equal(t, http.StatusOK, status)
	for _, line := range []string{
		`syncpg_request_duration_seconds_count\{code="ok",wire="2"\} [1-9]`,
		`syncpg_push_commits_total\{outcome="applied",replay="false"\} [1-9]`,
		`syncpg_pull_subscriptions_total\{mode="bootstrap",status="active"\} [1-9]`,
		`go_goroutines [1-9]`,
	} {
		require.Regexp(t, line, body)
	}
	require.NotContains(t, body, "smoke", "no partition, actor or client")
	status, _ = fetch(t, s.url+"/metrics")
	require.Equal(t, http.StatusNotFound, status, "not where clients are")

	other := runCommand(t, append([]string{"serve", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1"}, serve...)...)
	require.Equal(t, exitUsage, other.code)
	require.Contains(t, other.stderr, "--metrics-listen: ")

	end := s.stop()
	require.Zero(t, end.code, end.stderr)
	for _, event := range []string{"request.handled", "push.applied", "pull.served"} {
		require.Contains(t, end.stderr, "msg="+event)
	}
}

func TestNobodyIsToldByDefault(t *testing.T) {
	t.Parallel()
	o, err := observeFlags{}.observe(t.Context(), nil)
	require.NoError(t, err)
	require.Nil(t, o.sink)
	require.Empty(t, o.url)
	o.stop()
}
