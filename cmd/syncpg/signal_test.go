//go:build unix

package main

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/pgtest"
)

func TestSignalsEndTheProcessInOrder(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	require.Zero(t, runCommand(t, "schema", "apply", "--schema", sampleFile, "--database-url", dsn).code)
	for _, signal := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "serve", "--dev-auth", "--listen", "127.0.0.1:0", "--schema", sampleFile)
		cmd.Env = []string{envMain + "=1", "DATABASE_URL=" + dsn}
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(stderr)
		require.True(t, lines.Scan())
		require.Contains(t, lines.Text(), "msg=serving")
		require.NoError(t, cmd.Process.Signal(signal))
		var rest strings.Builder
		for lines.Scan() {
			rest.WriteString(lines.Text())
		}
		require.NoError(t, cmd.Wait(), "exit code 0")
		require.Contains(t, rest.String(), "msg=stopping")
	}
}
