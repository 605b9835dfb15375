package autodiff

import "math"

const (
	levels = 12 // the step is halved at most levels−1 times
	order  = 4  // extrapolations are kept up to an error of h^(2·order+2)
)

// derivative returns f′(0) and an estimate of its error, from central differences
//
//	D(h) = (f(h) − f(−h)) / 2h
//
// with steps h, h/2, h/4, ..., each cancelling one more even power of h by Richardson's extrapolation. It stops as soon as
// the estimated error is at most goal(f′), and otherwise returns the entry with the smallest estimate, so that a step too
// wide for f's curvature, its domain or a nearby kink only costs evaluations. Steps at which f is not finite are passed
// over; with none left the result is NaN. (Ridders, "Accurate computation of F′(x) and F′(x)F″(x)", 1982.)
func derivative(f func(t float64) (float64, error), h float64, goal func(d float64) float64) (best, spread float64, err error) {
	best, spread = math.NaN(), math.Inf(1)
	var last []float64 // the extrapolations of the level before, by order
	for range levels {
		up, err := f(h)
		if err != nil {
			return 0, 0, err
		}
		down, err := f(-h)
		if err != nil {
			return 0, 0, err
		}
		d := (up - down) / (2 * h)
		h /= 2
		if math.IsNaN(d) || math.IsInf(d, 0) {
			last = nil
			continue
		}
		row := []float64{d}
		if last == nil && math.IsNaN(best) {
			best = d
		}
		power := 4.0
		for k := 0; k < len(last) && k < order; k++ {
			next := row[k] + (row[k]-last[k])/(power-1)
			power *= 4
			// Both neighbours in the table approximate the same limit: the farther one bounds the error.
			if s := math.Max(math.Abs(next-row[k]), math.Abs(next-last[k])); s < spread {
				best, spread = next, s
			}
			row = append(row, next)
		}
		if spread <= goal(best) {
			break
		}
		last = row
	}
	return best, spread, nil
}
