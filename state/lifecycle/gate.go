package lifecycle

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/internal/half"
)

// Thresholds are the conditions of the gates between stages.
type Thresholds struct {
	// by Stage: least epochs in it before it is left, other than by a rollback
	MinEpochs [Count]int
	// Training → Grafting: largest training error of the seed, if that does not fall
	TrainingError float64
	Stability     float64 // Evaluating → FineTuning: least stability
	FossilStable  float64 // FineTuning → Fossilized: least stability
	// FineTuning → Fossilized: least relative improvement of performance since germination
	Improvement float64
	// Evaluating → Culled: performance delta below which a blueprint has failed ...
	CullDelta      float64
	CullErrorRate  float64 // ... or error rate above which it has ...
	CullErrorCount int     // ... or number of errors above which it has
}

// DefaultThresholds returns the thresholds that a lattice has unless state.WithThresholds gives
// others:
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

// DepthThresholds returns those of lattices whose seeds grow in depth, where blueprints are copies
// of blocks that have learnt already. They are grafted at once, and judged by the loss that the
// model would have had without them. No evaluation fails by a drop alone.
//
//	MinEpochs       Evaluating 1, FineTuning 1, else 0
//	Improvement     0
//	CullDelta       −1e6
//
// The others are those of DefaultThresholds.
func DepthThresholds() Thresholds {
	t := DefaultThresholds()
	t.MinEpochs = [Count]int{Evaluating: 1, FineTuning: 1}
	t.Improvement, t.CullDelta = 0, -1e6
	return t
}

// Within returns the thresholds with their MinEpochs cut in proportion. Those of a whole life, from
// Training to FineTuning, take at most half of the given epochs. A run of so many can then see
// blueprints become fossilized. Thresholds that do so already stay as they are.
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

// Check returns an error that names a threshold which makes no sense.
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

// Evidence is what the gates judge a seed by. A figure that has not been measured is NaN and meets
// no condition.
type Evidence struct {
	Epochs        int     // epochs in the present stage
	TrainingError float64 // of the seed, as last reported in Metrics
	ErrorFalling  bool    // it is below the first one reported in this stage
	LossFalling   bool    // the host's loss is below the first one measured in this stage
	// the blueprint's parameters change; where they are not reported, its chunk's gradient is
	// finite and not 0
	Learning bool
	// they are reported, and not finite, all 0, or the same as in the report before
	Resting bool
	// performance less that without the seed, or if never compared, that at the first report in
	// this stage
	Delta float64
	// (performance − p)/|p|; p is that without the seed or else the first reported after
	// germination
	Improvement float64
	Stability   float64
	Errors      int     // reported in this stage
	ErrorRate   float64 // errors per trial reported in this stage; 0 without trials
}

// Shortfall is a condition that keeps a gate shut.
type Shortfall struct {
	Condition string // what is wanted; empty when the gate is open
	Have      float64
	Threshold float64 // of Have
}

// String describes the shortfall with both figures, or says "nothing".
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

// Gate judges the transition from one stage to another, which the table of transitions must allow,
// by the evidence. It is a pure function of its arguments.
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

// atMost compares a figure that is kept in single precision, and may have been rounded up, with its
// threshold.
func atMost(v, threshold float64) bool { return v <= max(threshold, float64(float32(threshold))) }

// atLeast compares a figure that is kept as a Float16, and may have been rounded down, with its
// threshold.
func atLeast(v, threshold float64) bool {
	return v >= min(threshold, half.NewFloat16(threshold).Float64())
}

func finite(v float64) bool { return v-v == 0 }
