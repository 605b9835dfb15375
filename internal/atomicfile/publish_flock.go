//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// claim locks f until f is closed, which the kernel also does when a process dies. It fails if
// removeUnclaimed has locked f in order to remove it.
//
// File systems without locks deny removeUnclaimed its lock as well, so nothing is removed there.
func claim(f *os.File) bool {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != syscall.EWOULDBLOCK
}

// removeUnclaimed removes a temporary file or directory unless a running process has claimed it.
func removeUnclaimed(name string, folder bool) {
	f, err := openTemporary(name, folder)
	if err != nil {
		return // for example a named pipe, which is not a temporary file
	}
	defer f.Close()

	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return
	}

	if folder {
		os.RemoveAll(name)
	} else {
		os.Remove(name)
	}
}

func openTemporary(name string, folder bool) (*os.File, error) {
	if folder {
		return os.Open(name)
	}
	f, _, err := regular.Open(name)
	return f, err
}

// publish renames the synced file f to path and syncs the directory. f stays claimed until it has its
// new name.
func publish(f *os.File, path string, rename func(from, to string) error) error {
	if err := rename(f.Name(), path); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes renames within a directory durable.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()

	// Some file systems cannot sync directories and report this with EINVAL.
	if err := dir.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return err
	}

	return nil
}
