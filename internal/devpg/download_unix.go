//go:build unix

package devpg

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// downloadVersion is the release that is downloaded.
const downloadVersion = embeddedpostgres.V17

// download fetches and unpacks server binaries, once: they stay in the download directory. The library has no call for
// that alone, so this starts a throw-away server and stops it again; as root that start fails after the unpacking, which
// is all that counts here.
func download(ctx context.Context, opts Options) (Binaries, error) {
	base := opts.DownloadDir
	if base == "" {
		var err error
		if base, err = downloadDir(); err != nil {
			return Binaries{}, fmt.Errorf("find a place for downloaded binaries: %w", err)
		}
	}
	root := filepath.Join(base, "postgres-"+string(downloadVersion))
	bin := filepath.Join(root, "bin")
	if b, err := inspect(ctx, bin); err == nil {
		return b, nil
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return Binaries{}, fmt.Errorf("make a place for downloaded binaries: %w", err)
	}
	scratch, err := os.MkdirTemp("", "syncpg-download-")
	if err != nil {
		return Binaries{}, fmt.Errorf("make a scratch directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	port, err := freePort(ctx)
	if err != nil {
		return Binaries{}, err
	}
	opts.Logger.InfoContext(ctx, "downloading PostgreSQL", "version", string(downloadVersion), "dir", root)
	db := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(downloadVersion).
		Port(uint32(port)).
		CachePath(filepath.Join(scratch, "cache")).
		RuntimePath(filepath.Join(scratch, "run")).
		DataPath(filepath.Join(scratch, "data")).
		BinariesPath(root).
		StartTimeout(time.Minute).
		Logger(&output{log: opts.Logger}))
	startErr := db.Start()
	if startErr == nil {
		startErr = db.Stop()
	}
	b, err := inspect(ctx, bin)
	if err != nil {
		// That nothing is there follows from what went wrong before, if something did.
		return Binaries{}, fmt.Errorf("download PostgreSQL: %w", cmp.Or(startErr, err))
	}
	return b, nil
}

// downloadDir is a directory that this user keeps and that the account of the server can reach.
func downloadDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/syncpg", nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "syncpg"), nil
}
