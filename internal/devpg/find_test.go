package devpg_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/devpg"
)

// fakeInstall makes a directory with programs that print a version.
func fakeInstall(t *testing.T, version string, programs ...string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	for _, program := range programs {
		script := fmt.Sprintf("#!/bin/sh\necho '%s (PostgreSQL) %s'\n", program, version)
		require.NoError(t, os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755))
	}
	return dir
}

func TestFindTakesOnlyTheNamedDirectory(t *testing.T) {
	dir := fakeInstall(t, "99.7 (Somewhere 99.7-1)", "initdb", "postgres")
	t.Setenv(devpg.EnvBinDir, dir)
	all, err := devpg.FindAll(t.Context())
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "99.7", all[0].Version)
	require.Equal(t, 99, all[0].Major)
	require.Equal(t, filepath.Join(dir, "pg_dump"), all[0].Program("pg_dump"))
}

func TestFindPrefersTheNewestVersion(t *testing.T) {
	t.Setenv(devpg.EnvBinDir, "")
	older := fakeInstall(t, "98.11", "initdb", "postgres")
	newer := fakeInstall(t, "99beta1", "initdb", "postgres")
	t.Setenv("PATH", older)
	b, err := devpg.Find(t.Context())
	require.NoError(t, err)
	require.Equal(t, older, b.Dir)

	// A link in PATH leads to the directory that holds all programs.
	links := t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(newer, "postgres"), filepath.Join(links, "postgres")))
	require.NoError(t, os.Symlink(filepath.Join(older, "initdb"), filepath.Join(links, "initdb")))
	t.Setenv("PATH", links)
	b, err = devpg.Find(t.Context())
	require.NoError(t, err)
	require.Equal(t, newer, b.Dir)
	require.Equal(t, "99beta1", b.Version)
}

func TestFindSaysWhatToInstall(t *testing.T) {
	for name, dir := range map[string]string{
		"no initdb":        fakeInstall(t, "99.7", "postgres"),
		"no postgres":      fakeInstall(t, "99.7", "initdb"),
		"not Postgres":     fakeInstall(t, "", "initdb", "postgres"),
		"no such dir":      filepath.Join(t.TempDir(), "missing"),
		"an ordinary file": os.Args[0],
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(devpg.EnvBinDir, dir)
			_, err := devpg.Find(t.Context())
			require.ErrorIs(t, err, devpg.ErrNoBinaries)
			require.ErrorContains(t, err, dir)
		})
	}
	for _, goos := range []string{"linux", "darwin", "freebsd", "plan9"} {
		require.Contains(t, devpg.InstallAdvice(goos), devpg.EnvBinDir)
		require.Contains(t, devpg.InstallAdvice(goos), "install")
	}
}
