package graft_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op/graft"
)

// rig is a graph with random inputs.
type rig struct {
	*testing.T
	*rand.Rand
	g        *gorgonia.ExprGraph
	controls *gorgonia.Node
}

func newRig(t *testing.T, controls ...[graft.Controls]float64) *rig {
	seed := randtest.Seed(t)
	r := &rig{t, rand.New(rand.NewPCG(seed, 0)), gorgonia.NewGraph(), nil}
	var flat []float64
	for _, c := range controls {
		flat = append(flat, c[:]...)
	}
	r.controls = gorgonia.NodeFromAny(r.g, tensor.New(tensor.WithShape(len(controls),
		graft.Controls), tensor.WithBacking(flat)), gorgonia.WithName("controls"))
	return r
}

func (r *rig) input(name string, shape ...int) *gorgonia.Node {
	x := make([]float64, tensor.Shape(shape).TotalSize())
	for i := range x {
		x[i] = r.NormFloat64()
	}
	return gorgonia.NodeFromAny(r.g, tensor.New(tensor.WithShape(shape...),
		tensor.WithBacking(x)), gorgonia.WithName(name))
}

func (r *rig) must(n *gorgonia.Node, err error) *gorgonia.Node {
	r.Helper()
	require.NoError(r, err)
	return n
}

// cost returns Σ y ⊙ weights with random weights.
func (r *rig) cost(y *gorgonia.Node) *gorgonia.Node {
	return r.must(gorgonia.Sum(r.must(gorgonia.HadamardProd(y, r.input("weights",
		y.Shape()...)))))
}

// gradients returns the gradients of the cost with respect to nodes.
func (r *rig) gradients(cost *gorgonia.Node, of ...*gorgonia.Node) (all [][]float64) {
	d, err := gorgonia.Grad(cost, of...)
	require.NoError(r, err)
	m := gorgonia.NewTapeMachine(r.g)
	defer m.Close()
	require.NoError(r, m.RunAll())
	for _, n := range d {
		all = append(all, n.Value().Data().([]float64))
	}
	return all
}

// blueprint builds y from a host's x and a blueprint tanh(c·Isolate(x)) with the parameter c.
func (r *rig) blueprint(row graft.Row) (y, x, c *gorgonia.Node) {
	rows, d := 1+r.IntN(5), 1+r.IntN(7)
	x, c = r.input("x", rows, d), r.input("c", rows, d)
	in := r.must(graft.Isolate(x, row, graft.Inward))
	own := r.must(graft.Isolate(c, row, graft.Learning))
	t := r.must(gorgonia.Tanh(r.must(gorgonia.HadamardProd(in, own))))
	return r.must(graft.Blend(x, t, row)), x, c
}

// TestBlendMatchesDifferences compares the gradients of a blended blueprint with central differences.
func TestBlendMatchesDifferences(t *testing.T) {
	for range 10 {
		alpha := rand.Float64()
		r := newRig(t, [4]float64{}, [4]float64{alpha, alpha, 1, 1})
		y, x, c := r.blueprint(graft.Row{Of: r.controls, At: 1})
		report, err := autodiff.CheckGradients(r.cost(r.must(gorgonia.Tanh(y))),
			gorgonia.Nodes{x, c})
		require.NoError(t, err)
		require.True(t, report.OK(1e-6), "%v", report)
	}
}

// TestStages checks the output and the gradients for the controls of each stage.
func TestStages(t *testing.T) {
	const alpha = 0.3
	for name, s := range map[string][graft.Controls]float64{
		"training": {0, 1, 0, 1}, "grafting": {alpha, alpha, 1, 1},
		"evaluating": {alpha, alpha, 1, 0}, "fine-tuning": {1, 1, 1, 1}, "muted": {}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, s)
			y, x, c := r.blueprint(graft.Row{Of: r.controls})
			w := r.input("weights", y.Shape()...)
			var blended gorgonia.Value
			gorgonia.Read(y, &blended)
			d := r.gradients(r.must(gorgonia.Sum(r.must(gorgonia.HadamardProd(y, w)))), x, c)
			out, xs, cs := blended.Data().([]float64), x.Value().Data().([]float64),
				c.Value().Data().([]float64)
			for i, g := range w.Value().Data().([]float64) {
				h := math.Tanh(xs[i] * cs[i])
				slope := 1 - h*h
				require.InDelta(t, xs[i]+s[0]*h, out[i], 1e-12)
				require.InDelta(t, g+s[1]*s[2]*g*slope*cs[i], d[0][i], 1e-12)
				require.InDelta(t, s[1]*s[3]*g*slope*xs[i], d[1][i], 1e-12)
			}
		})
	}
}

