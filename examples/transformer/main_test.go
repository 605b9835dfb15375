package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

// small replaces the model by a tiny one, and returns a folder of text.
func small(t *testing.T) (folder string) {
	large := config
	t.Cleanup(func() { config = large })
	config = llm.Config{Dim: 16, Layers: 1, Heads: 2, Seq: 8, Kasmina: []int{0}, Seeds: 4, Depth: 1}

	folder = t.TempDir()
	for i := range 25 {
		text := strings.Repeat(fmt.Sprintf("func f%d(x int) int { return x + %d }\n", i, i%3), 40)
		require.NoError(t, os.WriteFile(filepath.Join(folder, fmt.Sprint(i, ".go")), []byte(text), 0o666))
	}
	return folder
}

// TestRun checks that a run learns, grows, reports the cost of its seeds and writes all files.
func TestRun(t *testing.T) {
	text, out := small(t), t.TempDir()
	var stdout bytes.Buffer
	require.NoError(t, run(t.Context(), text, out, 200, 1, false, &stdout))

	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	var result map[string]float64
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result))
	require.Equal(t, 200.0, result["steps"])
	require.Equal(t, 5.0, result["seeds"])  // four of the Kasmina layer, and one in depth
	require.Less(t, result["val_bpb"], 1.5) // a uniform distribution over bytes has 8
	require.Greater(t, result["kasmina_share"], 0.0)
	require.Less(t, result["kasmina_share"], 1.0)
	require.Contains(t, stdout.String(), "Kasmina layer 0: features of its 4 seeds deviate by ")
	require.NotContains(t, stdout.String(), "deviate by 0 to")

	for _, name := range []string{"model.safetensors", "tokenizer.bpe", "log.jsonl", "loss.png",
		"sample.txt"} {
		require.FileExists(t, filepath.Join(out, name))
	}

	log, err := os.ReadFile(filepath.Join(out, "log.jsonl"))
	require.NoError(t, err)
	require.Contains(t, string(log), "1 blocks to 2")

	err = run(t.Context(), text, out, 79, 1, false, &stdout)
	require.ErrorContains(t, err, "-steps is 79, want at least 80")
	err = run(t.Context(), text, out, 200, 1, false, &stdout)
	require.ErrorContains(t, err, "holds a run: add -resume to continue it")
	err = run(t.Context(), text, out, 200, 1, true, &stdout)
	require.ErrorContains(t, err, "has made all of its 200 steps")
}

// endsInTraining is a context that is canceled once the log of a run contains a step.
type endsInTraining struct {
	context.Context
	log string
}

func (c endsInTraining) Err() error {
	if log, err := os.ReadFile(c.log); err == nil && bytes.Contains(log, []byte(`"event":"step"`)) {
		return context.Canceled
	}
	return nil
}

// TestResume checks that an interrupted and continued run is bit-identical to a run without the
// interruption.
func TestResume(t *testing.T) {
	text, whole, parts := small(t), t.TempDir(), t.TempDir()
	var stdout bytes.Buffer
	require.NoError(t, run(t.Context(), text, whole, 100, 1, false, &stdout))

	ctx := endsInTraining{t.Context(), filepath.Join(parts, "log.jsonl")}
	err := run(ctx, text, parts, 100, 1, false, &stdout)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "add -resume to continue")
	require.NoError(t, run(t.Context(), text, parts, 100, 1, true, &stdout))

	want, err := os.ReadFile(filepath.Join(whole, "model.safetensors"))
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(parts, "model.safetensors"))
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
}
