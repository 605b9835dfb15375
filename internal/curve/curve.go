// Package curve tells from the loss of a run how it falls.
package curve

import "math"

// Point is a loss, Y, when X has been spent.
type Point struct{ X, Y float64 }

// Trend fits the part of a curve from two thirds of its last X on with
//
//	Y = level − fall·ln(X)
//
// by least squares: the loss of a run falls by about the same amount whenever what is spent grows
// by the same factor. ok is false for fewer than four points with X above 0, or all at one X.
func Trend(points []Point) (fall, level float64, ok bool) {
	if len(points) == 0 {
		return 0, 0, false
	}
	from := points[len(points)-1].X * 2 / 3
	var n, sx, sy, sxx, sxy float64
	for _, p := range points {
		if p.X < from || p.X <= 0 {
			continue
		}
		x := math.Log(p.X)
		n, sx, sy, sxx, sxy = n+1, sx+x, sy+p.Y, sxx+x*x, sxy+x*p.Y
	}
	if spread := n*sxx - sx*sx; n >= 4 && spread > 1e-12*n*n {
		fall = -(n*sxy - sx*sy) / spread
		return fall, (sy + fall*sx) / n, true
	}
	return 0, 0, false
}
