//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package folderlock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// lock locks a folder, which leaves nothing in it. File systems of a network want a file that is
// open for writing: there it is one of the folder, which stays.
func lock(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err == nil {
		err = flock(f)
	}
	if err == nil || errors.Is(err, ErrInUse) {
		return f, err
	}
	if f, err = os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o666); err != nil {
		return nil, err
	}
	return f, flock(f)
}

// flock locks what f is of, until f is closed, which the kernel does for a process that dies. It
// closes f if it cannot.
func flock(f *os.File) error {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case err == nil:
		return nil
	case err == syscall.EWOULDBLOCK:
		err = ErrInUse
	default:
		err = fmt.Errorf("%w: this file system cannot lock: %w", errors.ErrUnsupported, err)
	}
	f.Close()
	return err
}
