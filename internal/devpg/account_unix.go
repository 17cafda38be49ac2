//go:build unix

package devpg

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is whom the server runs as. The zero value is the account of this process.
type account struct {
	name     string
	uid, gid uint32
	switched bool // the server needs another account than this process
}

// serverAccount chooses the account of the server for a data directory.
func serverAccount(dataDir string) (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	if info, err := os.Stat(dataDir); err == nil {
		// A cluster keeps its owner, whoever made it.
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 {
			return accountByID(st.Uid, st.Gid), nil
		}
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
			gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
			if err := errors.Join(err1, err2); err != nil {
				return account{}, fmt.Errorf("read ids of account %s: %w", name, err)
			}
			return account{name: name, uid: uint32(uid), gid: uint32(gid), switched: true}, nil
		}
	}
	return account{}, errors.New("PostgreSQL does not run as root, and there is no account \"postgres\" or \"nobody\" to run it as")
}

func accountByID(uid, gid uint32) account {
	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	return account{name: name, uid: uid, gid: gid, switched: true}
}

// own gives one file or directory to the account.
func (a account) own(path string) error {
	if !a.switched {
		return nil
	}
	return os.Lchown(path, int(a.uid), int(a.gid))
}

// ownTree gives a directory and everything in it to the account.
func (a account) ownTree(root string) error {
	if !a.switched {
		return nil
	}
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return a.own(path)
	})
}

// checkPassage verifies that the account may enter every directory above path. Links must be resolved.
func (a account) checkPassage(path string) error {
	if !a.switched {
		return nil
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err != nil {
			return fmt.Errorf("look at the way to %s: %w", path, err)
		}
		if !a.mayEnter(info) {
			return &PassageError{Path: path, Blocked: dir, Account: a.name}
		}
		if dir == filepath.Dir(dir) {
			return nil
		}
	}
}

func (a account) mayEnter(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return true
	}
	switch {
	case st.Uid == a.uid:
		return info.Mode()&0o100 != 0
	case st.Gid == a.gid:
		return info.Mode()&0o010 != 0
	default:
		return info.Mode()&0o001 != 0
	}
}

// procAttr returns the attributes of a child process: run as the account, out of reach of the terminal's Ctrl-C, which the
// parent turns into an orderly stop.
func (a account) procAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if a.switched {
		attr.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid}
	}
	return attr
}
