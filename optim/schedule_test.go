package optim_test

import (
	"math"
	"strings"
	"testing"

	"github.com/kasmina-go/kasmina/optim"
)

func TestWarmupCosine(t *testing.T) {
	s, err := optim.WarmupCosine(1, 0.1, 4, 24)
	if err != nil {
		t.Fatal(err)
	}

	for step, want := range map[int]float64{-3: 0.2, 0: 0.2, 3: 0.8, 4: 1,
		9: 0.1 + 0.45*(1+math.Sqrt2/2), 14: 0.55, 24: 0.1, 1000: 0.1} {
		if got := s(step); math.Abs(got-want) > 1e-15 {
			t.Errorf("step %d: rate %v, want %v", step, got, want)
		}
	}

	for step := 4; step < 24; step++ {
		if s(step+1) >= s(step) {
			t.Errorf("the rate rises from %v to %v after step %d", s(step), s(step+1), step)
		}
	}

	if c := optim.Constant(0.3); c(0) != 0.3 || c(999) != 0.3 {
		t.Error("a constant schedule is not")
	}

	for _, c := range []struct {
		peak, floor   float64
		warmup, total int
		want          string
	}{{0, 0, 1, 2, "peak is 0"}, {math.Inf(1), 0, 1, 2, "peak is +Inf"},
		{1, -1, 1, 2, "floor is -1"}, {1, 2, 1, 2, "floor is 2"},
		{1, math.NaN(), 1, 2, "floor is NaN"}, {1, 0, -1, 2, "warmup is -1"},
		{1, 0, 2, 2, "warmup is 2 and total is 2"}} {
		if _, err := optim.WarmupCosine(c.peak, c.floor, c.warmup, c.total); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want one with %q", err, c.want)
		}
	}
}

func TestLinearAnnealing(t *testing.T) {
	for _, c := range []struct {
		start, floor float64
		want         map[float64]float64
	}{
		{0, 0, map[float64]float64{-1: 1, 0: 1, 0.25: 0.75, 1: 0, 2: 0}},
		{0.5, 0.1, map[float64]float64{0: 1, 0.5: 1, 0.75: 0.55, 1: 0.1}},
	} {
		a, err := optim.LinearAnnealing(c.start, c.floor)
		if err != nil {
			t.Fatal(err)
		}
		for share, want := range c.want {
			if got := a(share); math.Abs(got-want) > 1e-15 {
				t.Errorf("from %v to %v at share %v: factor %v, want %v", c.start, c.floor, share,
					got, want)
			}
		}
	}

	for _, c := range []struct {
		start, floor float64
		want         string
	}{{1, 0, "start is 1"}, {-0.1, 0, "start is -0.1"}, {math.NaN(), 0, "start is NaN"},
		{0, 1.5, "floor is 1.5"}, {0, math.NaN(), "floor is NaN"}} {
		_, err := optim.LinearAnnealing(c.start, c.floor)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want one with %q", err, c.want)
		}
	}
}
