package llm

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/safetensors"
	"github.com/kasmina-go/kasmina/llm/chatdata"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/optim"
)

// frozenTypes are the types of LoadFrozen.
var frozenTypes = []cpuops.WeightType{cpuops.Float32, cpuops.BFloat16, cpuops.Float8, cpuops.NF4}

// modelReader reads the parameters of a model.
type modelReader struct{ m *Model }

func (r modelReader) Read(_ context.Context, name string, put func([]byte, string) error) error {
	p := r.m.Param(name)
	if p == nil {
		return fmt.Errorf("there is no %s", name)
	}
	raw := safetensors.Memory(p.Float32s())
	at := len(raw) / 8 * 4
	if err := put(raw[:at], "float32"); err != nil {
		return err
	}
	return put(raw[at:], "float32")
}

// frozenModel returns a model read by LoadFrozen, and a float64 model with the weights that it represents.
func frozenModel(t *testing.T, typ cpuops.WeightType, c Config, tuned ...string) (frozen, wide *Model) {
	t.Helper()
	m, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	enlarge(m.Param(embedName), 10)
	frozen, err = LoadFrozen(t.Context(), typ, c, modelReader{m}, tuned...)
	require.NoError(t, err)
	wide, err = NewModelFrom(c, tensor.Float64, func(p Param) error {
		for i, x := range frozen.weight(p.Name).Float32s() {
			p.Value.Float64s()[i] = float64(x)
		}
		return nil
	})
	require.NoError(t, err)
	return frozen, wide
}

// TestFrozenModel trains a model on frozen weights of each type, and compares the loss of every step and
// the merged weights with a float64 model that has the represented weights.
func TestFrozenModel(t *testing.T) {
	c := maskedConfig()
	for _, typ := range frozenTypes {
		// The adapter does not know the type of the weights.
		for name, a := range randtest.Sample(t, 2, adapters(t, c), "LoRA") {
			t.Run(fmt.Sprint(typ, " ", name), func(t *testing.T) {
				frozen, wide := frozenModel(t, typ, c)
				require.Equal(t, typ, frozen.BaseType())
				require.Equal(t, wide.NumParams(), frozen.NumParams())

				var losses [2][]float64
				for i, base := range []*Model{frozen, wide} {
					m, err := Adapt(base, a, 3)
					require.NoError(t, err)
					tr := newTuningTrainer(t, m, name == "LoRA")
					losses[i] = lossesOf(t, tr)
					if i == 0 {
						require.Equal(t, tr.Last().AllParams, m.NumParams())
					}
					require.NoError(t, tr.Close())
				}
				// Later, rounding errors have grown.
				require.Less(t, far(losses[0][:10], losses[1][:10]), 1e-4, "%v\n%v", losses[0], losses[1])
				require.Less(t, losses[0][19], losses[0][0]-0.1)
			})
		}
	}
}

// TestFrozenGradients compares the first gradients on frozen weights with the gradients of a float64
// model that has the represented weights.
func TestFrozenGradients(t *testing.T) {
	c := maskedConfig()
	for _, typ := range frozenTypes {
		for name, a := range adapters(t, c) {
			if a.Dropout > 0 {
				continue
			}
			t.Run(fmt.Sprint(typ, " ", name), func(t *testing.T) {
				frozen, wide := frozenModel(t, typ, c)
				grads := map[*Model]map[string][]float64{}
				for _, base := range []*Model{frozen, wide} {
					m, err := Adapt(base, a, 3)
					require.NoError(t, err)
					fill(m)
					grads[base] = gradientsOf(t, m)
				}
				for name, want := range grads[wide] {
					require.Less(t, distance(grads[frozen][name], want), 3e-5, name)
				}
			})
		}
	}
}

// gradientsOf returns the gradients of all parameters that learn, for one batch.
func gradientsOf(t *testing.T, m *Model) map[string][]float64 {
	t.Helper()
	l, err := chatdata.NewLoader(masked(12), data.LoaderConfig{Batch: 2, Seq: m.Config.Seq, Seed: 1})
	require.NoError(t, err)
	b, err := l.Next()
	require.NoError(t, err)
	o, err := optim.NewAdamW(optim.WithLR(0.02))
	require.NoError(t, err)
	e, err := CPUEngine()(m, o, TrainConfig{Batch: 2, Accumulate: 1, adapted: true})
	require.NoError(t, err)
	defer e.Close()
	_, err = e.Gradients(b)
	require.NoError(t, err)

	all := map[string][]float64{}
	for _, p := range m.Params {
		if !IsAdapterParam(p.Name) {
			continue
		}
		g, err := e.(Listener).Gradient(p.Name)
		require.NoError(t, err)
		switch x := g.(type) {
		case []float32:
			for _, v := range x {
				all[p.Name] = append(all[p.Name], float64(v))
			}
		case []float64:
			all[p.Name] = append(all[p.Name], x...)
		}
	}
	return all
}

// distance returns ‖got − want‖/‖want‖.
func distance(got, want []float64) float64 {
	var off, size float64
	for i, w := range want {
		off, size = off+(got[i]-w)*(got[i]-w), size+w*w
	}
	return math.Sqrt(off / max(size, 1e-300))
}

