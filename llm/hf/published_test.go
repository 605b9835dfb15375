package hf

import (
	"encoding/binary"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/llm"
)

// published maps configurations from their publishers to the number of parameters that these
// configurations imply.
var published = map[string]int{
	"llama-2-7b": 6738415616, "llama-3.1-8b": 8030261248, "llama-3.2-1b": 1235814400,
	"qwen2.5-0.5b": 494032768, "qwen2.5-7b": 7615616512, "qwen3-0.6b": 596049920,
	"qwen3-8b": 8190735360, "mistral-7b-v0.1": 7241732096, "mistral-7b-v0.3": 7248023552,
	"smollm2-135m": 134515008, "smollm3-3b": 3075098624, "gemma-3-1b": 999885952,
	"gpt2": 124439808,
}

// sparseFolder creates a folder for a published configuration. Its weights are sparse files of zeros.
func sparseFolder(t *testing.T, name string) string {
	dir := t.TempDir()
	text, err := os.ReadFile(filepath.Join("testdata", "configs", name+".json"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, configName), text, 0o666))
	traits, err := parseConfig(text)
	require.NoError(t, err)
	c, err := traits.config()
	require.NoError(t, err)
	head, at := map[string]any{}, 0
	for _, x := range traits.layout(&weights{})(c) {
		n := 2
		for _, d := range x.shape {
			n *= d
		}
		head[x.name] = map[string]any{"dtype": "BF16", "shape": x.shape,
			"data_offsets": []int{at, at + n}}
		at += n
	}

	line, err := json.Marshal(head)
	require.NoError(t, err)
	path := filepath.Join(dir, "model.safetensors")
	require.NoError(t, os.WriteFile(path,
		append(binary.LittleEndian.AppendUint64(nil, uint64(len(line))), line...), 0o666))
	require.NoError(t, os.Truncate(path, int64(8+len(line)+at)))
	return dir
}

// TestPublished checks that published configurations are read completely: it compares the number of
// parameters and the differences from Llama 2.
func TestPublished(t *testing.T) {
	traits := map[string]func(*testing.T, llm.Config){
		"llama-3.1-8b": func(t *testing.T, c llm.Config) { require.EqualValues(t, 8, c.Scaling.Factor) },
		"llama-3.2-1b": func(t *testing.T, c llm.Config) {
			require.EqualValues(t, 32, c.Scaling.Factor)
			require.False(t, c.Untied)
		},
		"qwen2.5-7b": func(t *testing.T, c llm.Config) {
			require.True(t, c.QKVBias)
			require.Empty(t, c.Blocks) // use_sliding_window is false
		},
		"qwen3-0.6b":      func(t *testing.T, c llm.Config) { require.True(t, c.QKNorm) },
		"mistral-7b-v0.1": func(t *testing.T, c llm.Config) { require.Equal(t, 4096, c.Block(9).Window) },
		"mistral-7b-v0.3": func(t *testing.T, c llm.Config) { require.Zero(t, c.Block(9).Window) },
		"smollm3-3b": func(t *testing.T, c llm.Config) {
			require.False(t, c.Block(2).NoRoPE)
			require.True(t, c.Block(3).NoRoPE)
		},
		"gpt2": func(t *testing.T, c llm.Config) {
			require.True(t, c.LayerNorm && c.PlainMLP && c.OutBias && !c.Untied)
			require.Equal(t, 3072, c.FF)
			require.Equal(t, 1024, c.Positions)
			require.True(t, c.Block(11).NoRoPE)
		},
		"gemma-3-1b": func(t *testing.T, c llm.Config) {
			require.Equal(t, llm.Block{Window: 512, Base: 10000}, c.Block(4))
			require.Equal(t, llm.Block{Base: 1e6}, c.Block(5))
			require.True(t, c.NormPlusOne && c.PostNorms && c.GELU && c.QKNorm)
			require.InDelta(t, 1./16, c.AttentionScale, 1e-12)
		},
	}

	for name, want := range published {
		t.Run(name, func(t *testing.T) {
			f, err := Open(sparseFolder(t, name))
			require.NoError(t, err)
			defer f.Close()
			params := 0
			for _, x := range f.Tensors() {
				n := 1
				for _, d := range x.Shape {
					n *= int(d)
				}
				params += n
			}
			require.Equal(t, want, params)
			if check := traits[name]; check != nil {
				check(t, f.Config)
			}
		})
	}
}
