package op

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/state"
	"github.com/kasmina-go/kasmina/state/graft"
)

// TestKeepSlots trains a blueprint with one of Gorgonia's solvers and fossilizes it while another seed
// continues to learn. With KeepSlots the fossilized weights and scale don't change; without it they do.
func TestKeepSlots(t *testing.T) {
	const rows, features, slots = 4, 6, 3
	for _, keep := range []bool{true, false} {
		lattice, err := state.NewLattice(2, features, state.WithSlots(slots), state.WithoutGates())
		require.NoError(t, err)
		g := gorgonia.NewGraph()
		input := func(name string, value float64, shape ...int) *gorgonia.Node {
			data := make([]float64, tensor.Shape(shape).TotalSize())
			for i := range data {
				data[i] = value * float64(1+i%5)
			}
			return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)),
				gorgonia.WithName(name))
		}
		x, target := input("x", 0.5, rows, features), input("target", 1, rows, features)
		weights, scales := input("weights", 0.01, slots, 3), input("scales", 0.1, slots)
		y, err := Kasmina(x, weights, scales, lattice)
		require.NoError(t, err)
		loss := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(gorgonia.Must(gorgonia.Sub(y, target))))))
		_, err = gorgonia.Grad(loss, weights, scales)
		require.NoError(t, err)
		machine := gorgonia.NewTapeMachine(g, gorgonia.BindDualValues(weights, scales))
		defer machine.Close()
		solver := gorgonia.NewAdamSolver(gorgonia.WithLearnRate(0.1))

		steps := func() {
			for range 5 {
				require.NoError(t, machine.RunAll())
				restore := func() {}
				if keep {
					restore, err = KeepSlots(lattice, weights, scales)
					require.NoError(t, err)
				}
				require.NoError(t, solver.Step(gorgonia.NodesToValueGrads(gorgonia.Nodes{weights, scales})))
				restore()
				machine.Reset()
			}
			_, err := lattice.StepEpoch(state.Metrics{Loss: 1})
			require.NoError(t, err)
		}
		grow := func(seed int, to state.Stage) {
			require.NoError(t, lattice.RequestGermination(seed, state.GerminationRequest{Slot: seed + 1,
				Kind: blueprints.Residual, Strategy: graft.FixedRamp{Ramp: graft.Linear, Epochs: 1, Target: 1}}))
			for stage := state.Germinated; stage != to; stage = stage.Next() {
				require.NoError(t, lattice.Transition(seed, stage.Next()))
				steps()
			}
		}
		grow(0, state.Fossilized)
		own := func() []float64 {
			return append(slices.Clone(weights.Value().Data().([]float64)[3:6]), scales.Value().Data().([]float64)[1])
		}
		fossil, other := own(), slices.Clone(weights.Value().Data().([]float64)[6:9])
		require.NotEqual(t, []float64{0.04, 0.05, 0.01, 0.2}, fossil, "the blueprint has learned nothing")
		grow(1, state.Grafting)
		require.NotEqual(t, other, weights.Value().Data().([]float64)[6:9], "the other blueprint learns nothing")
		require.Equal(t, keep, slices.Equal(fossil, own()))
	}

	_, err := KeepSlots(nil, nil, nil)
	require.ErrorContains(t, err, "must not be nil")
}
