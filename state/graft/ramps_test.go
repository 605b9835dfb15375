package graft_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/state/graft"
)

// grafted drives a strategy as a lattice does, which stores α in single precision and never lowers
// it.
type grafted struct {
	graft.Progress
	done bool
}

func (g *grafted) step(s graft.Strategy) {
	g.Epochs++
	if g.done {
		return
	}
	var alpha float64
	alpha, g.Memory, g.done = s.Advance(g.Progress)
	g.Alpha = max(g.Alpha, float64(float32(min(1, max(0, alpha)))))
}

// TestStrategyProperties checks, for every strategy and with random measurements, that α stays in
// [0, 1], never decreases, reaches the target, and pauses when it must.
func TestStrategyProperties(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	runs := 3000
	if testing.Short() {
		runs = 500
	}

	for range runs {
		epochs, target := 1+r.IntN(60), 1-r.Float64()
		low := r.Float64()
		for _, s := range []graft.Strategy{
			graft.FixedRamp{Ramp: graft.Ramp(r.IntN(3)), Epochs: epochs, Target: target},
			graft.PerformanceLinked{Epochs: epochs, Target: target, Gain: r.Float64(),
				MaxSpeed: 1 + 5*r.Float64()},
			graft.DriftControlled{Epochs: epochs, Target: target, Threshold: 0.8,
				Pause: 1 + r.IntN(4)},
			graft.GradNormGated{Epochs: epochs, Target: target, Low: low,
				High: low + 0.5 + r.Float64()},
		} {
			if err := s.Check(); err != nil {
				t.Fatal(err)
			}
			g := grafted{}
			if r.IntN(4) == 0 {
				g.Alpha = float64(float32(r.Float64())) // set by hand
			}
			if err := follow(r, s, &g, epochs, target); err != nil {
				t.Fatalf("%+v, %+v: %v", s, g, err)
			}
		}
	}
}

func follow(r *rand.Rand, s graft.Strategy, g *grafted, epochs int, target float64) error {
	least := float64(float32(target)) - 1e-6
	share, start, moved, rest := target/float64(epochs), g.Alpha, 0, 0
	for range 40*epochs + 400 {
		before, memory := g.Alpha, g.Memory
		g.Drift, g.GradNorm, g.Performance = r.Float64(), 2*r.Float64(), r.NormFloat64()
		if r.IntN(50) == 0 {
			g.Drift, g.GradNorm = math.NaN(), math.Inf(1)
		}
		wasDone := g.done
		g.step(s)
		step := g.Alpha - before
		resting := false
		switch s := s.(type) {
		case graft.DriftControlled:
			if rest--; !(g.Drift <= s.Threshold) {
				rest = s.Pause
			}
			resting = rest > 0
		case graft.GradNormGated:
			resting = !(g.GradNorm >= s.Low && g.GradNorm <= s.High)
		case graft.PerformanceLinked:
			if most := share * s.MaxSpeed * (1 + 2*0x1p-8); !g.done &&
				(step < share*(1-1e-3)-1e-7 || step > most+1e-7) {
				return fmt.Errorf("a step of %v, want %v to %v", step, share, most)
			}
			speed := float32(1)
			if memory[1] > 0 && g.Performance > float64(memory[0]) {
				speed = float32(min(s.MaxSpeed, float64(memory[1])*(1+s.Gain)))
			}
			if !wasDone && g.Memory[1] != speed {
				return fmt.Errorf("speed %v after %v, performance %v, want %v", g.Memory[1],
					memory, g.Performance, speed)
			}
		}

		if step > 0 {
			moved++
		}
		switch {
		case !(g.Alpha >= 0 && g.Alpha <= 1) || step < 0:
			return fmt.Errorf("α went from %v to %v", before, g.Alpha)
		case (wasDone || resting) && step != 0:
			return fmt.Errorf("α went from %v to %v while at rest", before, g.Alpha)
		case g.done && g.Alpha < least:
			return fmt.Errorf("it ended at %v, want %v", g.Alpha, target)
		}
	}

	if _, fixed := s.(graft.FixedRamp); !g.done || !fixed && start < target-share && moved == 0 {
		return fmt.Errorf("it did not end in %d epochs, or did nothing", g.Epochs)
	}
	return nil
}

// TestStrategyChecks checks that invalid parameters are rejected.
func TestStrategyChecks(t *testing.T) {
	for _, s := range []graft.Strategy{
		graft.PerformanceLinked{Epochs: 0, Target: 1, MaxSpeed: 1},
		graft.PerformanceLinked{Epochs: 1, Target: 1, Gain: -1, MaxSpeed: 1},
		graft.PerformanceLinked{Epochs: 1, Target: 1, MaxSpeed: 0.5},
		graft.PerformanceLinked{Epochs: 1, Target: 1, MaxSpeed: math.Inf(1)},
		graft.DriftControlled{Epochs: 1, Target: 2, Pause: 1},
		graft.DriftControlled{Epochs: 1, Target: 1, Threshold: -1, Pause: 1},
		graft.DriftControlled{Epochs: 1, Target: 1},
		graft.GradNormGated{Epochs: 1, Target: 0, High: 1},
		graft.GradNormGated{Epochs: 1, Target: 1, Low: 2, High: 1},
		graft.GradNormGated{Epochs: 1, Target: 1, High: math.Inf(1)},
		graft.GradNormGated{Epochs: 1 << 16, Target: 1, High: 1},
	} {
		if s.Check() == nil {
			t.Errorf("%+v passes its check", s)
		}
	}
}
