// Package preference computes the losses of preference pairs. The documentation of op.Preference states their formulas.
package preference

import "math"

// A Kind is a formula for the loss of a pair. The GPU kernels use the same numbers.
type Kind int

// The kinds of losses.
const (
	Sigmoid Kind = iota
	Hinge
	IPO
	Robust
)

// Loss is a kind of loss with its settings.
type Loss struct {
	Kind            Kind
	Beta, Smoothing float64
}

// A Pair holds the log-probability of each answer minus its log-probability under the reference, and the answer's
// number of tokens. Index 0 is the chosen answer, and index 1 the rejected one.
type Pair struct {
	Ratio [2]float64
	Rows  [2]float64
}

// Present reports whether any row belongs to the pair.
func (x Pair) Present() bool { return x.Rows[0]+x.Rows[1] > 0 }

// Gather sets each element of pairs to the sums over the rows of the pair with that number, and returns the number of
// pairs that have rows. Every element of answers must be less than 2·len(pairs).
func Gather[T float32 | float64](pairs []Pair, logProbs, reference []T, answers []int) (n int) {
	clear(pairs)
	for r, a := range answers {
		if a < 0 {
			continue
		}
		x := &pairs[a/2]
		x.Ratio[a%2] += float64(logProbs[r]) - float64(reference[r])
		x.Rows[a%2]++
	}

	for _, x := range pairs {
		if x.Present() {
			n++
		}
	}
	return n
}

// Of returns the loss of a pair and its derivatives with respect to both ratios.
func (l Loss) Of(x Pair) (loss float64, grad [2]float64) {
	if l.Kind == IPO {
		chosen, rejected := max(1, x.Rows[0]), max(1, x.Rows[1])
		d := x.Ratio[0]/chosen - x.Ratio[1]/rejected - 1/(2*l.Beta)
		return d * d, [2]float64{2 * d / chosen, -2 * d / rejected}
	}

	z, e := l.Beta*(x.Ratio[0]-x.Ratio[1]), l.Smoothing
	var slope float64
	switch l.Kind {
	case Hinge:
		switch {
		case math.IsNaN(z):
			loss, slope = z, z
		case z < 1:
			loss, slope = 1-z, -1
		}
	case Robust:
		loss = ((1-e)*softplus(-z) - e*softplus(z)) / (1 - 2*e)
		slope = (-(1-e)*sigmoid(-z) - e*sigmoid(z)) / (1 - 2*e)
	default:
		loss = (1-e)*softplus(-z) + e*softplus(z)
		slope = -(1-e)*sigmoid(-z) + e*sigmoid(z)
	}

	return loss, [2]float64{l.Beta * slope, -l.Beta * slope}
}

// softplus returns log(1+eˣ), which is −log σ(−x).
func softplus(x float64) float64 { return max(x, 0) + math.Log1p(math.Exp(-math.Abs(x))) }

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
