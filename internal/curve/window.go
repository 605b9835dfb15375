package curve

import "math"

// A Window computes the trend of a curve point by point, in less time than a call of [Trend] for each
// point. Its zero value contains no points.
type Window struct {
	points   []Point // in the window
	sx, sy   float64
	sxx, sxy float64
}

// Add adds the next point, whose X must be above 0 and not below that of the previous point. It returns
// the trend of the curve up to this point, as Trend does.
func (w *Window) Add(p Point) (fall, level float64, ok bool) {
	w.points = append(w.points, p)
	w.sum(p, 1)
	for w.points[0].X < p.X*2/3 {
		w.sum(w.points[0], -1)
		w.points = w.points[1:]
	}

	n := float64(len(w.points))
	if spread := n*w.sxx - w.sx*w.sx; n >= 4 && spread > 1e-12*n*n {
		fall = -(n*w.sxy - w.sx*w.sy) / spread
		return fall, (w.sy + fall*w.sx) / n, true
	}

	return 0, 0, false
}

// sum adds the terms of a point to the sums, or subtracts them.
func (w *Window) sum(p Point, sign float64) {
	x := math.Log(p.X)
	w.sx += sign * x
	w.sy += sign * p.Y
	w.sxx += sign * x * x
	w.sxy += sign * x * p.Y
}
