package llm

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/op"
)

// gemma is a tiny model with all traits, five blocks of which three have windows and one no RoPE.
func gemma() Config {
	c := tiny()
	c.Layers, c.Kasmina, c.Seeds, c.Slots, c.Seq = 5, nil, 0, 0, 70
	c.Traits = Traits{Scaling: op.RoPEScaling{Factor: 4, BetaFast: 32, BetaSlow: 1, Original: 2048},
		AttentionScale: 0.3,
		QKVBias:        true, QKNorm: true, NormPlusOne: true, PostNorms: true,
		GELU: true, EmbedScale: 4,
		Blocks: []Block{{Window: 5, Base: 100}, {}, {NoRoPE: true, Window: 40}}}
	return c.Default()
}

// TestBlocks wants the pattern of Blocks to repeat, and Base and Scaling to be those of the model
// where a block has none.
func TestBlocks(t *testing.T) {
	c := gemma()
	require.Equal(t, Block{Window: 5, Base: 100}, c.Block(3))
	require.Equal(t, Block{Base: c.Base, Scaling: c.Scaling}, c.Block(4))
	require.Equal(t, Block{NoRoPE: true, Window: 40}, c.Block(2))
	require.Equal(t, Block{Base: 500}, Config{Base: 500}.Block(7))
}

// TestTraitErrors wants each trait that does not fit to be refused by name.
func TestTraitErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"Config.AttentionScale is -1": func(c *Config) { c.AttentionScale = -1 },
		"Config.EmbedScale is -2":     func(c *Config) { c.EmbedScale = -2 },
		"Config.Scaling.Factor is 0.5": func(c *Config) {
			c.Scaling = op.RoPEScaling{Factor: 0.5}
		},
		"Blocks[1].Window is -3": func(c *Config) { c.Blocks = []Block{{}, {Window: -3}} },
		"Blocks[0].Base is 1":    func(c *Config) { c.Blocks = []Block{{Base: 1}} },
		"want a Base beside it": func(c *Config) {
			c.Blocks = []Block{{Scaling: op.RoPEScaling{Factor: 2}}}
		},
		"NoRoPE and a Base": func(c *Config) {
			c.Blocks = []Block{{NoRoPE: true, Base: 10}}
		},
		"Blocks[0].Scaling.Factor is 0.5": func(c *Config) {
			c.Blocks = []Block{{Base: 10, Scaling: op.RoPEScaling{Factor: 0.5}}}
		},
		"Blocks has 6 entries": func(c *Config) { c.Blocks = make([]Block, 6) },
	} {
		c := gemma()
		change(&c)
		require.ErrorContains(t, c.Check(), want)
	}
}

// TestTraitsDecode wants the logits of cached keys and values to be those of whole windows, for
// blocks with windows and without RoPE, across the edge of Config.Seq too.
func TestTraitsDecode(t *testing.T) {
	r := texttest.Rand(t)
	for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float32: 2e-5,
		tensor.Float64: 1e-12} {
		m, err := NewModel(gemma(), dt, r.Uint64())
		require.NoError(t, err)
		stir(r.NormFloat64, m)
		whole := wholeLogits(t, m)
		defer whole.Machine.Close()
		i := &Inference{Model: m}
		defer i.Close()
		next, err := i.Decoder()
		require.NoError(t, err)
		var all []int
		for range m.Config.Seq + 3 {
			all = append(all, r.IntN(m.Config.Vocab))
			window := all[max(0, len(all)-m.Config.Seq):]
			got, err := next(t.Context(), window)
			require.NoError(t, err)
			want, err := whole.Next(t.Context(), window)
			require.NoError(t, err)
			require.Less(t, apartBy(t, got, want), tolerance, "%v after %d tokens", dt, len(all))
		}
	}
}

// stir moves parameters away from where they start, so that biases and norms matter.
func stir(next func() float64, m *Model) {
	for _, p := range m.Params {
		switch x := p.Value.Data().(type) {
		case []float32:
			for i := range x {
				x[i] += float32(0.2 * next())
			}
		case []float64:
			for i := range x {
				x[i] += 0.2 * next()
			}
		}
	}
}

