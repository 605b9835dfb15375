package autodiff

import "math"

const (
	tables = 3  // the first step is tried, then ones wider by
	wider  = 32 // each time
	levels = 12 // within a table the step is halved at most levels−1 times
	order  = 4  // extrapolations are kept up to an error of h^(2·order+2)
)

// derivative returns f′(0) and an estimate of its error, from central differences
//
//	D(h) = (f(h) − f(−h)) / 2h
//
// with steps h, h/2, h/4, ..., each cancelling one more even power of h by Richardson's
// extrapolation. It stops as soon as the estimated error is at most goal(f′). A step too wide for
// f's curvature, its domain or a nearby kink only costs evaluations. Where no step is narrow
// enough, rounding is the trouble, and wider steps are tried. In the end the entry with the
// smallest estimate counts. Steps at which f is not finite are passed over; with none left the
// result is NaN. (Ridders, "Accurate computation of F′(x) and F′(x)F″(x)", 1982.)
func derivative(f func(t float64) (float64, error), h float64,
	goal func(d float64) float64) (best, spread float64, err error) {
	best, spread = math.NaN(), math.Inf(1)
	for range tables {
		d, s, err := extrapolate(f, h, goal)
		if err != nil {
			return 0, 0, err
		}
		if s < spread || math.IsNaN(best) {
			best, spread = d, s
		}
		if spread <= goal(best) {
			break
		}
		h *= wider
	}
	return best, spread, nil
}

// extrapolate fills one table of extrapolated differences, and returns its best entry.
func extrapolate(f func(t float64) (float64, error), h float64,
	goal func(d float64) float64) (best, spread float64, err error) {
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
		rounding := 0x1p-52 * math.Max(math.Abs(up), math.Abs(down)) / h
		h /= 2
		if math.IsNaN(d) || math.IsInf(d, 0) {
			last = nil
			continue
		}
		if math.IsNaN(best) {
			best = d
		}
		row, power := []float64{d}, 4.0
		for k := 0; k < len(last) && k < order; k++ {
			next := row[k] + (row[k]-last[k])/(power-1)
			power *= 4
			// Both neighbours in the table approximate the same limit, so the farther one bounds
			// the error. Narrow steps can still agree by chance: few bits of f remain in their
			// differences.
			if s := rounding + math.Max(math.Abs(next-row[k]), math.Abs(next-last[k])); s < spread {
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
