//go:build !unix && !windows

package atomicfile

import "os"

func renameFolder(from, to string) error { return os.Rename(from, to) }
