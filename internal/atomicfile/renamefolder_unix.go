//go:build unix

package atomicfile

import (
	"os"
	"syscall"
)

// renameFolder renames a directory over an empty one, which os.Rename refuses to do.
func renameFolder(from, to string) error {
	if err := syscall.Rename(from, to); err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}
