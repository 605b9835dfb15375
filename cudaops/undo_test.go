package cudaops

import (
	"errors"
	"fmt"
	"hash"
	"slices"
	"testing"

	"github.com/chewxy/hm"
	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver/fake"
	"github.com/kasmina-go/kasmina/op"
)

// failing is the identity, which a machine computes on the host. The computation of its gradient
// fails when it is told to.
type failing struct {
	fails    *bool
	gradient bool
}

var errHostOp = errors.New("the op fails")

func (f failing) Arity() int { return 1 }
func (f failing) Type() hm.Type {
	a := hm.TypeVariable('a')
	return hm.NewFnType(a, a)
}
func (f failing) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (f failing) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	if f.gradient && *f.fails {
		return nil, errHostOp
	}
	return gorgonia.CloneValue(in[0])
}
func (f failing) ReturnsPtr() bool      { return false }
func (f failing) CallsExtern() bool     { return false }
func (f failing) OverwritesInput() int  { return -1 }
func (f failing) WriteHash(h hash.Hash) { fmt.Fprintf(h, "failing %p %v", f.fails, f.gradient) }
func (f failing) Hashcode() uint32      { return 1 }
func (f failing) String() string        { return "failing" }
func (f failing) DiffWRT(int) []bool    { return []bool{true} }
func (f failing) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	g, err := gorgonia.ApplyOp(failing{f.fails, true}, grad)
	return gorgonia.Nodes{g}, err
}

// TestFailedRunAddsNothing wants a run that an op on the host ends to leave gathered gradients as
// they were, so that the next run adds to nothing of it.
func TestFailedRunAddsNothing(t *testing.T) {
	device, _ := openFake(t, fake.Config{})
	fails := false
	g := gorgonia.NewGraph()
	input := func(name string, shape ...int) *gorgonia.Node {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = float32(i%5)/4 - 0.5
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(x)), gorgonia.WithName(name))
	}
	h := input("x", 3, 4)
	weights := gorgonia.Nodes{input("a", 4, 4), input("b", 4, 4), input("c", 4, 4)}
	for i, w := range weights {
		h = gorgonia.Must(gorgonia.Tanh(gorgonia.Must(op.Linear(h, w))))
		if i == 0 {
			h = gorgonia.Must(gorgonia.ApplyOp(failing{&fails, false}, h))
		}
	}
	loss := gorgonia.Must(op.CrossEntropy(h, intNode(g, "targets", []int{0, 1, 3})))
	_, err := gorgonia.Grad(loss, weights...)
	require.NoError(t, err)
	m := openMachine(t, device, g, WithParams(weights...), WithAccumulation())
	sums := func() (all [][]float32) {
		for _, w := range weights {
			all = append(all, slices.Clone(flat(t, gathered(t, m, w))))
		}
		return all
	}
	var want [][][]float32
	for range 3 {
		require.NoError(t, m.RunAll())
		want = append(want, sums())
	}
	require.NoError(t, m.DropGradients())
	for i := range want {
		fails = true
		require.ErrorIs(t, m.RunAll(), errHostOp)
		if i > 0 {
			require.Equal(t, want[i-1], sums())
		}
		fails = false
		require.NoError(t, m.RunAll())
		require.Equal(t, want[i], sums())
	}
}
