//go:build unix && !aix && !solaris && !illumos

package llm

import (
	"path/filepath"
	"syscall"
	"testing"
)

// namedPipe returns the path of one that nobody writes to.
func namedPipe(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}
