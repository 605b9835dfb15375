package llm

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// TestZeroOutputs checks that no block of a new model adds anything to the residual stream, and that the
// model still learns.
func TestZeroOutputs(t *testing.T) {
	c := tiny()
	c.ZeroOutputs = true
	tr := newTrainer(t, trainerOptions{config: c, steps: 20})

	zeros := func() (names []string) {
		for _, p := range tr.Model.Params {
			if !slices.ContainsFunc(p.Value.Data().([]float32), func(v float32) bool { return v != 0 }) &&
				!strings.Contains(p.Name, "kasmina") {
				names = append(names, p.Name)
			}
		}
		return names
	}

	require.Equal(t, []string{
		"model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight",
		"model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight",
	}, zeros())

	require.NoError(t, tr.Run(t.Context()))
	require.Empty(t, zeros())
	require.Less(t, tr.Last().Loss, math.Log(256))
}

func TestConfigErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"Vocab is 0":            func(c *Config) { c.Vocab = 0 },
		"Dim is -1":             func(c *Config) { c.Dim = -1 },
		"Config.Default fills":  func(c *Config) { c.FF = 0 },
		"Layers is 65537":       func(c *Config) { c.Layers = 1<<16 + 1 },
		"Layers is 0":           func(c *Config) { c.Layers = 0 },
		"multiple of KVHeads":   func(c *Config) { c.KVHeads = 3 },
		"HeadDim is 3":          func(c *Config) { c.HeadDim = 3 },
		"Seq is 0":              func(c *Config) { c.Seq = 0 },
		"Base is 1":             func(c *Config) { c.Base = 1 },
		"Eps is -1":             func(c *Config) { c.Eps = -1 },
		"Boundary is -1":        func(c *Config) { c.Boundary = -1 },
		"Kasmina names block 2": func(c *Config) { c.Kasmina = []int{2} },
		"names block 1 twice":   func(c *Config) { c.Kasmina = []int{1, 1} },
		"Seeds is 5":            func(c *Config) { c.Seeds = 5 },
		"Seeds is 0":            func(c *Config) { c.Seeds = 0 },
		"Slots is 1":            func(c *Config) { c.Slots = 1 },
		"Slots is 70000":        func(c *Config) { c.Slots = 70000 },
		"multiple of Heads, 3": func(c *Config) {
			*c = Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 3, Seq: 4}.Default()
		},
		"FF is 16777217":     func(c *Config) { c.FF = 1<<24 + 1 },
		"2.6e+13 parameters": func(c *Config) { c.Dim, c.FF, c.Seeds = 1<<20, 1<<22, 4 },
		"5.6e+14 parameters": func(c *Config) {
			c.Vocab, c.Dim, c.Kasmina, c.Slots = 1<<24, 1<<24, nil, math.MinInt
		},
		"Base is +Inf":              func(c *Config) { c.Base = math.Inf(1) },
		"ZeroOutputs and PostNorms": func(c *Config) { c.ZeroOutputs, c.PostNorms = true, true },
		"float32 or float64":        nil,
		"Config.Seq":                nil,
		"TrainConfig.Steps is 0":    nil,
		"TrainConfig.Schedule":      nil,
		"TrainConfig.Clip is NaN":   nil,
		"vocabulary of 300":         nil,
		"TrainConfig.Epoch is -1":   nil,
		"TrainConfig.Batch is 0":    nil,
		"Accumulate is -1":          nil,
		"a batch of 0 sequences":    nil,
		"the prompt is empty":       nil,
		"the layer is 2, want":      nil,
		"Temperature is -1":         nil,
		"ids[1] is 256|0 to 255":    nil,
	} {
		t.Run(want, func(t *testing.T) {
			c := tiny()
			if change != nil {
				change(&c)
			}
			_, err := NewModel(c, tensor.Float32, 1)
			if change == nil {
				err = otherError(t, want)
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, word := range strings.Split(want, "|") {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("error %q does not say %q", err, word)
				}
			}
		})
	}
}

