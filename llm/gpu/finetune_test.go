package gpu_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/modeltest"
	"github.com/kasmina-go/kasmina/llm"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/llm/gpu"
	"github.com/kasmina-go/kasmina/optim"
)

const (
	tuningSteps = 20
	tuningLR    = 0.003
)

// newTuner returns a trainer that tunes adapters on the device, or on the CPU if device is nil. Several
// sequences share a row, and only a part of their tokens is learned.
func newTuner(t *testing.T, device *cudaops.Device, p cudaops.Precision, a llm.LoRA, accumulate int,
	opts ...cudaops.MachineOption) *llm.Trainer {
	return newTunerOn(t, cpuops.Float32, device, p, a, accumulate, opts...)
}

// newTunerOn is newTuner for frozen weights of the given type.
func newTunerOn(t *testing.T, typ cpuops.WeightType, device *cudaops.Device, p cudaops.Precision, a llm.LoRA,
	accumulate int, opts ...cudaops.MachineOption) *llm.Trainer {
	t.Helper()
	c := llm.Config{Vocab: 256, Dim: 128, Layers: 2, Heads: 2, KVHeads: 1, FF: 256, Seq: 128,
		Documents: true}.Default()
	base := must[*llm.Model](t)(llm.NewModel(c, tensor.Float32, 7))
	if typ != cpuops.Float32 {
		base = must[*llm.Model](t)(llm.LoadFrozen(t.Context(), typ, c, modeltest.Weights{Model: base}))
	}
	a.Targets = must[[]string](t)(c.MatchLayers(llm.AllLinear))
	m := must[*llm.Model](t)(llm.Adapt(base, a, 3))

	var sequences []chatdata.Sequence
	for i := range 60 {
		s := chatdata.Sequence{Line: i + 1}
		for j := range 20 + i%70 {
			s.IDs, s.Learn = append(s.IDs, (7*i+3*j)%256), append(s.Learn, j > i%9)
		}
		sequences = append(sequences, s)
	}

	batch := 4 / accumulate
	l := must[*chatdata.Loader](t)(chatdata.NewLoader(sequences, data.LoaderConfig{Batch: batch, Seq: c.Seq,
		Seed: 3}))
	o := must[*optim.AdamW](t)(optim.NewAdamW(optim.WithLR(tuningLR)))
	config := llm.TrainConfig{Steps: tuningSteps, Batch: batch, Accumulate: accumulate,
		Schedule: optim.Constant(tuningLR), Clip: 1}
	if device != nil {
		config.Engine = gpu.Engine(device, p, opts...)
	}

	tr := must[*llm.Trainer](t)(llm.NewTrainer(m, l, o, config))
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	return tr
}

// TestTuningOnFrozenWeights checks that a GPU has the losses of the CPU when it tunes adapters next to frozen
// weights of each type.
func TestTuningOnFrozenWeights(t *testing.T) {
	device := open(t)
	for _, typ := range []cpuops.WeightType{cpuops.BFloat16, cpuops.Float8, cpuops.NF4} {
		for name, a := range map[string]llm.LoRA{"LoRA": {Rank: 16, Alpha: 32},
			"DoRA": {Rank: 16, Alpha: 16, Magnitude: true}} {
			t.Run(fmt.Sprint(typ, " ", name), func(t *testing.T) {
				want, wantHeld := evaluatedLosses(t, newTunerOn(t, typ, nil, 0, a, 1))
				got, held := evaluatedLosses(t, newTunerOn(t, typ, device, cudaops.Float32, a, 1))
				require.InDeltaSlice(t, want, got, 1e-4, "float32")
				require.InDeltaSlice(t, wantHeld, held, 1e-4, "evaluations in float32")
				for _, p := range []cudaops.Precision{cudaops.BFloat16, cudaops.Float8} {
					if p == cudaops.Float8 && !multipliesFloat8(device) {
						continue
					}
					tr := newTunerOn(t, typ, device, p, a, 1)
					plan, ok := tr.MemoryPlan()
					require.True(t, ok)
					got := tunedLosses(t, tr, "")
					t.Logf("%v: %v to %v, CPU %v to %v, %d bytes of weights", p, got[0], got[tuningSteps-1], want[0],
						want[tuningSteps-1], plan.Weights)
					require.InDeltaSlice(t, want, got, map[bool]float64{false: 3e-2, true: 0.05}[p == cudaops.Float8], "%v", p)
				}
			})
		}
	}
}

