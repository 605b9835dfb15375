//go:build linux || darwin

package atomicfile

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPipeOfAStaleName wants a named pipe, called as the temporary file of a dead writer is, not to
// stop the next one.
func TestPipeOfAStaleName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	pipe := filepath.Join(filepath.Dir(path), temporaryPrefix(path)+
		strings.Repeat("d", randomDigits))
	require.NoError(t, syscall.Mkfifo(pipe, 0o666))
	mustWrite(t, path, "new")
	_, err := os.Stat(pipe)
	require.NoError(t, err)
}
