package opcase

import (
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var siluMLP = gatedMLP("SiLUMLP", op.SiLUMLP, silu, stockSiLUMLP)

var geluMLP = gatedMLP("GELUMLP", op.GELUMLP, gelu, nil)

// gatedMLP returns the entry of a gated MLP with the given gate activation.
func gatedMLP(name string, build func(x, gate, up, down *gorgonia.Node) (*gorgonia.Node, error),
	gate func(float64) float64,
	stock func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error)) *Op {
	newCase := func(r *rand.Rand, rows, d, f int) Case {
		want := func(in []Input) []float64 {
			a := refLinear(in[0].Values, in[1].Values, rows, d, f)
			b := refLinear(in[0].Values, in[2].Values, rows, d, f)
			for i, v := range a {
				a[i] = gate(v) * b[i]
			}
			return refLinear(a, in[3].Values, rows, f, d)
		}
		return Case{In: []Input{Normal(r, rows, d), weight(r, f, d), weight(r, f, d),
			weight(r, d, f)}, Want: want, Size: want,
			Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return build(in[0], in[1], in[2], in[3])
			}}
	}

	return &Op{
		Name: name,
		Cases: func(r *rand.Rand) (cases []Case) {
			for _, s := range matrices {
				cases = append(cases, newCase(r, s[0], s[1], 1+r.IntN(40)))
			}
			return cases
		},
		Bench: &Bench{
			Shape: "rows, features, hidden", Small: []int{64, 32, 48}, Usual: []int{1024, 256, 704},
			Elements: sum(product(2, 0, 1), product(3, 1, 2), product(3, 0, 2)),
			FLOPs:    product(6, 0, 1, 2),
			Case: func(r *rand.Rand, s []int) (Case, error) {
				return newCase(r, s[0], s[1], s[2]), nil
			},
			Stock: stock,
		},
	}
}

func silu(v float64) float64 { return v / (1 + math.Exp(-v)) }

// gelu returns the tanh approximation of GELU.
func gelu(v float64) float64 {
	return v / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*v*v*v)))
}

// stockSiLUMLP computes (silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ.
func stockSiLUMLP(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) {
	var c chain
	a := c.do(func() (*gorgonia.Node, error) { return timesTransposed(in[0], in[1]) })
	b := c.do(func() (*gorgonia.Node, error) { return timesTransposed(in[0], in[2]) })
	s := c.do(func() (*gorgonia.Node, error) { return gorgonia.Sigmoid(a) })
	s = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(a, s) })
	s = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(s, b) })
	y := c.do(func() (*gorgonia.Node, error) { return timesTransposed(s, in[3]) })
	return y, c.err
}
