//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd || windows)

package folderlock

import (
	"errors"
	"fmt"
	"runtime"
)

func lock(string) (unlock func() error, err error) {
	return nil, fmt.Errorf("%w: no folder can be locked on %s", errors.ErrUnsupported, runtime.GOOS)
}
