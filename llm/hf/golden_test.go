package hf

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// folders lists the models that testdata/make.py creates.
var folders = []string{"llama2", "llama3.1", "llama3.2", "llama-linear", "llama-bias", "llama-yarn", "smollm2",
	"mistral", "mistral-full", "qwen2.5", "qwen2-window", "qwen3", "smollm3", "gemma3", "olmo2", "gpt2"}

// golden holds the results of transformers for a model.
type golden struct {
	ids    [][]int // two sequences
	logits [][]float32
	losses []float32
}

func readGolden(t *testing.T, folder string) (g golden) {
	tensors, _, err := safetensors.Load(filepath.Join("testdata", folder, "golden.safetensors"))
	require.NoError(t, err)
	for _, x := range tensors {
		switch x.Name {
		case "ids":
			for i, id := range x.Data.([]int64) {
				if i%x.Shape[1] == 0 {
					g.ids = append(g.ids, nil)
				}
				g.ids[len(g.ids)-1] = append(g.ids[len(g.ids)-1], int(id))
			}
		case "logits":
			v, all := x.Shape[2], x.Data.([]float32)
			for ; len(all) > 0; all = all[v:] {
				g.logits = append(g.logits, all[:v])
			}
		case "losses":
			g.losses = x.Data.([]float32)
		}
	}

	require.NotEmpty(t, g.ids)
	require.NotEmpty(t, g.losses)
	return g
}

func open(t *testing.T, folder string) *Folder {
	f, err := Open(filepath.Join("testdata", folder))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// distance returns |a−b| / |b|.
func distance(a, b []float32) float64 {
	var off, size float64
	for i := range b {
		off += math.Pow(float64(a[i])-float64(b[i]), 2)
		size += math.Pow(float64(b[i]), 2)
	}
	return math.Sqrt(off / size)
}

// offLogits returns the distance between a model's logits and transformers' logits over all positions.
func offLogits(t *testing.T, g golden, i *llm.Inference) float64 {
	var ours, theirs []float32
	for s, ids := range g.ids {
		next, err := i.Decoder()
		require.NoError(t, err)
		for n := 1; n <= len(ids); n++ {
			if n%7 == 0 { // start over with an empty cache
				next, err = i.Decoder()
				require.NoError(t, err)
			}
			got, err := next(t.Context(), ids[:n])
			require.NoError(t, err)
			ours = append(ours, got.([]float32)...)
			theirs = append(theirs, g.logits[s*len(ids)+n-1]...)
		}
	}

	require.NoError(t, i.Close())
	return distance(ours, theirs)
}

// TestLogits compares logits with transformers, both from passes over all tokens and with the cache of
// keys and values.
func TestLogits(t *testing.T) {
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			m, err := open(t, folder).Load(t.Context())
			require.NoError(t, err)
			require.Less(t, offLogits(t, readGolden(t, folder), &llm.Inference{Model: m}), 1e-5)
		})
	}
}

// lossesOf returns the losses of ten AdamW steps on an engine.
func lossesOf(t *testing.T, folder string, g golden,
	engine func(*llm.Model, optim.Optimizer, llm.TrainConfig) (llm.Engine, error)) []float32 {
	seq := len(g.ids[0])
	m, err := open(t, folder).Load(t.Context(), WithConfig(func(c *llm.Config) { c.Seq = seq }))
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(1e-3), optim.WithBetas(0.9, 0.99),
		optim.WithWeightDecay(0.01))
	require.NoError(t, err)
	e, err := engine(m, o, llm.TrainConfig{Batch: len(g.ids)})
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	var b data.Batch
	for _, ids := range g.ids {
		b.Inputs = append(b.Inputs, ids...)
		b.Targets = append(append(b.Targets, ids[1:]...), -1)
	}

	b.Count = len(g.ids) * (seq - 1)
	losses := make([]float32, len(g.losses))
	for step := range losses {
		loss, err := e.Gradients(b)
		require.NoError(t, err)
		losses[step] = float32(loss)
		_, err = e.Update()
		require.NoError(t, err)
	}

	return losses
}

