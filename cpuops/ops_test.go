package cpuops_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/internal/opcase"
	"github.com/kasmina-go/kasmina/internal/opcase/optest"
	"github.com/kasmina-go/kasmina/internal/randtest"
)

// TestOps runs the suite of op cases on this package's machine.
func TestOps(t *testing.T) {
	open := func(g *gorgonia.ExprGraph, _, outputs gorgonia.Nodes) (optest.Machine, error) {
		return cpuops.NewMachine(g, cpuops.WithOutputs(outputs...))
	}
	for _, s := range []optest.Setup{
		{Dtype: tensor.Float64, Open: open, Forward: 1e-12, Backward: 1e-13},
		{Dtype: tensor.Float32, Open: open, Forward: 1e-6, Backward: 1e-5},
	} {
		t.Run(s.Dtype.String(), func(t *testing.T) { optest.Run(t, s) })
	}
}

// TestOpsWithFrozenWeights runs the suite with frozen matrices in each of the compact types. The references
// use the weights that the matrices represent.
func TestOpsWithFrozenWeights(t *testing.T) {
	for _, typ := range randtest.SampleOf(t, 2, []cpuops.WeightType{cpuops.NF4, cpuops.BFloat16, cpuops.Q8, cpuops.Float8}) {
		t.Run(typ.String(), func(t *testing.T) {
			var weights *cpuops.Weights
			read := 0
			prepare := func(c opcase.Case) opcase.Case {
				weights, c.In = &cpuops.Weights{}, slices.Clone(c.In)
				in, _ := c.Nodes(tensor.Float32)
				_, err := c.Build(in)
				require.NoError(t, err)
				for i, n := range in {
					if a := &c.In[i]; a.Frozen && cpuops.CanBeCompact(n.Graph(), n) {
						a.Values = rounded(t, weights, typ, fmt.Sprintf("input %d", i), a)
						read++
					}
				}
				return c
			}
			open := func(g *gorgonia.ExprGraph, _, outputs gorgonia.Nodes) (optest.Machine, error) {
				return cpuops.NewMachine(g, cpuops.WithOutputs(outputs...), cpuops.WithWeights(weights))
			}
			optest.Run(t, optest.Setup{Dtype: tensor.Float32, Open: open, Prepare: prepare, Forward: 2e-6,
				Backward: 1e-5})
			require.Greater(t, read, 30)
		})
	}
}

// rounded adds an input to the weights, and returns the numbers that the weights represent.
func rounded(t *testing.T, w *cpuops.Weights, typ cpuops.WeightType, name string, in *opcase.Input) []float64 {
	t.Helper()
	rows, width := in.Shape[0], in.Shape[1]
	values := opcase.Dense(tensor.Float32, in.Values, in.Shape...).Float32s()
	require.NoError(t, w.Add(typ, name, rows, width, func(put func([]float32) error) error { return put(values) }))
	require.NoError(t, w.Rows(name, values, 0, rows))

	all := make([]float64, len(values))
	for i, v := range values {
		all[i] = float64(v)
	}
	return all
}
