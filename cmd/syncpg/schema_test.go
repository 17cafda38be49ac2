package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
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
		"another version": {changed(t, `"schemaVersion": 1`, `"schemaVersion": 2`), "schema version 1 is installed"},
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
