// The parts of PreferenceLoss:
//   - shapes and gradients: this file
//   - CPU: internal/cpu/preference, on the base in internal/opbase
//   - GPU: cudaops/internal/lower/preference.go, with the kernels in cudaops/internal/kernel/preference
//   - test cases and benchmark: internal/opcase/preference.go

package op

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/preference"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// A PreferenceKind is a formula for the loss of a preference pair. See [Preference].
type PreferenceKind string

// The kinds of losses, named as in TRL.
const (
	PreferenceSigmoid PreferenceKind = "sigmoid"
	PreferenceHinge   PreferenceKind = "hinge"
	PreferenceIPO     PreferenceKind = "ipo"
	PreferenceRobust  PreferenceKind = "robust"
)

// PreferenceKinds lists the kinds of losses, in the order of package internal/cpu/preference.
var PreferenceKinds = []PreferenceKind{PreferenceSigmoid, PreferenceHinge, PreferenceIPO, PreferenceRobust}

// Preference configures the loss for preference pairs. A pair consists of a chosen and a rejected answer
// to the same prompt, and the reference is the model before training. Let c be the log-probability of the
// chosen answer minus its log-probability under the reference, let r be the same difference for the
// rejected answer, let z = β·(c−r), and let ε be Smoothing:
//
//	sigmoid  −(1−ε)·log σ(z) − ε·log σ(−z)
//	hinge    max(0, 1−z)
//	ipo      (c/|chosen| − r/|rejected| − 1/(2β))²
//	robust   (−(1−ε)·log σ(z) + ε·log σ(−z)) / (1−2ε)
//
// |chosen| and |rejected| are the numbers of tokens of the answers.
//
// (Rafailov et al., "Direct Preference Optimization", 2023, with the smoothing of Mitchell, "A note on DPO
// with noisy preferences", 2023; Zhao et al., "SLiC-HF", 2023; Azar et al., "A General Theoretical
// Paradigm to Understand Learning from Human Preferences", 2023; Chowdhury et al., "Provably Robust DPO",
// 2024.)
type Preference struct {
	Kind      PreferenceKind `json:"kind"`
	Beta      float64        `json:"beta"`
	Smoothing float64        `json:"smoothing,omitempty"` // probability that an answer was preferred by mistake
}

// Check returns an error if the settings are invalid.
func (p Preference) Check() error {
	smooths := p.Kind == PreferenceSigmoid || p.Kind == PreferenceRobust
	switch {
	case !smooths && p.Kind != PreferenceHinge && p.Kind != PreferenceIPO:
		names := make([]string, len(PreferenceKinds))
		for i, k := range PreferenceKinds {
			names[i] = string(k)
		}
		return fmt.Errorf("the loss of preference pairs is %.40q, want one of %s", p.Kind,
			strings.Join(names, ", "))
	case !(p.Beta > 0) || math.IsInf(p.Beta, 0):
		return fmt.Errorf("β is %v, want a finite number above 0", p.Beta)
	case !(p.Smoothing >= 0 && p.Smoothing < 0.5):
		return fmt.Errorf("the smoothing is %v, want at least 0 and less than 0.5", p.Smoothing)
	case p.Smoothing > 0 && !smooths:
		return fmt.Errorf("the smoothing is %v, and the loss %s has none", p.Smoothing, p.Kind)
	}
	return nil
}

// Loss returns the settings for package internal/cpu/preference, which machines use too.
func (p Preference) Loss() preference.Loss {
	return preference.Loss{Kind: preference.Kind(slices.Index(PreferenceKinds, p.Kind)), Beta: p.Beta,
		Smoothing: p.Smoothing}
}

// PreferenceFigures summarizes preference pairs. The reward of an answer is β times the difference
// between its log-probability and its log-probability under the reference.
type PreferenceFigures struct {
	Pairs    int     `json:"pairs"`
	Right    int     `json:"right"`    // pairs with a higher reward for the chosen answer
	Chosen   float64 `json:"chosen"`   // sum of the rewards of the chosen answers
	Rejected float64 `json:"rejected"` // sum of the rewards of the rejected answers
}

// Plus returns the combined figures of f and g.
func (f PreferenceFigures) Plus(g PreferenceFigures) PreferenceFigures {
	return PreferenceFigures{f.Pairs + g.Pairs, f.Right + g.Right, f.Chosen + g.Chosen,
		f.Rejected + g.Rejected}
}

// Accuracy returns the fraction of pairs in which the chosen answer has the higher reward.
func (f PreferenceFigures) Accuracy() float64 { return float64(f.Right) / float64(f.Pairs) }

// Margin returns the mean difference between the rewards of the chosen and the rejected answer.
func (f PreferenceFigures) Margin() float64 { return (f.Chosen - f.Rejected) / float64(f.Pairs) }

// PreferenceLossOp is the op that [PreferenceLoss] applies.
type PreferenceLossOp struct {
	opbase.Base
	Preference
	figures PreferenceFigures
	pairs   []preference.Pair // scratch memory, by the numbers of the pairs
}

