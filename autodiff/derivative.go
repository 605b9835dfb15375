package autodiff

import (
	"math"
	"slices"
)

const (
	narrower = 14  // maximum number of halvings of the first step
	wider    = 10  // maximum number of doublings
	order    = 4   // extrapolations are kept up to an error of h^(2·order+2)
	samples  = 3   // estimates at the narrowest steps that serve only to determine the rounding error
	trust    = 10  // tolerated difference between wide and narrow steps, in errors
	probing  = 100 // tolerance for the narrowest step, as a multiple of the goal plus its rounding error
)

// difference is D(h) = (f(h) − f(−h)) / 2h, with the error that rounding f alone can cause.
type difference struct{ h, d, rounding float64 }

// estimate is an estimate of f′(0) from differences with h as their narrowest step.
type estimate struct{ h, d, spread float64 }

// derivative returns f′(0) and an estimate of its error, from central differences
//
//	D(h) = (f(h) − f(−h)) / 2h
//
// with steps h, h/2, h/4, ..., each cancelling one more even power of h by Richardson's
// extrapolation (Ridders, "Accurate computation of F′(x) and F′(x)F″(x)", 1982).
//
// It stops when the estimated error is at most goal(f′), provided that the narrowest step does not
// contradict the estimate. A step too wide for f's curvature, its domain or a nearby kink only costs
// evaluations. If no step is narrow enough, rounding errors dominate, so wider steps are tried and
// [choose] picks among all estimates. Steps at which f is not finite are skipped. If none remains,
// the result is NaN.
func derivative(f func(t float64) (float64, error), h float64,
	goal func(d float64) float64) (best, spread float64, err error) {
	probe, err := differ(f, math.Ldexp(h, -narrower))
	if err != nil {
		return 0, 0, err
	}

	var steps []difference // from wide to narrow
	for range narrower {
		s, err := differ(f, h)
		if err != nil {
			return 0, 0, err
		}
		steps = append(steps, s)
		h /= 2
		if e := extrapolate(steps); len(e) > 0 && e[len(e)-1].h == s.h {
			if e, ok := e[len(e)-1].against(probe, goal); ok && e.spread <= goal(e.d) {
				return e.d, e.spread, nil
			}
		}
	}

	steps = append(steps, probe)
	for range wider {
		if best, spread = choose(steps); spread <= goal(best) {
			return best, spread, nil
		}
		s, err := differ(f, 2*steps[0].h)
		if err != nil {
			return 0, 0, err
		}
		steps = slices.Insert(steps, 0, s)
	}

	best, spread = choose(steps)
	return best, spread, nil
}

// differ returns D(h), or NaN if D(h) is not finite.
func differ(f func(t float64) (float64, error), h float64) (difference, error) {
	up, err := f(h)
	if err != nil {
		return difference{}, err
	}

	down, err := f(-h)
	if err != nil {
		return difference{}, err
	}

	s := difference{h: h, d: (up - down) / (2 * h),
		rounding: 0x1p-52 * math.Max(math.Abs(up), math.Abs(down)) / h}
	if math.IsInf(s.d, 0) {
		s.d = math.NaN()
	}
	return s, nil
}

// extrapolate returns the best extrapolation at every step that has a wider neighbor. Each step
// must be half the previous one.
func extrapolate(steps []difference) []estimate {
	var all []estimate
	var last []float64 // extrapolations of the previous step, by order
	for _, s := range steps {
		if math.IsNaN(s.d) {
			last = nil
			continue
		}

		row, power := []float64{s.d}, 4.0
		e := estimate{h: s.h, spread: math.Inf(1)}
		for k := 0; k < len(last) && k < order; k++ {
			next := row[k] + (row[k]-last[k])/(power-1)
			power *= 4

			// Both neighbors in the table approximate the same limit, so the more distant one bounds
			// the error. Narrow steps may still agree by chance, because few significant bits of f
			// survive in their differences.
			if spread := s.rounding + math.Max(math.Abs(next-row[k]),
				math.Abs(next-last[k])); spread < e.spread {
				e.d, e.spread = next, spread
			}
			row = append(row, next)
		}

		if len(last) > 0 {
			all = append(all, e)
		}
		last = row
	}

	return all
}

// against returns e with an error that allows for the narrowest step, and whether that step supports
// e. Rounding, which affects wider steps less, may explain the difference between them. If it does
// not, e is worthless, since steps far out on a plateau agree with each other too.
func (e estimate) against(probe difference,
	goal func(d float64) float64) (estimate, bool) {
	off := math.Abs(probe.d - e.d)
	e.spread = math.Max(e.spread, off*probe.h/e.h)
	return e, off <= probing*(goal(e.d)+probe.rounding)
}

// choose returns the estimate with the smallest error, and the error, going from narrow steps to
// wide ones.
//
// Rounding errors of D fall as 1/h, while other errors rise with h. An estimate may therefore claim
// a smaller error than narrower steps allow, because it agrees with its neighbors by chance or lies
// on a plateau that does not extend to 0. Its error is then taken to be the error they allow. An
// estimate that contradicts the best of the narrower steps is skipped, no matter how small its
// error seems. (Lepski, "On a problem of adaptive estimation in Gaussian white noise", 1990.)
func choose(steps []difference) (best, spread float64) {
	all := extrapolate(steps)
	if len(all) == 0 {
		best = math.NaN()
		for _, s := range steps {
			if !math.IsNaN(s.d) {
				best = s.d
			}
		}
		return best, math.Inf(1)
	}

	slices.Reverse(all)
	noise := 0. // largest error times h
	for i, e := range all {
		noise = math.Max(noise, e.spread*e.h)
		s := noise / e.h
		if i < samples || s < spread && math.Abs(e.d-best) <= trust*spread {
			best, spread = e.d, s
		}
	}

	return best, spread
}
