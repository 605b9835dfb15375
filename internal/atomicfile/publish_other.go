//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package atomicfile

import "os"

// claim reports success without locking the file, because Windows does not remove a file that a process
// holds open. On other systems without flock, another process may remove the file. Then publish returns the
// error of the rename.
func claim(*os.File) bool { return true }

// removeUnclaimed removes a temporary file. On Windows this fails while a process holds the file open. It
// never removes directories, because a process that writes one need not hold its files open.
func removeUnclaimed(name string, folder bool) {
	if !folder {
		os.Remove(name)
	}
}

// publish renames the synced file f to path. Windows renames only closed files and cannot sync
// directories, but its file system records renames in a journal.
func publish(f *os.File, path string, rename func(from, to string) error) error {
	if err := f.Close(); err != nil {
		return err
	}
	return rename(f.Name(), path)
}

// syncDir does nothing; see publish.
func syncDir(string) error { return nil }
