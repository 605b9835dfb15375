package judge

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state"
)

// depthHorizon limits how far the law of a curve is extrapolated, as a multiple of the curve's
// length. Runs usually grow early, and their losses fall ever more slowly. In trials, extrapolating
// half again as far predicted losses that no model reached, so that good growths were undone.
const depthHorizon = 1.15

// Depth returns the metrics of a seed in depth during its evaluation: the run's current loss and the
// loss the run would have reached by now without the growth.
//
// [curve.Fit] predicts the latter from the curve before the growth. If the curve does not follow a
// law yet, the last loss before the growth is used instead, so that the growth need only prove
// harmless. Without a curve, ok is false.
func Depth(points []state.Point, past []state.Transition, seed int) (m state.SeedMetrics, ok bool) {
	grafted, evaluated := -1, -1
	for _, p := range past { // newest first
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
