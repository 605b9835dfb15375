//go:build cuda

package cuinterop_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// doerGraph is a small model with gradients that uses only this module's ops.
type doerGraph struct {
	g              *gorgonia.ExprGraph
	inputs, params gorgonia.Nodes
	loss           *gorgonia.Node
}

func newDoerGraph(t *testing.T, seed uint64) *doerGraph {
	t.Helper()
	const rows, vocab, seeds, chunk, dim = 12, 19, 8, 3, 24
	d := &doerGraph{g: gorgonia.NewGraph()}
	r := rand.New(rand.NewPCG(seed, 9))
	input := func(name string, shape ...int) *gorgonia.Node {
		n := gorgonia.NewTensor(d.g, tensor.Float32, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithInit(func(tensor.Dtype, ...int) any {
				x := make([]float32, opbase.Size(shape))
				for i := range x {
					x[i] = float32(r.NormFloat64())
				}
				return x
			}))
		d.params = append(d.params, n)
		return n
	}

	ids := func(name string) *gorgonia.Node {
		x := make([]int, rows)
		for i := range x {
			x[i] = r.IntN(vocab)
		}
		n := gorgonia.NewVector(d.g, tensor.Int, gorgonia.WithShape(rows), gorgonia.WithName(name),
			gorgonia.WithValue(tensor.New(tensor.WithShape(rows), tensor.WithBacking(x))))
		d.inputs = append(d.inputs, n)
		return n
	}

	must := gorgonia.Must
	lattice, err := state.NewLattice(seeds, dim, state.WithoutGates())
	require.NoError(t, err)
	for i := range seeds - 1 {
		require.NoError(t, lattice.RequestGermination(i,
			state.GerminationRequest{Slot: 1 + i%4}))
		for _, s := range []state.Stage{state.Training, state.Grafting}[:i%3] {
			require.NoError(t, lattice.Transition(i, s))
		}
	}

	x := must(op.Embedding(ids("ids"), input("table", vocab, dim)))
	x = must(op.RMSNorm(x, input("norm", dim), 1e-5))
	x = must(op.Kasmina(x, input("weights", 6, chunk), input("scales", 6), lattice))
	x = must(op.SiLUMLP(x, input("gate", 40, dim), input("up", 40, dim), input("down", dim, 40)))
	d.loss = must(op.LinearCrossEntropy(x, input("head", vocab, dim), ids("targets")))
	_, err = gorgonia.Grad(d.loss, d.params...)
	require.NoError(t, err)
	return d
}

// TestCUDADoers runs a model on Gorgonia's own CUDA machine, which copies inputs, constants and results
// by itself, and compares it with a Machine.
func TestCUDADoers(t *testing.T) {
	device, err := cudaops.Open()
	if errors.Is(err, cudaops.ErrNoDevice) {
		t.Skip("needs an NVIDIA GPU: ", err)
	}

	require.NoError(t, err)
	defer device.Close()
	seed := randtest.Seed(t)
	ours, theirs := newDoerGraph(t, seed), newDoerGraph(t, seed)
	for _, n := range theirs.g.AllNodes() {
		if _, ok := n.Op().(gorgonia.CUDADoer); n.Op() != nil && !graph.IsConstant(n) && !ok {
			t.Fatalf("%v is not a CUDADoer", n)
		}
	}

	m, err := cudaops.NewMachine(device, ours.g, cudaops.WithParams(ours.params...),
		cudaops.WithOutputs(ours.loss), cudaops.WithStrict())
	require.NoError(t, err)
	defer m.Close()
	read := make([]gorgonia.Value, len(theirs.params)+1)
	gorgonia.Read(theirs.loss, &read[0])
	for i, p := range theirs.params {
		gorgonia.Read(p.Deriv(), &read[1+i])
	}

	vm := gorgonia.NewTapeMachine(theirs.g)
	for step := range 3 {
		require.NoError(t, m.RunAll())
		require.NoError(t, vm.RunAll())
		vm.Reset()
		results := gorgonia.Nodes{ours.loss}
		for _, p := range ours.params {
			results = append(results, p.Deriv())
		}
		for i, n := range results {
			v, err := m.Value(n)
			require.NoError(t, err)
			require.Less(t, relativeError(read[i], v), 1e-5, "step %d: result %d", step, i)
		}
	}

	t.Log("all compared")
	require.NoError(t, vm.Close())
}

// relativeError returns ‖got − want‖/‖want‖, or NaN if an element is NaN.
func relativeError(got, want gorgonia.Value) float64 {
	numbers := func(v gorgonia.Value) []float32 {
		if x, ok := v.Data().(float32); ok {
			return []float32{x}
		}
		return v.Data().([]float32)
	}

	var diff, norm float64
	for i, w := range numbers(want) {
		d := float64(numbers(got)[i]) - float64(w)
		diff, norm = diff+d*d, norm+float64(w)*float64(w)
	}

	if diff == 0 {
		return 0
	}

	return math.Sqrt(diff / norm)
}
