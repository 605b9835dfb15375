//go:build unix && !aix && !solaris && !illumos

package llm

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
)

// TestSampleToAPipe wants a pipe that nobody reads to be an error, and not to be waited for.
func TestSampleToAPipe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(path, 0o666))
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 2})
	tr.On(SampleText(tr, tokenizer.Bytes{}, "0", 3, sampler.Config{}, path, 1))
	require.ErrorIs(t, tr.Run(t.Context()), syscall.ENXIO)
}
