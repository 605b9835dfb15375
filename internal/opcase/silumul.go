package opcase

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var siluMul = gate("SiLUMul", op.SiLUMul, silu, stockSiLUMul)

var geluMul = gate("GELUMul", op.GELUMul, gelu, nil)

// gate returns the entry of f(a) ⊙ b.
func gate(name string, build func(a, b *gorgonia.Node) (*gorgonia.Node, error), f func(float64) float64,
	stock func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error)) *Op {
	newCase := func(r *rand.Rand, rows, d int) Case {
		return Case{In: []Input{Normal(r, rows, d), Normal(r, rows, d)},
			Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return build(in[0], in[1]) },
			Want: func(in []Input) []float64 {
				y := mapped(in[0].Values, f)
				for i, v := range in[1].Values {
					y[i] *= v
				}
				return y
			}}
	}

	return &Op{
		Name: name,
		Cases: func(r *rand.Rand) (cases []Case) {
			for _, s := range append(matrices, [2]int{9, 600}) {
				cases = append(cases, newCase(r, s[0], s[1]))
			}
			return cases
		},
		Bench: &Bench{
			Shape: "rows, features", Small: []int{64, 48}, Usual: []int{1024, 704},
			Elements: product(3, 0, 1), FLOPs: noFLOPs,
			Case:  func(r *rand.Rand, s []int) (Case, error) { return newCase(r, s[0], s[1]), nil },
			Stock: stock,
		},
	}
}

// stockSiLUMul is silu(a) ⊙ b.
func stockSiLUMul(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) {
	var c chain
	y := c.do(func() (*gorgonia.Node, error) { return gorgonia.Sigmoid(in[0]) })
	y = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(in[0], y) })
	y = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(y, in[1]) })
	return y, c.err
}