// TestLosses compares the losses of ten AdamW steps with transformers.
func TestLosses(t *testing.T) {
	for _, folder := range folders {
		t.Run(folder, func(t *testing.T) {
			g := readGolden(t, folder)
			require.InEpsilonSlice(t, g.losses, lossesOf(t, folder, g, llm.CPUEngine()), 1e-4)
			require.Less(t, g.losses[9], g.losses[0]-0.05)
		})
	}
}

// TestInAndOut checks that saving a loaded model reproduces the bytes of every tensor, config.json and
// the other files, whether the weights are in one file or several.
func TestInAndOut(t *testing.T) {
	for _, folder := range randtest.SampleOf(t, 5, folders) {
		t.Run(folder, func(t *testing.T) {
			f := open(t, folder)
			m, err := f.Load(t.Context())
			require.NoError(t, err)
			for name, opts := range map[string][]SaveOption{"one": {Like(f)},
				"shards": {Like(f), WithShardSize(3000)}} {
				dir := filepath.Join(t.TempDir(), name)
				require.NoError(t, SavePretrained(t.Context(), dir, m, opts...))
				again, err := Open(dir)
				require.NoError(t, err)
				require.Equal(t, name == "shards", len(again.weights.files) > 1)
				require.Equal(t, f.config, again.config)
				require.Equal(t, f.Generation, again.Generation)
				require.Len(t, again.Tensors(), len(f.Tensors()))
				for tensor, file := range f.weights.in {
					want, err := file.Tensor(t.Context(), tensor)
					require.NoError(t, err)
					require.Contains(t, again.weights.in, tensor)
					got, err := again.weights.in[tensor].Tensor(t.Context(), tensor)
					require.NoError(t, err)
					require.Equal(t, want, got)
				}
				require.NoError(t, again.Close())
			}
		})
	}
}

// TestOwnModel checks that a model that wasn't loaded from a folder is unchanged after saving and
// loading.
func TestOwnModel(t *testing.T) {
	c := llm.Config{Vocab: 50, Dim: 24, Layers: 2, Heads: 4, KVHeads: 2, FF: 40, Seq: 16,
		Kasmina: []int{0, 1}, Seeds: 4}.Default()
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		m, err := llm.NewModel(c, dt, 3)
		require.NoError(t, err)
		dir := filepath.Join(t.TempDir(), "own")
		require.NoError(t, SavePretrained(t.Context(), dir, m))
		again, err := Load(t.Context(), dir)
		require.NoError(t, err)
		require.Equal(t, c.Plain(), again.Config)
		for _, p := range again.Params {
			want := m.Param(p.Name)
			for i, v := range p.Value.Float32s() {
				if dt == tensor.Float64 {
					require.Equal(t, float32(want.Float64s()[i]), v)
				} else {
					require.Equal(t, want.Float32s()[i], v)
				}
			}
		}
		err = SavePretrained(t.Context(), dir, m)
		require.ErrorContains(t, err, "is not empty")
	}
}

// TestWithTokenizer checks that a new model is saved with the tokenizer of a folder or a file.
func TestWithTokenizer(t *testing.T) {
	m, err := llm.NewModel(llm.Config{Vocab: 50, Dim: 24, Layers: 1, Heads: 4, Seq: 16}.Default(),
		tensor.Float32, 3)
	require.NoError(t, err)
	files := map[string][]string{"testdata/tiny": {"tokenizer.json", "tokenizer_config.json",
		"chat_template.jinja"}, "testdata/tiny/tokenizer.json": {"tokenizer.json"}}
	for path, want := range files {
		dir := filepath.Join(t.TempDir(), "out")
		require.NoError(t, SavePretrained(t.Context(), dir, m, WithTokenizer(path)))

		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, 3+len(want)) // the weights and two configurations are there as well
		for _, name := range want {
			a, err := os.ReadFile(filepath.Join("testdata/tiny", name))
			require.NoError(t, err)
			b, err := os.ReadFile(filepath.Join(dir, name))
			require.NoError(t, err)
			require.Equal(t, a, b, name)
		}
	}
}

