package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNormalizeKeepsTheSchemaAndNothingOfTheProgram(t *testing.T) {
	t.Parallel()
	got := normalize(`--
-- PostgreSQL database dump
--

\restrict x7YjZ

-- Dumped from database version 15.1

SET statement_timeout = 0;
SELECT pg_catalog.set_config('search_path', '', false);


CREATE FUNCTION syncpg.f() RETURNS void
    LANGUAGE plpgsql
    AS $$
-- a comment of the function

SET work_mem = 1;


$$;

SET default_tablespace = '';


CREATE TABLE syncpg.t (
);


\unrestrict x7YjZ
`)
	require.Equal(t, `CREATE FUNCTION syncpg.f() RETURNS void
    LANGUAGE plpgsql
    AS $$
-- a comment of the function

SET work_mem = 1;


$$;

CREATE TABLE syncpg.t (
);
`, got)
}

func TestCheckFailsOnADifference(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "schema.sql")
	require.NoError(t, run(t.Context(), path, false))
	require.NoError(t, run(t.Context(), path, true))
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(b), "CREATE TABLE syncpg.sync_commits")
	require.NoError(t, os.WriteFile(path, append([]byte("-- edited\n"), b...), 0o600))
	require.ErrorContains(t, run(t.Context(), path, true), "make generate/schema")
}

func TestFirstDifference(t *testing.T) {
	t.Parallel()
	require.Equal(t, 1, firstDifference("a", "b"))
	require.Equal(t, 2, firstDifference("a\nb", "a\nc"))
	require.Equal(t, 2, firstDifference("a", "a\nb"))
}
