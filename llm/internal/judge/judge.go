// Package judge measures the effect of seeds on a model that grows, from its losses on held-out text.
package judge

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/llm/data"
	"github.com/kasmina-go/kasmina/state"
)

// A Judge measures the effect of seeds on a model.
type Judge struct {
	Seeds *state.Network
	Text  *data.Evaluation
	Loss  func(data.Batch) (float64, error) // loss of the current model

	// Trial lists the seeds on trial, whose blueprints the model's twin lacks. Without holds the twin's
	// losses on the batches of the text, or a single infinite loss if the twin has diverged.
	Trial   []state.Address
	Without []float64
}

// A Verdict describes the effect of the seeds on trial.
type Verdict struct {
	// the model's mean loss minus its twin's, in nats per token
	Harm float64
	// share of the batches with a difference of the same sign as Harm
	Agree  float64
	Errors int // batches on which the model's loss is not finite
}

// Add measures the model with all seeds, with each seed in Training at full strength, and without each
// seed under evaluation. It adds the results to the metrics of their layers.
//
// Seeds on trial are compared in every stage, with the model's twin. Other seeds are compared in
// Evaluating and FineTuning, with the model after muting them. The verdict is nil without a trial.
func (j Judge) Add(metrics []state.Metrics) (verdict *Verdict, err error) {
	var with []float64
	for layer, l := range j.Seeds.Lattices() {
		if l.Site() == blueprints.Depth {
			continue
		}
		for _, s := range l.Report().Seeds {
			if s.Stage < state.Training || s.Stage > state.FineTuning {
				continue
			}
			if with == nil {
				if with, err = j.Losses(); err != nil {
					return nil, err
				}
			}
			m := state.SeedMetrics{Seed: s.Seed, TrainingError: math.NaN(), Trials: len(with),
				Stability: s.Stability}
			switch {
			case s.Stage == state.Training:
				err = j.try(&m, l, with)
			case slices.Contains(j.Trial, state.Address{Layer: layer, Seed: s.Seed}):
				verdict = j.compareTwin(&m, with)
			case s.Stage == state.Evaluating || s.Stage == state.FineTuning:
				err = j.compare(&m, l, with)
			default:
				m.Performance, m.Errors = meanPerformance(with, with)
			}
			if err != nil {
				return nil, err
			}
			metrics[layer].Seeds = append(metrics[layer].Seeds, m)
		}
	}

	return verdict, nil
}

// compareTwin compares the model with its twin and returns the verdict.
func (j Judge) compareTwin(m *state.SeedMetrics, with []float64) *Verdict {
	if len(j.Without) == len(with) {
		scoreSeed(m, with, j.Without)
	} else { // the twin has diverged
		m.Compared, m.Without, m.Stability = true, -worstLoss, 1
		m.Performance, m.Errors = meanPerformance(with, with)
	}
	return &Verdict{m.Without - m.Performance, m.Stability, m.Errors}
}

// Mean returns the model's mean loss over the batches. If no loss is finite, it returns a large
// number, because a curve requires finite numbers.
func (j Judge) Mean() (float64, error) {
	losses, err := j.Losses()
	if err != nil {
		return 0, err
	}
	performance, _ := meanPerformance(losses, losses)
	return -performance, nil
}

// try measures the model with the blueprint of a seed in Training at full strength. with holds the losses
// of the batches without it.
func (j Judge) try(m *state.SeedMetrics, l *state.Lattice, with []float64) error {
	if err := l.Probe(m.Seed, true); err != nil {
		return err
	}

	tried, err := j.Losses()
	if err := errors.Join(err, l.Probe(m.Seed, false)); err != nil {
		return err
	}

	m.Unscored = true
	now, _ := meanPerformance(with, tried)
	then, bad := meanPerformance(tried, with)
	if m.TrainingError, m.Errors = now-then, bad; bad > 0 {
		m.TrainingError = worstLoss
	}

	return nil
}

// compare measures the model without a seed. with holds the losses of the batches with it.
func (j Judge) compare(m *state.SeedMetrics, l *state.Lattice, with []float64) error {
	if err := l.Mute(m.Seed, true); err != nil {
		return err
	}
	without, err := j.Losses()
	if err := errors.Join(err, l.Mute(m.Seed, false)); err != nil {
		return err
	}
	scoreSeed(m, with, without)
	return nil
}

// scoreSeed stores the result of comparing two lists of losses, batch by batch, in the seed's metrics.
func scoreSeed(m *state.SeedMetrics, with, without []float64) {
	m.Compared = true
	m.Performance, m.Errors = meanPerformance(with, without)
	m.Without, _ = meanPerformance(without, with)
	agree := 0
	for i := range with {
		if d := without[i] - with[i]; d*(m.Performance-m.Without) > 0 {
			agree++
		}
	}
	m.Stability = float64(agree) / float64(len(with))
}

// Losses returns the model's loss on each batch of the text; it may be NaN or infinite.
func (j Judge) Losses() (losses []float64, err error) {
	for b := range j.Text.Batches() {
		l, err := j.Loss(b)
		if err != nil {
			return nil, fmt.Errorf("validation: %w", err)
		}
		losses = append(losses, l)
	}
	return losses, nil
}

// worstLoss is the limit for losses in a comparison. Lattices accept no performance below -worstLoss,
// and a model with such a loss has diverged.
const worstLoss = 65504

// meanPerformance returns minus the mean of the losses on the batches with finite losses in both
// lists. The result is at least -worstLoss, which is also the result if no batch has finite losses in
// both. bad is the number of non-finite losses.
func meanPerformance(losses, others []float64) (performance float64, bad int) {
	n := 0
	for i, l := range losses {
		if l-l != 0 {
			bad++
		} else if others[i]-others[i] == 0 {
			performance -= l
			n++
		}
	}

	if n == 0 {
		return -worstLoss, bad
	}

	return max(performance/float64(n), -worstLoss), bad
}