// otherError provokes the error that contains want.
func otherError(t *testing.T, want string) error {
	tr := newTrainer(t, trainerOptions{config: tiny(), steps: 1})
	train := func(change func(*TrainConfig)) error {
		c := tr.Config
		change(&c)
		_, err := NewTrainer(tr.Model, tr.Loader, tr.Optimizer, c)
		return err
	}

	generate := func(prompt []int, c sampler.Config) error {
		g, err := NewGenerator(tr.Model)
		if err != nil {
			t.Fatal(err)
		}
		s, err := sampler.New(c)
		if err == nil {
			_, err = collect(g.Generate(t.Context(), prompt, 3, s))
		}
		return err
	}

	switch want {
	case "float32 or float64":
		_, err := NewModel(tiny(), tensor.Int, 1)
		return err
	case "Config.Seq":
		return train(func(c *TrainConfig) { c.Batch++ })
	case "TrainConfig.Steps is 0":
		return train(func(c *TrainConfig) { c.Steps = 0 })
	case "TrainConfig.Schedule":
		return train(func(c *TrainConfig) { c.Schedule = nil })
	case "TrainConfig.Clip is NaN":
		return train(func(c *TrainConfig) { c.Clip = math.NaN() })
	case "vocabulary of 300":
		tr.Loader.(*data.Loader).Tokens().(*idTokens).vocab = 300
		return train(func(*TrainConfig) {})
	case "TrainConfig.Epoch is -1":
		return train(func(c *TrainConfig) { c.Epoch = -1 })
	case "TrainConfig.Batch is 0":
		return train(func(c *TrainConfig) { c.Batch = 0 })
	case "Accumulate is -1":
		return train(func(c *TrainConfig) { c.Accumulate = -1 })
	case "a batch of 0 sequences":
		if _, err := tr.Model.Graph(ForLoss, math.MaxInt); err == nil {
			t.Error("a batch of all sequences that an int can count is accepted")
		}
		_, err := tr.Model.Graph(ForLoss, 0)
		return err
	case "the prompt is empty":
		return generate(nil, sampler.Config{})
	case "the layer is 2, want":
		return tr.Model.Germinate(2, 0, state.GerminationRequest{Slot: 1})
	case "Temperature is -1":
		return generate([]int{1}, sampler.Config{Temperature: -1})
	case "ids[1] is 256|0 to 255":
		return generate([]int{1, 256}, sampler.Config{})
	}

	t.Fatalf("nothing provokes %q", want)
	return nil
}

// TestKasminaOptionsInGraphs checks that the options reach every layer of every graph, where engines read
// them. Only training clips and stops.
func TestKasminaOptionsInGraphs(t *testing.T) {
	for options, want := range map[KasminaOptions]op.KasminaConfig{
		{}: {Epsilon: 1e-8},
		{Stability: op.Strict, Epsilon: 1e-3, GradClip: 2}: {Stability: op.Strict, Epsilon: 1e-3,
			GradClip: 2},
		{Stability: op.Fast, AdaptiveClip: 3, StopOnNonFinite: true}: {Stability: op.Fast,
			Epsilon:      1e-8,
			AdaptiveClip: 3, StopOnNonFinite: true},
	} {
		m, err := NewModel(tiny(), tensor.Float32, 1)
		require.NoError(t, err)
		m.KasminaOptions = options
		for _, kind := range []GraphKind{ForTraining, ForLoss, ForLogits} {
			g, err := m.Graph(kind, 2, WithRecompute())
			require.NoError(t, err)
			want := want
			if kind != ForTraining {
				want.NoTelemetry, want.StopOnNonFinite = true, false
			}
			layers := 0
			for _, n := range g.G.AllNodes() {
				if o, ok := n.Op().(*op.KasminaOp); ok {
					require.Equal(t, want, o.Config)
					layers++
				}
			}
			require.Equal(t, len(m.Config.Kasmina), layers)
		}
	}
}

// steps returns a trainer that has made three steps with the options.
func steps(t *testing.T, o KasminaOptions) *Trainer {
	tr := newTrainer(t, trainerOptions{config: tiny(), kasmina: o, steps: 3})
	require.NoError(t, tr.Run(t.Context()))
	return tr
}

// sums returns the total clips and dead ratios of a run's seeds.
func sums(tr *Trainer) (clips int, dead float64) {
	for _, r := range tr.Model.Kasmina.Report() {
		for _, s := range r.Seeds {
			clips, dead = clips+s.Clips, dead+s.Health.DeadRatio
		}
	}
	return clips, dead
}

