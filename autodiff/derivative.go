package autodiff

import (
	"math"
	"slices"
)

const (
	narrower = 14  // times the first step is halved at most
	wider    = 10  // times it is doubled at most
	order    = 4   // extrapolations are kept up to an error of h^(2·order+2)
	samples  = 3   // estimates at the narrowest steps that only tell how large rounding errors are
	trust    = 10  // errors by which wide steps may differ from narrow ones
	probing  = 100 // times the goal, and its rounding error, that the narrowest step may be off
)

// difference is D(h) = (f(h) − f(−h)) / 2h, with what rounding f alone can add to it.
type difference struct{ h, d, rounding float64 }

// estimate is one of f′(0), from differences of which h is the narrowest step.
type estimate struct{ h, d, spread float64 }

// derivative returns f′(0) and an estimate of its error, from central differences
//
//	D(h) = (f(h) − f(−h)) / 2h
//
// with steps h, h/2, h/4, ..., each cancelling one more even power of h by Richardson's
// extrapolation. It stops as soon as the estimated error is at most goal(f′), and the narrowest
// step does not speak against it. A step too wide for f's curvature, its domain or a nearby kink
// only costs evaluations. Where no step is narrow enough, rounding is the trouble, and wider steps
// are tried. In the end [choose] decides. Steps at which f is not finite are passed over; with none
// left the result is NaN. (Ridders, "Accurate computation of F′(x) and F′(x)F″(x)", 1982.)
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

// differ returns D(h). Where it is not finite, it is NaN.
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

// extrapolate returns the best extrapolation at every step that has a wider neighbour. Steps are
// halved from one to the next.
func extrapolate(steps []difference) []estimate {
	var all []estimate
	var last []float64 // the extrapolations of the step before, by order
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
			// Both neighbours in the table approximate the same limit, so the farther one bounds
			// the error. Narrow steps can still agree by chance: few bits of f remain in their
			// differences.
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

// against returns e with the error that the narrowest step leaves it, and whether that step is for
// it. Rounding, of which a wider step has less, can explain their difference. Else e is no estimate
// at all: far out on a plateau, steps agree with each other too.
func (e estimate) against(probe difference,
	goal func(d float64) float64) (estimate, bool) {
	off := math.Abs(probe.d - e.d)
	e.spread = math.Max(e.spread, off*probe.h/e.h)
	return e, off <= probing*(goal(e.d)+probe.rounding)
}

// choose returns the estimate that errs least, and its error, going from narrow steps to wide ones.
//
// Rounding errors of D fall as 1/h and other errors rise with h. So an estimate may claim less
// error than narrower steps allow. It then agrees with its neighbours by chance, or lies on a
// plateau, which what happens at 0 does not reach. Its error is taken to be what they allow. An
// estimate that contradicts the best of narrower steps is passed over, however small its error
// seems. (Lepski, "On a problem of adaptive estimation in Gaussian white noise", 1990.)
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
	noise := 0. // errors times h
	for i, e := range all {
		noise = math.Max(noise, e.spread*e.h)
		s := noise / e.h
		if i < samples || s < spread && math.Abs(e.d-best) <= trust*spread {
			best, spread = e.d, s
		}
	}
	return best, spread
}
