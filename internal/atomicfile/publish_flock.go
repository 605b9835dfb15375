//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kasmina-go/kasmina/internal/regular"
)

// claim marks f as a living writer's until f is closed, which the kernel does for a process that
// dies. It fails when a remover has claimed f, which is about to go then. File systems without
// locks cannot lock it for the remover either, so there nothing is removed.
func claim(f *os.File) bool {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != syscall.EWOULDBLOCK
}

// removeUnclaimed removes the file unless a living writer has claimed it.
func removeUnclaimed(name string) {
	f, _, err := regular.Open(name)
	if err != nil { // a named pipe of that name is nobody's file either
		return
	}
	defer f.Close()
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
		os.Remove(name)
	}
}

// publish renames the synced file f to path and syncs the directory. f keeps its claim until it has
// its new name.
func publish(f *os.File, path string) error {
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	// Some file systems cannot sync directories and say so with EINVAL.
	if err := dir.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return err
	}
	return nil
}
