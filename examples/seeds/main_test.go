package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

// TestRun checks that blueprints are planted and judged, and that the events of seeds include reasons.
func TestRun(t *testing.T) {
	large := config
	t.Cleanup(func() { config = large })
	config = llm.Config{Vocab: 256, Dim: 32, Layers: 1, Heads: 2, Seq: 16, Kasmina: []int{0}, Seeds: 4,
		SlotWidth: 64}

	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("The quick brown fox jumps. "), 4000), 0o666))
	var stdout bytes.Buffer
	require.NoError(t, run(t.Context(), text, 100, 1, "127.0.0.1:0", true, &stdout))
	require.Contains(t, stdout.String(), "Germinated")
	require.Contains(t, stdout.String(), "Grafting")
	require.Contains(t, stdout.String(), "blueprints were kept")
}
