package gpu_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/optim"
	"github.com/kasmina-go/kasmina/state"
)

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

// open opens the GPU. Without a GPU it skips the test.
func open(t *testing.T) *cudaops.Device {
	t.Helper()
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, device.Close())
	})
	return device
}

// kinds lists the kinds that newTrainer's trainer grafts in, one after another.
var kinds = []blueprints.Kind{blueprints.LowRank, blueprints.AttentionGate, blueprints.ChunkMLP,
	blueprints.MLPExpansion, blueprints.ConvFilter}

// plan describes a run: the model's blocks, the sequences in a batch, the steps, and options for the
// engine's machines. Another seed is grafted in every graft steps, or all seeds after the first step if
// graft is 0. After step load, seed 6 continues with what seed 0 has learned.
type plan struct {
	layers, batch, steps, graft, load int
	options                           []cudaops.MachineOption
	traits                            llm.Traits
	recompute                         bool
	depth                             int // seeds in depth
}

// planned returns the default run. In short mode it is small enough for compute-sanitizer, which needs
// tens of milliseconds per launch.
func planned() plan {
	if testing.Short() {
		return plan{layers: 1, batch: 2, steps: 4, load: 2}
	}
	return plan{layers: 2, batch: 4, steps: 20, graft: 4, load: 14}
}

// grafted returns the seeds that are grafted in after a step.
func (p plan) grafted(step int) (seeds []int) {
	for seed := range kinds {
		if step == 1 && p.graft == 0 || step == (seed+1)*p.graft {
			seeds = append(seeds, seed)
		}
	}
	return seeds
}

// newTrainer returns a trainer for a new model on the device, or on the CPU if device is nil. Seeds are
// grafted in during the run as planned.
func newTrainer(t *testing.T, device *cudaops.Device, precision cudaops.Precision, accumulate int,
	muon bool, lattice ...state.Option) *llm.Trainer {
	t.Helper()
	return planned().trainer(t, device, precision, accumulate, muon, lattice...)
}

func (p plan) trainer(t *testing.T, device *cudaops.Device, precision cudaops.Precision,
	accumulate int, muon bool, lattice ...state.Option) *llm.Trainer {
	t.Helper()
	path := filepath.Join(t.TempDir(), "text")
	text := strings.Repeat("func main() { fmt.Println(\"hello\") }\nif err != nil { return err }\n",
		100)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o666))
	config := llm.Config{Vocab: 256, Dim: 64, Layers: p.layers, Heads: 4, KVHeads: 2, Seq: 32,
		Kasmina: []int{0, 1}[:p.layers], Seeds: 8,
		SlotWidth: 53, Depth: p.depth, Traits: p.traits}.Default()
	model := must[*llm.Model](t)(llm.NewModel(config, tensor.Float32, 3,
		append(lattice, state.WithoutGates())...))
	corpus := must[*data.Corpus](t)(data.Open(path))
	tokens := must[data.Tokens](t)(data.Tokenize(t.Context(), corpus.Train, tokenizer.Bytes{}))
	loader := must[*data.Loader](t)(data.NewLoader(tokens, data.LoaderConfig{Batch: p.batch,
		Seq: config.Seq, Seed: 1}))
	var optimizer optim.Optimizer = must[*optim.AdamW](t)(optim.NewAdamW(optim.WithLR(3e-3)))
	if muon {
		optimizer = must[*optim.Muon](t)(optim.NewMuon(optim.WithLR(0.01),
			optim.WithAdamW(optim.WithLR(3e-3))))
	}

	c := llm.TrainConfig{Steps: p.steps, Batch: p.batch, Accumulate: accumulate, Clip: 1, Epoch: 2,
		Recompute: p.recompute,
		Schedule:  optim.Constant(optimizer.LR())}
	if device != nil {
		c.Engine = gpu.Engine(device, precision, p.options...)
	}

	trainer := must[*llm.Trainer](t)(llm.NewTrainer(model, loader, optimizer, c))
	t.Cleanup(func() {
		require.NoError(t, trainer.Close())
	})
	trainer.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		for layer := range model.Kasmina.Lattices() {
			for _, seed := range p.grafted(e.Step) {
				if err := graft(model, layer, seed, kinds[seed]); err != nil {
					return err
				}
			}
			if e.Step != p.load {
				continue
			}
			err := errors.Join(graft(model, layer, 6, kinds[0]),
				model.SaveBlueprint(path+".blueprint", layer, 0),
				model.LoadBlueprint(path+".blueprint", layer, 6))
			if err != nil {
				return err
			}
		}
		return nil
	})

	return trainer
}