// PreferenceLoss computes the mean loss of preference pairs from the log-probabilities of their tokens:
//
//	loss = mean over pairs of p.loss(Σ logProbs − Σ reference of the chosen answer, and of the rejected)
//
// logProbs is [rows] of float32 or float64, and reference has the same type and shape; only the sum over
// the rows of an answer matters. answers is [rows] of type int: 2·i for the rows of the chosen answer of
// pair i, 2·i+1 for the rows of the rejected one, and negative for all other rows. The numbers i need not be
// consecutive, but must be less than the number of rows. The run returns an error if there are no pairs.
func PreferenceLoss(logProbs, reference, answers *gorgonia.Node, p Preference) (*gorgonia.Node, error) {
	const name = "PreferenceLoss"
	al, ar, aa := arg{"logProbs", logProbs}, arg{"reference", reference}, arg{"answers", answers}
	if err := checkGraph(name, al, ar, aa); err != nil {
		return nil, err
	}

	if err := checkFloats(name, al, ar); err != nil {
		return nil, err
	}

	if err := checkDims(name, al, 1, "[rows]"); err != nil {
		return nil, err
	}

	rows := logProbs.Shape()[0]
	because := fmt.Sprintf("one for each of logProbs %v", logProbs.Shape())
	if err := checkShape(name, ar, because, rows); err != nil {
		return nil, err
	}

	if err := checkInts(name, aa, rows, because); err != nil {
		return nil, err
	}

	if err := p.Check(); err != nil {
		return nil, fmt.Errorf("op.%s: %w", name, err)
	}

	o := &PreferenceLossOp{Preference: p}
	in := gorgonia.Nodes{logProbs, reference, answers}
	opbase.Init(&o.Base, o, name, fmt.Sprintf("%s beta=%v smoothing=%v", p.Kind, p.Beta, p.Smoothing), in,
		logProbs.Dtype(), tensor.Shape{}, preferenceLoss[float32], preferenceLoss[float64])
	return gorgonia.ApplyOp(o, in...)
}

// TakeFigures returns the figures of all pairs since the last call, and resets them.
func (o *PreferenceLossOp) TakeFigures() PreferenceFigures {
	f := o.figures
	o.figures = PreferenceFigures{}
	return f
}

// AddFigures adds figures that a machine has computed instead of calling Do.
func (o *PreferenceLossOp) AddFigures(f PreferenceFigures) { o.figures = o.figures.Plus(f) }

// CheckAnswers returns an error unless every answer belongs to a pair with a number less than the number of
// rows, and there is at least one pair.
func CheckAnswers[T int | int64](answers []T) error {
	pairs := false
	for r, a := range answers {
		if int(a)/2 >= len(answers) {
			return fmt.Errorf("answer %d of row %d belongs to pair %d, want less than the %d rows", a, r,
				a/2, len(answers))
		}
		pairs = pairs || a >= 0
	}
	if !pairs {
		return fmt.Errorf("there are no pairs: %w", ErrNoTargets)
	}
	return nil
}

// gatherPairs sums up the rows of each pair into o.pairs, and returns the number of pairs.
func gatherPairs[T cpu.Float](o *PreferenceLossOp, logProbs, reference []T, answers []int) (int, error) {
	if err := CheckAnswers(answers); err != nil {
		return 0, err
	}
	if len(o.pairs) != len(answers) {
		o.pairs = make([]preference.Pair, len(answers))
	}
	return preference.Gather(o.pairs, logProbs, reference, answers), nil
}

func preferenceLoss[T cpu.Float](o *PreferenceLossOp, loss []T, in opbase.Args) error {
	n, err := gatherPairs(o, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), opbase.Slice[int](in, 2))
	if err != nil {
		return err
	}

	sum, own, of := 0.0, PreferenceFigures{Pairs: n}, o.Loss()
	for _, x := range o.pairs {
		if !x.Present() {
			continue
		}
		l, _ := of.Of(x)
		sum += l
		own.Chosen += o.Beta * x.Ratio[0]
		own.Rejected += o.Beta * x.Ratio[1]
		if x.Ratio[0] > x.Ratio[1] {
			own.Right++
		}
	}
	o.AddFigures(own)

	loss[0] = T(sum / float64(n))
	return nil
}

// DiffWRT reports that the op is differentiable in the log-probabilities.
func (o *PreferenceLossOp) DiffWRT(int) []bool { return []bool{true, false, false} }

// SymDiff returns the gradient with respect to the log-probabilities.
func (o *PreferenceLossOp) SymDiff(in gorgonia.Nodes,
	output, grad *gorgonia.Node) (gorgonia.Nodes, error) {
	if err := opbase.CheckGradient(&o.Base, in, output, grad); err != nil {
		return nil, err
	}

	b := &PreferenceLossGradOp{Forward: o}
	b.Differentiates(o)
	inputs := gorgonia.Nodes{in[0], in[1], in[2], output, grad}
	opbase.Init(&b.Base, b, "PreferenceLossGrad", fmt.Sprint(o), inputs, in[0].Dtype(), in[0].Shape(),
		preferenceLossGrad[float32], preferenceLossGrad[float64])
	dx, err := gorgonia.ApplyOp(b, inputs...)
	if err != nil {
		return nil, err
	}

	return gorgonia.Nodes{dx, nil, nil}, nil
}

// PreferenceLossGradOp computes the gradient with respect to the log-probabilities, from the inputs of
// [PreferenceLossOp], the loss, and the gradient of the loss.
type PreferenceLossGradOp struct {
	opbase.Base
	Forward *PreferenceLossOp
}

func preferenceLossGrad[T cpu.Float](o *PreferenceLossGradOp, out []T, in opbase.Args) error {
	answers, g := opbase.Slice[int](in, 2), float64(opbase.Slice[T](in, 4)[0])
	n, err := gatherPairs(o.Forward, opbase.Slice[T](in, 0), opbase.Slice[T](in, 1), answers)
	if err != nil {
		return err
	}

	clear(out)
	of := o.Forward.Loss()
	for r, a := range answers {
		if a >= 0 {
			_, grad := of.Of(o.Forward.pairs[a/2])
			out[r] = T(g / float64(n) * grad[a%2])
		}
	}
	return nil
}