// TestKasminaOptionsTakeEffect checks the effect of each option on the CPU.
func TestKasminaOptionsTakeEffect(t *testing.T) {
	plain := steps(t, KasminaOptions{})
	clips, dead := sums(plain)
	require.Zero(t, clips)
	seeds := float64(plain.Model.NumSeeds())
	require.Less(t, dead, seeds/10)

	_, dead = sums(steps(t, KasminaOptions{Epsilon: 1e9}))
	require.Equal(t, seeds, dead, "all is below ε")

	strict := steps(t, KasminaOptions{Stability: op.Strict, Epsilon: 0.02})
	require.NotEqual(t, plain.Last().Loss, strict.Last().Loss, "what is below ε becomes 0")
	same := steps(t, KasminaOptions{Epsilon: 0.02})
	require.Equal(t, plain.Last().Loss, same.Last().Loss, "ε alone is for figures")

	for _, o := range []KasminaOptions{{GradClip: 1e-9}, {AdaptiveClip: 1e-3}} {
		clipped := steps(t, o)
		clips, _ := sums(clipped)
		require.Positive(t, clips, "%+v", o)
		require.NotEqual(t, plain.Last().Loss, clipped.Last().Loss, "%+v", o)
	}
}

// TestStopOnNonFinite checks that the option stops a run at the first layer that encounters a
// non-finite value, and that the error names the seed. Without the option, the loss stops the run.
func TestStopOnNonFinite(t *testing.T) {
	for _, stop := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "run.safetensors")
		tr := newTrainer(t,
			trainerOptions{config: tiny(), kasmina: KasminaOptions{StopOnNonFinite: stop},
				steps: 4})
		tr.On(Checkpoint(tr, path, 2), func(e Event) error {
			if e.Kind == StepEnd && e.Step == 2 {
				norm := tr.Model.Param("model.layers.0.input_layernorm.weight").Float32s()
				norm[0] = float32(math.Inf(1))
			}
			return nil
		})
		err := tr.Run(t.Context())
		require.ErrorIs(t, err, ErrDiverged)
		require.Equal(t, 2, tr.Step())
		if !stop {
			require.NotErrorIs(t, err, op.ErrNonFinite)
			continue
		}
		require.ErrorIs(t, err, op.ErrNonFinite)
		require.ErrorContains(t, err, "the first of them seed 0")
		_, err = LoadModel(t.Context(), path)
		require.NoError(t, err, "the checkpoint before")
	}
}

// TestKasminaOptionsOfCheckpoints checks that options are saved with a model, and that Resume names
// the options that differ and rejects them unless the caller accepts new settings. Files from before
// there were options load with none.
func TestKasminaOptionsOfCheckpoints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.safetensors")
	options := KasminaOptions{Stability: op.Strict, Epsilon: 1e-6, GradClip: 3,
		StopOnNonFinite: true}
	tr := newTrainer(t, trainerOptions{config: tiny(), kasmina: options, steps: 4})
	require.NoError(t, tr.step())
	require.NoError(t, tr.Save(path))
	m, err := LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, options, m.KasminaOptions)
	again := newTrainer(t, trainerOptions{config: tiny(), kasmina: options, steps: 4})
	require.NoError(t, again.Resume(t.Context(), path))

	others := KasminaOptions{Stability: op.Fast, AdaptiveClip: 2}
	other := newTrainer(t, trainerOptions{config: tiny(), kasmina: others, steps: 4})
	err = other.Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	differences := []string{
		"Model.KasminaOptions.Stability is Fast here and Strict there",
		"Model.KasminaOptions.Epsilon is 0 here and 1e-06 there",
		"Model.KasminaOptions.GradClip is 0 here and 3 there",
		"Model.KasminaOptions.AdaptiveClip is 2 here and 0 there",
		"Model.KasminaOptions.StopOnNonFinite is false here and true there",
	}

	for _, d := range differences {
		require.ErrorContains(t, err, d)
	}

	var told []string
	require.NoError(t, other.Resume(t.Context(), path, WithNewSettings(func(d []string) {
		told = d
	})))
	require.Equal(t, differences, told)
	require.NoError(t, other.Run(t.Context()))
	require.Equal(t, others, other.Model.KasminaOptions)

	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	require.NoError(t, plain.Save(path))
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NotContains(t, string(file), modelfile.OptionsKey)
	m, err = LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Zero(t, m.KasminaOptions)
}

