package kasmina

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/cputest"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/figures"
	"github.com/kasmina-go/kasmina/internal/cpu/kasmina/strip"
	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/internal/seed"
)

// layerRun is a layer with its inputs and outputs.
type layerRun[T cpu.Float] struct {
	*Layer[T]
	x, g, weights, scales []T
	y, dx, dw, da         []T
	input, gradient       []figures.Chunk
}

func (p *layerRun[T]) run() {
	for _, v := range [][]T{p.y, p.dx, p.dw, p.da} {
		for i := range v {
			v[i] = T(math.NaN())
		}
	}
	p.Forward(p.y, p.x, p.weights, p.scales)
	p.input = slices.Clone(p.Figures)
	p.Backward(p.dx, p.dw, p.da, p.g, p.x, p.weights, p.scales)
	p.gradient = slices.Clone(p.Figures)
}

// newLayerRun returns a layer with inputs of the given mean and deviation, and the same layer in
// float64.
func newLayerRun(t *testing.T, r *rand.Rand, rows, seeds, chunk int,
	mean, deviation float64) (*layerRun[float32], *layerRun[float64]) {
	const slots = 5
	a := &layerRun[float32]{Layer: mixedLayer[float32](t, rows, seeds, chunk, slots)}
	b := &layerRun[float64]{Layer: mixedLayer[float64](t, rows, seeds, chunk, slots)}
	n := rows * seeds * chunk
	fill := func(n int, mean, deviation float64) (single []float32, double []float64) {
		single, double = make([]float32, n), make([]float64, n)
		for i := range single {
			single[i] = float32(mean + deviation*r.NormFloat64())
			double[i] = float64(single[i])
		}
		return single, double
	}

	a.x, b.x = fill(n, mean, deviation)
	a.g, b.g = fill(n, mean, deviation)
	a.weights, b.weights = fill(slots*chunk, 0, 1)
	a.scales, b.scales = fill(slots, 0, 1)
	a.y, b.y, a.dx, b.dx = make([]float32, n), make([]float64, n),
		make([]float32, n), make([]float64, n)
	a.dw, b.dw, a.da, b.da = make([]float32, slots*chunk), make([]float64, slots*chunk),
		make([]float32, slots), make([]float64, slots)
	unmeasured := r.IntN(3)
	for s := range seeds {
		a.Measure[s] = unmeasured != 0 && (unmeasured != 1 || s%3 != 0)
	}

	copy(b.Measure, a.Measure)
	return a, b
}

func sameFigures(t *testing.T, what string, seed int, got, want *figures.Chunk, measured bool) {
	t.Helper()
	moments := func(of string, g, w figures.Moments) {
		unit := 1e-14 * math.Abs(w.Mean) // precision of a norm
		spread := math.Sqrt(w.M2)
		if g.N != w.N || math.Abs(g.Mean-w.Mean) > 1e-9*spread+unit ||
			math.Abs(g.M2-w.M2) > 1e-8*w.M2+4*w.N*unit*(spread+unit) {
			t.Errorf("%s: seed %d's moments of %s are %+v, want %+v", what, seed, of, g, w)
		}
	}

	if got.Bad != want.Bad {
		t.Errorf("%s: seed %d has %d bad elements, want %d", what, seed, got.Bad, want.Bad)
	}

	if !measured {
		return
	}

	moments("elements", got.Moments, want.Moments)
	moments("norms", got.Norms, want.Norms)
	if got.Min != want.Min || got.Max != want.Max || got.Dead != want.Dead {
		t.Errorf("%s: seed %d is %+v, want %+v", what, seed, got, want)
	}
}

// TestStrips compares the strips of every instruction set with the row-by-row computation in
// float64. Chunks are smaller and larger than vectors and strips and not multiples of either, with
// all kinds in all situations.
func TestStrips(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for _, s := range []struct{ rows, seeds, chunk int }{
			{1, 1, 1}, {3, 70, 1}, {9, 65, 2}, {8, 100, 3}, {300, 70, 4}, {13, 53, 5}, {17, 40, 8},
			{9, 33, 12}, {70, 40, 16}, {4, 32, 17}, {257, 32, 16},
			{5, 33, 64}, {7, 32, 100}, {3, 32, 255}, {6, 32, 256}, {11, 33, 257},
			{5, 32, 300}, {3, 32, 600},
		} {
			for _, of := range [][2]float64{{0, 1}, {1e4, 1e-2}, {-3, 1e-20}, {0, 1e-30}} {
				a, b := newLayerRun(t, r, s.rows, s.seeds, s.chunk, of[0], of[1])
				a.run()
				b.run()
				name := fmt.Sprintf("%+v of %v", s, of)
				for i := range a.input {
					sameFigures(t, name+", input", i, &a.input[i], &b.input[i], a.Measure[i])
					sameFigures(t, name+", gradient", i, &a.gradient[i],
						&b.gradient[i], a.Measure[i])
				}

				for what, v := range map[string]struct {
					got   []float32
					want  []float64
					limit float64
				}{"y": {a.y, b.y, 1e-6}, "dx": {a.dx, b.dx, 1e-6}, "dweights": {a.dw, b.dw, 1e-5},
					"dscales": {a.da, b.da, 1e-5}} {
					var off, size float64
					for i, w := range v.want {
						off, size = math.Hypot(off, float64(v.got[i])-w), math.Hypot(size, w)
					}
					if !(off <= v.limit*size) {
						t.Errorf("%s: %s has relative error %g", name, what, off/size)
					}
				}

				if t.Failed() {
					t.FailNow()
				}
			}
		}
	})
}

