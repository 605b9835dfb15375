package opcase

import (
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var layerNorm = &Op{
	Name: "LayerNorm",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range append(matrices, [2]int{33, 264}) {
			cases = append(cases, layerNormCase("", r, s[0], s[1], normEps),
				layerNormCase("eps 0.5", r, s[0], s[1], 0.5))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, features", Small: []int{64, 96}, Usual: []int{1024, 1024},
		Elements: product(2, 0, 1), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return layerNormCase("", r, s[0], s[1], normEps), nil
		},
		Stock: stockLayerNorm,
	},
}

func layerNormCase(config string, r *rand.Rand, rows, d int, eps float64) Case {
	return Case{Config: config, In: []Input{Normal(r, rows, d), Normal(r, d), Normal(r, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.LayerNorm(in[0], in[1], in[2], eps)
		},
		Want: func(in []Input) []float64 {
			x, w, b := in[0].Values, in[1].Values, in[2].Values
			y := make([]float64, len(x))
			for row := range rows {
				var mean, variance float64
				for _, v := range x[row*d:][:d] {
					mean += v / float64(d)
				}
				for _, v := range x[row*d:][:d] {
					variance += (v - mean) * (v - mean) / float64(d)
				}

				for i := range d {
					y[row*d+i] = (x[row*d+i]-mean)/math.Sqrt(variance+eps)*w[i] + b[i]
				}
			}
			return y
		}}
}

// stockLayerNorm computes (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) ⊙ w + b.
func stockLayerNorm(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error) {
	var c chain
	x, w, b := in[0], in[1], in[2]
	m := c.do(func() (*gorgonia.Node, error) { return gorgonia.Mean(x, 1) })
	x = c.do(func() (*gorgonia.Node, error) { return gorgonia.BroadcastSub(x, m, nil, []byte{1}) })
	n := c.do(func() (*gorgonia.Node, error) { return gorgonia.Square(x) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Mean(n, 1) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Add(n, number(w, normEps)) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.Sqrt(n) })

	n = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardDiv(x, n, nil, []byte{1})
	})
	n = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.BroadcastHadamardProd(n, w, nil, []byte{0})
	})
	row := c.do(func() (*gorgonia.Node, error) { return gorgonia.Reshape(b, []int{1, shape[1]}) })
	n = c.do(func() (*gorgonia.Node, error) { return gorgonia.BroadcastAdd(n, row, nil, []byte{0}) })
	return n, c.err
}
