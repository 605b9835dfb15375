//go:build unix && !aix && !solaris && !illumos

package texttest

import (
	"path/filepath"
	"syscall"
	"testing"
)

// NamedPipe returns the path of a named pipe without a writer.
func NamedPipe(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}
