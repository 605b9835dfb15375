package judge

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/curve"
	"github.com/kasmina-go/kasmina/state"
)

// Depth returns what is known of a seed in depth that is being evaluated: the loss of the run now,
// and the one that it would have if the model had not grown. That is told from the curve before,
// whose loss falls by about the same amount whenever the share that is spent grows by the same
// factor. ok is false where the curve is too short to tell.
func Depth(points []state.Point, past []state.Transition, seed int) (m state.SeedMetrics, ok bool) {
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
	fall, level, ok := curve.Trend(before)
	if !ok {
		return m, false
	}
	m = state.SeedMetrics{Seed: seed, TrainingError: math.NaN(), Compared: true, Stability: 1, Trials: 1}
	for _, p := range after {
		m.Performance -= p.Loss / float64(len(after))
		m.Without -= (level - max(0, fall)*math.Log(p.Share)) / float64(len(after))
	}
	if !(m.Performance > -worst) {
		m.Performance, m.Errors = -worst, 1
	}
	return m, m.Without > -worst
}
