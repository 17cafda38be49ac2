package devpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// EnvBinDir names the environment variable that holds the directory of the server binaries. When it is set no other place
// is searched.
const EnvBinDir = "SYNCPG_PG_BIN"

// Binaries is one installation of the PostgreSQL server programs.
type Binaries struct {
	Dir     string // directory that holds initdb and postgres, symbolic links resolved
	Version string // version as the server prints it, such as "15.18"
	Major   int    // major version, such as 15
	minor   int
}

// Program returns the path of one of the programs of the installation, such as "pg_dump". It does not check that the
// program exists.
func (b Binaries) Program(name string) string { return filepath.Join(b.Dir, name) }

// usualDirs are the places where packages put server binaries without linking them into PATH.
var usualDirs = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/lib/postgresql*/bin",
	"/usr/libexec/postgresql*",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/opt/local/lib/postgresql*/bin",
	"/usr/local/pgsql/bin",
	"/usr/local/bin",
}

// Find returns the newest installation of the machine, or an error that wraps [ErrNoBinaries].
func Find(ctx context.Context) (Binaries, error) {
	all, err := FindAll(ctx)
	if err != nil {
		return Binaries{}, err
	}
	return all[0], nil
}

// FindAll returns every installation of the machine, the newest first; never an empty list without an error. An error
// wraps [ErrNoBinaries]. It looks into the directory named by [EnvBinDir] and nowhere else if that is set; otherwise into
// PATH, the answer of `pg_config --bindir`, and the usual directories of packages.
func FindAll(ctx context.Context) ([]Binaries, error) {
	if dir := os.Getenv(EnvBinDir); dir != "" {
		b, err := inspect(ctx, dir)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("look for PostgreSQL: %w", ctx.Err())
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %s=%s: %w", ErrNoBinaries, EnvBinDir, dir, err)
		}
		return []Binaries{b}, nil
	}
	found := findIn(ctx, candidates(ctx, usualDirs))
	if ctx.Err() != nil { // programs that were cut short count as not there
		return nil, fmt.Errorf("look for PostgreSQL: %w", ctx.Err())
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNoBinaries, installAdvice(runtime.GOOS))
	}
	return found, nil
}

func candidates(ctx context.Context, patterns []string) []string {
	var dirs []string
	for _, program := range []string{"postgres", "initdb"} {
		if path, err := exec.LookPath(program); err == nil {
			// A link in PATH points to the directory that holds the other programs as well.
			if target, err := filepath.EvalSymlinks(path); err == nil {
				dirs = append(dirs, filepath.Dir(target))
			}
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range patterns {
		matches, err := filepath.Glob(pattern)
		if err == nil {
			dirs = append(dirs, matches...)
		}
	}
	return dirs
}

func findIn(ctx context.Context, dirs []string) []Binaries {
	var found []Binaries
	seen := map[string]bool{}
	for _, dir := range dirs {
		b, err := inspect(ctx, dir)
		if err != nil || seen[b.Dir] {
			continue
		}
		seen[b.Dir] = true
		found = append(found, b)
	}
	slices.SortStableFunc(found, func(a, b Binaries) int {
		return cmp.Or(cmp.Compare(b.Major, a.Major), cmp.Compare(b.minor, a.minor))
	})
	return found
}

var versionPattern = regexp.MustCompile(`\(PostgreSQL\) ((\d+)(?:\.(\d+))?\S*)`)

// inspect tells whether dir holds initdb and postgres, and of which version.
func inspect(ctx context.Context, dir string) (Binaries, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return Binaries{}, fmt.Errorf("resolve directory: %w", err)
	}
	for _, program := range []string{"initdb", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, program)); err != nil {
			return Binaries{}, fmt.Errorf("look for %s: %w", program, err)
		}
	}
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return Binaries{}, fmt.Errorf("ask postgres for its version: %w", err)
	}
	m := versionPattern.FindStringSubmatch(string(out))
	if m == nil {
		return Binaries{}, fmt.Errorf("unknown version %q", strings.TrimSpace(string(out)))
	}
	major, err := strconv.Atoi(m[2])
	if err != nil {
		return Binaries{}, fmt.Errorf("read major version: %w", err)
	}
	minor, err := strconv.Atoi(cmp.Or(m[3], "0"))
	if err != nil {
		return Binaries{}, fmt.Errorf("read minor version: %w", err)
	}
	return Binaries{Dir: dir, Version: m[1], Major: major, minor: minor}, nil
}

// installAdvice says how to get the server binaries on a platform.
func installAdvice(goos string) string {
	var how string
	switch goos {
	case "linux":
		how = "install the server package: `apt-get install postgresql` (Debian, Ubuntu), " +
			"`dnf install postgresql-server` (Fedora, RHEL), `apk add postgresql` (Alpine), `pacman -S postgresql` (Arch)"
	case "darwin":
		how = "install the server: `brew install postgresql@17`"
	case "freebsd":
		how = "install the server: `pkg install postgresql17-server`"
	default:
		how = "install the PostgreSQL server"
	}
	return how + "; or set " + EnvBinDir + " to the directory that holds initdb and postgres"
}

// choose picks the installation for a cluster of the given major version, or the newest if major is 0.
func choose(all []Binaries, major int) (Binaries, bool) {
	if major == 0 {
		return all[0], true
	}
	i := slices.IndexFunc(all, func(b Binaries) bool { return b.Major == major })
	if i < 0 {
		return Binaries{}, false
	}
	return all[i], true
}

// isNoBinaries tells whether a download could help.
func isNoBinaries(err error) bool {
	return errors.Is(err, ErrNoBinaries) && os.Getenv(EnvBinDir) == ""
}
