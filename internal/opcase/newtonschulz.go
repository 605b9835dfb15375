package opcase

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

// muonSteps is the number of steps that Muon takes.
const muonSteps = 5

var newtonSchulz = &Op{
	Name: "NewtonSchulz",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, newtonSchulzCase(r, s[0], s[1], muonSteps))
		}
		return append(cases, newtonSchulzCase(r, 7, 4, muonSteps), newtonSchulzCase(r, 5, 5, 2))
	},
	Bench: &Bench{
		Shape: "rows, columns", Small: []int{32, 48}, Usual: []int{256, 704},
		Elements: product(2, 0, 1),
		// Three products a step: X·Xᵀ, A² and the polynomial with X.
		FLOPs: func(shape []int) float64 {
			m, n := float64(min(shape[0], shape[1])), float64(max(shape[0], shape[1]))
			return muonSteps * (4*m*m*n + 2*m*m*m)
		},
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return newtonSchulzCase(r, s[0], s[1], muonSteps), nil
		},
	},
}

func newtonSchulzCase(r *rand.Rand, rows, columns, steps int) Case {
	return Case{Config: fmt.Sprintf("%d steps", steps), In: []Input{Normal(r, rows, columns)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.NewtonSchulz(in[0], steps)
		},
		Want: func(in []Input) []float64 {
			return refNewtonSchulz(in[0].Values, rows, columns, steps)
		},
		// Each step multiplies errors in small singular values by up to 3.4.
		Loss: 10}
}

func refNewtonSchulz(x []float64, rows, columns, steps int) []float64 {
	var squares float64
	for _, v := range x {
		squares += v * v
	}

	y := slices.Clone(x)
	for i := range y {
		y[i] /= math.Sqrt(squares) + 1e-7
	}

	for range steps {
		gram := refLinear(y, y, rows, columns, rows)
		square := refLinear(gram, gram, rows, rows, rows) // the Gram matrix is symmetric
		next := make([]float64, len(y))
		for i := range rows {
			for j := range columns {
				next[i*columns+j] = 3.4445 * y[i*columns+j]
				for k := range rows {
					next[i*columns+j] += (-4.7750*gram[i*rows+k] +
						2.0315*square[i*rows+k]) * y[k*columns+j]
				}
			}
		}
		y = next
	}

	return y
}
