package opcase

import (
	"math"
	"math/rand/v2"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/op"
)

// linearLogProbs is an output layer with the log-probability of each row's target.
var linearLogProbs = &Op{
	Name: "LinearLogProbs",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, s := range matrices {
			c := linearLogProbsCase(r, s[0], s[1], s[1]+1)
			cases = append(cases, c)

			c.Config = "frozen"
			c.In = []Input{c.In[0], c.In[1].frozen(), c.In[2]}
			c.Build = func(in gorgonia.Nodes) (*gorgonia.Node, error) {
				return op.FrozenLinearLogProbs(in[0], in[1], in[2])
			}
			cases = append(cases, c)
		}
		return cases
	},
}

func linearLogProbsCase(r *rand.Rand, rows, d, vocab int) Case {
	logits := func(in []Input) []float64 {
		return refLinear(in[0].Values, in[1].Values, rows, d, vocab)
	}
	return Case{In: []Input{Normal(r, rows, d), weight(r, vocab, d), targets(r, rows, vocab, -1)},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.LinearLogProbs(in[0], in[1], in[2])
		},
		Want: func(in []Input) []float64 {
			all := logits(in)
			y := make([]float64, rows)
			for i, t := range in[2].IDs {
				if t >= 0 {
					y[i] = -refCrossEntropy(all[i*vocab:(i+1)*vocab], []int{t}, vocab)[0]
				}
			}
			return y
		},
		Size: func(in []Input) []float64 {
			y := make([]float64, rows)
			for i, l := range logits(in) {
				y[i/vocab] = max(y[i/vocab], 1+math.Abs(l))
			}
			return y
		}}
}

// preferenceLoss is the loss of preference pairs, of every kind.
var preferenceLoss = &Op{
	Name: "PreferenceLoss",
	Cases: func(r *rand.Rand) (cases []Case) {
		for _, kind := range op.PreferenceKinds {
			for _, smoothing := range []float64{0, 0.2} {
				p := op.Preference{Kind: kind, Beta: 0.3, Smoothing: smoothing}
				if p.Check() != nil {
					continue // this kind has no smoothing
				}
				for _, rows := range []int{2, 7, 60} {
					cases = append(cases, preferenceLossCase(r, rows, p))
				}
			}
		}
		return cases
	},
}

func preferenceLossCase(r *rand.Rand, rows int, p op.Preference) Case {
	// Some rows belong to no answer, and some pairs lack an answer or are missing altogether.
	answers := ids(r, rows, -2, 2*max(1, rows/4))
	answers.IDs[0], answers.IDs[1] = 0, 1
	return Case{Config: string(p.Kind), In: []Input{Normal(r, rows), Normal(r, rows).frozen(), answers},
		Build: func(in gorgonia.Nodes) (*gorgonia.Node, error) {
			return op.PreferenceLoss(in[0], in[1], in[2], p)
		},
		Want: func(in []Input) []float64 {
			ratios, lengths := map[int]float64{}, map[int]float64{}
			pairs := map[int]bool{}
			for i, a := range in[2].IDs {
				if a >= 0 {
					ratios[a] += in[0].Values[i] - in[1].Values[i]
					lengths[a]++
					pairs[a/2] = true
				}
			}

			sum := 0.0
			for i := range rows {
				if pairs[i] {
					sum += refPreference(p, ratios[2*i], ratios[2*i+1], lengths[2*i], lengths[2*i+1])
				}
			}
			return []float64{sum / float64(len(pairs))}
		},
		Size: func([]Input) []float64 { return []float64{10} }}
}

// refPreference returns the loss of a pair by the formulas of [op.Preference].
func refPreference(p op.Preference, chosen, rejected, chosenLen, rejectedLen float64) float64 {
	logSigmoid := func(x float64) float64 { return -math.Log(1 + math.Exp(-x)) }
	z, e := p.Beta*(chosen-rejected), p.Smoothing
	switch p.Kind {
	case op.PreferenceHinge:
		return max(0, 1-z)
	case op.PreferenceIPO:
		d := chosen/max(1, chosenLen) - rejected/max(1, rejectedLen) - 1/(2*p.Beta)
		return d * d
	case op.PreferenceRobust:
		return (-(1-e)*logSigmoid(z) + e*logSigmoid(-z)) / (1 - 2*e)
	default:
		return -(1-e)*logSigmoid(z) - e*logSigmoid(-z)
	}
}