func graft(m *llm.Model, layer, seed int, kind blueprints.Kind) error {
	l := m.Kasmina.Lattice(layer)
	return errors.Join(m.Germinate(layer, seed, state.GerminationRequest{Slot: seed + 1,
		Kind: kind}), l.Transition(seed, state.Training),
		l.Transition(seed, state.Grafting), l.SetAlpha(seed, 0.5))
}

// losses runs a trainer and returns the loss of every step.
func losses(t *testing.T, tr *llm.Trainer) []float64 {
	t.Helper()
	var all []float64
	tr.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd {
			all = append(all, e.Loss)
		}
		return nil
	})
	require.NoError(t, tr.Run(context.Background()))
	return all
}

// requireClose checks that each loss is within a relative tolerance of the expected one.
func requireClose(t *testing.T, want, got []float64, tolerance float64) {
	t.Helper()
	require.Len(t, got, len(want))
	for i, w := range want {
		require.InEpsilon(t, w, got[i], tolerance, "step %d of %v, want %v", i+1, got, want)
	}
}

// TestSameLosses trains a growing model on the CPU and on the GPU from the same start and compares the
// losses of every step.
func TestSameLosses(t *testing.T) {
	device := open(t)
	for name, c := range map[string]struct {
		precision  cudaops.Precision
		accumulate int
		muon       bool
		tolerance  float64
	}{
		"float32":    {cudaops.Float32, 1, false, 1e-4},
		"accumulate": {cudaops.Float32, 2, false, 1e-4},
		"muon":       {cudaops.Float32, 1, true, 1e-3},
		"bfloat16":   {cudaops.BFloat16, 1, false, 2e-2},
		"float16":    {cudaops.Float16, 1, false, 5e-3},
		"float8":     {cudaops.Float8, 1, false, 5e-2},
		"float16 +":  {cudaops.Float16, 2, true, 2e-2},
	} {
		if c.precision == cudaops.Float8 && !multipliesFloat8(device) || testing.Short() &&
			name != "float32" && name != "bfloat16" && name != "float16 +" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			want := losses(t, newTrainer(t, nil, 0, c.accumulate, c.muon))
			got := losses(t, newTrainer(t, device, c.precision, c.accumulate, c.muon))
			requireClose(t, want, got, c.tolerance)
		})
	}
}

// families holds the traits of published models.
var families = map[string]llm.Traits{
	"Llama 3.1": {Scaling: op.RoPEScaling{Factor: 8, LowFreq: 1, HighFreq: 4, Original: 16}},
	"Qwen2": {QKVBias: true, Scaling: op.RoPEScaling{Factor: 4, BetaFast: 32,
		BetaSlow: 1, Original: 16},
		Blocks: []llm.Block{{}, {Window: 9}}},
	"Qwen3":   {QKNorm: true},
	"Mistral": {Blocks: []llm.Block{{Window: 11}}},
	"SmolLM3": {Blocks: []llm.Block{{}, {NoRoPE: true}}},
	"Gemma 3": {QKNorm: true, NormPlusOne: true, PostNorms: true, GELU: true,
		EmbedScale: 8, AttentionScale: 0.2,
		Blocks: []llm.Block{{Window: 5, Base: 100}, {}}},
}