// TestIsolationIsWhole checks that a blueprint with non-finite output doesn't affect the host's
// output.
func TestIsolationIsWhole(t *testing.T) {
	r := newRig(t, [4]float64{0, 1, 0, 1})
	row := graft.Row{Of: r.controls}
	x, bad := r.input("x", 2, 3), r.input("bad", 2, 3)
	bad.Value().Data().([]float64)[1] = math.NaN()
	y := r.must(graft.Blend(x, bad, row))
	a, b := r.input("a", 1, 3), r.input("b", 2, 1)
	a.Value().Data().([]float64)[0] = math.Inf(1)
	w := r.must(graft.LowRank(x, a, b, row, 1))
	var blended, summed gorgonia.Value
	gorgonia.Read(y, &blended)
	gorgonia.Read(w, &summed)
	r.gradients(r.cost(r.must(gorgonia.Add(y, w))), x)
	require.Equal(t, x.Value().Data(), blended.Data())
	require.Equal(t, x.Value().Data(), summed.Data())
}

// TestLowRank compares the gradients with central differences where the output depends on a and b, and
// checks the formula where a and b are isolated or frozen.
func TestLowRank(t *testing.T) {
	for range 10 {
		alpha, scale := rand.Float64(), rand.NormFloat64()
		r := newRig(t, [4]float64{alpha, alpha, 1, 1})
		out, in, rank := 1+r.IntN(6), 1+r.IntN(6), 1+r.IntN(3)
		w, a, b := r.input("w", out, in), r.input("a", rank, in), r.input("b", out, rank)
		y := r.must(graft.LowRank(w, a, b, graft.Row{Of: r.controls}, scale))
		report, err := autodiff.CheckGradients(r.cost(r.must(gorgonia.Tanh(y))),
			gorgonia.Nodes{w, a, b})
		require.NoError(t, err)
		require.True(t, report.OK(1e-6), "%v", report)
	}

	// Isolated, a and b receive the same gradients as for α = 1.
	gradients := func(s [graft.Controls]float64) [][]float64 {
		r := &rig{t, rand.New(rand.NewPCG(1, 2)), gorgonia.NewGraph(), nil}
		r.controls = gorgonia.NodeFromAny(r.g, tensor.New(tensor.WithShape(1, graft.Controls),
			tensor.WithBacking(s[:])), gorgonia.WithName("controls"))
		w, a, b := r.input("w", 3, 4), r.input("a", 2, 4), r.input("b", 3, 2)
		y := r.must(graft.LowRank(w, a, b, graft.Row{Of: r.controls}, 0.5))
		return r.gradients(r.cost(y), w, a, b)
	}

	full := gradients([4]float64{1, 1, 1, 1})
	require.Equal(t, full, gradients([4]float64{0, 1, 0, 1}))
	frozen := gradients([4]float64{0.3, 0.3, 1, 0})
	require.Equal(t, full[0], frozen[0])
	require.Equal(t, make([]float64, len(full[1])), frozen[1])
	require.Equal(t, make([]float64, len(full[2])), frozen[2])
}

func TestErrors(t *testing.T) {
	r := newRig(t, [4]float64{})
	x, w := r.input("x", 2, 3), r.input("w", 3, 2)
	row := graft.Row{Of: r.controls}
	other := gorgonia.NewMatrix(gorgonia.NewGraph(), tensor.Float64, gorgonia.WithShape(2, 3))
	narrow := gorgonia.NewMatrix(r.g, tensor.Float32, gorgonia.WithShape(2, 3))
	for name, f := range map[string]func() (*gorgonia.Node, error){
		"nil": func() (*gorgonia.Node, error) { return graft.Isolate(nil, row, graft.Inward) },
		"row": func() (*gorgonia.Node, error) {
			return graft.Blend(x, x, graft.Row{Of: r.controls, At: 1})
		},
		"controls": func() (*gorgonia.Node, error) { return graft.Blend(x, x, graft.Row{Of: x}) },
		"control":  func() (*gorgonia.Node, error) { return graft.Isolate(x, row, graft.Controls) },
		"shape":    func() (*gorgonia.Node, error) { return graft.Blend(x, w, row) },
		"graph":    func() (*gorgonia.Node, error) { return graft.Blend(x, other, row) },
		"type":     func() (*gorgonia.Node, error) { return graft.Blend(x, narrow, row) },
		"low rank": func() (*gorgonia.Node, error) { return graft.LowRank(x, x, x, row, 1) },
		"scale": func() (*gorgonia.Node, error) {
			return graft.LowRank(x, r.input("a", 1, 3), r.input("b", 2, 1), row, math.Inf(1))
		},
		"no matrix": func() (*gorgonia.Node, error) { return graft.Isolate(x, graft.Row{}, graft.Inward) },
	} {
		_, err := f()
		require.Error(t, err, name)
	}
}
