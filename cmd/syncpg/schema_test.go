package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
	"github.com/syncpg/syncpg/schemaddl"
)

const smallSchema = `{
  "irVersion": 1, "schemaVersion": 1,
  "tables": [{
    "name": "notes", "primaryKey": "id",
    "columns": [
      {"name": "id", "type": "string", "nullable": false},
      {"name": "team", "type": "string", "nullable": false},
      {"name": "text", "type": "string", "nullable": true}
    ],
    "scopes": [{"pattern": "team:{team_id}", "column": "team"}],
    "indexes": [{"name": "notes_by_text", "columns": ["text"]}]
  }]
}`

// changed is smallSchema with a replacement.
func changed(t *testing.T, old, replacement string) string {
	t.Helper()
	require.Contains(t, smallSchema, old)
	return writeFile(t, "changed.json", strings.Replace(smallSchema, old, replacement, 1))
}

func TestSchemaApplyInstallsOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	file := writeFile(t, "small.json", smallSchema)
	clean := func(s string) string { return strings.ReplaceAll(s, filepath.Dir(file), "DIR") }

	r := runCommand(t, "schema", "check", "--schema", file, "--database-url", url)
	require.Equal(t, exitState, r.code)
	golden(t, "schema-check.txt", clean(r.stdout))
	require.Contains(t, r.stderr, "no schema is installed in this database: run `syncpg schema apply`")

	r = runCommand(t, "schema", "apply", "--dry-run", "--schema", file, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, `create table "public"."notes" (`)
	require.Contains(t, r.stdout, "\ncommit;\n")
	offline := runCommand(t, "schema", "apply", "--dry-run", "--schema", file)
	require.Equal(t, r, offline, "the statements do not depend on the database")

	r = runCommand(t, "schema", "apply", "--schema", file, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	functions := regexp.MustCompile(`create \d+ generated`).ReplaceAllString(clean(r.stdout), "create N generated")
	golden(t, "schema-apply.txt", functions)

	r = runCommand(t, "schema", "check", "--schema", file, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, "\nthe database has this schema\n")

	for _, args := range [][]string{{}, {"--dry-run"}} {
		r = runCommand(t, append([]string{"schema", "apply", "--schema", file, "--database-url", url}, args...)...)
		require.Zero(t, r.code, r.stderr)
		require.Equal(t, "nothing to do: the database has DIR/small.json, version 1\n", clean(r.stdout))
	}
}

func TestSchemaIsRefusedWhenTheDatabaseHasAnother(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	r := runCommand(t, "schema", "apply", "--schema", writeFile(t, "small.json", smallSchema), "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	for name, tc := range map[string]struct{ file, want string }{
		"same version, another layout": {
			changed(t, `"name": "text", "type": "string", "nullable": true`, `"name": "text", "type": "string", "nullable": false`),
			"sync.storage.stored_layout_mismatch",
		},
	} {
		for _, command := range []string{"check", "apply"} {
			r := runCommand(t, "schema", command, "--schema", tc.file, "--database-url", url)
			require.Equal(t, exitState, r.code, name)
			require.Contains(t, r.stderr, tc.want)
		}
	}
}