// TestSameLossesOfFamilies is TestSameLosses for the traits of published models, with and without
// recomputing blocks in the backward pass.
func TestSameLossesOfFamilies(t *testing.T) {
	device := open(t)
	for name, traits := range families {
		p := planned()
		p.layers, p.traits = 2, traits
		for precision, tolerance := range map[cudaops.Precision]float64{cudaops.Float32: 2e-4,
			cudaops.BFloat16: 3e-2,
			cudaops.Float8:   6e-2} {
			if precision == cudaops.Float8 && !multipliesFloat8(device) {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", name, precision), func(t *testing.T) {
				p.recompute = precision == cudaops.BFloat16
				want, got := losses(t, p.trainer(t, nil, 0, 1, false)),
					losses(t, p.trainer(t, device, precision, 1, false))
				requireClose(t, want, got, tolerance)
			})
		}
	}
}

// multipliesFloat8 reports whether the GPU supports cudaops.Float8.
func multipliesFloat8(d *cudaops.Device) bool {
	major, minor := d.ComputeCapability()
	return major == 9 && minor == 0
}

// precisions returns the precisions to test. Short mode avoids attention's plain kernels, the slowest
// ones to watch, and tests a single precision.
func precisions(d *cudaops.Device) map[string]cudaops.Precision {
	all := map[string]cudaops.Precision{"float32": cudaops.Float32, "bfloat16": cudaops.BFloat16,
		"float16": cudaops.Float16}
	if multipliesFloat8(d) {
		all["float8"] = cudaops.Float8
	}

	if testing.Short() {
		delete(all, "float8")
		delete(all, "float32")
		delete(all, "float16")
	}

	return all
}

// TestSameBits checks that two runs from the same seed save identical checkpoints, in every precision.
func TestSameBits(t *testing.T) {
	device := open(t)
	for name, p := range precisions(device) {
		t.Run(name, func(t *testing.T) {
			var all [2][]float64
			var files [2][]byte
			for i := range files {
				tr := newTrainer(t, device, p, 2, true)
				all[i] = losses(t, tr)
				files[i] = saved(t, tr)
			}
			require.Equal(t, all[0], all[1])
			require.True(t, bytes.Equal(files[0], files[1]), "two runs leave other files")
		})
	}
}

// saved returns the checkpoint of a trainer.
func saved(t *testing.T, tr *llm.Trainer) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "end.safetensors")
	require.NoError(t, tr.Save(path))
	return must[[]byte](t)(os.ReadFile(path))
}

// TestResumeOnGPU checks that a run interrupted halfway and resumed by another trainer is
// bit-identical to an uninterrupted one, and that its evaluations agree with the CPU's.
func TestResumeOnGPU(t *testing.T) {
	device := open(t)
	for name, p := range precisions(device) {
		t.Run(name, func(t *testing.T) { testResume(t, device, p) })
	}
}

func testResume(t *testing.T, device *cudaops.Device, precision cudaops.Precision) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	straight := newTrainer(t, device, precision, 1, false)
	straight.On(func(e llm.Event) error {
		if e.Kind == llm.StepEnd && e.Step == planned().steps/2 {
			return straight.Save(path)
		}
		return nil
	})

	losses(t, straight)
	resumed := newTrainer(t, device, precision, 1, false)
	require.NoError(t, resumed.Resume(t.Context(), path))
	losses(t, resumed)
	text := must[*data.Evaluation](
		t)(data.NewEvaluation([]byte(strings.Repeat("return fmt.Errorf(\"x\")\n", 20)),
		tokenizer.Bytes{}, 4, 32))
	a, _, err := straight.Evaluate(text)
	require.NoError(t, err)
	b, _, err := resumed.Evaluate(text)
	require.NoError(t, err)
	require.Equal(t, a, b, "held-out loss")
	require.True(t, bytes.Equal(saved(t, straight), saved(t, resumed)),
		"the checkpoints of a straight and a resumed run differ")
	if precision == cudaops.Float16 {
		require.True(t, bytes.Contains(saved(t, straight), []byte("loss_scale")))
	}

	if precision != cudaops.Float32 {
		return
	}

	onCPU := newTrainer(t, nil, 0, 1, false)
	err = onCPU.Resume(t.Context(), path)
	require.ErrorIs(t, err, llm.ErrSettings)
	require.ErrorContains(t, err, `Engine is "cpu" here and "cuda f32" there`)
	require.NoError(t, onCPU.Resume(t.Context(), path, llm.WithNewSettings(nil)))
	losses(t, onCPU)
	c, _, err := onCPU.Evaluate(text)
	require.NoError(t, err)
	require.InEpsilon(t, a, c, 1e-3, "held-out loss on the CPU")
}

