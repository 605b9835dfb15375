package data

import (
	"fmt"
	"io/fs"
	"syscall"
	"time"
)

// fileIdentity tells a file from another one that took its place, and when it was last changed, its
// times included.
func fileIdentity(info fs.FileInfo) (identity string, changed time.Time) {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", time.Time{}
	}
	changed = time.Unix(s.Ctimespec.Unix())
	return fmt.Sprintf("%d:%d:%d", s.Dev, s.Ino, changed.UnixNano()), changed
}
