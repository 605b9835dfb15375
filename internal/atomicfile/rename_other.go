//go:build !(linux || darwin || windows)

package atomicfile

import "errors"

// renameNew returns errors.ErrUnsupported, because renames always replace existing files on these
// systems.
func renameNew(from, to string) error { return errors.ErrUnsupported }
