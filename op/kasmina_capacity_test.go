package op_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// mixedSettings returns seeds of all kinds and stages. Several seeds share a slot with seeds of another
// kind.
func mixedSettings(n, slots int) []seedSetting {
	all := slices.Concat(capacityKinds, kasminaKinds)
	s := make([]seedSetting, n)
	for i := range s {
		s[i] = seedSetting{state.Stage(i % 11).String(), all[i/11%len(all)], 1 + i%(slots-1), 0.375}
	}
	return s
}

// TestKasminaCapacityIsItsBlueprint checks that the layer computes the same outputs for many rows at once
// as the blueprints compute row by row, and that its gradients are the sums over rows and over the seeds
// of a slot.
func TestKasminaCapacityIsItsBlueprint(t *testing.T) {
	r := random(t)
	for _, size := range []struct{ rows, chunk, width int }{{1, 1, 2}, {3, 5, 19}, {70, 4, 64},
		{300, 16, 260}, {21, 130, 800}} {
		const seeds, slots = 66, 5
		l := newLattice(t, seeds*size.chunk, mixedSettings(seeds, slots))
		k := newWideLayer(t, r, tensor.Float64, size.rows, slots, size.width, l,
			op.WithStability(op.Fast), op.WithoutTelemetry())
		single := newWideLayer(t, r, tensor.Float32, size.rows, slots, size.width, l,
			op.WithoutTelemetry())
		for _, v := range []*[]float64{&k.x, &k.g, &k.weights, &k.scale} {
			*v = mapped(*v, func(e float64) float64 { return float64(float32(e)) })
		}
		k.weights = mapped(k.weights, func(e float64) float64 { return e / 4 })
		single.x, single.g, single.weights, single.scale = k.x, k.g, k.weights, k.scale
		wantY, want := k.rowByRow(l)
		for name, c := range map[string]struct {
			*kasminaLayer
			forward, backward float64
		}{"float64": {k, 1e-14, 1e-13}, "float32": {single, 1e-6, 1e-5}} {
			y := c.kasminaLayer.forward()
			d := c.kasminaLayer.backward()
			for what, e := range map[string][2]float64{"y": {distance(y, wantY), c.forward},
				"dx":       {distance(d.x, want.x), c.backward},
				"dweights": {distance(d.weights, want.weights), c.backward},
				"dscales":  {distance(d.scales, want.scales), c.backward}} {
				if !(e[0] <= e[1]) {
					t.Errorf("%+v in %s: %s has error %g, want at most %g", size,
						name, what, e[0], e[1])
				}
			}
		}
	}
}

// rowByRow computes the layer with the functions of the blueprints.
func (k *kasminaLayer) rowByRow(l *state.Lattice) (y []float64, d kasminaGrads) {
	y, d = slices.Clone(k.x), kasminaGrads{slices.Clone(k.g), make([]float64, len(k.weights)),
		make([]float64, len(k.scale))}
	for seed, s := range l.Report().Seeds {
		if !s.Stage.Blends() && !s.Stage.Learns() {
			continue
		}
		b, err := blueprints.Lookup(s.Kind)
		if err != nil {
			k.t.Fatal(err)
		}
		n, err := blueprints.Size(s.Kind, k.chunk, k.width)
		if err != nil {
			k.t.Fatal(err)
		}
		w, a, alpha := k.weights[s.Slot*k.width:][:n], k.scale[s.Slot], s.Alpha
		if s.Stage == state.Training || s.Stage == state.FineTuning || s.Stage == state.Fossilized {
			alpha = 1
		}
		p, dp := w, make([]float64, n)
		if b.F64.Prepare != nil {
			p = make([]float64, n)
			b.F64.Prepare(p, w)
		}
		var da float64
		for row := range k.rows {
			at := row*k.dim + seed*k.chunk
			x, g, out, dx := k.x[at:][:k.chunk], k.g[at:][:k.chunk], make([]float64, k.chunk),
				make([]float64, k.chunk)
			gt := mapped(g, func(v float64) float64 { return alpha * v })
			b.F64.Forward(out, x, p, a)
			da += b.F64.Backward(dx, dp, gt, x, p, a)
			for i := range x {
				if s.Stage.Blends() {
					y[at+i] = x[i] + alpha*(out[i]-x[i])
					d.x[at+i] = (1-alpha)*g[i] + dx[i]
				}
			}
		}
		if !s.Stage.Learns() {
			continue
		}
		if b.F64.Finish != nil {
			b.F64.Finish(dp, p)
		}
		d.scales[s.Slot] += da
		for i, v := range dp {
			d.weights[s.Slot*k.width+i] += v
		}
	}

	return y, d
}

