package lifecycle

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/internal/half"
)

// Thresholds are the conditions of the gates between stages.
type Thresholds struct {
	// MinEpochs is, for each stage, the minimum number of epochs before a seed may leave it.
	// Rollbacks ignore it.
	MinEpochs [Count]int
	// TrainingError is the maximum training error for Training → Grafting, unless the error falls.
	TrainingError float64
	Stability     float64 // minimum stability for Evaluating → FineTuning
	FossilStable  float64 // minimum stability for FineTuning → Fossilized
	// Improvement is the minimum of Evidence.Improvement, the relative improvement of the performance
	// over the performance without the seed, for FineTuning → Fossilized.
	Improvement float64
	// A blueprint has failed, which permits Evaluating → Culled, if its performance delta is below
	// CullDelta, its error rate above CullErrorRate, or its number of errors above CullErrorCount.
	CullDelta      float64
	CullErrorRate  float64
	CullErrorCount int
}

// DefaultThresholds returns the thresholds of a lattice created without state.WithThresholds:
//
//	MinEpochs       Training 100, Grafting 50, Stabilization 20, Evaluating 30, FineTuning 50, else 0
//	TrainingError   0.01
//	Stability       0.8
//	FossilStable    0.95
//	Improvement     0.01
//	CullDelta       −0.05
//	CullErrorRate   0.1
//	CullErrorCount  5
func DefaultThresholds() Thresholds {
	return Thresholds{
		MinEpochs: [Count]int{Training: 100, Grafting: 50, Stabilization: 20,
			Evaluating: 30, FineTuning: 50},
		TrainingError:  0.01,
		Stability:      0.8,
		FossilStable:   0.95,
		Improvement:    0.01,
		CullDelta:      -0.05,
		CullErrorRate:  0.1,
		CullErrorCount: 5,
	}
}

// DepthThresholds returns the default thresholds in depth, where blueprints are copies of trained
// blocks. They are grafted at once and judged by the loss that the model would have without them. A
// drop in performance alone never makes an evaluation fail.
//
//	MinEpochs       Evaluating 1, FineTuning 1, else 0
//	Improvement     0
//	CullDelta       −1e6
//
// The rest equals DefaultThresholds.
func DepthThresholds() Thresholds {
	t := DefaultThresholds()
	t.MinEpochs = [Count]int{Evaluating: 1, FineTuning: 1}
	t.Improvement, t.CullDelta = 0, -1e6
	return t
}

// Within returns thresholds with MinEpochs reduced proportionally so that a whole life, from Training
// to FineTuning, takes at most half of the given number of epochs. Blueprints can then become
// fossilized in a run of that length. Thresholds that are already short enough stay unchanged.
func (t Thresholds) Within(epochs int) Thresholds {
	all := 0
	for stage := Training; stage <= FineTuning; stage++ {
		all += t.MinEpochs[stage]
	}
	if most := max(epochs, 0) / 2; all > most {
		for stage := Training; stage <= FineTuning; stage++ {
			t.MinEpochs[stage] = t.MinEpochs[stage] * most / all
		}
	}
	return t
}

// Check returns an error that names the first invalid threshold.
func (t Thresholds) Check() error {
	for s, n := range t.MinEpochs {
		if n < 0 || n > math.MaxUint16 {
			return fmt.Errorf("MinEpochs of %v is %d, want 0 to %d", Stage(s), n, math.MaxUint16)
		}
	}

	for _, f := range []struct {
		name  string
		value float64
	}{{"TrainingError", t.TrainingError}, {"Stability", t.Stability},
		{"FossilStable", t.FossilStable},
		{"Improvement", t.Improvement}, {"CullDelta", t.CullDelta},
		{"CullErrorRate", t.CullErrorRate}} {
		if !finite(f.value) {
			return fmt.Errorf("%s is %v, want a finite number", f.name, f.value)
		}
	}

	if t.CullErrorCount < 0 {
		return fmt.Errorf("CullErrorCount is %d, want at least 0", t.CullErrorCount)
	}
	return nil
}

