package llm

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/texttest"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// adapters returns kinds of adapters for all linear layers of a model.
func adapters(t *testing.T, c Config) map[string]LoRA {
	t.Helper()
	targets, err := c.MatchLayers(AllLinear)
	require.NoError(t, err)
	plain := LoRA{Rank: 4, Alpha: 8, Targets: targets}
	all := map[string]LoRA{"LoRA": plain}

	stable := plain
	stable.RankStabilized = true
	all["rsLoRA"] = stable

	dora := plain
	dora.Magnitude = true
	all["DoRA"] = dora

	dropout := dora
	dropout.Dropout = 0.2
	all["DoRA with dropout"] = dropout

	dropout = plain
	dropout.Dropout = 0.2
	all["LoRA with dropout"] = dropout

	some, err := c.MatchLayers("self_attn.[qv]_proj", "layers.1.mlp.down_proj")
	require.NoError(t, err)
	outer := plain
	outer.Targets, err = c.MatchLayers("embed_tokens", "q_proj", "lm_head")
	require.NoError(t, err)
	outer.Dropout = 0.1
	all["embedding and output layer"] = outer

	all["some layers"] = LoRA{Rank: 2, Alpha: 3, Targets: some, Ranks: map[string]int{some[1]: 5}}
	return all
}

// adapted returns a model with adapters that shares the base model's parameters.
func adapted(t *testing.T, dt tensor.Dtype, a LoRA) (base, m *Model) {
	t.Helper()
	base, err := NewModel(maskedConfig(), dt, 7)
	require.NoError(t, err)
	enlarge(base.Param(embedName), 10) // as those of trained models, in comparison
	m, err = Adapt(base, a, 3)
	require.NoError(t, err)
	return base, m
}

// enlarge multiplies all numbers of a tensor by a factor.
func enlarge(x *tensor.Dense, factor float64) {
	switch x := x.Data().(type) {
	case []float32:
		for i := range x {
			x[i] *= float32(factor)
		}
	case []float64:
		for i := range x {
			x[i] *= factor
		}
	}
}

// lossOf returns the loss of a model on a text.
func lossOf(t *testing.T, m *Model) float64 {
	t.Helper()
	l, err := chatdata.NewLoader(masked(12), data.LoaderConfig{Batch: 2, Seq: m.Config.Seq, Seed: 1})
	require.NoError(t, err)
	b, err := l.Next()
	require.NoError(t, err)
	i := &Inference{Model: m}
	defer i.Close()
	loss, err := i.Loss(b)
	require.NoError(t, err)
	return loss
}

// fill gives the matrices b of the adapters, and the magnitudes, values that change the model.
func fill(m *Model) {
	for k, p := range m.Params {
		if !IsAdapterParam(p.Name) {
			continue
		}
		set := func(i int) float64 { return 0.3 * math.Sin(float64(k*1000+i)) }
		switch x := p.Value.Data().(type) {
		case []float32:
			for i := range x {
				x[i] += float32(set(i))
			}
		case []float64:
			for i := range x {
				x[i] += set(i)
			}
		}
	}
}

// TestAdaptedModel checks that adapters change nothing at first, and that a model computes the same
// function before and after its adapters are merged into its weights.
func TestAdaptedModel(t *testing.T) {
	for name, a := range adapters(t, maskedConfig()) {
		t.Run(name, func(t *testing.T) {
			for dt, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-12, tensor.Float32: 1e-5} {
				base, m := adapted(t, dt, a)
				plain := lossOf(t, base)
				require.InDelta(t, plain, lossOf(t, m), tolerance)

				fill(m)
				merged, err := m.Plain()
				require.NoError(t, err)
				more := 0
				if merged.Config.Untied { // merging has separated the output layer from the embedding
					more = 1
				}
				require.Len(t, merged.Params, len(base.Params)+more)
				require.InDelta(t, lossOf(t, m), lossOf(t, merged), tolerance)
				require.Greater(t, math.Abs(lossOf(t, merged)-plain), 1e-4)
				require.Equal(t, plain, lossOf(t, base), "merging has changed the base model")
			}
		})
	}
}

// newAdaptedTrainer returns a trainer of a model with adapters on packed sequences.
func newAdaptedTrainer(t *testing.T, a LoRA, recompute bool) *Trainer {
	t.Helper()
	_, m := adapted(t, tensor.Float32, a)
	return newTuningTrainer(t, m, recompute)
}

