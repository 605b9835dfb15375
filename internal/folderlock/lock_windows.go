package folderlock

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

const (
	deleteOnClose    = 0x04000000        // FILE_FLAG_DELETE_ON_CLOSE
	sharingViolation = syscall.Errno(32) // ERROR_SHARING_VIOLATION
	hidden           = syscall.FILE_ATTRIBUTE_HIDDEN
)

// lock holds a hidden file in the directory open exclusively. The system deletes the file when it is
// closed, which also happens when the process dies.
func lock(dir string) (unlock func() error, err error) {
	path := filepath.Join(dir, name)
	p, err := syscall.UTF16PtrFromString(path)
	if err != nil {
		return nil, err
	}

	h, err := syscall.CreateFile(p, syscall.GENERIC_READ|syscall.GENERIC_WRITE, 0, nil,
		syscall.CREATE_ALWAYS, hidden|deleteOnClose, 0)
	if errors.Is(err, sharingViolation) || errors.Is(err, syscall.ERROR_ACCESS_DENIED) &&
		exists(path) {
		return nil, ErrInUse
	}
	if err != nil {
		return nil, &os.PathError{Op: "lock", Path: path, Err: err}
	}

	return os.NewFile(uintptr(h), path).Close, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
