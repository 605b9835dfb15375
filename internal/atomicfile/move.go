package atomicfile

import (
	"errors"
	"os"
)

// Move renames a file or a directory to a path in the same file system. Unlike os.Rename, it never
// replaces anything. If something exists at the new path, even a file that has just appeared, Move
// changes nothing and returns an error that wraps fs.ErrExist.
//
// Linux, macOS and Windows do this atomically. Elsewhere, and on file systems that cannot, the new
// name is added as a second link before the old one is removed, so both names remain if the process
// is killed in between.
func Move(from, to string) error {
	err := renameNew(from, to)
	if !errors.Is(err, errors.ErrUnsupported) {
		return err
	}

	info, err := os.Lstat(from)
	if err != nil {
		return err
	}

	if info.IsDir() {
		return moveFolder(from, to)
	}

	if err := os.Link(from, to); err != nil {
		if _, missing := os.Lstat(to); missing == nil {
			return exists(to)
		}
		return moveOver(from, to)
	}

	return os.Remove(from)
}

// moveFolder moves a directory by first creating an empty directory at the destination, since renaming
// a directory over another fails unless the other is empty. Only this process can have created the
// empty directory.
func moveFolder(from, to string) error {
	if err := os.Mkdir(to, 0o777); err != nil {
		return err
	}
	if err := renameFolder(from, to); err != nil {
		os.Remove(to)
		return err
	}
	return nil
}

// moveOver moves a file over an empty file that only this process can have created, on file systems
// without links.
func moveOver(from, to string) error {
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}

	if err := f.Close(); err != nil {
		return err
	}

	if err := os.Rename(from, to); err != nil {
		return errors.Join(err, os.Remove(to))
	}

	return nil
}
