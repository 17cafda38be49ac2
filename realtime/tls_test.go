package realtime_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/realtime"
)

// overTLS serves a hub with TLS, and HTTP/2 for who wants it.
func (w *world) overTLS() {
	w.t.Helper()
	server := httptest.NewUnstartedServer(w.server.Config.Handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	trusted, ok := server.Client().Transport.(*http.Transport)
	require.True(w.t, ok)
	transport := &http.Transport{TLSClientConfig: &tls.Config{
		RootCAs: trusted.TLSClientConfig.RootCAs, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12,
	}}
	w.t.Cleanup(transport.CloseIdleConnections)
	w.http = &http.Client{Transport: transport}
	w.server.Close()
	w.server = server
}

// TestManyClientsOverTLS: what does not wait for a socket may not write past its encryption.
// All of it arrives, whole and in order: deltas, texts, responses, and the end.
func TestManyClientsOverTLS(t *testing.T) {
	t.Parallel()
	const clients, commits = 200, 20
	w := newWorld(t, realtime.Options{MaxUnacked: commits})
	w.overTLS()
	w.engine.run = pulls(commits + 1)
	all := make([]*client, clients)
	for i := range all {
		name := fmt.Sprintf("c%d", i)
		w.record(name, name, 0, orgSub("o1"))
		all[i] = w.connect(name, name)
	}
	row := change("d", "o1", "f")
	row.Payload = make([]byte, 40<<10) // more than a record of TLS
	for range commits {
		w.commit(row)
	}
	w.commit(row) // one too many
	for _, c := range all {
		for seq := range commits {
			c.expect(fmt.Sprintf("delta s:%d[d]>%d", seq+1, seq+1))
		}
		c.expect(fmt.Sprintf("wake catchup-required %d", commits+1))
		c.chunk(pullRequest(c.hello.ClientID, orgSub("o1")))
	}
	for _, c := range all {
		_, others := c.response()
		require.Empty(t, others)
	}
	w.settle()
	w.hub.BeatAll()
	for _, c := range all {
		c.expect("heartbeat")
	}
	stopped := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		stopped <- w.hub.Stop(ctx)
	}()
	for _, c := range all {
		require.EqualValues(t, 1001, c.ended())
	}
	require.NoError(t, <-stopped)
}

// TestHTTP2IsNoUpgrade: it is refused as the rest is, and says why.
func TestHTTP2IsNoUpgrade(t *testing.T) {
	t.Parallel()
	w := newWorld(t, realtime.Options{})
	w.overTLS()
	transport, ok := w.http.Transport.(*http.Transport)
	require.True(t, ok)
	transport = transport.Clone()
	transport.TLSClientConfig.NextProtos = []string{"h2"}
	transport.ForceAttemptHTTP2 = true
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.server.URL+"/realtime?clientId=a", http.NoBody)
	require.NoError(t, err)
	req.Header.Set("X-Actor", "ada")
	res, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	require.Equal(t, 2, res.ProtoMajor)
	require.Equal(t, http.StatusUpgradeRequired, res.StatusCode)
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Contains(t, string(body), "sync.invalid_request")
}
