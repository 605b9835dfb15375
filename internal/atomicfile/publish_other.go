//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package atomicfile

import "os"

// claim does nothing, because Windows does not remove a file that a process holds open. Where a file
// can be removed all the same, its writer's rename fails and reports it.
func claim(*os.File) bool { return true }

// removeUnclaimed removes a temporary file unless a running process holds it open. It never removes
// directories, because their files need not be open.
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

func syncDir(string) error { return nil }
