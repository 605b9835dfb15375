package cpuops_test

import (
	"errors"
	"fmt"
	"hash"
	"slices"
	"testing"
	"time"

	"github.com/chewxy/hm"
	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
)

// cancelAfter is a context that is canceled after n calls of Err.
type cancelAfter struct {
	n    int
	done chan struct{}
}

var errCanceled = errors.New("ended")

func (c *cancelAfter) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c *cancelAfter) Done() <-chan struct{}       { return c.done }
func (c *cancelAfter) Value(any) any               { return nil }
func (c *cancelAfter) Err() error {
	if c.n--; c.n < 0 {
		return errCanceled
	}
	return nil
}

// failing is the identity function. Its gradient fails or panics if how is "error" or "panic".
type failing struct {
	how      *string
	gradient bool
}

var errOp = errors.New("the op fails")

func (f failing) Arity() int { return 1 }
func (f failing) Type() hm.Type {
	a := hm.TypeVariable('a')
	return hm.NewFnType(a, a)
}
func (f failing) InferShape(in ...gorgonia.DimSizer) (tensor.Shape, error) {
	return in[0].(tensor.Shape).Clone(), nil
}
func (f failing) Do(in ...gorgonia.Value) (gorgonia.Value, error) {
	switch {
	case f.gradient && *f.how == "error":
		return nil, errOp
	case f.gradient && *f.how == "panic":
		panic(errOp)
	}
	return gorgonia.CloneValue(in[0])
}
func (f failing) ReturnsPtr() bool          { return false }
func (f failing) CallsExtern() bool         { return false }
func (f failing) OverwritesInput() int      { return -1 }
func (f failing) WriteHash(h hash.Hash)     { fmt.Fprintf(h, "failing %p %v", f.how, f.gradient) }
func (f failing) Hashcode() uint32          { return 1 }
func (f failing) String() string            { return "failing" }
func (f failing) DiffWRT(inputs int) []bool { return []bool{true} }
func (f failing) SymDiff(in gorgonia.Nodes, _, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	g, err := gorgonia.ApplyOp(failing{f.how, true}, grad)
	return gorgonia.Nodes{g}, err
}

// chain returns a machine for three layers, with a failing op after the first, that computes the
// gradients of all weights. It also returns the number of nodes.
func chain(t *testing.T, dt tensor.Dtype, how *string) (*cpuops.Machine, int) {
	t.Helper()
	g := gorgonia.NewGraph()
	input := func(name string, from float64, shape ...int) *gorgonia.Node {
		x := make([]float64, tensor.Shape(shape).TotalSize())
		for i := range x {
			x[i] = from + float64(i%3)
		}
		var data any = x
		if dt == tensor.Float32 {
			narrow := make([]float32, len(x))
			for i, v := range x {
				narrow[i] = float32(v)
			}
			data = narrow
		}
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(shape...),
			tensor.WithBacking(data)), gorgonia.WithName(name))
	}

	x := input("x", 1, 3, 4)
	weights := gorgonia.Nodes{input("a", -.5, 4, 4), input("b", .25, 4, 4), input("c", -1, 4, 4)}
	h := x
	for i, w := range weights {
		h = gorgonia.Must(gorgonia.Tanh(gorgonia.Must(op.Linear(h, w))))
		if i == 0 {
			h = gorgonia.Must(gorgonia.ApplyOp(failing{how, false}, h))
		}
	}

	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Square(h))))
	_, err := gorgonia.Grad(cost, weights...)
	require.NoError(t, err)
	m, err := cpuops.NewMachine(g, cpuops.WithParams(weights...))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m, len(g.AllNodes())
}

// sumsOf returns copies of the sums of all gradients.
func sumsOf(t *testing.T, m *cpuops.Machine) (all []any) {
	t.Helper()
	for _, p := range m.ValueGrads() {
		g, err := p.Grad()
		require.NoError(t, err)
		switch x := g.Data().(type) {
		case []float32:
			all = append(all, slices.Clone(x))
		case []float64:
			all = append(all, slices.Clone(x))
		}
	}

	return all
}

// TestFailedRunAddsNothing checks that a canceled, failed or panicking run does not change the sums of
// gradients, whether they are zero or contain earlier runs, and that the next run adds the same gradients
// as without the failure.
func TestFailedRunAddsNothing(t *testing.T) {
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		how := ""
		plain, steps := chain(t, dt, &how)
		var want []any // by the number of successful runs
		for range 3 {
			want = append(want, sumsOf(t, plain))
			require.NoError(t, plain.RunAll())
		}
		for runs := range 2 {
			for _, kind := range []string{"canceled", "error", "panic"} {
				partly := 0
				for n := range 2 * steps {
					what := fmt.Sprintf("%v, %d runs, then one %s at %d", dt, runs, kind, n)
					m, _ := chain(t, dt, &how)
					for range runs {
						require.NoError(t, m.RunAll())
					}
					switch kind {
					case "canceled":
						if m.Run(&cancelAfter{n, make(chan struct{})}) == nil {
							n = 2 * steps // the run was complete before
						}
					case "error":
						how = "error"
						require.ErrorIs(t, m.RunAll(), errOp)
					case "panic":
						how = "panic"
						require.Panics(t, func() { _ = m.RunAll() })
					}
					how = ""
					if n == 2*steps {
						break
					}
					partly++
					require.Equal(t, want[runs], sumsOf(t, m), what)
					require.NoError(t, m.RunAll())
					require.Equal(t, want[runs+1], sumsOf(t, m), what)
					if kind != "canceled" {
						break
					}
				}
				require.NotZero(t, partly)
			}
		}
	}
}