// TestSchemaMovesToAnotherVersion: what is shown before is what is done, once, and there is
// no way back.
func TestSchemaMovesToAnotherVersion(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	one := writeFile(t, "small.json", smallSchema)
	r := runCommand(t, "schema", "plan", "--json", "--schema", one, "--database-url", url)
	require.Contains(t, r.stdout, `"rewrites": []`)
	r = runCommand(t, "schema", "apply", "--schema", one, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	// The row ("1", "red", NULL).
	_, err = conn.Exec(t.Context(), `insert into public.notes (_sync_partition, _sync_row_id, _sync_server_version, _sync_payload, id, team)
		values ('p', '1', 1, '\x04010000003103000000726564', '1', 'red')`)
	require.NoError(t, errors.Join(err, conn.Close(t.Context())))

	two := writeFile(t, "two.json", strings.NewReplacer(`"schemaVersion": 1`, `"schemaVersion": 2`,
		`{"name": "text", "type": "string", "nullable": true}`, `{"name": "due", "type": "integer", "nullable": true}`,
		`{"name": "notes_by_text", "columns": ["text"]}`, `{"name": "notes_by_due", "columns": ["due"]}`).Replace(smallSchema))
	clean := func(s string) string { return strings.ReplaceAll(s, filepath.Dir(two), "DIR") }
	r = runCommand(t, "schema", "check", "--schema", two, "--database-url", url)
	require.Equal(t, exitState, r.code)
	require.Contains(t, r.stderr, "schema version 1 is installed and this server has version 2: `syncpg schema plan` shows what is to be done")
	plan := runCommand(t, "schema", "plan", "--schema", two, "--database-url", url)
	require.Zero(t, plan.code, plan.stderr)
	golden(t, "schema-plan.txt", regexp.MustCompile(`\([0-9.]+ KiB\)`).ReplaceAllString(plan.stdout, "(SIZE)"))
	require.Equal(t, plan, runCommand(t, "schema", "apply", "--dry-run", "--schema", two, "--database-url", url))
	r = runCommand(t, "schema", "plan", "--json", "--drop", "--schema", two, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	golden(t, "schema-plan.json", regexp.MustCompile(`"(b|logB)ytes": \d+`).ReplaceAllString(r.stdout, `"${1}ytes": 0`))

	r = runCommand(t, "schema", "apply", "--schema", two, "--database-url", url)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, plan.stdout+"installed DIR/two.json, version 2\n", clean(r.stdout))
	require.Contains(t, r.stderr, "waiting for pushes under way\nwaiting for who uses the tables\nrewriting about 1 row of notes\n")
	for _, command := range [][]string{{"plan"}, {"apply"}, {"apply", "--dry-run"}} {
		r = runCommand(t, append(append([]string{"schema"}, command...), "--schema", two, "--database-url", url)...)
		require.Zero(t, r.code, r.stderr)
		require.Equal(t, "nothing to do: the database has DIR/two.json, version 2\n", clean(r.stdout))
	}
	require.Equal(t, "null\n", runCommand(t, "schema", "plan", "--json", "--schema", two, "--database-url", url).stdout)
	for _, command := range []string{"check", "plan", "apply"} {
		r = runCommand(t, "schema", command, "--schema", one, "--database-url", url)
		require.Equal(t, exitState, r.code)
		require.Contains(t, r.stderr, "an installed schema cannot go back")
	}
	refused := writeFile(t, "three.json", strings.NewReplacer(`"schemaVersion": 1`, `"schemaVersion": 3`, `"name": "text", "type": "string"`, `"name": "due", "type": "float"`,
		`{"name": "notes_by_text", "columns": ["text"]}`, ``).Replace(smallSchema))
	for _, command := range []string{"plan", "apply"} {
		r = runCommand(t, "schema", command, "--schema", refused, "--database-url", url)
		require.Equal(t, exitState, r.code)
		require.Contains(t, r.stderr, "the schema cannot go from version 2 to version 3:\n  table \"notes\", column \"due\": its type was integer and is float; add a column of another name")
	}
}

// TestAVersionThatChangesNoTable says so, rather than nothing.
func TestAVersionThatChangesNoTable(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", writeFile(t, "small.json", smallSchema), "--database-url", url).code)
	r := runCommand(t, "schema", "plan", "--schema", changed(t, `"schemaVersion": 1`, `"schemaVersion": 2`), "--database-url", url)
	require.Zero(t, r.code)
	require.Equal(t, "from version 1 to version 2\n\nno table changes\n\n", r.stdout)
}

func TestProgressOfARewrite(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	now := time.UnixMilli(0)
	p := newProgress(&out, func() time.Time { return now })
	at := schemaddl.Progress{Stage: schemaddl.StageRows, Table: "notes", Total: 1000}
	p.tell(at)
	for range 4 {
		now = now.Add(time.Second)
		at.Done += 100
		p.tell(at)
	}
	p.tell(schemaddl.Progress{Stage: schemaddl.StageIndexes})
	require.Equal(t, "rewriting about 1000 rows of notes\n"+
		"rewriting about 1000 rows of notes: 200 done, 100/s, at most 8.0 s left\n"+
		"rewriting about 1000 rows of notes: 400 done, 100/s, at most 6.0 s left\n"+
		"building indexes and functions\n", out.String())
}

func TestSchemaThatCannotBeInstalledPrintsNoPlan(t *testing.T) {
	t.Parallel()
	url := pgtest.DSN(t)
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `create table public.notes ()`)
	require.NoError(t, errors.Join(err, conn.Close(t.Context())))
	r := runCommand(t, "schema", "apply", "--schema", writeFile(t, "small.json", smallSchema), "--database-url", url)
	require.Equal(t, exitFailed, r.code)
	require.Empty(t, r.stdout)
	require.Contains(t, r.stderr, `create table "public"."notes": an object of this name exists already`)
}

func TestSchemaNeedsMigrationsFirst(t *testing.T) {
	t.Parallel()
	url := emptyDatabase(t)
	file := writeFile(t, "small.json", smallSchema)
	for _, command := range []string{"check", "apply"} {
		r := runCommand(t, "schema", command, "--schema", file, "--database-url", url)
		require.Equal(t, exitState, r.code)
		require.Contains(t, r.stderr, "run `syncpg migrate up`")
	}
}

func TestSchemaCheckWithoutADatabaseLooksAtTheFile(t *testing.T) {
	t.Parallel()
	r := runCommand(t, "schema", "check", "--schema", filepath.Join("..", "..", "schema", "sample", "sample.ir.json"))
	require.Zero(t, r.code, r.stderr)
	golden(t, "schema-check-sample.txt", strings.ReplaceAll(r.stdout, string(os.PathSeparator), "/"))
}
