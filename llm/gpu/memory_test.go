package gpu_test

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/modeltest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/llm/tokenizer"
	"github.com/kasmina-go/kasmina/optim"
)

// memoryCase is a configuration of TestMemoryPlan.
type memoryCase struct {
	adapter    llm.LoRA
	base       cpuops.WeightType // if it is not Float32, the model is loaded with LoadFrozen
	precision  cudaops.Precision
	accumulate int
	recompute  bool
	mlps       int // blocks whose MLPs are recomputed
	last       bool
}

// cycle is a source of tokens.
type cycle struct{}

func (cycle) Len() int64          { return 1 << 16 }
func (cycle) VocabSize() int      { return 8192 }
func (cycle) Tokenizer() string   { return "cycle" }
func (cycle) Fingerprint() string { return "cycle" }
func (cycle) ReadTokens(dst []int, offset int64) error {
	for i := range dst {
		dst[i] = int(offset+int64(i)) * 37 % 8192
	}
	return nil
}

// train makes two steps, evaluates after each, and saves the run. It returns the memory that the run planned, and the
// memory that the driver counts after the first step and at the end.
func (p memoryCase) train(t *testing.T, device *cudaops.Device) (plan llm.MemoryPlan, first, end int) {
	t.Helper()
	c := llm.Config{Vocab: 8192, Dim: 512, Layers: 4, Heads: 8, KVHeads: 4, FF: 2048, Seq: 1024}.Default()
	m := must[*llm.Model](t)(llm.NewModel(c, tensor.Float32, 7))
	var tuned []string
	if p.last {
		tuned = must[[]string](t)(c.LastBlocks(1))
	}
	if p.base != cpuops.Float32 {
		m = must[*llm.Model](t)(llm.LoadFrozen(t.Context(), p.base, c, modeltest.Weights{Model: m}, tuned...))
	}
	if !p.adapter.IsZero() {
		p.adapter.Targets = must[[]string](t)(c.MatchLayers(llm.AllLinear))
		m = must[*llm.Model](t)(llm.Adapt(m, p.adapter, 3))
	}

	const batch = 16
	loader := func() *data.Loader {
		return must[*data.Loader](t)(data.NewLoader(cycle{}, data.LoaderConfig{Batch: batch, Seq: c.Seq, Seed: 3}))
	}
	o := must[*optim.AdamW](t)(optim.NewAdamW(optim.WithLR(1e-4)))
	before, _, err := device.Memory()
	require.NoError(t, err)
	tr := must[*llm.Trainer](t)(llm.NewTrainer(m, loader(), o, llm.TrainConfig{Steps: 2, Batch: batch,
		Accumulate: max(1, p.accumulate), Schedule: optim.Constant(1e-4), Clip: 1, Tuned: tuned, Recompute: p.recompute,
		RecomputeMLPs: p.mlps, Engine: gpu.Engine(device, p.precision, cudaops.WithTuning(cudaops.TuneOff))}))
	defer func() { require.NoError(t, tr.Close()) }()

	counted := func() int {
		after, _, err := device.Memory()
		require.NoError(t, err)
		return int(before - after)
	}
	plan, ok := tr.MemoryPlan()
	require.True(t, ok)
	held := must[*data.Evaluation](t)(data.NewEvaluation(bytes.Repeat([]byte("some text "), batch*c.Seq/10+1),
		tokenizer.Bytes{}, batch, c.Seq))
	path := filepath.Join(t.TempDir(), "run.safetensors")
	tr.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		if e.Step == 1 {
			first = counted()
		}
		if _, _, err := tr.Evaluate(held); err != nil {
			return err
		}
		return tr.Save(path)
	})
	require.NoError(t, tr.Run(t.Context()))
	return plan, first, counted()
}

// driverPage is the size of the pages in which the driver hands out device memory. Its count of free memory changes by
// whole pages.
const driverPage = 2 << 20

// TestMemoryPlan compares the memory that runs plan with the driver's count in ten configurations. Evaluating and saving
// must not take more memory than the first step has taken, apart from a page for small buffers.
func TestMemoryPlan(t *testing.T) {
	device := open(t)
	lora := llm.LoRA{Rank: 16, Alpha: 32}
	dora := llm.LoRA{Rank: 16, Alpha: 16, Magnitude: true}
	const bf16 = cudaops.BFloat16
	configs := map[string]memoryCase{
		"all weights, float32":       {precision: cudaops.Float32},
		"all weights":                {precision: bf16},
		"all weights, accumulated":   {precision: bf16, accumulate: 2},
		"all weights, recomputed":    {precision: bf16, recompute: true},
		"LoRA":                       {adapter: lora, precision: bf16},
		"LoRA on bfloat16, two MLPs": {adapter: lora, base: cpuops.BFloat16, precision: bf16, mlps: 2},
		"LoRA on float8, float8":     {adapter: lora, base: cpuops.Float8, precision: cudaops.Float8},
		"LoRA on NF4":                {adapter: lora, base: cpuops.NF4, precision: bf16, accumulate: 2},
		"DoRA on NF4, recomputed":    {adapter: dora, base: cpuops.NF4, precision: bf16, recompute: true},
		"last block on NF4":          {base: cpuops.NF4, precision: bf16, last: true},
	}
	require.Len(t, configs, 10)
	for name, p := range configs {
		t.Run(name, func(t *testing.T) {
			if p.precision == cudaops.Float8 && !multipliesFloat8(device) {
				t.Skip("the GPU has no products in float8")
			}

			p.train(t, device) // loads the kernels, which take memory of their own
			plan, first, end := p.train(t, device)
			t.Logf("planned %.1f MiB, counted %.1f MiB after a step and %.1f MiB at the end", mib(plan.Total()), mib(first),
				mib(end))
			require.InEpsilon(t, first, plan.Total(), 0.05, "%+v", plan)
			require.LessOrEqual(t, end, first+driverPage)
		})
	}
}

func mib(bytes int) float64 { return float64(bytes) / (1 << 20) }
