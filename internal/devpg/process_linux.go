package devpg

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// endWithParent makes the kernel ask the server for a fast shutdown when the thread that started it ends.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGINT }

// worksIn tells whether a process has dir as its working directory, as a server has its data directory. When that cannot
// be found out it answers yes.
func worksIn(pid int, dir string) bool {
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return true
	}
	dir, err = filepath.EvalSymlinks(dir)
	return err != nil || cwd == dir
}