// TestBadKasminaOptions checks that invalid options are rejected, also when a file contains them.
func TestBadKasminaOptions(t *testing.T) {
	for want, o := range map[string]KasminaOptions{
		"KasminaOptions.Epsilon is -1, want":         {Epsilon: -1},
		"KasminaOptions.Epsilon is NaN":              {Epsilon: math.NaN()},
		"KasminaOptions.GradClip is +Inf":            {GradClip: math.Inf(1)},
		"KasminaOptions.AdaptiveClip is -2":          {AdaptiveClip: -2},
		"KasminaOptions.Stability is Stability(3)":   {Stability: 3},
		"GradClip is 1 and AdaptiveClip is 2, want ": {GradClip: 1, AdaptiveClip: 2},
	} {
		m, err := NewModel(tiny(), tensor.Float32, 1)
		require.NoError(t, err)
		m.KasminaOptions = o
		_, err = m.Graph(ForLoss, 1)
		require.ErrorContains(t, err, want)
	}

	path := filepath.Join(t.TempDir(), "m.safetensors")
	m, err := NewModel(tiny(), tensor.Float32, 1)
	require.NoError(t, err)
	m.KasminaOptions.Epsilon = 0.5
	tensors, metadata, err := tensorsOf(m)
	require.NoError(t, err)
	options := metadata[modelfile.OptionsKey]
	for json, want := range map[string]string{
		`"epsilon":-1`:               "KasminaOptions.Epsilon is -1",
		`"stability":"\u001b[2J"`:    `the stability mode is "\x1b[2J", want one of`,
		`"stability":2,"epsilon":1`:  "options of the Kasmina layers",
		`"grad_clip":"1"`:            "options of the Kasmina layers",
		`"adaptive_clip":-0.5`:       "KasminaOptions.AdaptiveClip is -0.5",
		`"stop_on_non_finite":"yes"`: "options of the Kasmina layers",
	} {
		metadata[modelfile.OptionsKey] = strings.Replace(options, `"epsilon":0.5`, json, 1)
		require.NoError(t, safetensors.Save(path, tensors, metadata))
		_, err := LoadModel(t.Context(), path)
		require.ErrorContains(t, err, want, json)
	}
}

// TestOlderConfigurations checks that files whose configuration contains obsolete architecture fields
// are rejected with an appropriate error.
func TestOlderConfigurations(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	m, err := NewModel(tiny(), tensor.Float32, 1)
	require.NoError(t, err)
	tensors, metadata, err := tensorsOf(m)
	require.NoError(t, err)
	config := metadata[modelfile.ConfigKey]
	for _, old := range []string{`"frozen":true`, `"directed":true`, `"kasmina_options":{"epsilon":0.5}`,
		`"planted":[{"site":"weight","seed":0,"kind":"LoRA","size":1}]`} {
		metadata[modelfile.ConfigKey] = strings.Replace(config, "{", "{"+old+",", 1)
		require.NoError(t, safetensors.Save(path, tensors, metadata))
		_, err := LoadModel(t.Context(), path)
		require.ErrorIs(t, err, ErrArchitecture)
		require.ErrorContains(t, err, "written by an older version")
	}
}

