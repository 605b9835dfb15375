package llm

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state"
)

// depthHorizon is how far the law of a curve is followed, in shares of the curve's end. Runs are early in
// their lives when they grow, and their losses fall more and more slowly. Laws that were followed
// half as much again told losses that no model came to, and good growths were taken back.
const depthHorizon = 1.15

// depthScore returns what is known of a seed in depth that is being evaluated. It is the loss of the run
// now, and the one that it would have soon behind the growth if the model had not grown.
// [curve.Fit] tells the latter from the curve before. Where the curve follows no law yet it is the
// last loss before: then a growth has to show that it does no harm. ok is false where there is no
// curve.
func depthScore(points []state.Point, past []state.Transition, seed int) (m state.SeedMetrics, ok bool) {
	grafted, evaluated := -1, -1
	for _, p := range past { // the latest first
		switch p.To {
		case state.Grafting:
			grafted = p.Epoch
		case state.Evaluating:
			evaluated = p.Epoch
		}
	}

	if grafted < 0 || evaluated < 0 {
		return m, false
	}

	var before []curve.Point
	var after []state.Point
	for _, p := range points {
		switch {
		case p.Epoch <= grafted:
			before = append(before, curve.Point{X: p.Share, Y: p.Loss})
		case p.Epoch > evaluated:
			after = append(after, p)
		}
	}

	if len(after) == 0 {
		return m, false
	}

	if len(before) == 0 {
		return m, false
	}

	without := func(float64) float64 { return before[len(before)-1].Y }
	if law, ok := curve.Fit(before); ok {
		furthest := depthHorizon * before[len(before)-1].X
		without = func(share float64) float64 { return law.At(min(share, furthest)) }
	}

	m = state.SeedMetrics{Seed: seed, TrainingError: math.NaN(), Compared: true,
		Stability: 1, Trials: 1}
	for _, p := range after {
		m.Performance -= p.Loss / float64(len(after))
		m.Without -= without(p.Share) / float64(len(after))
	}

	if !(m.Performance > -worstLoss) {
		m.Performance, m.Errors = -worstLoss, 1
	}

	return m, m.Without > -worstLoss
}