// evaluatedLosses runs a trainer and returns the losses of its steps, and those of an evaluation after each step.
func evaluatedLosses(t *testing.T, tr *llm.Trainer) (all, held []float64) {
	t.Helper()
	tokens := make([]int, 128)
	rows := data.Batch{Inputs: tokens, Targets: make([]int, 128), Starts: make([]int, 128), Positions: make([]int, 128)}
	for i := range tokens {
		tokens[i], rows.Targets[i], rows.Positions[i] = 5*i%256, 5*(i+1)%256, i
	}
	evaluation := must[*data.Evaluation](t)(data.NewPackedEvaluation(rows, 128, 1, 128))
	tr.On(llm.Evaluate(tr, evaluation, 1), func(e llm.Event) error {
		if e.Kind == llm.EvalEnd {
			held = append(held, e.ValLoss)
		}
		return nil
	})
	all = tunedLosses(t, tr, "")
	require.Len(t, held, tuningSteps)
	return all, held
}

// tunedLosses runs a trainer and returns the losses of its steps.
func tunedLosses(t *testing.T, tr *llm.Trainer, save string) (all []float64) {
	t.Helper()
	tr.On(func(e llm.Event) error {
		if e.Kind != llm.StepEnd {
			return nil
		}
		all = append(all, e.Loss)
		if e.Step == tuningSteps/2 && save != "" {
			return tr.Save(save)
		}
		return nil
	})
	require.NoError(t, tr.Run(t.Context()))
	return all
}

// TestTuning checks that a GPU has the losses of the CPU when it tunes adapters, with fused products and
// with separate ones, and that a resumed run repeats the remaining losses bit for bit.
func TestTuning(t *testing.T) {
	device := open(t)
	for name, a := range map[string]llm.LoRA{
		"LoRA":    {Rank: 16, Alpha: 32},
		"rsLoRA":  {Rank: 8, Alpha: 16, RankStabilized: true},
		"DoRA":    {Rank: 16, Alpha: 16, Magnitude: true},
		"dropout": {Rank: 16, Alpha: 32, Dropout: 0.1},
		"rank 5":  {Rank: 5, Alpha: 10},
	} {
		t.Run(name, func(t *testing.T) {
			var want []float64
			for _, accumulate := range []int{2, 1} { // dropout draws other masks for other batches
				want = tunedLosses(t, newTuner(t, nil, 0, a, accumulate), "")
				require.Less(t, want[tuningSteps-1], want[0])
				got := tunedLosses(t, newTuner(t, device, cudaops.Float32, a, accumulate), "")
				require.InDeltaSlice(t, want, got, 1e-4, "float32, %d batches", accumulate)
			}

			for _, p := range []cudaops.Precision{cudaops.BFloat16, cudaops.Float16} {
				for _, rule := range []string{"separate", "fused"} {
					narrow := map[string]string{"separate": rule, "fused": "narrow"}[rule]
					opts := cudaops.WithVariants("SiLUProduct*="+rule, "RoPEProduct="+rule,
						"StatisticsProduct="+rule, "ProductSum="+map[string]string{"separate": rule,
							"fused": "hopper-*"}[rule], "RowProduct="+narrow, "ColumnProduct="+narrow, "NarrowProducts="+narrow)
					path := filepath.Join(t.TempDir(), fmt.Sprint(p, rule))
					tr := newTuner(t, device, p, a, 1, opts)
					got := tunedLosses(t, tr, path)
					t.Log(p, rule, want[0], got[0], want[tuningSteps-1], got[tuningSteps-1])
					require.InDeltaSlice(t, want, got, 3e-2, "%v, %s", p, rule)

					resumed := newTuner(t, device, p, a, 1, opts)
					require.NoError(t, resumed.Resume(t.Context(), path))
					require.Equal(t, got[tuningSteps/2:], tunedLosses(t, resumed, ""), "%v, %s", p, rule)
				}
			}
		})
	}
}