// TestWindowsHideTokens wants a token to matter to the logits within the reach of the windows of
// all blocks, and not behind it.
func TestWindowsHideTokens(t *testing.T) {
	c := gemma()
	c.Layers, c.Blocks = 2, []Block{{Window: 4}, {Window: 3}}
	m, err := NewModel(c, tensor.Float64, 1)
	require.NoError(t, err)
	whole := wholeLogits(t, m)
	defer whole.Machine.Close()
	tokens := make([]int, 20)
	logits := func() []float64 {
		x, err := whole.Next(t.Context(), tokens)
		require.NoError(t, err)
		return append([]float64{}, x.([]float64)...)
	}
	before := logits()
	const reach = 3 + 2 // positions before the last that it sees through both blocks
	for back := range len(tokens) {
		tokens[len(tokens)-1-back] = 7
		if after := logits(); back <= reach {
			require.NotEqual(t, before, after, "%d positions back", back)
		} else {
			require.Equal(t, before, after, "%d positions back", back)
		}
		tokens[len(tokens)-1-back] = 0
	}
}

// TestTraitsInAFile wants a model with traits back from its file, and gradients of all parameters
// in its steps.
func TestTraitsInAFile(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: gemma(), steps: 2})
	require.NoError(t, tr.Run(t.Context()))
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, tr.Model.Save(path))
	m, err := LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, tr.Model.Config, m.Config)
	for i, p := range m.Params {
		require.Equal(t, tr.Model.Params[i].Value.Data(), p.Value.Data(), p.Name)
	}
	require.Len(t, m.Params, 1+5*16+1)
}

// TestPlainConfig wants a model without traits to be described in its file as before there were
// any.
func TestPlainConfig(t *testing.T) {
	text, err := json.Marshal(tiny())
	require.NoError(t, err)
	require.JSONEq(t,
		`{"vocab":256,"dim":16,"layers":2,"heads":2,"kv_heads":1,"head_dim":8,"ff":64,"seq":12,
		"rope_base":10000,"eps":1e-5,"kasmina":[0,1],"seeds":4,"slots":5}`, string(text))
}

// TestTraitsGrow wants copies of a block to have its traits, and the pattern back from the grown
// configuration.
func TestTraitsGrow(t *testing.T) {
	c := gemma()
	c.Depth = 1
	blocks := func(c Config) (all []Block) {
		for i := range c.Layers {
			all = append(all, c.Block(i))
		}
		return all
	}
	before := blocks(c)
	for _, order := range [][]int{{0, 1, 2, 3, 4, 0, 1, 2, 3, 4}, {0, 0, 1, 1, 2, 2, 3, 3, 4, 4},
		{0, blueprints.NewBlock, 1, 2, 3, 4}, {blueprints.NewBlock, 0, 1, 2, 3, 4,
			blueprints.NewBlock}} {
		grown := c.Grow(Grown{Kind: "Stack", Size: 1, Order: order})
		require.NoError(t, grown.Check())
		for i, from := range order {
			want := grown.Block(max(0, i-1)) // that of the block before a new one
			if from >= 0 {
				want = before[from]
			} else if i == 0 {
				want = before[0]
			}
			require.Equal(t, want, grown.Block(i), "%v: block %d", order, i)
		}
		require.Equal(t, c, grown.Origin())
	}
	plain := gemma()
	plain.Blocks = make([]Block, 3)
	require.Nil(t, plain.Origin().Blocks, fmt.Sprint(plain.Origin().Blocks))
}

// TestFLOPsOfWindows counts the keys that the queries of a sequence see.
func TestFLOPsOfWindows(t *testing.T) {
	c := gemma()
	c.Blocks = nil
	full := c.FLOPs()
	c.Blocks = []Block{{Window: 20}}
	unseen := 0
	for i := range c.Seq {
		unseen += max(0, i+1-20)
	}
	want := 12 * float64(c.Layers*c.Heads*c.HeadDim) * float64(unseen) / float64(c.Seq)
	require.InEpsilon(t, want, full-c.FLOPs(), 0.03)
}