// TestBlueprintMovesBetweenRuns checks that a blueprint trained in one run continues bit for bit in a
// slot of another run. Another goroutine submits it together with the command that germinates the seed.
func TestBlueprintMovesBetweenRuns(t *testing.T) {
	randtest.Concurrent(t)
	dir := t.TempDir()
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		for seed, kind := range map[int]blueprints.Kind{1: blueprints.LowRank,
			2: blueprints.ConvFilter, 3: blueprints.ChunkMLP} {
			source := newTrainer(t, trainerOptions{config: roomy(), steps: 7, dt: dt})
			if err := source.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, kind.String())
			if err := source.Model.SaveBlueprint(path, 1, seed); err != nil {
				t.Fatal(err)
			}
			to := newTrainer(t, trainerOptions{config: roomy(), steps: 6, dt: dt})
			var done <-chan error
			to.On(func(e Event) error {
				// takes effect after the last update, so that the slot does not decay
				if e.Kind == StepEnd && e.Step == 5 {
					submitted := make(chan struct{})
					go func() {
						defer close(submitted)
						load, err := to.Model.ReadBlueprint(path, 0, 0)
						if err != nil {
							t.Error(err)
						}
						plant := state.Command{Action: state.Germinate,
							Request: state.GerminationRequest{Slot: 4, Kind: kind}}
						done = to.Model.Kasmina.Submit(plant, load)
					}()
					<-submitted
				}
				return nil
			})
			if err := to.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			got, err := slotStore{Model: to.Model}.Read(0, 4)
			if err != nil {
				t.Fatal(err)
			}
			want, err := slotStore{Model: source.Model}.Read(1, seed)
			if err != nil {
				t.Fatal(err)
			}
			n, err := blueprints.Size(kind, 4, 18)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got.Weights[:n], want.Weights[:n]) || got.Scale != want.Scale {
				t.Errorf("%v in %v: slot is %v, want %v", kind, dt, got, want)
			}
			if stage, _ := to.Model.Kasmina.Lattice(0).Stage(0); stage != state.Germinated {
				t.Errorf("%v: the seed is %v, want Germinated", kind, stage)
			}
		}
	}
}

