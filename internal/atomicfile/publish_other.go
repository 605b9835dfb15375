//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package atomicfile

import "os"

// claim does nothing: Windows does not remove a file that a process holds open. Where a file can be
// removed all the same, its writer's rename fails and says so.
func claim(*os.File) bool { return true }

// removeUnclaimed removes the file unless a living writer holds it open.
func removeUnclaimed(name string) { os.Remove(name) }

// publish renames the synced file f to path. Windows renames closed files only and has no sync for
// directories: its rename is recorded in the file system's journal.
func publish(f *os.File, path string) error {
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
