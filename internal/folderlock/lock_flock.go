//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package folderlock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// lock locks the directory itself, without creating a file in it. On network file systems, which lock
// only files open for writing, it locks a file in the directory instead.
func lock(dir string) (unlock func() error, err error) {
	f, err := os.Open(dir)
	if err == nil {
		err = flock(f)
	}

	if errors.Is(err, ErrInUse) {
		return nil, err
	}
	if err != nil {
		return lockFile(filepath.Join(dir, name))
	}

	return f.Close, nil
}

// lockFile creates and locks a file, which unlock removes.
func lockFile(path string) (unlock func() error, err error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			return nil, err
		}
		if err := flock(f); err != nil {
			return nil, err
		}

		// The program that held the lock may have removed the file since it was opened.
		locked, err := f.Stat()
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if current, err := os.Stat(path); err == nil && os.SameFile(locked, current) {
			return func() error { return errors.Join(os.Remove(path), f.Close()) }, nil
		}
		f.Close()
	}
}

// flock locks f until it is closed, which the kernel also does for a process that dies. If it
// cannot, it closes f.
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
