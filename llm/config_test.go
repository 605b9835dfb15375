package llm

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/internal/modelfile"
	"github.com/kasmina-go/kasmina/llm/sampler"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

func TestConfigErrors(t *testing.T) {
	for want, change := range map[string]func(*Config){
		"Vocab is 0":              func(c *Config) { c.Vocab = 0 },
		"Dim is -1":               func(c *Config) { c.Dim = -1 },
		"Config.Default fills":    func(c *Config) { c.FF = 0 },
		"Layers is 65537":         func(c *Config) { c.Layers = 1<<16 + 1 },
		"Layers is 0":             func(c *Config) { c.Layers = 0 },
		"multiple of KVHeads":     func(c *Config) { c.KVHeads = 3 },
		"HeadDim is 3":            func(c *Config) { c.HeadDim = 3 },
		"Seq is 0":                func(c *Config) { c.Seq = 0 },
		"Base is 1":               func(c *Config) { c.Base = 1 },
		"Eps is -1":               func(c *Config) { c.Eps = -1 },
		"Kasmina names block 2":   func(c *Config) { c.Kasmina = []int{2} },
		"names block 1 twice":     func(c *Config) { c.Kasmina = []int{1, 1} },
		"Seeds is 5":              func(c *Config) { c.Seeds = 5 },
		"Seeds is 0":              func(c *Config) { c.Seeds = 0 },
		"Slots is 1":              func(c *Config) { c.Slots = 1 },
		"Slots is 70000":          func(c *Config) { c.Slots = 70000 },
		"multiple of Heads, 3":    func(c *Config) { *c = Config{Vocab: 256, Dim: 16, Layers: 1, Heads: 3, Seq: 4}.Default() },
		"FF is 16777217":          func(c *Config) { c.FF = 1<<24 + 1 },
		"2.6e+13 parameters":      func(c *Config) { c.Dim, c.FF, c.Seeds = 1<<20, 1<<22, 4 },
		"5.6e+14 parameters":      func(c *Config) { c.Vocab, c.Dim, c.Kasmina, c.Slots = 1<<24, 1<<24, nil, math.MinInt },
		"Base is +Inf":            func(c *Config) { c.Base = math.Inf(1) },
		"float32 or float64":      nil,
		"Config.Seq":              nil,
		"TrainConfig.Steps is 0":  nil,
		"TrainConfig.Schedule":    nil,
		"TrainConfig.Clip is NaN": nil,
		"vocabulary of 300":       nil,
		"TrainConfig.Epoch is -1": nil,
		"TrainConfig.Batch is 0":  nil,
		"Accumulate is -1":        nil,
		"a batch of 0 sequences":  nil,
		"the prompt is empty":     nil,
		"the layer is 2, want":    nil,
		"Temperature is -1":       nil,
		"ids[1] is 256|0 to 255":  nil,
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

// otherError provokes the error that should say want.
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
		tr.Loader.Tokens().(*idTokens).vocab = 300
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

// withOptions is a small model's configuration with options of its layers.
func withOptions(o KasminaOptions) Config {
	c := tiny()
	c.KasminaOptions = o
	return c
}

// TestKasminaOptionsInGraphs wants the options in every layer of every graph, where an engine finds
// them. Only training clips and stops.
func TestKasminaOptionsInGraphs(t *testing.T) {
	for options, want := range map[KasminaOptions]op.KasminaConfig{
		{}: {Epsilon: 1e-8},
		{Stability: op.Strict, Epsilon: 1e-3, GradClip: 2}: {Stability: op.Strict, Epsilon: 1e-3,
			GradClip: 2},
		{Stability: op.Fast, AdaptiveClip: 3, StopOnNonFinite: true}: {Stability: op.Fast, Epsilon: 1e-8,
			AdaptiveClip: 3, StopOnNonFinite: true},
	} {
		m, err := NewModel(withOptions(options), tensor.Float32, 1)
		require.NoError(t, err)
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

// steps returns what three steps with the options leave of a run.
func steps(t *testing.T, o KasminaOptions) *Trainer {
	tr := newTrainer(t, trainerOptions{config: withOptions(o), steps: 3})
	require.NoError(t, tr.Run(t.Context()))
	return tr
}

// sums are figures of a run's seeds, all together.
func sums(tr *Trainer) (clips int, dead float64) {
	for _, r := range tr.Model.Kasmina.Report() {
		for _, s := range r.Seeds {
			clips, dead = clips+s.Clips, dead+s.Health.DeadRatio
		}
	}
	return clips, dead
}

// TestKasminaOptionsTakeEffect wants each option to do on the CPU what it is for.
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

// TestStopOnNonFinite wants a run to end where a layer first meets what is not finite, by the seed,
// and to end by its loss without the option.
func TestStopOnNonFinite(t *testing.T) {
	for _, stop := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "run.safetensors")
		tr := newTrainer(t, trainerOptions{config: withOptions(KasminaOptions{StopOnNonFinite: stop}),
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

// TestKasminaOptionsOfCheckpoints wants options to be saved with a model, a run that goes on with
// others to be refused by name unless the caller asks for it, and a file from before there were any
// to have none.
func TestKasminaOptionsOfCheckpoints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.safetensors")
	options := KasminaOptions{Stability: op.Strict, Epsilon: 1e-6, GradClip: 3, StopOnNonFinite: true}
	tr := newTrainer(t, trainerOptions{config: withOptions(options), steps: 4})
	require.NoError(t, tr.step())
	require.NoError(t, tr.Save(path))
	m, err := LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Equal(t, options, m.Config.KasminaOptions)
	again := newTrainer(t, trainerOptions{config: withOptions(options), steps: 4})
	require.NoError(t, again.Resume(t.Context(), path))

	others := KasminaOptions{Stability: op.Fast, AdaptiveClip: 2}
	other := newTrainer(t, trainerOptions{config: withOptions(others), steps: 4})
	err = other.Resume(t.Context(), path)
	require.ErrorIs(t, err, ErrSettings)
	differences := []string{
		"Config.KasminaOptions.Stability is Fast here and Strict there",
		"Config.KasminaOptions.Epsilon is 0 here and 1e-06 there",
		"Config.KasminaOptions.GradClip is 0 here and 3 there",
		"Config.KasminaOptions.AdaptiveClip is 2 here and 0 there",
		"Config.KasminaOptions.StopOnNonFinite is false here and true there",
	}
	for _, d := range differences {
		require.ErrorContains(t, err, d)
	}
	var told []string
	require.NoError(t, other.Resume(t.Context(), path, WithNewSettings(func(d []string) { told = d })))
	require.Equal(t, differences, told)
	require.NoError(t, other.Run(t.Context()))
	require.Equal(t, others, other.Model.Config.KasminaOptions)

	plain := newTrainer(t, trainerOptions{config: tiny(), steps: 4})
	require.NoError(t, plain.Save(path))
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NotContains(t, string(file), "kasmina_options", "as files were before")
	m, err = LoadModel(t.Context(), path)
	require.NoError(t, err)
	require.Zero(t, m.Config.KasminaOptions)
}

// TestBadKasminaOptions wants values that make no sense to be refused, also those of a file.
func TestBadKasminaOptions(t *testing.T) {
	for want, o := range map[string]KasminaOptions{
		"KasminaOptions.Epsilon is -1, want":         {Epsilon: -1},
		"KasminaOptions.Epsilon is NaN":              {Epsilon: math.NaN()},
		"KasminaOptions.GradClip is +Inf":            {GradClip: math.Inf(1)},
		"KasminaOptions.AdaptiveClip is -2":          {AdaptiveClip: -2},
		"KasminaOptions.Stability is Stability(3)":   {Stability: 3},
		"GradClip is 1 and AdaptiveClip is 2, want ": {GradClip: 1, AdaptiveClip: 2},
	} {
		_, err := NewModel(withOptions(o), tensor.Float32, 1)
		require.ErrorContains(t, err, want)
	}
	path := filepath.Join(t.TempDir(), "m.safetensors")
	m, err := NewModel(withOptions(KasminaOptions{Epsilon: 0.5}), tensor.Float32, 1)
	require.NoError(t, err)
	tensors, metadata, err := m.tensors()
	require.NoError(t, err)
	config := metadata[modelfile.ConfigKey]
	for json, want := range map[string]string{
		`"epsilon":-1`:               "KasminaOptions.Epsilon is -1",
		`"stability":"\u001b[2J"`:    `the stability mode is "\x1b[2J", want one of`,
		`"stability":2,"epsilon":1`:  "configuration",
		`"grad_clip":"1"`:            "configuration",
		`"adaptive_clip":-0.5`:       "KasminaOptions.AdaptiveClip is -0.5",
		`"stop_on_non_finite":"yes"`: "configuration",
	} {
		metadata[modelfile.ConfigKey] = strings.Replace(config, `"epsilon":0.5`, json, 1)
		require.NoError(t, safetensors.Save(path, tensors, metadata))
		_, err := LoadModel(t.Context(), path)
		require.ErrorContains(t, err, want, json)
	}
}
