package cudaops

import (
	"context"
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

// failing is the identity, which a machine computes on the host. Before the gradient is computed,
// fault is called, and the computation fails with its error.
type failing struct {
	fault    *func() error
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
	if f.gradient {
		if err := (*f.fault)(); err != nil {
			return nil, err
		}
	}

	return gorgonia.CloneValue(in[0])
}
func (f failing) ReturnsPtr() bool      { return false }
func (f failing) CallsExtern() bool     { return false }
func (f failing) OverwritesInput() int  { return -1 }
func (f failing) WriteHash(h hash.Hash) { fmt.Fprintf(h, "failing %p %v", f.fault, f.gradient) }
func (f failing) Hashcode() uint32      { return 1 }
func (f failing) String() string        { return "failing" }
func (f failing) DiffWRT(int) []bool    { return []bool{true} }
func (f failing) SymDiff(_ gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	g, err := gorgonia.ApplyOp(failing{f.fault, true}, grad)
	return gorgonia.Nodes{g}, err
}

// newFailing returns a machine and its parameters. The machine accumulates gradients, and its backward
// pass calls fault twice on the host.
func newFailing(t *testing.T, fault *func() error) (*Machine, gorgonia.Nodes) {
	device, _ := openFake(t, fake.Config{})
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
		if i < 2 {
			h = gorgonia.Must(gorgonia.ApplyOp(failing{fault, false}, h))
		}
	}

	loss := gorgonia.Must(op.CrossEntropy(h, intNode(g, "targets", []int{0, 1, 3})))
	_, err := gorgonia.Grad(loss, weights...)
	require.NoError(t, err)

	return openMachine(t, device, g, WithParams(weights...), WithAccumulation()), weights
}

// TestFailedRunAddsNothing checks that a run which fails in an op on the host does not change the
// accumulated gradients, so that repeating it gives the sums of a run that did not fail.
func TestFailedRunAddsNothing(t *testing.T) {
	fault := func() error { return nil }
	m, weights := newFailing(t, &fault)
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
		fault = func() error { return errHostOp }
		require.ErrorIs(t, m.RunAll(), errHostOp)
		if i > 0 {
			require.Equal(t, want[i-1], sums())
		}

		fault = func() error { return nil }
		require.NoError(t, m.RunAll())
		require.Equal(t, want[i], sums())
	}
}

// TestCanceledRun checks that Run returns the cause of a cancellation, before the run as well as
// between two ops on the host, and that the machine runs again afterwards with the same sums.
func TestCanceledRun(t *testing.T) {
	calls := 0
	fault := func() error { calls++; return nil }
	m, weights := newFailing(t, &fault)
	require.NoError(t, m.Run(t.Context()))
	require.Equal(t, 2, calls)
	want := slices.Clone(flat(t, gathered(t, m, weights[0])))
	require.NoError(t, m.DropGradients())

	why := errors.New("the user has had enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	require.ErrorIs(t, m.Run(ctx), why)
	require.Equal(t, 2, calls, "a canceled run has computed something")

	ctx, cancel = context.WithCancelCause(t.Context())
	fault = func() error { calls++; cancel(why); return nil }
	require.ErrorIs(t, m.Run(ctx), why)
	require.Equal(t, 3, calls, "a canceled run continued with the next op on the host")

	fault = func() error { return nil }
	require.NoError(t, m.Run(t.Context()))
	require.Equal(t, want, flat(t, gathered(t, m, weights[0])))
}
