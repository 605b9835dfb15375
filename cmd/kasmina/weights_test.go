package main

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/llm/hf"
)

// TestWeightTypes generates text and evaluates a model with each type of weights. Weights stored in bfloat16
// must keep this type in memory, and give the same results as when they are converted to float32.
func TestWeightTypes(t *testing.T) {
	wide := filepath.Join(t.TempDir(), "wide")
	_, err := kasmina(t, "convert", "--model", tiny, "--out", wide, "--precision", "f32")
	require.NoError(t, err)
	stored := cpuops.Float32
	if cpuops.FastWeights() {
		stored = cpuops.BFloat16
	}
	for dir, want := range map[string]cpuops.WeightType{wide: cpuops.Float32, tiny: stored} {
		f, err := hf.Open(dir)
		require.NoError(t, err)
		require.Equal(t, want, new(common).weightType(f), dir)
		require.NoError(t, f.Close())
	}

	generate := func(precision ...string) string {
		text, err := kasmina(t, append([]string{"generate", "--model", tiny, "--device", "cpu", "--prompt",
			"Permission is", "--n", "30", "--temperature", "0"}, precision...)...)
		require.NoError(t, err)
		return text
	}
	measure := func(precision ...string) float64 {
		text, err := kasmina(t, append([]string{"eval", "--model", tiny, "--device", "cpu", "--data",
			"weights_test.go", "--seq", "32"}, precision...)...)
		require.NoError(t, err)
		lines := strings.Split(strings.TrimSpace(text), "\n")
		var s score
		require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &s))
		return s.Loss
	}

	exact, loss := generate("--precision", "f32"), measure("--precision", "f32")
	require.Equal(t, exact, generate())
	require.Equal(t, exact, generate("--precision", "bf16"))
	require.InEpsilon(t, loss, measure(), 1e-5)
	require.NotEmpty(t, generate("--precision", "q8_0"))
	rounded := measure("--precision", "q8_0")
	require.InEpsilon(t, loss, rounded, 0.01)
	require.NotEqual(t, loss, rounded)

	for args, want := range map[string]string{
		"generate --prompt a --device cuda --precision q8_0":      "needs --device cpu",
		"generate --prompt a --device cpu --precision q4":         "or q8_0 on a CPU",
		"eval --data weights_test.go --device cpu --precision f8": "needs a GPU",
		"generate --prompt a --device cpu --precision nf4":        "needs a GPU",
	} {
		_, err := kasmina(t, append(strings.Fields(args), "--model", tiny)...)
		require.ErrorContains(t, err, want, args)
	}
}