// TestFrozenLastBlock checks that the parameters of the last block learn next to frozen weights, and that
// Rebase combines them with other weights.
func TestFrozenLastBlock(t *testing.T) {
	c := maskedConfig()
	tuned, err := c.LastBlocks(1)
	require.NoError(t, err)
	m, wide := frozenModel(t, cpuops.NF4, c, tuned...)
	losses := lossesOf(t, newTuningTrainer(t, m, false, tuned...))
	require.Less(t, far(losses[:10], lossesOf(t, newTuningTrainer(t, wide, false, tuned...))[:10]), 1e-4)

	base, err := NewModel(c, tensor.Float32, 7)
	require.NoError(t, err)
	first := blockPrefix(0) + "mlp.up_proj.weight"
	before := append([]float32{}, base.Param(first).Float32s()...)
	whole, err := m.Rebase(base)
	require.NoError(t, err)
	require.Equal(t, before, whole.Param(first).Float32s())
	last := blockPrefix(1) + "mlp.up_proj.weight"
	require.Equal(t, m.Param(last).Data(), whole.Param(last).Data())

	other := c
	other.FF += 8
	wrong, err := NewModel(other, tensor.Float32, 7)
	require.NoError(t, err)
	_, err = m.Rebase(wrong)
	require.ErrorContains(t, err, "the other model has no parameter model.layers.1.mlp.")
}

// TestFrozenMerge checks that a merged model has the sums of the represented weights and the adapters, and
// that Rebase merges into other weights.
func TestFrozenMerge(t *testing.T) {
	c := maskedConfig()
	for name, a := range adapters(t, c) {
		t.Run(name, func(t *testing.T) {
			frozen, wide := frozenModel(t, cpuops.NF4, c)
			m, err := Adapt(frozen, a, 3)
			require.NoError(t, err)
			fill(m)
			plain, err := m.Plain()
			require.NoError(t, err)
			require.Nil(t, plain.Base)

			same, err := Adapt(wide, a, 3)
			require.NoError(t, err)
			fill(same)
			want, err := same.Plain()
			require.NoError(t, err)
			for i, p := range plain.Params {
				require.Less(t, apartBy(t, p.Value.Data(), want.Params[i].Value.Data()), 1e-5, p.Name)
			}
			require.InEpsilon(t, lossOf(t, want), lossOf(t, m), 1e-5)

			base, err := NewModel(c, tensor.Float32, 7)
			require.NoError(t, err)
			whole, err := m.Rebase(base)
			require.NoError(t, err)
			require.Nil(t, whole.Base)
			for _, p := range whole.Params {
				if IsAdapterParam(p.Name) {
					require.Equal(t, m.Param(p.Name).Data(), p.Value.Data())
				} else {
					require.Equal(t, base.Param(p.Name).Data(), p.Value.Data())
				}
			}
		})
	}
}

// TestFrozenResume checks that a run on frozen weights continues bit for bit, from a checkpoint without these
// weights, and that a model with weights of another type is rejected.
func TestFrozenResume(t *testing.T) {
	c := maskedConfig()
	make := func(typ cpuops.WeightType) *Trainer {
		frozen, _ := frozenModel(t, typ, c)
		m, err := Adapt(frozen, adapters(t, c)["DoRA with dropout"], 3)
		require.NoError(t, err)
		return newTuningTrainer(t, m, false)
	}

	path := filepath.Join(t.TempDir(), "run.safetensors")
	whole := make(cpuops.NF4)
	whole.On(func(e Event) error {
		if e.Kind != StepEnd || e.Step != 7 {
			return nil
		}
		return whole.Save(path)
	})
	want := lossesOf(t, whole)

	resumed := make(cpuops.NF4)
	require.NoError(t, resumed.Resume(t.Context(), path))
	require.Equal(t, want[7:], lossesOf(t, resumed))
	for _, p := range whole.Model.Params {
		if p.Value != nil {
			require.Equal(t, p.Value.Data(), resumed.Model.Param(p.Name).Data(), p.Name)
		}
	}
	require.ErrorIs(t, make(cpuops.Float8).Resume(t.Context(), path), ErrArchitecture)
}

// TestFrozenErrors checks the errors for uses that frozen weights do not support.
func TestFrozenErrors(t *testing.T) {
	c := maskedConfig()
	m, _ := frozenModel(t, cpuops.NF4, c)
	require.ErrorContains(t, m.Save(filepath.Join(t.TempDir(), "m.safetensors")), "load it without LoadFrozen")
	_, err := m.Compact(cpuops.Q8)
	require.ErrorContains(t, err, "load it without LoadFrozen")

	l, err := chatdata.NewLoader(masked(40), data.LoaderConfig{Batch: 2, Seq: c.Seq, Seed: 5})
	require.NoError(t, err)
	o, err := adamW()
	require.NoError(t, err)
	config := TrainConfig{Steps: 2, Batch: 2, Schedule: optim.Constant(0.02)}
	_, err = NewTrainer(m, l, o, config)
	require.ErrorContains(t, err, "learns, but the model holds it as")

	adapted, err := Adapt(m, adapters(t, c)["LoRA"], 3)
	require.NoError(t, err)
	tr, err := NewTrainer(adapted, l, o, config)
	require.NoError(t, err)
	average, err := NewEMA(0.9)
	require.NoError(t, err)
	require.NoError(t, tr.Use(average))
	require.ErrorContains(t, tr.Run(t.Context()), "llm: EMA: the model holds frozen matrices")

	_, err = LoadFrozen(t.Context(), cpuops.NF4, c, modelReader{m})
	require.ErrorContains(t, err, "there is no "+embedName)
	_, err = LoadFrozen(t.Context(), cpuops.NF4, adapted.Config, modelReader{m})
	require.ErrorContains(t, err, "add adapters with Adapt")
	_, err = LoadFrozen(t.Context(), cpuops.NF4, c, modelReader{m}, "none")
	require.ErrorContains(t, err, "the model has no such parameter")
	_, err = LoadCompact(t.Context(), cpuops.NF4, c, modelReader{m})
	require.ErrorContains(t, err, "use q8_0, or LoadFrozen")
}
