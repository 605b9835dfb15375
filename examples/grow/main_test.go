package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

// TestRun checks that both models are trained, that the second one grows, and that its record reproduces
// it.
func TestRun(t *testing.T) {
	large := config
	t.Cleanup(func() { config = large })
	config = llm.Config{Vocab: 256, Dim: 16, Layers: 2, Heads: 2, Seq: 16}

	out := t.TempDir()
	text := filepath.Join(out, "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("The quick brown fox jumps. "), 2000), 0o666))
	var stdout bytes.Buffer
	require.NoError(t, run(t.Context(), text, out, "", llm.Budget{Tokens: 40_000}, 1, &stdout))
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	require.Len(t, lines, 3)
	require.Contains(t, lines[0], "from the start  2 blocks")
	require.Contains(t, lines[1], "grown")

	record := filepath.Join(out, "record.jsonl")
	decisions, err := os.ReadFile(record)
	require.NoError(t, err)
	require.NotEmpty(t, decisions)
	stdout.Reset()
	require.NoError(t, run(t.Context(), text, out, record, llm.Budget{Tokens: 40_000}, 1, &stdout))
	_, result, _ := strings.Cut(lines[1], "grown")
	require.Contains(t, stdout.String(), strings.TrimSpace(result))
}
