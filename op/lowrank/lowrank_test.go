package lowrank

import (
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
)

const rows, in, out = 9, 5, 7

// numbers returns random numbers.
func numbers(t *testing.T, n int) []float64 {
	r := randtest.New(t)
	x := make([]float64, n)
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return x
}

// fewAdapters returns adapters of different ranks, with and without factors, and a nil adapter.
func fewAdapters(t *testing.T) []*Adapter {
	return []*Adapter{{Rank: 2, Scale: 0.5, A: numbers(t, 2*in), B: numbers(t, 2*out)}, nil,
		{Rank: 3, Scale: 2, A: numbers(t, 3*in), B: numbers(t, 3*out), Factors: numbers(t, out)}}
}

// TestAdd checks rows with different adapters against the formula.
func TestAdd(t *testing.T) {
	all := fewAdapters(t)
	x, y := numbers(t, rows*in), numbers(t, rows*out)
	s := &Selection{}
	g := gorgonia.NewGraph()
	node := func(v []float64, width int, name string) *gorgonia.Node {
		return gorgonia.NodeFromAny(g, tensor.New(tensor.WithShape(rows, width), tensor.WithBacking(v)),
			gorgonia.WithName(name))
	}
	z, err := Add(node(x, in, "x"), node(y, out, "y"), all, s)
	require.NoError(t, err)
	m := gorgonia.NewTapeMachine(g)
	defer m.Close()

	for _, selected := range [][]int{{}, {0, 0, 2, 2, 2, -1, 1, 0, 2}, {2, 2, 2, 2, 2, 2, 2, 2, 2}, {-1, 0}} {
		s.Set(selected)
		m.Reset()
		require.NoError(t, m.RunAll())
		have := z.Value().Data().([]float64)
		for r := range rows {
			var a *Adapter
			if r < len(selected) && selected[r] >= 0 {
				a = all[selected[r]]
			}
			for o := range out {
				want := y[r*out+o]
				if a != nil {
					for k := range a.Rank {
						h := 0.0
						for i := range in {
							h += x[r*in+i] * a.A.([]float64)[k*in+i]
						}
						want += a.Scale * h * a.B.([]float64)[o*a.Rank+k]
					}
					if a.Factors != nil {
						want *= a.Factors.([]float64)[o]
					}
				}
				require.InDelta(t, want, have[r*out+o], 1e-12, "row %d of %v", r, selected)
			}
		}
	}

	s.Set([]int{3})
	m.Reset()
	require.ErrorContains(t, m.RunAll(), "row 0 has adapter 3 of 3")
	_, err = z.Op().(*AddOp).SymDiff(nil, nil, nil)
	require.ErrorContains(t, err, "has no gradient")
}

func TestAddErrors(t *testing.T) {
	g := gorgonia.NewGraph()
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(rows, in), gorgonia.WithName("x"))
	y := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(rows, out), gorgonia.WithName("y"))
	narrow := gorgonia.NewMatrix(g, tensor.Float32, gorgonia.WithShape(rows, out), gorgonia.WithName("narrow"))
	s := &Selection{}
	for want, f := range map[string]func() (*gorgonia.Node, error){
		"the selection is nil":  func() (*gorgonia.Node, error) { return Add(x, y, nil, nil) },
		"want floats of one":    func() (*gorgonia.Node, error) { return Add(x, narrow, nil, s) },
		"adapter 0: rank 0":     func() (*gorgonia.Node, error) { return Add(x, y, []*Adapter{{}}, s) },
		"do not fit a layer of": func() (*gorgonia.Node, error) { return Add(y, x, fewAdapters(t), s) },
	} {
		_, err := f()
		require.ErrorContains(t, err, want)
	}
}