// TestBlueprintErrors checks that an unsuitable file is rejected with the reason and changes nothing.
func TestBlueprintErrors(t *testing.T) {
	tr := newTrainer(t, trainerOptions{config: roomy(), steps: 3})
	m := tr.Model
	dir := t.TempDir()
	good := filepath.Join(dir, "good")
	if err := m.SaveBlueprint(good, 0, 1); err != nil { // a LowRank
		t.Fatal(err)
	}

	tensors, metadata, err := safetensors.Load(good)
	if err != nil {
		t.Fatal(err)
	}

	file := func(change func(tensors []safetensors.Tensor,
		metadata map[string]string) []safetensors.Tensor) string {
		path := filepath.Join(t.TempDir(), "file")
		meta := map[string]string{modelfile.KindKey: metadata[modelfile.KindKey],
			modelfile.ChunkKey: metadata[modelfile.ChunkKey]}
		if err := safetensors.Save(path, change(slices.Clone(tensors), meta), meta); err != nil {
			t.Fatal(err)
		}
		return path
	}

	with := func(name string, shape []int, data any) string {
		return file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor {
			for i, x := range all {
				if x.Name == name {
					if all[i], err = safetensors.New(name, shape, data); err != nil {
						t.Fatal(err)
					}
				}
			}
			return all
		})
	}

	named := func(key, value string) string {
		return file(func(all []safetensors.Tensor, meta map[string]string) []safetensors.Tensor {
			meta[key] = value
			return all
		})
	}

	damaged := filepath.Join(dir, "damaged")
	raw, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}

	raw[len(raw)-3] ^= 4
	if err := os.WriteFile(damaged, raw, 0o666); err != nil {
		t.Fatal(err)
	}

	// Seed 0 shares slot 3 with seed 3, which is a ChunkMLP; seed 2 is fossilized.
	for _, to := range []state.Stage{state.Stabilization, state.Evaluating,
		state.FineTuning, state.Fossilized} {
		if err := m.Kasmina.Do(state.Command{Action: state.Move, Layer: 0, Seed: 2,
			To: to}); err != nil {
			t.Fatal(err)
		}
	}

	conv := filepath.Join(dir, "conv")
	if err := m.SaveBlueprint(conv, 0, 2); err != nil {
		t.Fatal(err)
	}

	shared := newTrainer(t, trainerOptions{config: roomy(), steps: 3}).Model
	if err := shared.Germinate(0, 0, state.GerminationRequest{Slot: 3,
		Kind: blueprints.LowRank}); err != nil {
		t.Fatal(err)
	}

	inf := slices.Repeat([]float64{math.Inf(1)}, 8)
	for name, c := range map[string]struct {
		m           *Model
		path        string
		layer, seed int
		want        string
	}{
		"no file":      {m, filepath.Join(dir, "none"), 0, 1, "none"},
		"damaged":      {m, damaged, 0, 1, "tensor"},
		"no blueprint": {m, named(modelfile.KindKey, ""), 0, 1, "Model.SaveBlueprint writes one"},
		"no such kind": {m, named(modelfile.KindKey, "Best"), 0, 1, `"Best": register it`},
		"another chunk": {m, named(modelfile.ChunkKey, "8"), 0, 1,
			`chunks of "8" features, and the model's have 4`},
		"another rank": {m, with("V", []int{3, 4}, make([]float64, 12)), 0, 1,
			`"V" has shape [3 4], want [2 4], as slots of 18`},
		"integers":  {m, with("U", []int{4, 2}, make([]int64, 8)), 0, 1, `"U" is of type I64`},
		"infinite":  {m, with("U", []int{4, 2}, inf), 0, 1, "+Inf"},
		"too large": {m, with("scale", []int{1}, []float64{1e300}), 0, 1, "1e+300"},
		"a tensor more": {m,
			file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor {
				return all[:2]
			}), 0, 1, "2 tensors, want 3"},
		"another name": {m,
			file(func(all []safetensors.Tensor, _ map[string]string) []safetensors.Tensor {
				all[0].Name = "X"
				return all
			}), 0, 1, "missing"},
		"another kind": {m, good, 0, 3,
			"seed 3 uses the same slot and has a ChunkMLP, not a LowRank"},
		"a shared slot": {shared, good, 0, 0, "seed 3 uses the same slot and has a ChunkMLP"},
		"dormant":       {m, good, 0, 0, "it is Dormant"},
		"fossilized":    {m, conv, 0, 2, "seed 2 uses the same slot and is fossilized"},
		"no such layer": {m, good, 2, 0, "layer is 2"},
		"no such seed":  {m, good, 0, 4, "seed is 4"},
		"a narrower model": {newTrainer(t, trainerOptions{config: tiny(), steps: 1}).Model, good, 0,
			1, "LowRank needs 8 weights"},
	} {
		before := slices.Clone(c.m.Param(blockPrefix(0) + kasminaWeights).Float32s())
		err := c.m.LoadBlueprint(c.path, c.layer, c.seed)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", name, err, c.want)
		}
		if !slices.Equal(before, c.m.Param(blockPrefix(0)+kasminaWeights).Float32s()) {
			t.Errorf("%s: the refused file has changed weights", name)
		}
	}

	if err := m.SaveBlueprint(filepath.Join(dir, "x"), 0, 0); err == nil ||
		!strings.Contains(err.Error(), "seed 0: it is Dormant") {
		t.Errorf("saving a dormant seed: %v", err)
	}

	for _, at := range [][2]int{{0, -1}, {0, 4}, {2, 0}} {
		if err := m.SaveBlueprint(filepath.Join(dir, "x"), at[0],
			at[1]); !errors.Is(err, state.ErrSeed) {
			t.Errorf("saving seed %d of layer %d: %v", at[1], at[0], err)
		}
	}

	// The slot of a blueprint at the end of its life may belong to another seed.
	if err := shared.Kasmina.Do(state.Command{Action: state.Move, Layer: 0, Seed: 3,
		To: state.RolledBack}); err != nil {
		t.Fatal(err)
	}

	if err := shared.SaveBlueprint(filepath.Join(dir, "x"), 0, 3); err == nil ||
		!strings.Contains(err.Error(), "seed 3: it is RolledBack") {
		t.Errorf("saving a blueprint that has been rolled back: %v", err)
	}

	if err := m.LoadBlueprint(with("V", []int{2, 4}, make([]float32, 8)), 0, 1); err != nil {
		t.Errorf("float32 in the file: %v", err)
	}
}

// roomy returns tiny with slots large enough for rank 2.
func roomy() Config {
	c := tiny()
	c.SlotWidth = 18
	return c
}