// TestResumeGradientPrecision resumes a run with float32 gradients as one with bfloat16 gradients,
// and vice versa. Changing the precision affects the results of the run, so the user must request it
// explicitly. If batches are accumulated, the precision has no effect and nothing needs to be
// confirmed.
func TestResumeGradientPrecision(t *testing.T) {
	device := open(t)
	wide, narrow := planned(), planned()
	narrow.options = []cudaops.MachineOption{cudaops.WithGradientPrecision(cudaops.BFloat16)}
	resume := func(from, to plan, accumulate int, want string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "model.safetensors")
		first := from.trainer(t, device, cudaops.BFloat16, accumulate, false)
		first.On(func(e llm.Event) error {
			if e.Kind == llm.StepEnd && e.Step == from.steps/2 {
				return first.Save(path)
			}
			return nil
		})
		all := losses(t, first)
		second := to.trainer(t, device, cudaops.BFloat16, accumulate, false)
		err := second.Resume(t.Context(), path)
		if want != "" {
			require.ErrorIs(t, err, llm.ErrSettings)
			require.ErrorContains(t, err, want)
			err = second.Resume(t.Context(), path, llm.WithNewSettings(nil))
		}
		require.NoError(t, err)
		rest := losses(t, second)
		require.Equal(t, want == "", slices.Equal(rest, all[len(all)-len(rest):]),
			"the losses are %v, and %v without a break", rest, all)
		require.InEpsilon(t, all[len(all)-1], rest[len(rest)-1], 0.02)
	}

	resume(wide, narrow, 1, `Engine is "cuda bf16, gradients bf16" here and "cuda bf16" there`)
	resume(narrow, wide, 1, `Engine is "cuda bf16" here and "cuda bf16, gradients bf16" there`)
	resume(narrow, narrow, 1, "")
	resume(wide, narrow, 2, "")
}

// TestProfileStep checks that taking a profile during a growing model's training changes nothing. Short
// mode, used when a tool watches every launch, only checks the profile itself, because that takes enough
// steps already.
func TestProfileStep(t *testing.T) {
	device := open(t)
	p, after, accumulate := planned(), 3, 2
	if testing.Short() {
		after, accumulate = 1, 1
	}

	p.steps = max(p.steps, after+cudaops.ProfileSteps+1)
	var want []float64
	if !testing.Short() {
		want = losses(t, p.trainer(t, device, cudaops.BFloat16, accumulate, true))
	}

	tr := p.trainer(t, device, cudaops.BFloat16, accumulate, !testing.Short())
	path := filepath.Join(t.TempDir(), "trace.json")
	var out bytes.Buffer
	tr.On(llm.ProfileStep(tr, &out, path, after))
	if got := losses(t, tr); want != nil {
		require.Equal(t, want, got)
	}

	trace := must[[]byte](t)(os.ReadFile(path))
	for _, want := range []string{"traceEvents", fmt.Sprintf("model.layers.%d", p.layers-1),
		"Kasmina"} {
		require.True(t, bytes.Contains(trace, []byte(want)), "no %s in the trace", want)
	}

	t.Logf("%s", out.String())
}
