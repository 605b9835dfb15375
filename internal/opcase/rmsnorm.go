package opcase

import (
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

// normEps is the epsilon of all timed norms and of most tested ones.
const normEps = 1e-5

var rmsNorm = &Op{
	Name: "RMSNorm",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			rows, d, heads := s[0], s[1], 1+r.IntN(4)
			cases = append(cases,
				rmsNormCase("", r, rows, d, 1, normEps),
				rmsNormCase("eps 0.5", r, rows, d, 1, 0.5),
				rmsNormCase("1+weight", r, rows, d, 1, normEps, op.WeightPlusOne()),
				rmsNormCase("heads, 1+weight", r, rows, d, heads, normEps, op.EachHead(),
					op.WeightPlusOne()))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, features", Small: []int{64, 96}, Usual: []int{1024, 1024},
		Elements: product(2, 0, 1), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return rmsNormCase("", r, s[0], s[1], 1, normEps), nil
		},
		Stock: stockRMSNorm,
	},
}

// rmsNormCase returns a case in which each row consists of the given number of heads of d features. If there
// are options, they must include op.WeightPlusOne.
func rmsNormCase(config string, r *rand.Rand, rows, d, heads int, eps float64,
	opts ...op.RMSNormOption) Case {
	offset := 0.0
	if len(opts) > 0 {
		offset = 1
	}

	return Case{Config: config, In: []Input{Normal(r, rows, heads*d), Normal(r, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.RMSNorm(in[0], in[1], eps, opts...)
		},
		Want: func(in []Input) []float64 {
			x, w := in[0].Values, in[1].Values
			y := make([]float64, len(x))
			for row := range rows * heads {
				var meanSquare float64
				for _, v := range x[row*d:][:d] {
					meanSquare += v * v / float64(d)
				}

				for i := range d {
					y[row*d+i] = x[row*d+i] / math.Sqrt(meanSquare+eps) * (offset + w[i])
				}
			}
			return y
		}}
}

// stockRMSNorm computes x / sqrt(mean(x²) + eps) ⊙ w.
func stockRMSNorm(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) {
	var c chain
	x, w := in[0], in[1]
	n := c.do(func() (*gorgonia.Node, error) { return gorgonia.Square(x) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Mean(n, 1) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Add(n, number(x, normEps)) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Sqrt(n) })
	n = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardDiv(x, n, nil, []byte{1})
	})
	n = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardProd(n, w, nil, []byte{0})
	})
	return n, c.err
}
