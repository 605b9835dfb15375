//go:build !(linux || darwin || windows)

package atomicfile

import "errors"

// renameNew returns errors.ErrUnsupported: these systems always replace a file.
func renameNew(from, to string) error { return errors.ErrUnsupported }