// TestKasminaCapacityIsDeterministic checks that results don't depend on the number of cores, bit for
// bit.
func TestKasminaCapacityIsDeterministic(t *testing.T) {
	const rows, seeds, chunk, slots, width = 300, 44, 24, 5, 200
	var first []float64
	for _, procs := range []int{1, 2, 5} {
		before := runtime.GOMAXPROCS(procs)
		l := newLattice(t, seeds*chunk, mixedSettings(seeds, slots))
		k := newWideLayer(t, random(t), tensor.Float32, rows, slots, width, l)
		k.x, k.g, k.weights, k.scale = fixed(len(k.x), 1), fixed(len(k.g), 2),
			fixed(len(k.weights), 3), fixed(len(k.scale), 4)
		all := k.forward()
		d := k.backward()
		all = slices.Concat(all, d.x, d.weights, d.scales)
		runtime.GOMAXPROCS(before)
		if first == nil {
			first = all
		}
		if !sameBits(all, first) {
			t.Errorf("%d cores give other bits than 1", procs)
		}
	}
}

// TestKasminaCapacityNaN checks that at α = 0 the transform affects nothing, not even as 0·NaN, and that
// otherwise NaN is visible even if it is multiplied by 0.
func TestKasminaCapacityNaN(t *testing.T) {
	r := random(t)
	for _, kind := range capacityKinds {
		for stability := op.Adaptive; stability <= op.Strict; stability++ {
			l := newLattice(t, 5, []seedSetting{{"Grafting", kind, 1, 0}})
			k := newWideLayer(t, r, tensor.Float64, 3, 2, 20, l, op.WithStability(stability))
			k.x = mapped(k.x, awayFromZero)
			k.x[7] = 1e7 // large enough for the adaptive mode to scale
			k.weights, k.scale = mapped(k.weights, func(float64) float64 {
				return math.NaN()
			}), []float64{math.NaN(), math.Inf(1)}
			if y := k.forward(); !sameBits(y, k.x) {
				t.Errorf("%s, %v: y is %v, want %v", kind, stability, y, k.x)
			}
			if d := k.backward(); !sameBits(d.x, k.g) || !sameBits(d.weights,
				make([]float64, 40)) || !sameBits(d.scales, make([]float64, 2)) {
				t.Errorf("%s, %v: gradients are %v", kind, stability, d)
			}
		}
		l := newLattice(t, 5, []seedSetting{{"Grafting", kind, 1, 0.5}})
		k := newWideLayer(t, r, tensor.Float64, 3, 2, 20, l)
		k.weights[20], k.scale = math.NaN(), []float64{0, 0}
		if y := k.forward(); !slices.ContainsFunc(y, math.IsNaN) {
			t.Errorf("%s: a weight that is NaN does not show with a scale of 0", kind)
		}
	}
}

// TestKasminaCapacityAdaptive checks that inputs of LowRank near the largest float32 are scaled, and that
// inputs of ChunkMLP never are.
func TestKasminaCapacityAdaptive(t *testing.T) {
	r := random(t)
	for _, size := range []float64{1e6, 3e6, 1e20, 3e37} {
		l := newLattice(t, 2*8, []seedSetting{{"FineTuning", "LowRank", 1, 1},
			{"Grafting", "ChunkMLP", 2, 0.375}})
		k := newWideLayer(t, r, tensor.Float32, 5, 3, 48, l)
		exact := newWideLayer(t, r, tensor.Float64, 5, 3, 48, l, op.WithStability(op.Fast))
		k.x = mapped(k.x, func(float64) float64 {
			return float64(float32(size * (2*r.Float64() - 1)))
		})
		for i := range k.weights {
			if k.weights[i] = float64(float32(r.NormFloat64() / 64)); i < 2*48 && i%48 < 24 {
				// V·x overflows although U(V·x) doesn't.
				k.weights[i] = float64(float32(64 * r.NormFloat64()))
			}
		}
		k.scale = []float64{0, 0x1p-9, 0x1p-9}
		exact.x, exact.weights, exact.scale = k.x, k.weights, k.scale
		if e := distance(k.forward(), exact.forward()); !(e < 1e-6) {
			t.Errorf("activations near %g have error %g", size, e)
		}
	}
}