// Evidence holds the figures by which gates judge. An unmeasured figure is NaN and satisfies no
// condition.
type Evidence struct {
	Epochs        int     // number of epochs in the current stage
	TrainingError float64 // as last reported in Metrics
	ErrorFalling  bool    // TrainingError is below the first one reported in this stage
	LossFalling   bool    // the host's loss is below the first one measured in this stage
	// Learning means that the blueprint's parameters change or, if they are not reported, that the
	// gradient of its chunk is finite and not 0.
	Learning bool
	// Resting means that the parameters are reported, and are not finite, all 0 or unchanged since
	// the previous report.
	Resting bool
	// Delta is the performance minus the performance without the seed. If the two were never
	// compared, it is the performance minus the first one reported in this stage.
	Delta float64
	// Improvement is (performance − p)/|p|, where p is the performance without the seed or, if they
	// were never compared, the first one reported since germination.
	Improvement float64
	Stability   float64
	Errors      int     // number reported in this stage
	ErrorRate   float64 // errors per trial in this stage; 0 without trials
}

// Shortfall is a condition that keeps a gate shut.
type Shortfall struct {
	Condition string // description of the requirement; empty if the gate is open
	Have      float64
	Threshold float64 // limit for Have
}

// String describes the shortfall with both figures, or returns "nothing".
func (s Shortfall) String() string {
	if s.Condition == "" {
		return "nothing"
	}
	have := fmt.Sprintf("%.4g", s.Have)
	if math.IsNaN(s.Have) {
		have = "none measured"
	}
	return fmt.Sprintf("%s (it has %s, the threshold is %.4g)", s.Condition, have, s.Threshold)
}

// Gate judges by the evidence whether a seed may move from one stage to another. If not, it returns
// the first unmet condition. The transition must be allowed by the table. The result depends only on
// the arguments.
func (t Thresholds) Gate(from, to Stage, e Evidence) (s Shortfall, open bool) {
	if to == RolledBack {
		return Shortfall{}, true
	}
	if from < Count && e.Epochs < t.MinEpochs[from] {
		return Shortfall{"more epochs in the stage", float64(e.Epochs), float64(t.MinEpochs[from])},
			false
	}

	switch {
	case from == Training && to == Grafting:
		falling := e.ErrorFalling || math.IsNaN(e.TrainingError) && e.LossFalling
		switch {
		case e.Resting:
			return Shortfall{"a blueprint whose own parameters change with training", 0, 1}, false
		case atMost(e.TrainingError, t.TrainingError) || falling && e.Learning:
			return Shortfall{}, true
		}
		return Shortfall{"a lower training error, or a falling loss and live gradients",
			e.TrainingError, t.TrainingError}, false
	case from == Evaluating && to == FineTuning:
		if !(e.Delta > 0) {
			return Shortfall{"a positive performance delta", e.Delta, 0}, false
		}
		if !atLeast(e.Stability, t.Stability) {
			return Shortfall{"more stability", e.Stability, t.Stability}, false
		}
	case from == Evaluating && to == Culled:
		if !(e.Delta < t.CullDelta || e.ErrorRate > t.CullErrorRate ||
			e.Errors > t.CullErrorCount) {
			return Shortfall{"a failed evaluation: a performance drop, a high error rate or many " +
				"errors", e.Delta, t.CullDelta}, false
		}
	case from == FineTuning && to == Fossilized:
		if !(e.Improvement >= t.Improvement) {
			return Shortfall{"more total improvement", e.Improvement, t.Improvement}, false
		}
		if !atLeast(e.Stability, t.FossilStable) {
			return Shortfall{"more stability", e.Stability, t.FossilStable}, false
		}
	}

	return Shortfall{}, true
}

// atMost reports whether v ≤ threshold, allowing for v having been rounded up to single precision.
func atMost(v, threshold float64) bool { return v <= max(threshold, float64(float32(threshold))) }

// atLeast reports whether v ≥ threshold, allowing for v having been rounded down to a Float16.
func atLeast(v, threshold float64) bool {
	return v >= min(threshold, half.NewFloat16(threshold).Float64())
}

// finite reports whether v is neither NaN nor infinite.
func finite(v float64) bool { return v-v == 0 }