// TestGrowing checks that adding Kasmina layers to a model doesn't change its results.
func TestGrowing(t *testing.T) {
	f, g := open(t, "llama2"), readGolden(t, "llama2")
	m, err := f.Load(t.Context(), WithConfig(func(c *llm.Config) {
		c.Kasmina, c.Seeds = []int{0, 1}, 4
		*c = c.Default()
	}))
	require.NoError(t, err)
	require.Equal(t, 8, m.NumSeeds())
	i := &llm.Inference{Model: m}
	defer i.Close()
	next, err := i.Decoder()
	require.NoError(t, err)
	got, err := next(t.Context(), g.ids[0])
	require.NoError(t, err)
	require.Less(t, distance(got.([]float32), g.logits[len(g.ids[0])-1]), 1e-5)
	dir := filepath.Join(t.TempDir(), "out")
	require.NoError(t, SavePretrained(t.Context(), dir, m, Like(f)))
	config, err := os.ReadFile(filepath.Join(dir, configName))
	require.NoError(t, err)
	require.Equal(t, f.config, config)
}

// TestDtype checks that tensors saved in another type are rounded to it, and that config.json declares
// that type.
func TestDtype(t *testing.T) {
	f := open(t, "llama2")
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	for d, name := range dtypeNames {
		dir := filepath.Join(t.TempDir(), name)
		require.NoError(t, SavePretrained(t.Context(), dir, m, Like(f), WithDtype(name)))
		again, err := Open(dir)
		require.NoError(t, err)
		require.Equal(t, name, again.traits.dtype)
		for _, x := range again.Tensors() {
			require.Equal(t, string(d), x.Type)
		}
		require.NoError(t, again.Close())
	}

	err = SavePretrained(t.Context(), filepath.Join(t.TempDir(), "x"), m, WithDtype("int8"))
	require.ErrorContains(t, err, "want float32, float16 or bfloat16")
}

// TestCancel checks that canceling the context stops loading and saving, and that no folder is left over.
func TestCancel(t *testing.T) {
	f := open(t, "llama2")
	m, err := f.Load(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = f.Load(ctx)
	require.ErrorIs(t, err, context.Canceled)
	parent := t.TempDir()
	require.ErrorIs(t, SavePretrained(ctx, filepath.Join(parent, "x"), m), context.Canceled)
	left, err := os.ReadDir(parent)
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestGrownConfig checks that a model with more blocks than its folder gets a config.json like the
// folder's, even if config.json has an entry for each layer.
func TestGrownConfig(t *testing.T) {
	for _, name := range []string{"qwen2.5", "qwen2-window", "qwen3", "smollm3", "gemma3"} {
		dir := copyOf(t, name)
		var types, rope []any
		rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
			if f["layer_types"] == nil {
				for range int(f["num_hidden_layers"].(float64)) {
					types = append(types, "full_attention")
				}
				f["layer_types"] = types
			}
			types = f["layer_types"].([]any)
			rope, _ = f["no_rope_layers"].([]any)
		})
		f, err := Open(dir)
		require.NoError(t, err, name)
		require.NoError(t, f.Close())

		// As if every block had been duplicated in place.
		c := f.Config
		c.Layers, c.Blocks = 2*c.Layers, nil
		for _, b := range eachBlock(f.Config) {
			c.Blocks = append(c.Blocks, b, b)
		}
		s := &saving{like: f}
		text, err := s.config(c)
		require.NoError(t, err, name)
		var got map[string]any
		require.NoError(t, json.Unmarshal(text, &got))
		double := func(all []any) (twice []any) {
			for _, x := range all {
				twice = append(twice, x, x)
			}
			return twice
		}
		require.Equal(t, double(types), got["layer_types"], name)
		if rope != nil {
			require.Equal(t, double(rope), got["no_rope_layers"], name)
		}
	}
}

// TestGrownWindows checks that a grown model with windowed layers gets a config.json if its folder has no
// layer_types.
func TestGrownWindows(t *testing.T) {
	for _, name := range []string{"mistral", "qwen2-window", "gemma3"} {
		dir := copyOf(t, name)
		rewrite(t, filepath.Join(dir, configName), func(f map[string]any) {
			if name == "qwen2-window" {
				f["max_window_layers"] = 1
			}
			delete(f, "layer_types")
		})
		f, err := Open(dir)
		require.NoError(t, err, name)
		require.NoError(t, f.Close())
		require.NotEmpty(t, f.Config.Blocks, name)

		c := f.Config
		c.Blocks = append(eachBlock(c), eachBlock(c)...)
		c.Layers *= 2
		require.NoError(t, CheckSave(c, Like(f)), name)
	}
}
