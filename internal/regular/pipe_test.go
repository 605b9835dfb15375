//go:build unix && !aix && !solaris && !illumos

package regular

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPipe checks that Open and Append reject a named pipe, and that opening one for reading does not block, as when a
// pipe replaces a regular file just before it is opened.
func TestPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o666))
	_, _, err := Open(path)
	require.ErrorContains(t, err, "is a named pipe, want a regular file")
	_, _, err = Append(path)
	require.ErrorContains(t, err, "is a named pipe, want a regular file")
	f, err := os.OpenFile(path, os.O_RDONLY|nonBlocking, 0)
	require.NoError(t, err)
	require.NoError(t, f.Close())
}
