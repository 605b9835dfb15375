package figures

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

func TestMomentsMerge(t *testing.T) {
	seed := randtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	var all, parts Moments
	for range 20 {
		var part Moments
		for range r.IntN(50) {
			v := 1e6 + r.NormFloat64()
			all.Add(v)
			part.Add(v)
		}
		parts.Merge(part)
	}

	if parts.N != all.N || math.Abs(parts.Mean-all.Mean) > 1e-8 ||
		math.Abs(parts.M2-all.M2) > 1e-7*all.M2 {
		t.Errorf("merged moments are %+v, want %+v", parts, all)
	}

	var none Moments
	none.Merge(Moments{})
	if none != (Moments{}) || none.Variance() != 0 {
		t.Errorf("nothing merged with nothing is %+v", none)
	}
}

// TestScanExtremes checks that a row with an overflowing sum has figures, and that a row without
// finite elements has none.
func TestScanExtremes(t *testing.T) {
	huge := []float64{1.5e308, 1.5e308, -1.5e308, -1.5e308, 1.5e308, 1.5e308}
	if s := Scan(huge, 1); s.Bad != 0 || s.Low != -1.5e308 || s.High != 1.5e308 ||
		s.Moments.N != 6 || math.Abs(s.Absolute().Mean/0.5e308-1) > 1e-12 {
		t.Errorf("%+v", s)
	}

	nan, inf := math.NaN(), math.Inf(1)
	s := Scan([]float64{nan, -inf, inf}, 1)
	if s.Bad != 3 || s.Moments.N != 0 || s.Dead != 0 {
		t.Errorf("%+v", s)
	}

	f := New(seed.Exact)
	f.AddRow(&s, 0)
	f.Finish(seed.Exact, 0)
	if f.Bad != 3 || f.Min != 0 || f.Max != 0 || f.Health(seed.Exact, 1) != [PerRow]float64{} ||
		f.Gradient(seed.Exact) != [3]float64{} {
		t.Errorf("%+v", f)
	}

	if s := Scan([]float32{float32(nan), 3, 5, 4, 1}, 2); s.Bad != 1 || s.Low != 1 || s.High != 5 ||
		s.Moments.N != 4 || s.Dead != 1 || s.Absolute().Mean != 3.25 {
		t.Errorf("%+v", s)
	}
}
