package atomicfile

import (
	"errors"
	"os"

	"golang.org/x/sys/windows"
)

// renameNew renames without replacing anything, as MoveFileEx does unless it is asked to.
func renameNew(from, to string) error {
	old, err := windows.UTF16PtrFromString(from)
	if err != nil {
		return err
	}

	new16, err := windows.UTF16PtrFromString(to)
	if err != nil {
		return err
	}

	err = windows.MoveFileEx(old, new16, windows.MOVEFILE_WRITE_THROUGH)
	if err == nil {
		return nil
	}

	if _, missing := os.Lstat(to); missing == nil && !errors.Is(err, windows.ERROR_SHARING_VIOLATION) {
		err = os.ErrExist // Windows reports "access denied" if a directory exists there
	}

	return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
}

func renameFolder(from, to string) error { return os.Rename(from, to) }
