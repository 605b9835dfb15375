package opcase

import (
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/internal/splitmix"
	"github.com/kasmina-go/kasmina/op"
)

// adaptedLinear is a frozen linear layer with a low-rank adapter, x·wᵀ + s·(x·aᵀ)·bᵀ.
var adaptedLinear = &Op{
	Name: "AdaptedLinear",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, adaptedLinearCase(r, s[0], s[1], 1+r.IntN(40), 1+r.IntN(4)))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, in, out, rank", Small: []int{64, 96, 32, 4}, Usual: []int{1024, 256, 704, 16},
		Elements: sum(product(1, 0, 1), product(1, 1, 2), product(1, 0, 2)),
		FLOPs:    sum(product(2, 0, 1, 2), product(2, 0, 1, 3), product(2, 0, 3, 2)),
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return adaptedLinearCase(r, s[0], s[1], s[2], s[3]), nil
		},
	},
}

func adaptedLinearCase(r *rand.Rand, rows, in, out, rank int) Case {
	const scale = 2
	want := func(v []Input) []float64 {
		y := refLinear(v[0].Values, v[1].Values, rows, in, out)
		h := refLinear(v[0].Values, v[2].Values, rows, in, rank)
		for i, z := range refLinear(h, v[3].Values, rows, rank, out) {
			y[i] += scale * z
		}
		return y
	}

	return Case{In: []Input{Normal(r, rows, in), weight(r, out, in).frozen(), weight(r, rank, in),
		weight(r, out, rank)}, Want: want, Size: want,
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.AdaptedLinear(in[0], in[1], in[2], in[3], scale)
		}}
}

// rowNorms scales features by the factors of DoRA, m/‖w + s·b·a‖ for each row of w. Gradients treat the
// norms as constants.
var rowNorms = &Op{
	Name: "RowNorms",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			for _, scale := range []float64{0.5, 2} {
				cases = append(cases, rowNormsCase(r, s[0], s[1], 1+r.IntN(4), scale))
			}
		}
		return cases
	},
}

func rowNormsCase(r *rand.Rand, out, in, rank int, scale float64) Case {
	const rows = 3
	w, a, b := weight(r, out, in).frozen(), weight(r, rank, in).frozen(), weight(r, out, rank).frozen()
	for o := range out {
		// A norm is inaccurate if the whole row of w and s·b·a cancels, so the first element of w is the larger one.
		var product float64
		for k := range rank {
			product += math.Abs(b.Values[o*rank+k] * a.Values[k*in])
		}
		w.Values[o*in] = 1 + scale*product
	}

	return Case{Config: fmt.Sprint("scale ", scale), In: []Input{Normal(r, rows, out), Normal(r, out), w, a, b},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			var c chain
			f := c.do(func() (*gorgonia.Node, error) { return op.RowNorms(in[2], in[3], in[4], scale) })
			f = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardDiv(in[1], f) })
			y := c.do(func() (*gorgonia.Node, error) { return op.ScaleColumns(in[0], f) })
			return y, c.err
		},
		Want: func(v []Input) []float64 {
			y := make([]float64, rows*out)
			for o := range out {
				var squares float64
				for i := range in {
					sum := v[2].Values[o*in+i]
					for k := range rank {
						sum += scale * v[4].Values[o*rank+k] * v[3].Values[k*in+i]
					}
					squares += sum * sum
				}
				for row := range rows {
					y[row*out+o] = v[0].Values[row*out+o] * v[1].Values[o] / math.Sqrt(squares)
				}
			}
			return y
		},
		Loss: 50, // most of w and s·b·a may cancel
	}
}

var scaleColumns = &Op{
	Name: "ScaleColumns",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, scaleColumnsCase(r, s[0], s[1]))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, features", Small: []int{64, 48}, Usual: []int{1024, 1024},
		Elements: sum(product(2, 0, 1), product(1, 1)), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) { return scaleColumnsCase(r, s[0], s[1]), nil },
	},
}

func scaleColumnsCase(r *rand.Rand, rows, d int) Case {
	return Case{In: []Input{Normal(r, rows, d), Normal(r, d)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) { return op.ScaleColumns(in[0], in[1]) },
		Want: func(in []Input) []float64 {
			y := make([]float64, rows*d)
			for i, v := range in[0].Values {
				y[i] = v * in[1].Values[i%d]
			}
			return y
		}}
}

var dropout = &Op{
	Name: "Dropout",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			for _, p := range []float64{0, 0.1, 0.5} {
				cases = append(cases, dropoutCase(r, s[0], s[1], p))
			}
		}
		return cases
	},
}

func dropoutCase(r *rand.Rand, rows, d int, p float64) Case {
	const salt = 3
	return Case{Config: fmt.Sprint("p ", p), In: []Input{Normal(r, rows, d), ids(r, 1, 0, 1<<30)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.Dropout(in[0], in[1], p, salt)
		},
		Want: func(in []Input) []float64 {
			y := make([]float64, len(in[0].Values))
			key := splitmix.Mix(uint64(in[1].IDs[0])) ^ splitmix.Mix(salt)
			for i, v := range in[0].Values {
				if u := float64(splitmix.Mix(key+uint64(i))>>11) / (1 << 53); u >= p {
					y[i] = v / (1 - p)
				}
			}
			return y
		}}
}
