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

// TestPipeOfAStaleName checks that a named pipe with the name of a stale temporary file does not
// block the next write.
func TestPipeOfAStaleName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	pipe := filepath.Join(filepath.Dir(path), prefixOf("model")+
		strings.Repeat("d", randomDigits)+nameSuffix)
	require.NoError(t, syscall.Mkfifo(pipe, 0o666))
	mustWrite(t, path, "new")
	_, err := os.Stat(pipe)
	require.NoError(t, err)
}
