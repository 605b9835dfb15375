package op_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// startLayer is a layer of two seeds over four positive features, whose three slots are zeros, and
// its gradients.
type startLayer struct {
	lattice            *state.Lattice
	x, weights, scales *gorgonia.Node
	y, cost            *gorgonia.Node
}

func newStartLayer(t *testing.T, dt tensor.Dtype, recompute bool) *startLayer {
	lattice, err := state.NewLattice(2, 4, state.WithoutGates(), state.WithWidth(8))
	require.NoError(t, err)
	l := &startLayer{lattice: lattice}
	g := gorgonia.NewGraph()
	input := func(name string, init gorgonia.InitWFn, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithInit(init))
	}
	l.x = input("x", gorgonia.Uniform(0.5, 2), 3, 4) // relu is the identity there
	l.weights = input("weights", gorgonia.Zeroes(), 3, 8)
	l.scales = input("scales", gorgonia.Zeroes(), 3)
	build := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Kasmina(in[0], in[1], in[2], l.lattice)
	}
	in := gorgonia.Nodes{l.x, l.weights, l.scales}
	if recompute {
		l.y, err = autodiff.Recompute(in, build)
	} else {
		l.y, err = build(in)
	}
	require.NoError(t, err)
	l.cost = must(t)(gorgonia.Sum(must(t)(gorgonia.Square(l.y))))
	return l
}

// machines are the ways to run a graph on a CPU, with gradients of the parameters.
var machines = map[string]func(t *testing.T, l *startLayer) gorgonia.VM{
	"tape": func(t *testing.T, l *startLayer) gorgonia.VM {
		_, err := gorgonia.Grad(l.cost, l.weights, l.scales)
		require.NoError(t, err)
		return gorgonia.NewTapeMachine(l.x.Graph(), gorgonia.BindDualValues(l.weights, l.scales))
	},
	"lisp": func(t *testing.T, l *startLayer) gorgonia.VM {
		return gorgonia.NewLispMachine(l.x.Graph())
	},
	"cpuops": func(t *testing.T, l *startLayer) gorgonia.VM {
		_, err := gorgonia.Grad(l.cost, l.weights, l.scales)
		require.NoError(t, err)
		m, err := cpuops.NewMachine(l.x.Graph(), cpuops.WithParams(l.weights, l.scales),
			cpuops.WithOutputs(l.y))
		require.NoError(t, err)
		return m
	},
}

func (l *startLayer) advance(t *testing.T, kind blueprints.Kind, slot int) {
	require.NoError(t, l.lattice.RequestGermination(1,
		state.GerminationRequest{Slot: slot, Kind: kind}))
	require.NoError(t, l.lattice.Transition(1, state.Training))
	require.NoError(t, l.lattice.Transition(1, state.Grafting))
	require.NoError(t, l.lattice.SetAlpha(1, 0.5))
}

// On weights of zeros, which nobody has written, every kind starts as the identity at the first
// pass that computes with it, and it learns from there.
func TestKasminaFreshWeights(t *testing.T) {
	for name, newMachine := range machines {
		for _, recompute := range []bool{false, true} {
			for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				for kind := range blueprints.ChunkMLP + 1 {
					l := newStartLayer(t, dt, recompute)
					l.advance(t, kind, 2)
					machine := newMachine(t, l)
					require.NoError(t, machine.RunAll(), name)
					x, y := floats(t, l.x.Value()), floats(t, l.y.Value())
					require.InDeltaSlice(t, x, y, 1e-6, "%s, recomputed %v: %v", name, recompute, kind)
					w, a := floats(t, l.weights.Value()), floats(t, l.scales.Value())
					require.NotZero(t, a[2], "%s, recomputed %v: %v", name, recompute, kind)
					require.Equal(t, make([]float64, 16), w[:16], "other slots")
					require.Equal(t, []float64{0, 0}, a[:2], "other slots")
					require.NoError(t, machine.Close())
					if name != "tape" || recompute {
						continue
					}
					var learns float64
					for _, p := range []*gorgonia.Node{l.weights, l.scales} {
						grad, err := p.Grad()
						require.NoError(t, err)
						for _, v := range floats(t, grad) {
							learns += math.Abs(v)
						}
					}
					require.Positive(t, learns, kind)
				}
			}
		}
	}
}

// The start is the same in every run, another one in another layer or slot, and comes once: what
// anybody has written stays.
func TestKasminaFreshWeightsOnce(t *testing.T) {
	first := func(slot int, name string) []float64 {
		l := newStartLayer(t, tensor.Float64, false)
		gorgonia.WithName(name)(l.weights)
		l.advance(t, blueprints.LowRank, slot)
		require.NoError(t, tryRun(l.x.Graph()))
		return slices.Clone(floats(t, l.weights.Value())[8*slot:][:4])
	}
	require.Equal(t, first(2, "weights"), first(2, "weights"))
	require.NotEqual(t, first(2, "weights"), first(1, "weights"))
	require.NotEqual(t, first(2, "weights"), first(2, "other"))
	for i := range 3 { // a weight, a weight that the kind does not use, the scale
		l := newStartLayer(t, tensor.Float64, false)
		w, a := floats(t, l.weights.Value()), floats(t, l.scales.Value())
		*[]*float64{&w[16], &w[23], &a[2]}[i] = 1e-300
		before := append(slices.Clone(w), a...)
		l.advance(t, blueprints.AttentionGate, 2)
		require.NoError(t, tryRun(l.x.Graph()))
		require.Equal(t, before, append(slices.Clone(w), a...))
	}
}

// A registered kind's Identity that panics is an error of the run.
func TestKasminaFreshWeightsPanic(t *testing.T) {
	l := newStartLayer(t, tensor.Float64, false)
	kind, ok := blueprints.ByName("FaultyStart")
	if !ok {
		var err error
		kind, err = blueprints.Register(blueprints.Blueprint{Name: "FaultyStart",
			F32: faultyRule[float32](), F64: faultyRule[float64](),
			Identity: faultyIdentity})
		require.NoError(t, err)
	}
	l.advance(t, kind, 2)
	err := op.RunError(tryRun(l.x.Graph()))
	require.ErrorIs(t, err, op.ErrBlueprint)
	require.ErrorContains(t, err, "seed 1")
	require.ErrorContains(t, err, "FaultyStart")
}

func faultyIdentity([]float64, int, *rand.Rand) float64 { panic("boom") }
