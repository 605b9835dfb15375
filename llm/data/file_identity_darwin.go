package data

import (
	"fmt"
	"io/fs"
	"syscall"
	"time"
)

// fileIdentity returns a string that distinguishes a file from other files that have had the same
// path, and the time when the contents or the metadata of the file last changed.
func fileIdentity(info fs.FileInfo) (identity string, changed time.Time) {
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", time.Time{}
	}
	changed = time.Unix(s.Ctimespec.Unix())
	return fmt.Sprintf("%d:%d:%d", s.Dev, s.Ino, changed.UnixNano()), changed
}
