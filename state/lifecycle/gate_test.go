package lifecycle_test

import (
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/state/lifecycle"
	"github.com/stretchr/testify/require"
)

// TestGates checks every condition of the specified gates on both sides of its threshold.
func TestGates(t *testing.T) {
	nan := math.NaN()
	with := func(change func(*lifecycle.Evidence)) lifecycle.Evidence {
		e := lifecycle.Evidence{Epochs: 1000, TrainingError: nan, Delta: nan, Improvement: nan}
		change(&e)
		return e
	}
	none := func(*lifecycle.Evidence) {}
	above := func(v float64) float64 { return math.Nextafter(v, math.Inf(1)) }
	below := func(v float64) float64 { return math.Nextafter(v, math.Inf(-1)) }
	for _, c := range []struct {
		name     string
		from, to lifecycle.Stage
		e        lifecycle.Evidence
		open     bool
	}{
		{"germination needs nothing", 0, 1, lifecycle.Evidence{}, true},
		{"training needs nothing", 1, 2, lifecycle.Evidence{}, true},
		{"cancelling what has not begun", 1, 9, lifecycle.Evidence{}, true},
		{"99 epochs of training", 2, 3, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.TrainingError = 99, 0
		}), false},
		{"100 epochs of training", 2, 3, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.TrainingError = 100, 0
		}), true},
		{"training error at the threshold", 2, 3, with(func(e *lifecycle.Evidence) {
			e.TrainingError = 0.01
		}), true},
		{"training error above", 2, 3, with(func(e *lifecycle.Evidence) {
			e.TrainingError = above(0.01)
		}), false},
		{"training error unknown", 2, 3, with(none), false},
		{"loss falls, gradients live", 2, 3, with(func(e *lifecycle.Evidence) {
			e.LossFalling, e.Learning = true, true
		}), true},
		{"loss falls, gradients dead", 2, 3, with(func(e *lifecycle.Evidence) {
			e.LossFalling = true
		}), false},
		{"gradients live, loss does not fall", 2, 3, with(func(e *lifecycle.Evidence) {
			e.Learning = true
		}), false},
		{"99 epochs before culling", 2, 8, with(func(e *lifecycle.Evidence) {
			e.Epochs = 99
		}), false},
		{"100 epochs before culling", 2, 8, with(func(e *lifecycle.Evidence) {
			e.Epochs = 100
		}), true},
		{"49 epochs of grafting", 3, 4, with(func(e *lifecycle.Evidence) { e.Epochs = 49 }), false},
		{"50 epochs of grafting", 3, 4, with(func(e *lifecycle.Evidence) { e.Epochs = 50 }), true},
		{"a rollback at once", 3, 10, lifecycle.Evidence{}, true},
		{"19 epochs of stabilization", 4, 5, with(func(e *lifecycle.Evidence) {
			e.Epochs = 19
		}), false},
		{"20 epochs of stabilization", 4, 5, with(func(e *lifecycle.Evidence) {
			e.Epochs = 20
		}), true},
		{"a rollback at once", 4, 10, lifecycle.Evidence{}, true},
		{"29 epochs of evaluation", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.Delta, e.Stability = 29, 1, 1
		}), false},
		{"30 epochs of evaluation", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.Delta, e.Stability = 30, 1, 1
		}), true},
		{"no delta", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Delta, e.Stability = 0, 1
		}), false},
		{"a positive delta", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Delta, e.Stability = above(0), 1
		}), true},
		{"delta unknown", 5, 6, with(func(e *lifecycle.Evidence) { e.Stability = 1 }), false},
		{"stable enough", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Delta, e.Stability = 1, 0.8
		}), true},
		{"not stable enough", 5, 6, with(func(e *lifecycle.Evidence) {
			e.Delta, e.Stability = 1, 0.799
		}), false},
		{"culled with nothing wrong", 5, 8, with(none), false},
		{"culled at the delta threshold", 5, 8, with(func(e *lifecycle.Evidence) {
			e.Delta = -0.05
		}), false},
		{"culled below it", 5, 8, with(func(e *lifecycle.Evidence) {
			e.Delta = below(-0.05)
		}), true},
		{"culled at the error rate", 5, 8, with(func(e *lifecycle.Evidence) {
			e.ErrorRate = 0.1
		}), false},
		{"culled above it", 5, 8, with(func(e *lifecycle.Evidence) {
			e.ErrorRate = above(0.1)
		}), true},
		{"culled at 5 errors", 5, 8, with(func(e *lifecycle.Evidence) { e.Errors = 5 }), false},
		{"culled at 6 errors", 5, 8, with(func(e *lifecycle.Evidence) { e.Errors = 6 }), true},
		{"a rollback at once", 5, 10, lifecycle.Evidence{}, true},
		{"49 epochs of fine-tuning", 6, 7, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.Improvement, e.Stability = 49, 1, 1
		}), false},
		{"50 epochs of fine-tuning", 6, 7, with(func(e *lifecycle.Evidence) {
			e.Epochs, e.Improvement, e.Stability = 50, 1, 1
		}), true},
		{"improved by 1%", 6, 7, with(func(e *lifecycle.Evidence) {
			e.Improvement, e.Stability = 0.01, 0.95
		}), true},
		{"improved by less", 6, 7, with(func(e *lifecycle.Evidence) {
			e.Improvement, e.Stability = below(0.01), 1
		}), false},
		{"improvement unknown", 6, 7, with(func(e *lifecycle.Evidence) { e.Stability = 1 }), false},
		{"not stable enough for good", 6, 7, with(func(e *lifecycle.Evidence) {
			e.Improvement, e.Stability = 1, 0.949
		}), false},
		{"a rollback at once", 6, 10, lifecycle.Evidence{}, true},
	} {
		s, open := lifecycle.DefaultThresholds().Gate(c.from, c.to, c.e)
		if open != c.open || (s.Condition == "") != open {
			t.Errorf("%s: %v to %v is open: %v (%+v), want %v", c.name, c.from,
				c.to, open, s, c.open)
		}
	}
}

// TestWithin checks that a whole life fits into half of a run, and that thresholds that fit already
// do not change.
func TestWithin(t *testing.T) {
	all := func(t lifecycle.Thresholds) (n int) {
		for _, e := range t.MinEpochs {
			n += e
		}
		return n
	}
	for _, epochs := range []int{-1, 0, 1, 10, 100, 499} {
		require.LessOrEqual(t, all(lifecycle.DefaultThresholds().Within(epochs)), max(0, epochs)/2)
	}
	require.Equal(t, lifecycle.DefaultThresholds(), lifecycle.DefaultThresholds().Within(500))
}
