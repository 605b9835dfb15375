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

// TestPipeOfAStaleName wants a named pipe that is called like a killed writer's temporary file not to
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