// TestCapacityResumes checks that blueprints in wide slots train, and that an interrupted run
// continues bit for bit.
func TestCapacityResumes(t *testing.T) {
	o := trainerOptions{config: roomy(), steps: 30}
	whole, first := newTrainer(t, o), newTrainer(t, o)
	start := slices.Clone(whole.Model.Param(blockPrefix(0) + kasminaWeights).Float32s())
	if err := whole.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	w := whole.Model.Param(blockPrefix(0) + kasminaWeights)
	for slot, used := range map[int]int{1: 16, 2: 4, 3: 16} { // LowRank, ConvFilter, ChunkMLP
		for i := range used {
			if at := slot*18 + i; w.Float32s()[at] == start[at] && (slot != 2 || i < 3) {
				t.Errorf("weight %d of slot %d has not learned", i, slot)
			}
		}
	}

	path := filepath.Join(t.TempDir(), "run.safetensors")
	first.On(func(e Event) error {
		if e.Kind == StepEnd && e.Step == 11 {
			return errors.Join(first.Save(path), errors.New("killed"))
		}
		return nil
	})

	if err := first.Run(t.Context()); err == nil {
		t.Fatal("the first run was not interrupted")
	}

	second := newTrainer(t, o)
	if err := second.Resume(t.Context(), path); err != nil {
		t.Fatal(err)
	}

	if err := second.Run(t.Context()); err != nil {
		t.Fatal(err)
	}

	checkSame(t, second, whole)
	narrow := newTrainer(t, trainerOptions{config: tiny(), steps: 30})
	if err := narrow.Resume(t.Context(), path); !errors.Is(err, ErrArchitecture) ||
		!strings.Contains(err.Error(), "SlotWidth is 0 here and 18 there") {
		t.Errorf("got %v", err)
	}
}

// TestCapacityStarts checks that initial weights differ between seeds, layers and plantings, and are the
// same in every run.
func TestCapacityStarts(t *testing.T) {
	plant := func() (all [][]float32) {
		m, err := NewModel(roomy(), tensor.Float32, 1, state.WithoutGates(), state.WithEmbargo(0))
		if err != nil {
			t.Fatal(err)
		}
		for layer, l := range m.Kasmina.Lattices() {
			for range 2 {
				for seed := range l.Seeds() {
					r := state.GerminationRequest{Slot: 1 + seed, Kind: blueprints.LowRank}
					if err := errors.Join(m.Germinate(layer, seed, r),
						l.Transition(seed, state.Cancelled), l.Recycle(seed)); err != nil {
						t.Fatal(err)
					}
					w := m.Param(blockPrefix(layer) +
						kasminaWeights).Float32s()[(1+seed)*18:][:18]
					all = append(all, slices.Clone(w))
				}
				if _, err := l.StepEpoch(state.Metrics{}); err != nil {
					t.Fatal(err)
				}
			}
		}
		return all
	}

	first, second := plant(), plant()
	for i, w := range first {
		if !slices.Equal(w, second[i]) {
			t.Errorf("start %d differs from model to model", i)
		}
		for j := range i {
			if slices.Equal(w, first[j]) {
				t.Errorf("starts %d and %d are the same", i, j)
			}
		}
	}
}

func TestCapacityErrors(t *testing.T) {
	c := tiny()
	c.SlotWidth = 3
	if _, err := NewModel(c, tensor.Float32, 1); err == nil || !strings.Contains(err.Error(),
		"Config.SlotWidth is 3, want Dim/Seeds, 4") {
		t.Errorf("got %v", err)
	}

	if _, err := NewModel(tiny(), tensor.Float32, 1, state.WithWidth(9)); err == nil ||
		!strings.Contains(err.Error(), "9 weights, want 4") {
		t.Errorf("got %v", err)
	}

	m, err := NewModel(tiny(), tensor.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}

	w := m.Param(blockPrefix(0) + kasminaWeights).Float32s()
	w[9] = 7
	before := slices.Clone(w)
	err = m.Germinate(0, 1, state.GerminationRequest{Slot: 2, Kind: blueprints.LowRank})
	if stage, _ := m.Kasmina.Lattice(0).Stage(1); !errors.Is(err, blueprints.ErrWidth) ||
		stage != state.Dormant || !slices.Equal(w, before) {
		t.Errorf("got %v, stage %v, weights %v", err, stage, w)
	}
}

