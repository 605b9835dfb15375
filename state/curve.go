package state

import "fmt"

// Point is where a run was when an epoch ended.
type Point struct {
	Epoch int     `json:"epoch"` // epochs that had ended
	Share float64 `json:"share"` // of the run's budget that was spent
	Loss  float64 `json:"loss"`  // the host's, as the metrics had it
}

// maxPoints bounds a curve.
const maxPoints = 512

// addPoint returns a curve with a point more. A full one first loses every second point, so that
// those that stay lie evenly over the run.
func addPoint(curve []Point, p Point) []Point {
	if len(curve) >= maxPoints {
		for i := range maxPoints / 2 {
			curve[i] = curve[2*i+1]
		}
		curve = curve[:maxPoints/2]
	}
	return append(curve, p)
}

// checkCurve returns an error unless a run that has come to the given epoch can have the curve.
func checkCurve(curve []Point, epoch uint32) error {
	if len(curve) > maxPoints {
		return fmt.Errorf("the curve has %d points, want at most %d", len(curve), maxPoints)
	}
	last := 0
	for i, p := range curve {
		if p.Epoch <= last || int64(p.Epoch) > int64(epoch) || !(p.Share >= 0 && p.Share <= 1) ||
			!finite(p.Loss) {
			return fmt.Errorf("point %d of the curve is %+v", i, p)
		}
		last = p.Epoch
	}
	return nil
}
