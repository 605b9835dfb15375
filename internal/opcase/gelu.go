package opcase

import (
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

// geluOp is GELU without a gate; gelu is its formula.
var geluOp = &Op{
	Name: "GELU",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range append(matrices, [2]int{9, 600}) {
			cases = append(cases, geluCase(r, s[0], s[1]))
		}

		large := geluCase(r, 4, 8)
		large.Config = "far from 0"
		for i := range large.In[0].Values {
			large.In[0].Values[i] *= []float64{10, 1e2, 1e3, 1e4}[i%4]
		}
		return append(cases, large)
	},
	Bench: &Bench{
		Shape: "rows, features", Small: []int{64, 48}, Usual: []int{1024, 1024},
		Elements: product(2, 0, 1), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) { return geluCase(r, s[0], s[1]), nil },
	},
}

func geluCase(r *rand.Rand, rows, d int) Case {
	return Case{In: []Input{Normal(r, rows, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.GELU(in[0]) },
		Want:  func(in []Input) []float64 { return mapped(in[0].Values, gelu) }}
}
