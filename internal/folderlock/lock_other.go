//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd || windows)

package folderlock

import (
	"errors"
	"fmt"
	"os"
	"runtime"
)

func lock(string) (*os.File, error) {
	return nil, fmt.Errorf("%w: no folder can be locked on %s", errors.ErrUnsupported, runtime.GOOS)
}
