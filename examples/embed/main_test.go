package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/syncpg/syncpg"
	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/internal/smoke"
	"github.com/syncpg/syncpg/schema/sample"
	"github.com/syncpg/syncpg/schemaddl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheAppServesSyncNextToItsPages(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := newServer(t.Context(), pool, sample.IR())
	require.ErrorContains(t, err, "syncpg schema apply")

	schema, err := syncpg.ParseSchema(sample.IR())
	require.NoError(t, err)
	require.NoError(t, schemaddl.Install(t.Context(), pool, schema, schemaddl.Options{}))
	for _, sql := range []string{
		`create table public.sessions (token text primary key, user_id text not null, tenant_id text not null)`,
		`create table public.memberships (tenant_id text, user_id text, team_id text, primary key (tenant_id, user_id, team_id))`,
		`insert into public.sessions values ('t1', 'ada', 'acme')`,
		`insert into public.memberships values ('acme', 'ada', 'red'), ('other', 'ada', 'blue')`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	syncer, err := newServer(t.Context(), pool, sample.IR())
	require.NoError(t, err)
	require.NoError(t, syncer.Start(t.Context()))
	defer func() { require.NoError(t, syncer.Stop(t.Context())) }()
	handler := routes(syncer)
	server := httptest.NewServer(handler)
	defer server.Close()

	run := func(token, team string) error {
		return smoke.Run(t.Context(), smoke.Options{
			URL: server.URL + "/sync-api", Schema: schema, Scopes: map[string]string{"team_id": team},
			Header: http.Header{"Authorization": {"Bearer " + token}}, HTTP: server.Client(),
		}, func(smoke.Step) {})
	}
	require.NoError(t, run("t1", "red"))
	require.ErrorContains(t, run("t1", "blue"), "revoked", "a team of another tenant")
	require.ErrorContains(t, run("t2", "red"), "sync.auth_required")

	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	require.Equal(t, "the app's own pages\n", w.Body.String())
}
