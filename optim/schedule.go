package optim

import (
	"fmt"
	"math"
)

// Schedule returns the learning rate of a step, given the number of steps before it.
type Schedule func(step int) float64

// Constant returns the schedule that always gives lr.
func Constant(lr float64) Schedule { return func(int) float64 { return lr } }

// Warmup returns the schedule that rises linearly to peak over the first steps and then stays
// constant:
//
//	peak·(step+1)/(steps+1)   step < steps
//	peak                      step ≥ steps
//
// It requires peak > 0 and steps ≥ 0. Use it with an [Annealing] for runs on a budget.
func Warmup(peak float64, steps int) (Schedule, error) {
	switch {
	case !(peak > 0) || math.IsInf(peak, 0):
		return nil, fmt.Errorf("optim.Warmup: peak is %v, want a finite number above 0", peak)
	case steps < 0:
		return nil, fmt.Errorf("optim.Warmup: steps is %d, want at least 0", steps)
	}

	return func(step int) float64 {
		if step = max(step, 0); step < steps {
			return peak * float64(step+1) / float64(steps+1)
		}
		return peak
	}, nil
}

// Annealing returns the factor of the learning rate at a share, from 0 to 1, of a run's budget. It
// suits runs with a growing model, in which this share is known but the number of remaining steps is
// not.
type Annealing func(share float64) float64

// CosineAnnealing returns an annealing that decays from 1 to floor, a number from 0 to 1, along half
// a cosine:
//
//	floor + (1−floor)·(1 + cos(π·share))/2
func CosineAnnealing(floor float64) (Annealing, error) {
	if !(floor >= 0 && floor <= 1) {
		return nil, fmt.Errorf("optim.CosineAnnealing: floor is %v, want a number from 0 to 1",
			floor)
	}
	return func(share float64) float64 {
		return floor + (1-floor)*(1+math.Cos(math.Pi*min(max(share, 0), 1)))/2
	}, nil
}

// LinearAnnealing returns an annealing that decays linearly from 1 to floor, a number from 0 to 1.
// The factor stays 1 up to the share start, which is at least 0 and less than 1:
//
//	1                                              share < start
//	1 − (1−floor)·(share − start)/(1 − start)      share ≥ start
//
// With start above 0, it is the warmup-stable-decay schedule (Hu et al., "MiniCPM: Unveiling the
// Potential of Small Language Models with Scalable Training Strategies", 2024).
func LinearAnnealing(start, floor float64) (Annealing, error) {
	switch {
	case !(start >= 0 && start < 1):
		return nil, fmt.Errorf("optim.LinearAnnealing: start is %v, want a number from 0 to less "+
			"than 1", start)
	case !(floor >= 0 && floor <= 1):
		return nil, fmt.Errorf("optim.LinearAnnealing: floor is %v, want a number from 0 to 1",
			floor)
	}

	return func(share float64) float64 {
		past := (min(max(share, start), 1) - start) / (1 - start)
		return 1 - (1-floor)*past
	}, nil
}

// WarmupCosine returns a schedule that rises linearly to peak over the first warmup steps. It then
// decays along half a cosine to floor at step total, and stays there:
//
//	peak·(step+1)/(warmup+1)                                                  step < warmup
//	floor + (peak−floor)·(1 + cos(π·(step−warmup)/(total−warmup)))/2          warmup ≤ step < total
//	floor                                                                     step ≥ total
//
// It requires 0 ≤ floor ≤ peak, peak > 0 and 0 ≤ warmup < total. (Loshchilov and Hutter, "SGDR:
// Stochastic Gradient Descent with Warm Restarts", 2017, with a single period.)
func WarmupCosine(peak, floor float64, warmup, total int) (Schedule, error) {
	switch {
	case !(peak > 0) || math.IsInf(peak, 0):
		return nil, fmt.Errorf("optim.WarmupCosine: peak is %v, want a finite number above 0", peak)
	case !(floor >= 0 && floor <= peak):
		return nil, fmt.Errorf("optim.WarmupCosine: floor is %v, want a number from 0 to peak, %v",
			floor, peak)
	case warmup < 0 || warmup >= total:
		return nil, fmt.Errorf(
			"optim.WarmupCosine: warmup is %d and total is %d, want 0 ≤ warmup < total",
			warmup, total)
	}

	return func(step int) float64 {
		switch step = max(step, 0); {
		case step < warmup:
			return peak * float64(step+1) / float64(warmup+1)
		case step < total:
			t := float64(step-warmup) / float64(total-warmup)
			return floor + (peak-floor)*(1+math.Cos(math.Pi*t))/2
		}
		return floor
	}, nil
}