// TestStripsNonFinite checks that NaN and infinities are counted for their own seeds, do not affect
// the results of other seeds, and are excluded from the figures.
func TestStripsNonFinite(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		for _, chunk := range []int{1, 3, 4, 16, 40, 300} {
			const rows, seeds = 21, 40
			clean, _ := newLayerRun(t, r, rows, seeds, chunk, 0, 1)
			bad := *clean
			bad.x, bad.g = slices.Clone(clean.x), slices.Clone(clean.g)
			bad.y, bad.dx = slices.Clone(clean.y), slices.Clone(clean.dx)
			clean.run()
			victim, first := r.IntN(seeds), r.IntN(rows-2)
			for i, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
				at := (first+i)*seeds*chunk + victim*chunk + r.IntN(chunk)
				bad.x[at], bad.g[at] = float32(v), float32(v)
			}

			bad.run()
			reference := &layerRun[float64]{Layer: mixedLayer[float64](t, rows, seeds, chunk, 5)}
			copy(reference.Measure, clean.Measure)
			reference.x, reference.weights, reference.scales, reference.y = cputest.Widen(bad.x),
				cputest.Widen(bad.weights), cputest.Widen(bad.scales), make([]float64, len(bad.x))
			reference.Forward(reference.y, reference.x, reference.weights, reference.scales)

			// including norms of infinities, which rules of strips do not compute
			for i, want := range reference.y {
				if math.IsNaN(float64(bad.y[i])) != math.IsNaN(want) {
					t.Fatalf("chunks of %d: element %d of y is %v, want %v, for %v", chunk, i,
						bad.y[i], want, bad.x[i])
				}
			}

			for s := range seeds {
				sameFigures(t, "with NaN", s, &bad.input[s],
					&reference.Figures[s], clean.Measure[s])
				if want := map[bool]int{true: 3}[s == victim]; bad.input[s].Bad != want ||
					bad.gradient[s].Bad != want {
					t.Errorf("chunks of %d: seed %d has %d and %d bad elements, want %d", chunk, s,
						bad.input[s].Bad, bad.gradient[s].Bad, want)
				}

				for row := range rows {
					at := (row*seeds + s) * chunk
					if s == victim && first <= row && row < first+3 {
						continue
					}
					if !slices.Equal(bad.y[at:][:chunk], clean.y[at:][:chunk]) ||
						!slices.Equal(bad.dx[at:][:chunk], clean.dx[at:][:chunk]) {
						t.Errorf("chunks of %d: row %d of seed %d changes with seed %d",
							chunk, row, s, victim)
					}
				}
			}
		}
	})
}

// TestStripsBits checks that seeds that do not blend pass every bit on, and that results do not
// depend on the number of cores.
func TestStripsBits(t *testing.T) {
	cputest.EachISA(t, func(t *testing.T) {
		r := randtest.New(t)
		p, _ := newLayerRun(t, r, 530, 96, 12, 0, 1)
		for i := range p.x {
			if i%7 == 0 {
				p.x[i], p.g[i] = float32(math.Copysign(0, -1)), float32(math.Copysign(0, -1))
			}
		}

		p.run()
		first := *p
		first.y, first.dx, first.dw, first.da = slices.Clone(p.y), slices.Clone(p.dx),
			slices.Clone(p.dw), slices.Clone(p.da)
		for s := range p.Seeds {
			if s%8 > 3 {
				continue
			}
			for row := range p.Rows {
				for i := (row*p.Seeds + s) * p.Chunk; i < (row*p.Seeds+s+1)*p.Chunk; i++ {
					if math.Float32bits(p.y[i]) != math.Float32bits(p.x[i]) ||
						math.Float32bits(p.dx[i]) != math.Float32bits(p.g[i]) {
						t.Fatalf(
							"seed %d does not blend, but %v becomes %v, and the gradient %v %v",
							s, p.x[i], p.y[i], p.g[i], p.dx[i])
					}
				}
			}
		}

		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
		for _, cores := range []int{1, 3} {
			runtime.GOMAXPROCS(cores)
			p.run()
			if !slices.Equal(p.y, first.y) || !slices.Equal(p.dx, first.dx) ||
				!slices.Equal(p.dw, first.dw) || !slices.Equal(p.da, first.da) ||
				!slices.Equal(p.input, first.input) || !slices.Equal(p.gradient, first.gradient) {
				t.Errorf("on %d cores the results are others", cores)
			}
		}
	})
}

// TestStreams checks that writing past the caches does not change results.
func TestStreams(t *testing.T) {
	defer func(n int) { strip.Streamed = n }(strip.Streamed)
	cputest.EachISA(t, func(t *testing.T) {
		p, _ := newLayerRun(t, randtest.New(t), 300, 64, 16, 0, 1)
		strip.Streamed = 1 << 40
		p.run()
		y, dx := slices.Clone(p.y), slices.Clone(p.dx)
		strip.Streamed = 0
		p.run()
		if !slices.Equal(y, p.y) || !slices.Equal(dx, p.dx) {
			t.Error("they differ")
		}
	})
}

// TestRuledKinds checks that elementwise kinds have a rule and other kinds have none.
func TestRuledKinds(t *testing.T) {
	for kind := range blueprints.Kind(6) {
		k := &Layer[float32]{Rows: 1, Seeds: 1, Chunk: 4, Slots: 2, Width: 8,
			Measure: make([]bool, 1)}
		if err := k.Activate(0, seed.Seed{Slot: 1, Kind: kind, Blend: true,
			Alpha: 0.5}); err != nil {
			t.Fatal(err)
		}
		k.prepare(make([]float32, 16), make([]float32, 2), false)
		if pointwise := kind <= blueprints.ConvFilter; k.Active[0].ruled != pointwise {
			t.Errorf("%v has a rule: %v", kind, k.Active[0].ruled)
		}
	}
}
