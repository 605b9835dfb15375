package opcase

import (
	"math"
	"math/rand/v2"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

var crossEntropy = &Op{
	Name: "CrossEntropy",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, crossEntropyCase(r, s[0], s[1]+1, -1))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, vocabulary", Small: []int{64, 50}, Usual: []int{1024, 4096},
		Elements: product(1, 0, 1), FLOPs: noFLOPs,
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return crossEntropyCase(r, s[0], s[1], 0), nil
		},
		Stock: func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error) {
			return stockLoss(in[0], in[1], shape[0], shape[1])
		},
		Room: func(s []int) (string, float64) { return "logits take", product(6, 0, 1)(s) },
	},
}

// crossEntropyCase returns a case with random targets of at least low. Targets below 0 are ignored.
func crossEntropyCase(r *rand.Rand, rows, vocab, low int) Case {
	return Case{In: []Input{Normal(r, rows, vocab), targets(r, rows, vocab, low)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.CrossEntropy(in[0], in[1])
		},
		Want: func(in []Input) []float64 { return refCrossEntropy(in[0].Values, in[1].IDs, vocab) },
		// Rounding errors are relative to the logits and to log Σ exp(logits).
		Size: func(in []Input) []float64 { return []float64{1 + slices.Max(in[0].Values)} }}
}

var linearCrossEntropy = &Op{
	Name: "LinearCrossEntropy",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			cases = append(cases, linearCrossEntropyCase(r, s[0], s[1], s[1]+1, -1))
		}
		return cases
	},
	Bench: &Bench{
		Shape: "rows, features, vocabulary",
		Small: []int{64, 32, 50}, Usual: []int{1024, 256, 4096},
		Elements: sum(product(1, 0, 1), product(1, 1, 2)), FLOPs: product(2, 0, 1, 2),
		Case: func(r *rand.Rand, s []int) (Case, error) {
			return linearCrossEntropyCase(r, s[0], s[1], s[2], 0), nil
		},
		Stock: func(in gorgonia.Nodes, shape []int) (*gorgonia.Node, error) {
			logits, err := timesTransposed(in[0], in[1])
			if err != nil {
				return nil, err
			}
			return stockLoss(logits, in[2], shape[0], shape[2])
		},
		Room: func(s []int) (string, float64) { return "logits take", product(6, 0, 2)(s) },
	},
}

func linearCrossEntropyCase(r *rand.Rand, rows, d, vocab, low int) Case {
	logits := func(in []Input) []float64 {
		return refLinear(in[0].Values, in[1].Values, rows, d, vocab)
	}
	return Case{In: []Input{Normal(r, rows, d), weight(r, vocab, d),
		targets(r, rows, vocab, low)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.LinearCrossEntropy(in[0], in[1], in[2])
		},
		Want: func(in []Input) []float64 { return refCrossEntropy(logits(in), in[2].IDs, vocab) },
		Size: func(in []Input) []float64 { return []float64{1 + slices.Max(logits(in))} }}
}

// frozenLinearCrossEntropy is an output layer whose weight has no gradient.
var frozenLinearCrossEntropy = &Op{
	Name: "FrozenLinearCrossEntropy",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			c := linearCrossEntropyCase(r, s[0], s[1], s[1]+1, -1)
			c.In[1] = c.In[1].frozen()
			c.Build = func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return op.FrozenLinearCrossEntropy(in[0], in[1], in[2])
			}
			cases = append(cases, c)
		}
		return cases
	},
}

// targets returns random targets. The first target is the last token of the vocabulary.
func targets(r *rand.Rand, rows, vocab, low int) Input {
	t := ids(r, rows, low, vocab)
	t.IDs[0] = vocab - 1
	return t
}

func refCrossEntropy(logits []float64, targets []int, v int) []float64 {
	var sum, n float64
	for r, t := range targets {
		if t < 0 {
			continue
		}
		var z float64
		for _, l := range logits[r*v : (r+1)*v] {
			z += math.Exp(l)
		}
		sum += math.Log(z) - logits[r*v+t]
		n++
	}

	return []float64{sum / n}
}

// stockLoss computes the mean of −log softmax(logits) at the targets, which it converts to a one-hot
// matrix.
func stockLoss(logits, targets *gorgonia.Node, rows, vocab int) (*gorgonia.Node, error) {
	one := make([]float64, rows*vocab)
	for i, t := range targets.Value().Data().([]int) {
		one[i*vocab+t] = 1
	}

	hot := gorgonia.NodeFromAny(logits.Graph(), Dense(logits.Dtype(), one, rows, vocab),
		gorgonia.WithName("one-hot"))

	var c chain
	p := c.do(func() (*gorgonia.Node, error) { return gorgonia.SoftMax(logits) })
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.Log(p) })
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.HadamardProd(p, hot) })
	p = c.do(func() (*gorgonia.Node, error) { return gorgonia.Sum(p) })
	p = c.do(func() (*gorgonia.Node, error) {
		return gorgonia.Mul(p, number(logits, -1/float64(rows)))
	})
	return p, c.err
}
