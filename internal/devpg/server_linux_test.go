package devpg_test

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/syncpg/syncpg/internal/devpg"
)

// TestServerEndsWithItsParent: only Linux tells a server that its parent died.
func TestServerEndsWithItsParent(t *testing.T) {
	t.Parallel()
	dir := dataDir(t)
	parent := exec.CommandContext(t.Context(), os.Args[0])
	// The killed process cannot tidy up, so its temporary files go to where the test does.
	parent.Env = append(os.Environ(), envOrphan+"="+dir, "TMPDIR="+filepath.Dir(dir))
	out, err := parent.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, parent.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err, line)

	require.NoError(t, parent.Process.Kill())
	require.Error(t, parent.Wait())
	require.Eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }, 30*time.Second, 10*time.Millisecond)
	start(t, devpg.Options{DataDir: dir})
}
