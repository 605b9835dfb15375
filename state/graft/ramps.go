package graft

import (
	"fmt"
	"math"
)

// Ramp is the shape of a [FixedRamp].
type Ramp uint8

// Shapes of ramps, for a fraction f that increases from 0 to 1.
const (
	Linear  Ramp = iota // f
	Cosine              // (1 − cos πf)/2
	Sigmoid             // the logistic function of 12f − 6, stretched to reach 0 and 1
)

// FixedRamp raises α to Target in the given number of epochs.
type FixedRamp struct {
	Ramp   Ramp    `json:"ramp"`
	Epochs int     `json:"epochs"`
	Target float64 `json:"target"`
}

// Name returns "FixedRamp".
func (FixedRamp) Name() string { return "FixedRamp" }

// Check returns an error unless Ramp is known, Epochs is from 1 to 65535 (the limit of a lattice's
// count) and Target is in (0, 1].
func (s FixedRamp) Check() error {
	if s.Ramp > Sigmoid {
		return fmt.Errorf("FixedRamp: Ramp is %d, want Linear, Cosine or Sigmoid", s.Ramp)
	}
	return checkRamp(s.Name(), s.Epochs, s.Target)
}

// Advance returns Target times the height of the ramp at p.Epochs/Epochs.
func (s FixedRamp) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	f := min(1, float64(p.Epochs)/float64(s.Epochs))
	switch s.Ramp {
	case Cosine:
		f = (1 - math.Cos(math.Pi*f)) / 2
	case Sigmoid:
		f = (1 + math.Tanh(6*f-3)/math.Tanh(3)) / 2
	}
	return s.Target * f, p.Memory, p.Epochs >= s.Epochs
}

// The strategies below raise α to Target in steps of Target/Epochs and differ in the number and time
// of the steps. They continue from the current α, so an α set by hand is never lowered.

// PerformanceLinked takes one step per epoch, and accelerates while the performance score improves.
// Each score above the previous one multiplies the speed by 1 + Gain for every epoch since then, up
// to MaxSpeed steps per epoch. Any other score resets the speed to one step. Epochs without a new
// score keep the speed, so the frequency of scores matters little.
type PerformanceLinked struct {
	Epochs   int     `json:"epochs"` // duration without acceleration
	Target   float64 `json:"target"`
	Gain     float64 `json:"gain"`
	MaxSpeed float64 `json:"max_speed"`
}

// Name returns "PerformanceLinked".
func (PerformanceLinked) Name() string { return "PerformanceLinked" }

// Check returns an error unless Epochs is from 1 to 65535, Target is in (0, 1], Gain is at least 0
// and MaxSpeed at least 1, both finite.
func (s PerformanceLinked) Check() error {
	if err := checkRamp(s.Name(), s.Epochs, s.Target); err != nil {
		return err
	}
	if !(s.Gain >= 0) || math.IsInf(s.Gain, 0) {
		return fmt.Errorf("PerformanceLinked: Gain is %v, want a finite number of at least 0",
			s.Gain)
	}
	if !(s.MaxSpeed >= 1) || math.IsInf(s.MaxSpeed, 0) {
		return fmt.Errorf("PerformanceLinked: MaxSpeed is %v, want a finite number of at least 1",
			s.MaxSpeed)
	}
	return nil
}

// Advance remembers the last performance and the speed. A speed of 0 means that there has been no
// performance yet.
func (s PerformanceLinked) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	last, speed := float64(p.Memory[0]), float64(p.Memory[1])
	switch {
	case p.Stale:
		alpha, done = step(p.Alpha, s.Target, max(speed, 1)/float64(s.Epochs))
		return alpha, p.Memory, done
	case speed > 0 && p.Performance > last:
		speed = min(s.MaxSpeed, speed*math.Pow(1+s.Gain, float64(max(p.Interval, 1))))
	default:
		speed = 1
	}

	alpha, done = step(p.Alpha, s.Target, speed/float64(s.Epochs))
	return alpha, [2]float32{float32(p.Performance), float32(speed)}, done
}

