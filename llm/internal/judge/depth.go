package judge

import (
	"math"

	"github.com/kasmina-go/kasmina/state"
)

// Depth returns what is known of a seed in depth that is being evaluated: the loss of the run now,
// and the one that it would have if the model had not grown. That is told from the curve before,
// whose loss falls by about the same amount whenever the share that is spent grows by the same
// factor. ok is false where the curve is too short to tell.
func Depth(curve []state.Point, past []state.Transition, seed int) (m state.SeedMetrics, ok bool) {
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
	var before, after []state.Point
	for _, p := range curve {
		switch {
		case p.Epoch <= grafted:
			before = append(before, p)
		case p.Epoch > evaluated:
			after = append(after, p)
		}
	}
	if len(after) == 0 {
		return m, false
	}
	fall, level, ok := Trend(before)
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

// Trend fits the latest third of a curve, by the share that is spent, with
//
//	loss = level − fall·ln(share)
//
// by least squares. ok is false for fewer than four points.
func Trend(curve []state.Point) (fall, level float64, ok bool) {
	if len(curve) == 0 {
		return 0, 0, false
	}
	from := curve[len(curve)-1].Share * 2 / 3
	var n, sx, sy, sxx, sxy float64
	for _, p := range curve {
		if p.Share < from || p.Share <= 0 {
			continue
		}
		x := math.Log(p.Share)
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+p.Loss, sxx+x*x, sxy+x*p.Loss
	}
	if spread := n*sxx - sx*sx; n >= 4 && spread > 0 {
		fall = -(n*sxy - sx*sy) / spread
		return fall, (sy + fall*sx) / n, true
	}
	return 0, 0, false
}
