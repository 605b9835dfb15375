package opcase

import (
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var bias = &Op{
	Name: "Bias",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, biasCase(r, s[0], s[1]))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, features", Small: []int{64, 48}, Usual: []int{1024, 1024},
		Elements: sum(product(2, 0, 1), product(1, 1)), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) { return biasCase(r, s[0], s[1]), nil },
		Stock: func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error) {
			row, err := gorgonia.Reshape(in[1], []int{1, shape[1]})
			if err != nil {
				return nil, err
			}
			return gorgonia.BroadcastAdd(in[0], row, nil, []byte{0})
		},
	},
}

func biasCase(r *rand.Rand, rows, d int) Case {
	return Case{In: []Input{Normal(r, rows, d), Normal(r, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.Bias(in[0], in[1]) },
		Want: func(in []Input) []float64 {
			y := slices.Clone(in[0].Values)
			for i := range y {
				y[i] += in[1].Values[i%d]
			}
			return y
		}}
}

var linear = &Op{
	Name: "Linear",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, linearCase(r, s[0], s[1], 1+r.IntN(9)))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, in, out", Small: []int{64, 96, 32}, Usual: []int{1024, 256, 704},
		Elements: sum(product(1, 0, 1), product(1, 1, 2), product(1, 0, 2)),
		FLOPs:    product(2, 0, 1, 2),
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return linearCase(r, s[0], s[1], s[2]), nil
		},
		Stock: func(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) {
			return timesTransposed(in[0], in[1])
		},
	},
}

func linearCase(r *rand.Rand, rows, in, out int) Case {
	want := func(a []Input) []float64 {
		return refLinear(a[0].Values, a[1].Values, rows, in, out)
	}
	return Case{In: []Input{Normal(r, rows, in), weight(r, out, in)}, Want: want, Size: want,
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.Linear(in[0], in[1]) }}
}

// linearAdd is a linear layer and a sum, which machines compute in one step.
var linearAdd = &Op{
	Name: "LinearAdd",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, linearAddCase(r, s[0], s[1], 1+r.IntN(9)))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, in, out", Small: []int{64, 96, 32}, Usual: []int{1024, 704, 256},
		Elements: sum(product(1, 0, 1), product(1, 1, 2), product(2, 0, 2)),
		FLOPs:    product(2, 0, 1, 2),
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return linearAddCase(r, s[0], s[1], s[2]), nil
		},
		Stock: func(in gorgonia.Nodes, _ []int) (*gorgonia.Node, error) {
			y, err := timesTransposed(in[0], in[1])
			if err != nil {
				return nil, err
			}
			return gorgonia.Add(y, in[2])
		},
	},
}

func linearAddCase(r *rand.Rand, rows, in, out int) Case {
	want := func(a []Input) []float64 {
		y := refLinear(a[0].Values, a[1].Values, rows, in, out)
		for i, v := range a[2].Values {
			y[i] += v
		}
		return y
	}

	return Case{In: []Input{Normal(r, rows, in), weight(r, out, in), Normal(r, rows, out)},
		Want: want, Size: want,
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			y, err := op.Linear(in[0], in[1])
			if err != nil {
				return nil, err
			}
			return gorgonia.Add(y, in[2])
		}}
}

// frozenLinear is a linear layer whose weight has no gradient.
var frozenLinear = &Op{
	Name: "FrozenLinear",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			c := linearCase(r, s[0], s[1], 1+r.IntN(9))
			c.In[1] = c.In[1].frozen()
			c.Build = func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return op.FrozenLinear(in[0], in[1])
			}
			cases = append(cases, c)
		}
		return cases
	},
}

// timesTransposed computes x·wᵀ with Gorgonia's own ops.
func timesTransposed(x, w *gorgonia.Node) (*gorgonia.Node, error) {
	t, err := gorgonia.Transpose(w)
	if err != nil {
		return nil, err
	}
	return gorgonia.Mul(x, t)
}

// refLinear returns x·wᵀ for x [rows, in] and w [out, in].
func refLinear(x, w []float64, rows, in, out int) []float64 {
	y := make([]float64, rows*out)
	for r := range rows {
		for o := range out {
			for i := range in {
				y[r*out+o] += x[r*in+i] * w[o*in+i]
			}
		}
	}
	return y
}