// TestKasminaTooNarrow checks that a kind that needs wider slots than the layer has makes the run fail
// with an error that names the kind, and that the next run is unaffected.
func TestKasminaTooNarrow(t *testing.T) {
	l := newLattice(t, 8, []seedSetting{{"FineTuning", "Residual", 1, 1},
		{"Dormant", "Residual", 1, 0}})
	k := newWideLayer(t, random(t), tensor.Float64, 3, 3, 7, l)
	y := k.forward()
	if err := l.RequestGermination(1, state.GerminationRequest{Slot: 2,
		Kind: blueprints.LowRank}); err != nil {
		t.Fatal(err) // the lattice doesn't know the layer's width
	}

	if again := k.forward(); !sameBits(y, again) {
		t.Error("a seed that has only germinated changes the output")
	}

	if err := l.Transition(1, state.Training); err != nil {
		t.Fatal(err)
	}

	if _, err := k.tryForward(k.forwardOp); !errors.Is(err, blueprints.ErrWidth) {
		t.Errorf("error %v, want ErrWidth", err)
	}

	if err := l.Transition(1, state.Culled); err != nil {
		t.Fatal(err)
	}

	if again := k.forward(); !sameBits(y, again) {
		t.Error("the run after the error gives another output")
	}

	knows := newLattice(t, 8, []seedSetting{{"Dormant", "Residual", 1, 0},
		{"Dormant", "Residual", 1, 0}}, state.WithWidth(7))
	err := knows.RequestGermination(1, state.GerminationRequest{Slot: 2, Kind: blueprints.ChunkMLP})
	if stage, _ := knows.Stage(1); !errors.Is(err, blueprints.ErrWidth) || stage != state.Dormant {
		t.Errorf("error %v and stage %v, want ErrWidth and Dormant", err, stage)
	}
}

// manyParams is a user-defined kind with a matrix and a bias: t = x + a·(M·x + b), with M [C, C] and b
// [C].
func manyParams[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward: func(t, x, p []T, a T) {
			c := len(x)
			for i := range t {
				sum := p[c*c+i]
				for j, v := range x {
					sum += p[i*c+j] * v
				}
				t[i] = x[i] + a*sum
			}
		},
		Backward: func(dx, dp, g, x, p []T, a T) (da float64) {
			c := len(x)
			copy(dx, g)
			for i, gi := range g {
				da += float64(gi) * float64(p[c*c+i])
				dp[c*c+i] += a * gi
				for j, v := range x {
					da += float64(gi) * float64(p[i*c+j]) * float64(v)
					dx[j] += a * gi * p[i*c+j]
					dp[i*c+j] += a * gi * v
				}
			}
			return da
		},
	}
}

var affineKind, errAffine = blueprints.Register(blueprints.Blueprint{
	Name:     "Affine",
	Layout:   "x + a·(M·x + b): M [C, C] and then b [C]",
	Size:     func(c, _ int) int { return c*c + c },
	Identity: func(w []float64, _ int, _ *rand.Rand) float64 { clear(w); return 1 },
	F32:      manyParams[float32](),
	F64:      manyParams[float64](),
})

// TestKasminaOwnKindWithManyParameters checks that a user-defined kind may have many parameters.
func TestKasminaOwnKindWithManyParameters(t *testing.T) {
	if errAffine != nil {
		t.Fatal(errAffine)
	}

	l := newLattice(t, 9, []seedSetting{{"Grafting", "Affine", 1, 0.375},
		{"FineTuning", "Affine", 1, 1}, {"Evaluating", "Affine", 2, 1}})
	k := newWideLayer(t, random(t), tensor.Float64, 4, 3, 14, l, op.WithoutTelemetry())
	k.forward()
	d := k.backward()
	k.checkDifferences("dx", d.x, k.x)
	k.checkDifferences("dweights of slot 1", d.weights[14:28], k.weights[14:28])
	k.checkDifferences("dscales of slot 1", d.scales[1:2], k.scale[1:2])
	if slices.ContainsFunc(d.weights[28:], func(v float64) bool { return v != 0 }) {
		t.Errorf("a frozen seed's slot has gradients %v", d.weights[28:])
	}

	narrow := newLattice(t, 9, make3(), state.WithWidth(11))
	if err := narrow.RequestGermination(0, state.GerminationRequest{Slot: 1,
		Kind: affineKind}); !errors.Is(err, blueprints.ErrWidth) {
		t.Errorf("error %v, want ErrWidth", err)
	}
}

func BenchmarkKasminaCapacity(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, kind := range []string{"Residual", "LowRank", "ChunkMLP"} {
		for _, c := range []struct{ seeds, chunk, m int }{{16, 16, 8}, {4, 64, 16}} {
			b.Run(fmt.Sprintf("%s/%dx%d/m=%d", kind, c.seeds, c.chunk, c.m), func(b *testing.B) {
				settings := make([]seedSetting, c.seeds)
				for i := range settings {
					settings[i] = seedSetting{"FineTuning", kind, 1 + i, 1}
				}
				l := newLattice(b, c.seeds*c.chunk, settings)
				k := newWideLayer(b, r, tensor.Float32, 1024, c.seeds+1, 2*c.m*c.chunk, l)
				in := append(k.params(), k.poisoned(k.rows, k.dim), dense(k.dt, k.g, k.rows, k.dim))
				y, d := k.poisoned(k.rows, k.dim), k.poisoned(len(k.x)+len(k.weights)+len(k.scale))
				for b.Loop() {
					if _, err := k.forwardOp.UsePreallocDo(y, in[:3]...); err != nil {
						b.Fatal(err)
					}
					if _, err := k.backwardOp.(prealloc).UsePreallocDo(d, in...); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
