package main

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

var exampleSeed = filepath.Join("..", "..", "examples", "seed", "seed.json")

// seeded installs the sample schema in a database.
func seeded(t *testing.T) (url string, seed func(args ...string) result) {
	t.Helper()
	url = pgtest.DSN(t)
	r := runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	return url, func(args ...string) result {
		t.Helper()
		return runCommand(t, append([]string{"seed", "--schema", sampleFile, "--database-url", url}, args...)...)
	}
}

// query reads one value.
func query[T any](t *testing.T, url, sql string) (v T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&v))
	require.NoError(t, conn.Close(t.Context()))
	return v
}

func TestSeedWritesOnce(t *testing.T) {
	t.Parallel()
	url, seed := seeded(t)
	took := regexp.MustCompile(`in [0-9.]+ m?s`)
	r := seed("--file", exampleSeed)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, "applied 3 commits with 7 operations in T, skipped 0 that were applied before\n", took.ReplaceAllString(r.stdout, "in T"))
	require.Equal(t, []string{"t-milk"}, query[[]string](t, url, `select array_agg(id) from public.todos where labels::text like '%heavy%' and due_at = 1767225600000`))
	require.Equal(t, 3, query[int](t, url, `select count(*) from syncpg.sync_commits where partition = 'acme' and actor_id = 'system'`))

	before := query[int](t, url, `select count(*) from syncpg.sync_changes`)
	r = seed("--file", exampleSeed)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, "applied 0 commits with 0 operations in T, skipped 3 that were applied before\n", took.ReplaceAllString(r.stdout, "in T"))
	require.Equal(t, before, query[int](t, url, `select count(*) from syncpg.sync_changes`))
}

func TestSeedSaysWhatToDoNext(t *testing.T) {
	t.Parallel()
	_, seed := seeded(t)
	file := func(actor, id, operations string) string {
		return writeFile(t, "seed.json", `{"partitions": [{"partition": "acme", "actor": "`+actor+`", "clientId": "seed", "commits": [
			{"id": "first", "operations": [{"table": "members", "values": {"id": "m1", "team_id": "t1", "name": "Ada"}}]},
			{"id": "`+id+`", "operations": [`+operations+`]}]}]}`)
	}
	lost := `{"table": "members", "values": {"id": "m2", "team_id": "t1", "name": "Bob"}}, {"table": "todos", "values": {"id": "t", "team_id": "t1", "list_id": "nowhere", "title": "x", "done": true}}`
	for _, tc := range []struct {
		name, file, code, message, next string
		op                              int // -1: none
		replay                          bool
	}{
		{"a rejection", file("system", "lost", lost), "sync.reference_violation", "rejected at operation 1", "give it a new one", 1, false},
		{"a rejection of before", file("system", "lost", lost), "sync.reference_violation", "rejected at operation 1", "give it a new one", 1, true},
		{"a mistake", file("system", "wrong", `{"table": "members", "values": {"id": "m2", "nam": "Bob"}}`), "", `operation 0 on table "members", column "nam": the table has no such column`, "correct it in the file", 0, false},
		{"another actor", file("mallory", "x", lost), "sync.invalid_client_id", "belongs to another actor", "another clientId", -1, false},
		{"too much", file("system", "much", strings.Repeat(`{"op": "delete", "table": "members", "rowId": "m"},`, 500)+`{"op": "delete", "table": "members", "rowId": "m"}`), "sync.too_many_operations", "501 operations", "split the commit", -1, false},
	} {
		r := seed("--file", tc.file, "--json")
		require.Equal(t, exitFailed, r.code, tc.name)
		var report seedReport
		require.NoError(t, json.Unmarshal([]byte(r.stdout), &report), r.stdout)
		f := report.Failure
		require.False(t, report.OK)
		require.NotNil(t, f, tc.name)
		require.Equal(t, tc.code, f.Code)
		require.Contains(t, f.Message, tc.message)
		require.Contains(t, f.Next, tc.next)
		require.Equal(t, tc.replay, f.Replay)
		if tc.op < 0 {
			require.Nil(t, f.OpIndex)
		} else {
			require.Equal(t, tc.op, *f.OpIndex, tc.name)
		}
		if tc.code == "sync.reference_violation" {
			require.Contains(t, f.Details, "missing_parent")
			require.NotEmpty(t, f.OutcomeID)
			require.NotNil(t, f.RecordedAt)
		}
		text := seed("--file", tc.file)
		require.Equal(t, exitFailed, text.code)
		require.Contains(t, text.stdout, "\nnext:    ")
	}
}

func TestSeedReadsTheFileFirst(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ text, says string }{
		"not JSON":        {"{\n\"partitions\": [\n}", "line 3"},
		"unknown member":  {`{"partition": []}`, `unknown field "partition"`},
		"two documents":   {`{} {}`, "something follows"},
		"no actor":        {`{"partitions": [{"partition": "p", "clientId": "c"}]}`, `needs "partition", "actor" and "clientId"`},
		"no id":           {`{"partitions": [{"partition": "p", "actor": "a", "clientId": "c", "commits": [{}]}]}`, `needs "id" and "operations"`},
		"an id twice":     {`{"partitions": [{"partition": "p", "actor": "a", "clientId": "c", "commits": [{"id": "1", "operations": [{}]}, {"id": "1", "operations": [{}]}]}]}`, "is there twice"},
		"another op":      {`{"partitions": [{"partition": "p", "actor": "a", "clientId": "c", "commits": [{"id": "1", "operations": [{"op": "insert"}]}]}]}`, `"op" is "insert"`},
		"a string for id": {`{"partitions": [{"partition": "p", "actor": "a", "clientId": "c", "commits": [{"id": 1}]}]}`, "line 1"},
	} {
		r := runCommand(t, "seed", "--schema", sampleFile, "--file", writeFile(t, "seed.json", tc.text), "--database-url", "postgres://127.0.0.1:1/none")
		require.Equal(t, exitUsage, r.code, name)
		require.Contains(t, r.stderr, tc.says, name)
	}
	r := runCommand(t, "seed", "--schema", sampleFile, "--file", filepath.Join(t.TempDir(), "none.json"), "--database-url", "postgres://127.0.0.1:1/none")
	require.Equal(t, exitUsage, r.code)
	require.Contains(t, r.stderr, "read the seed")
}

func TestSeedNeedsTheSchemaInstalled(t *testing.T) {
	t.Parallel()
	r := runCommand(t, "seed", "--schema", sampleFile, "--file", exampleSeed, "--database-url", pgtest.DSN(t))
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "run `syncpg schema apply`")
}

func TestSeedProgress(t *testing.T) {
	t.Parallel()
	require.Equal(t, "1000 of 4000 commits (25 %), 500 commits/s, about 6s left", seedProgress(1000, 4000, 2*time.Second))
	require.Equal(t, "4000 of 4000 commits (100 %), 1 commits/s, about 0s left", seedProgress(4000, 4000, 4000*time.Second))
}