func newTuningTrainer(t *testing.T, m *Model, recompute bool, tuned ...string) *Trainer {
	t.Helper()
	l, err := chatdata.NewLoader(masked(40), data.LoaderConfig{Batch: 2, Seq: m.Config.Seq, Seed: 5})
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.02))
	require.NoError(t, err)
	tr, err := NewTrainer(m, l, o, TrainConfig{Steps: 20, Batch: 2, Accumulate: 2,
		Schedule: optim.Constant(0.02), Clip: 1, Recompute: recompute, Tuned: tuned})
	require.NoError(t, err)
	t.Cleanup(func() { tr.Close() })
	return tr
}

// TestAdaptersLearn checks that adapters learn, and that nothing else changes or receives a gradient
// or optimizer state.
func TestAdaptersLearn(t *testing.T) {
	for name, a := range adapters(t, maskedConfig()) {
		t.Run(name, func(t *testing.T) {
			tr := newAdaptedTrainer(t, a, false)
			before := copies(tr.Model)
			losses := lossesOf(t, tr)
			require.Less(t, losses[len(losses)-1], losses[0]-0.1, "%v", losses)

			for i, p := range tr.Model.Params {
				same := slices.Equal(before[i], p.Value.Float32s())
				require.NotEqual(t, IsAdapterParam(p.Name), same, p.Name)
			}
			for _, s := range tr.Optimizer.State() {
				require.Contains(t, s.Name, "lora_", "optimizer state of a frozen parameter")
			}

			g, err := tr.Config.Graph(tr.Model)
			require.NoError(t, err)
			for _, p := range g.Frozen() {
				require.Nil(t, p.Deriv(), p.Name())
			}
			require.Less(t, tr.Last().Params, tr.Last().AllParams/2)
		})
	}
}

// copies returns copies of all parameters.
func copies(m *Model) (all [][]float32) {
	for _, p := range m.Params {
		all = append(all, slices.Clone(p.Value.Float32s()))
	}
	return all
}

// TestAdaptersResume checks that a resumed run continues bit for bit, including its dropout masks,
// and that recomputation doesn't change the result.
func TestAdaptersResume(t *testing.T) {
	for name, a := range randtest.Sample(t, 2, adapters(t, maskedConfig()), "LoRA") {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "run.safetensors")
			whole := newAdaptedTrainer(t, a, false)
			whole.On(Checkpoint(whole, path, 7), func(e Event) error {
				if e.Kind == StepEnd && e.Step == 7 {
					return whole.Save(path + ".7")
				}
				return nil
			})
			want := lossesOf(t, whole)

			resumed := newAdaptedTrainer(t, a, false)
			require.NoError(t, resumed.Resume(t.Context(), path+".7"))
			require.Equal(t, want[7:], lossesOf(t, resumed))
			require.Equal(t, copies(whole.Model), copies(resumed.Model))

			require.Equal(t, want, lossesOf(t, newAdaptedTrainer(t, a, true)), "with recomputation")

			m, err := LoadModel(t.Context(), path)
			require.NoError(t, err)
			require.Equal(t, whole.Model.Config, m.Config)
			require.Equal(t, copies(whole.Model), copies(m))
		})
	}
}

// TestTuned checks that only the named parameters learn. Parameters in earlier blocks have no gradients
// at all.
func TestTuned(t *testing.T) {
	c := maskedConfig()
	c.Untied = true
	tuned, err := c.LastBlocks(1)
	require.NoError(t, err)
	m, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	tr := newTuningTrainer(t, m, false, tuned...)
	before := copies(m)
	losses := lossesOf(t, tr)
	require.Less(t, losses[len(losses)-1], losses[0]-0.1, "%v", losses)
	for i, p := range m.Params {
		learns := strings.HasPrefix(p.Name, "model.layers.1.") || p.Name == "model.norm.weight"
		require.NotEqual(t, learns, slices.Equal(before[i], p.Value.Float32s()), p.Name)
	}

	// The first loss equals the loss of a model with all parameters learning, and so do the later steps
	// apart from the frozen parameters.
	all, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	require.Equal(t, losses[0], lossesOf(t, newTuningTrainer(t, all, false))[0])
}