// DriftControlled takes one step per epoch, and pauses for Pause epochs, including the current one,
// when the drift of the chunk's activations exceeds Threshold. Drift during a pause restarts the
// pause.
type DriftControlled struct {
	Epochs    int     `json:"epochs"` // duration without pauses
	Target    float64 `json:"target"`
	Threshold float64 `json:"threshold"`
	Pause     int     `json:"pause"`
}

// Name returns "DriftControlled".
func (DriftControlled) Name() string { return "DriftControlled" }

// Check returns an error unless Epochs and Pause are from 1 to 65535, Target is in (0, 1], and
// Threshold is finite and at least 0.
func (s DriftControlled) Check() error {
	if err := checkRamp(s.Name(), s.Epochs, s.Target); err != nil {
		return err
	}
	if !(s.Threshold >= 0) || math.IsInf(s.Threshold, 0) {
		return fmt.Errorf("DriftControlled: Threshold is %v, want a finite number of at least 0",
			s.Threshold)
	}
	if s.Pause < 1 || s.Pause > math.MaxUint16 {
		return fmt.Errorf("DriftControlled: Pause is %d, want 1 to %d", s.Pause, math.MaxUint16)
	}
	return nil
}

// Advance remembers the remaining epochs of a pause. A NaN counts as excessive drift.
func (s DriftControlled) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	rest := int(p.Memory[0])
	if !(p.Drift <= s.Threshold) {
		rest = s.Pause
	}
	if rest > 0 {
		return p.Alpha, [2]float32{float32(rest - 1)}, false
	}
	alpha, done = step(p.Alpha, s.Target, 1/float64(s.Epochs))
	return alpha, memory, done
}

// GradNormGated takes one step in every epoch if the norm of the chunk's gradient at its end is
// between Low and High, and no step otherwise.
type GradNormGated struct {
	Epochs int     `json:"epochs"` // duration inside the band
	Target float64 `json:"target"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// Name returns "GradNormGated".
func (GradNormGated) Name() string { return "GradNormGated" }

// Check returns an error unless Epochs is from 1 to 65535, Target is in (0, 1], and 0 ≤ Low ≤ High,
// both finite.
func (s GradNormGated) Check() error {
	if err := checkRamp(s.Name(), s.Epochs, s.Target); err != nil {
		return err
	}
	if !(s.Low >= 0 && s.Low <= s.High) || math.IsInf(s.High, 0) {
		return fmt.Errorf("GradNormGated: the band is from %v to %v, want 0 ≤ Low ≤ High, both "+
			"finite",
			s.Low, s.High)
	}
	return nil
}

// Advance remembers nothing.
func (s GradNormGated) Advance(p Progress) (alpha float64, memory [2]float32, done bool) {
	if !(p.GradNorm >= s.Low && p.GradNorm <= s.High) {
		return p.Alpha, memory, false
	}
	alpha, done = step(p.Alpha, s.Target, 1/float64(s.Epochs))
	return alpha, memory, done
}

// step returns α after a step of the given share of the target, and whether the target is reached.
// The target counts as reached if only a 256th of a step is missing, because α is stored in single
// precision.
func step(alpha, target, share float64) (next float64, done bool) {
	next = alpha + share*target
	if next >= target*(1-share*0x1p-8) {
		return max(alpha, target), true
	}
	return next, false
}

// checkRamp checks the parameters shared by all strategies.
func checkRamp(name string, epochs int, target float64) error {
	if epochs < 1 || epochs > math.MaxUint16 {
		return fmt.Errorf("%s: Epochs is %d, want 1 to %d", name, epochs, math.MaxUint16)
	}
	if !(target > 0 && target <= 1) {
		return fmt.Errorf("%s: Target is %v, want a number above 0 and at most 1", name, target)
	}
	return nil
}
