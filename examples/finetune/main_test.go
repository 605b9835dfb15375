package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/llm"
)

// TestRun checks that tuning lowers the loss of held-out answers, and that the adapters are saved.
func TestRun(t *testing.T) {
	large := config
	t.Cleanup(func() { config = large })
	config = llm.Config{Vocab: 257, Dim: 32, Layers: 1, Heads: 2, Seq: 48}

	out := t.TempDir()
	text := filepath.Join(out, "text")
	require.NoError(t, os.WriteFile(text, bytes.Repeat([]byte("Is buf exported? The quick brown fox. "), 2000), 0o666))
	for method := range randtest.Sample(t, 1, map[string]bool{"lora": true, "dora": true}) {
		var stdout bytes.Buffer
		o := options{data: text, out: out, method: method, budget: llm.Budget{Tokens: 100_000}, steps: 40,
			rank: 4, seed: 1}
		require.NoError(t, run(t.Context(), o, &stdout))
		lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
		require.Contains(t, stdout.String(), "correct answers")

		var r result
		require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &r))
		require.Less(t, r.ValLoss, r.BaseLoss-1)
		require.Less(t, r.TrainedParams, r.Params/2)
		require.FileExists(t, filepath.Join(out, "adapter", "adapter_config.json"))
		require.FileExists(t, filepath.Join(out, "adapter", "adapter_model.safetensors"))
	}
}