// TestFrozenLinear checks that freezing some parameters does not change the gradients of the rest.
func TestFrozenLinear(t *testing.T) {
	c := maskedConfig()
	gradients := func(tuned ...string) map[string]any {
		m, err := NewModel(c, tensor.Float32, 7)
		require.NoError(t, err)
		tr := newTuningTrainer(t, m, false, tuned...)
		b, err := tr.Loader.Next()
		require.NoError(t, err)
		_, err = tr.driver.engine.Gradients(b)
		require.NoError(t, err)
		all := map[string]any{}
		for _, p := range m.Params {
			if g, err := tr.driver.engine.(Listener).Gradient(p.Name); err == nil {
				all[p.Name] = g
			}
		}
		return all
	}

	want := gradients()
	have := gradients("model.layers.*.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight")
	require.Len(t, have, 3)
	for name, g := range have {
		require.InDeltaSlice(t, want[name], g, 1e-6, name)
	}
}

func TestAdapterErrors(t *testing.T) {
	c := maskedConfig()
	_, err := c.MatchLayers("q_proj", "c_attn")
	require.ErrorContains(t, err, `no linear layer of the model matches "c_attn"`)
	require.ErrorContains(t, err, "self_attn.q_proj, self_attn.k_proj")
	_, err = c.MatchLayers("[")
	require.ErrorContains(t, err, "syntax error in pattern")

	_, err = c.LastBlocks(3)
	require.ErrorContains(t, err, "want 1 to 2")

	q, err := c.MatchLayers("q_proj")
	require.NoError(t, err)
	m, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	for want, a := range map[string]LoRA{
		"its zero value":       {},
		"Targets is empty":     {Rank: 1, Alpha: 1},
		"has rank 0":           {Alpha: 1, Targets: q},
		"a finite Alpha":       {Rank: 1, Targets: q},
		"Dropout is 1":         {Rank: 1, Alpha: 1, Dropout: 1, Targets: q},
		"no such linear layer": {Rank: 1, Alpha: 1, Targets: []string{"model.head"}},
		"no adapters with mag": {Rank: 1, Alpha: 1, Magnitude: true, Targets: []string{EmbeddingLayer}},
		"twice or out of":      {Rank: 1, Alpha: 1, Targets: []string{q[1], q[0]}},
		"which is no target":   {Rank: 1, Alpha: 1, Targets: q[:1], Ranks: map[string]int{q[1]: 2}},
	} {
		_, err := Adapt(m, a, 1)
		require.ErrorContains(t, err, want)
	}

	a, err := Adapt(m, LoRA{Rank: 1, Alpha: 1, Targets: q}, 1)
	require.NoError(t, err)
	_, err = Adapt(a, LoRA{Rank: 1, Alpha: 1, Targets: q}, 1)
	require.ErrorContains(t, err, "has adapters already")

	tr := newTuningTrainer(t, a, false)
	for want, tuned := range map[string]string{"the model has no such parameter": "lm_head.weight",
		"syntax error in pattern": "["} {
		config := tr.Config
		config.Tuned = []string{tuned}
		_, err = NewTrainer(a, tr.Loader, tr.Optimizer, config)
		require.ErrorContains(t, err, want)
	}
	seeded := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	config := seeded.Config
	config.Tuned = []string{"*"}
	_, err = NewTrainer(seeded.Model, seeded.Loader, seeded.Optimizer, config)
	require.ErrorContains(t, err, "without seeds")
	c = tiny()
	c.Adapter = LoRA{Rank: 1, Alpha: 1, Targets: q}
	require.ErrorContains(t, c.Check(), "without seeds")
}

// TestAdaptedGenerator checks that cached decoding gives the logits of the merged model.
func TestAdaptedGenerator(t *testing.T) {
	_, m := adapted(t, tensor.Float32, adapters(t, maskedConfig())["DoRA"])
	fill(m)
	merged, err := m.Plain()
	require.NoError(t, err)
	ids := []int{}
	for _, b := range texttest.Words(1, 10) {
		ids = append(ids, int(b))
	}
	logits := func(m *Model) any {
		i := &Inference{Model: m}
		defer i.Close()
		next, err := i.Decoder()
		require.NoError(t, err)
		var out any
		for n := range len(ids) {
			out, err = next(t.Context(), ids[:n+1])
			require.NoError(t, err)
		}
		return slices.Clone(out.([]float32))
	}
	require.InDeltaSlice(t, logits(merged), logits(m), 1e-4)
}
