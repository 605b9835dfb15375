//go:build !linux && !darwin

package data

import (
	"io/fs"
	"time"
)

// fileIdentity returns nothing on this system, where only the size and the modification time identify
// a file.
func fileIdentity(fs.FileInfo) (identity string, changed time.Time) { return "", time.Time{} }
