package hf

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm"
)

// TestSeedsInAndOut checks that the chunk seeds of a model are read as they were written, and that errors describe
// folders that cannot be read.
func TestSeedsInAndOut(t *testing.T) {
	f := open(t, "tiny")
	base, err := f.Load(t.Context())
	require.NoError(t, err)
	m, err := llm.TuneSeeds(base, blueprints.LowRank, 2)
	require.NoError(t, err)
	for k, p := range m.Params {
		if llm.IsSeedParam(p.Name) {
			x := p.Value.Float32s()
			for i := range x {
				x[i] = float32(math.Sin(float64(k*100 + i)))
			}
		}
	}
	want, err := m.SeedAdapter()
	require.NoError(t, err)

	dir := filepath.Join(t.TempDir(), "seeds")
	require.NoError(t, CheckSaveAdapter(m.Config, "tiny", Like(f)))
	require.NoError(t, SaveAdapter(t.Context(), dir, "tiny", m, Like(f)))
	require.True(t, IsAdapter(dir))
	model, err := AdapterBase(dir)
	require.NoError(t, err)
	require.Equal(t, "tiny", model)
	require.FileExists(t, filepath.Join(dir, "tokenizer.json"))
	got, err := ReadAdapter(t.Context(), dir, f)
	require.NoError(t, err)
	require.Equal(t, want, got)

	config, err := os.ReadFile(filepath.Join(dir, adapterConfigName))
	require.NoError(t, err)
	refused := func(want, old, new string) {
		t.Helper()
		require.Contains(t, string(config), old)
		require.NoError(t, os.WriteFile(filepath.Join(dir, adapterConfigName), []byte(strings.Replace(string(config), old, new, 1)),
			0o666))
		_, err := ReadAdapter(t.Context(), dir, f)
		require.ErrorContains(t, err, want)
	}
	refused("kasmina_layers is [\n", "KASMINA_SEEDS", "LORA")
	refused("kasmina_layers is missing", "kasmina_layers", "auto_mapping")
	refused("has no tensor layers.7.chunks.0", `"block": 0`, `"block": 7`)
	refused("has no tensor layers.0.chunks.0", `"block": 1`, `"block": 0`)

	m.Config.Weights = []llm.WeightSite{{}}
	require.ErrorContains(t, SaveAdapter(t.Context(), dir+" of weights", "tiny", m, Like(f)), "seeds at weights")
}