// TestCapacityOfLattices checks that a lattice saved before slots had a width takes the model's
// width, and that a lattice of another width, or with a blueprint that does not fit, is rejected.
func TestCapacityOfLattices(t *testing.T) {
	tensors, metadata := smallCheckpoint(t)
	for name, c := range map[string]struct {
		opts []state.Option
		kind blueprints.Kind
		is   error
	}{
		"older":       {nil, blueprints.Residual, nil},
		"the same":    {[]state.Option{state.WithWidth(2)}, blueprints.Residual, nil},
		"wider":       {[]state.Option{state.WithWidth(4)}, blueprints.Residual, ErrArchitecture},
		"not fitting": {nil, blueprints.ChunkMLP, blueprints.ErrWidth},
	} {
		l, err := state.NewLattice(2, 4, append(c.opts, state.WithSlots(3))...)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.RequestGermination(0, state.GerminationRequest{Slot: 1,
			Kind: c.kind}); err != nil {
			t.Fatal(err)
		}
		for _, a := range l.Arrays() {
			for i, x := range tensors {
				if x.Name == "lattice.0."+a.Name {
					if tensors[i], err = safetensors.New(x.Name, a.Shape, a.Data); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		path := filepath.Join(t.TempDir(), "m.safetensors")
		if err := safetensors.Save(path, tensors, metadata); err != nil {
			t.Fatal(err)
		}
		m, err := LoadModel(t.Context(), path)
		if !errors.Is(err, c.is) {
			t.Errorf("%s: got %v, want %v", name, err, c.is)
		}
		if err == nil && m.Kasmina.Lattice(0).Width() != 2 {
			t.Errorf("%s: the lattice has a width of %d, want 2", name,
				m.Kasmina.Lattice(0).Width())
		}
	}
}

// gemma returns a tiny model with all traits. Three blocks out of five have windows, and one has no RoPE.
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

// TestBlocks checks that the pattern of Blocks repeats, and that blocks without Base and Scaling use the
// model's.
func TestBlocks(t *testing.T) {
	c := gemma()
	require.Equal(t, Block{Window: 5, Base: 100}, c.Block(3))
	require.Equal(t, Block{Base: c.Base, Scaling: c.Scaling}, c.Block(4))
	require.Equal(t, Block{NoRoPE: true, Window: 40}, c.Block(2))
	require.Equal(t, Block{Base: 500}, Config{Base: 500}.Block(7))
}

// TestTraitErrors checks that each invalid trait is rejected by name.
func TestTraitErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"Config.AttentionScale is -1": func(c *Config) { c.AttentionScale = -1 },
		"Config.EmbedScale is -2":     func(c *Config) { c.EmbedScale = -2 },
		"Config.Scaling.Factor is 0.5": func(c *Config) {
			c.Scaling = op.RoPEScaling{Factor: 0.5}
		},
		"Blocks[1].Window is -3": func(c *Config) { c.Blocks = []Block{{}, {Window: -3}} },
		"Blocks[0].Base is 1":    func(c *Config) { c.Blocks = []Block{{Base: 1}} },
		"want a Base with it": func(c *Config) {
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

// TestTraitsDecode checks that cached decoding gives the same logits as whole windows. The model has
// blocks with windows and without RoPE, and the sequence exceeds Config.Seq.
func TestTraitsDecode(t *testing.T) {
	r := randtest.New(t)
	tolerances := map[tensor.Dtype]float64{tensor.Float32: 2e-5, tensor.Float64: 1e-12}
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		tolerance := tolerances[dt]
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

// stir perturbs the initial parameters, so that biases and norms have an effect.
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

// TestWindowsHideTokens checks that a token affects the logits within the combined reach of all windows,
// and not beyond it.
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
	const reach = 3 + 2 // earlier positions that the last one can see through both blocks
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

// TestTraitsInAFile checks that a model with traits can be saved and loaded, and that every parameter is
// trained.
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

// TestPlainConfig checks that a model without traits is stored as before traits existed.
func TestPlainConfig(t *testing.T) {
	text, err := json.Marshal(tiny())
	require.NoError(t, err)
	require.JSONEq(t,
		`{"vocab":256,"dim":16,"layers":2,"heads":2,"kv_heads":1,"head_dim":8,"ff":64,"seq":12,
		"rope_base":10000,"eps":1e-5,"kasmina":[0,1],"seeds":4,"slots":5}`, string(text))
}

// TestTraitsGrow checks that copies of a block have its traits, and that Origin recovers the pattern from
// the grown configuration.
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
			want := grown.Block(max(0, i-1)) // a new block copies the block before it
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

// TestFLOPsOfWindows compares FLOPs with a count of the keys that the queries of a sequence attend to.
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
