package op_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/autodiff"
	"github.com/kasmina-go/kasmina/blueprints"
	"github.com/kasmina-go/kasmina/cpuops"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// TestKasminaGradients compares the gradients of every stage and kind with central differences, for odd
// chunks, for a single seed and for several that share a slot, in every stability mode.
func TestKasminaGradients(t *testing.T) {
	r := random(t)
	for stage := range state.RolledBack + 1 {
		for _, kind := range slices.Concat(kasminaKinds, capacityKinds) {
			for _, size := range []struct{ seeds, chunk int }{{1, 1}, {1, 5}, {3, 2}, {4, 3}} {
				for _, mode := range []op.Stability{op.Fast, op.Strict, op.Adaptive} {
					seeds := make([]seedSetting, size.seeds)
					for i := range seeds {
						seeds[i] = seedSetting{stage.String(), kind, 1 + i%2, 0.375}
					}
					l := newLattice(t, size.seeds*size.chunk, seeds)
					width := size.chunk
					if slices.Contains(capacityKinds, kind) {
						width = 7 * size.chunk // the kind uses 6 of these
					}
					k := newWideLayer(t, r, tensor.Float64, 3, 3, width, l, op.WithStability(mode),
						op.WithEpsilon(0.1), op.WithoutTelemetry())
					k.x, k.weights = mapped(k.x, awayFromZero), mapped(k.weights, awayFromZero)
					t.Run(fmt.Sprintf("%v/%s/%dx%d/%v", stage, kind, size.seeds, size.chunk, mode),
						func(t *testing.T) {
							k.t = t
							if mode == op.Strict {
								k.learnLimits(r.Float64())
							}
							if mode == op.Adaptive {
								k.x = mapped(k.x, func(v float64) float64 { return 0x1p22 * v })
								// w and a affect the output only slightly, but linearly.
								if kind == "Residual" {
									k.step = 4
								}
							}
							k.checkStage(stage, kind)
						})
				}
			}
		}
	}
}

// learnLimits runs a pass with telemetry over smaller inputs. It then makes every seed's first input
// exceed the limits and one input of row 1 too small, so that the strict mode clamps both.
func (k *kasminaLayer) learnLimits(turn float64) {
	l := k.forwardOp.Lattice
	kept := k.x
	k.x = mapped(k.x, func(v float64) float64 { return v / 4 })
	layer := newWideLayer(k.t, random(k.t), k.dt, k.rows, k.slots, k.width, l,
		op.WithStability(op.Strict))
	layer.x = k.x
	layer.forward()
	k.x = kept
	for at := 0; at < k.dim; at += k.chunk {
		k.x[at] = math.Copysign(40, turn-0.5)
		k.x[k.dim+at] = 0.05 * turn
	}
}

func (k *kasminaLayer) checkStage(stage state.Stage, kind string) {
	k.t.Helper()
	y := k.forward()
	d := k.backward()
	k.checkDifferences("dx", d.x, k.x)
	switch {
	case stage == state.Training:
		if !sameBits(y, k.x) || !sameBits(d.x, k.g) {
			k.t.Error("training changes the host: y is not x or dx is not g")
		}
		// The parameters learn as if blended with α = 1, so their gradients equal those of a seed
		// with α = 1 in the grafting stage.
		l := k.forwardOp.Lattice
		for i := range l.Seeds() {
			if err := errors.Join(l.Transition(i, state.Grafting), l.SetAlpha(i, 1)); err != nil {
				k.t.Fatal(err)
			}
		}
		k.forward()
		blended := k.backward()
		if !sameBits(d.weights, blended.weights) || !sameBits(d.scales, blended.scales) {
			k.t.Errorf("gradients in training are %v and %v, blended with α = 1 %v and %v",
				d.weights, d.scales, blended.weights, blended.scales)
		}
	case stage.Learns():
		k.checkDifferences("dweights", d.weights, k.weights)
		k.checkDifferences("dscales", d.scales, k.scale)
	default:
		if slices.ContainsFunc(append(d.weights, d.scales...), func(v float64) bool {
			return v != 0
		}) {
			k.t.Errorf("%v passes gradients to its parameters: %v and %v",
				stage, d.weights, d.scales)
		}
	}

	if !stage.Blends() && (!sameBits(y, k.x) || !sameBits(d.x, k.g)) {
		k.t.Errorf("%v is not the identity", stage)
	}
}

// TestKasminaStrict checks that the strict mode computes the same as the fast mode with clamped inputs,
// and that no gradient passes where the clamp changes the input.
func TestKasminaStrict(t *testing.T) {
	r := random(t)
	const seeds, chunk, rows, eps = 5, 7, 64, 0.01
	settings := make([]seedSetting, seeds)
	for i := range settings {
		settings[i] = seedSetting{"Grafting", kasminaKinds[i%4], 1 + i, 0.625}
	}

	settings[4].Stage = "Dormant"
	for _, dt := range []tensor.Dtype{tensor.Float64, tensor.Float32} {
		l := newLattice(t, seeds*chunk, settings)
		k := newKasminaLayer(t, r, dt, rows, seeds+1, l, op.WithStability(op.Strict),
			op.WithEpsilon(eps))
		previous := slices.Clone(k.x)
		k.forward()
		for i := range k.x {
			switch r.IntN(8) {
			case 0:
				k.x[i] *= 20
			case 1:
				k.x[i] *= 1e-3
			case 2:
				k.x[i] = 0 // the clamp doesn't change 0, so the gradient passes
			}
			if dt == tensor.Float32 {
				k.x[i] = float64(float32(k.x[i]))
			}
		}
		y := k.forward()
		d := k.backward()

		clamped, bites := slices.Clone(k.x), make([]bool, len(k.x))
		count := 0
		for s := range seeds - 1 {
			var chunkOf []float64
			for row := range rows {
				chunkOf = append(chunkOf, previous[row*k.dim+s*chunk:][:chunk]...)
			}
			mean, variance := meanVariance(chunkOf)
			lo, hi := mean-6*math.Sqrt(variance), mean+6*math.Sqrt(variance)
			for row := range rows {
				for i := row*k.dim + s*chunk; i < row*k.dim+(s+1)*chunk; i++ {
					v := k.x[i]
					if math.Abs(v) < eps {
						v = 0
					}
					clamped[i] = min(hi, max(lo, v))
					bites[i] = clamped[i] != k.x[i]
					if bites[i] {
						count++
					}
				}
			}
		}
		if count < 100 {
			t.Fatalf("only %d elements are clamped", count)
		}
		fast := newKasminaLayer(t, r, tensor.Float64, rows, seeds+1, l, op.WithStability(op.Fast),
			op.WithoutTelemetry())
		fast.x, fast.weights, fast.scale, fast.g = clamped, k.weights, k.scale, k.g
		wantY := fast.forward()
		want := fast.backward()
		for i := range want.x {
			if bites[i] {
				want.x[i] = 0
			}
		}
		limit := map[tensor.Dtype]float64{tensor.Float64: 1e-12, tensor.Float32: 1e-6}[dt]
		for what, e := range map[string]float64{"y": distance(y, wantY),
			"dx": distance(d.x, want.x), "dweights": distance(d.weights, want.weights) / 10,
			"dscales": distance(d.scales, want.scales) / 10} {
			if !(e <= limit) {
				t.Errorf("%v: %s has error %g, want at most %g", dt, what, e, limit)
			}
		}
	}
}

func meanVariance(v []float64) (mean, variance float64) {
	for _, e := range v {
		mean += e / float64(len(v))
	}
	for _, e := range v {
		variance += (e - mean) * (e - mean) / float64(len(v))
	}
	return mean, variance
}

// TestKasminaStrictUsesPreviousPass checks that the limits come from the previous pass rather than the
// current one, and that the first pass has none.
func TestKasminaStrictUsesPreviousPass(t *testing.T) {
	l := newLattice(t, 4, []seedSetting{{"Fossilized", "ConvFilter", 1, 1}})
	k := newKasminaLayer(t, random(t), tensor.Float64, 2, 2, l, op.WithStability(op.Strict))
	k.weights, k.scale = []float64{0, 0, 0, 0, 1, 0, 0, 0}, []float64{0, 1} // the identity
	for _, c := range []struct{ x, want []float64 }{
		{[]float64{1, 2, 3, 4, 1, 2, 3, 1e4}, []float64{1, 2, 3, 4, 1, 2, 3, 1e4}},
		{[]float64{5, 5, 5, 5, 5, 5, 5, 5}, []float64{5, 5, 5, 5, 5, 5, 5, 5}},
		{[]float64{5, 5, 6, 5, -9, 5, 1e-9, 5}, []float64{5, 5, 5, 5, 5, 5, 5, 5}},
	} {
		k.x = c.x
		if y := k.forward(); !sameBits(y, c.want) {
			t.Errorf("y of %v is %v, want %v", c.x, y, c.want)
		}
	}
}

// TestKasminaAdaptive checks that in the adaptive mode a transform of activations near the largest
// float32 gives t(x), although its intermediate results would overflow, and that smaller activations
// give results bit-identical to the fast mode's.
func TestKasminaAdaptive(t *testing.T) {
	r := random(t)
	const chunk = 64
	for _, kind := range kasminaKinds {
		for _, size := range []float64{1, 1e6, 3e6, 1e12, 1e30, 3e36} {
			settings := []seedSetting{{"FineTuning", kind, 1, 1}, {"Grafting", kind, 2, 0.375}}
			l := newLattice(t, 2*chunk, settings)
			k := newKasminaLayer(t, r, tensor.Float32, 5, 3, l)
			for i := range k.x {
				k.x[i] = float64(float32(size * (2*r.Float64() - 1)))
			}
			k.scale = []float64{0, -0x1p-10, 0x1p-11}
			overflows := kind == "MLPExpansion" || kind == "ConvFilter"
			if overflows { // x·w overflows at 3e36, although a·x·w doesn't
				k.weights = mapped(k.weights, func(v float64) float64 {
					return 1024 * math.Mod(v, 1)
				})
			}
			fast := newKasminaLayer(t, r, tensor.Float32, 5, 3, l, op.WithStability(op.Fast))
			exact := newKasminaLayer(t, r, tensor.Float64, 5, 3, l, op.WithStability(op.Fast))
			for _, other := range []*kasminaLayer{fast, exact} {
				other.x, other.weights, other.scale, other.g = k.x, k.weights, k.scale, k.g
			}
			y := k.forward()
			if e := distance(y, exact.forward()); !(e < 1e-6) {
				t.Errorf("%s of activations near %g has error %g", kind, size, e)
			}
			plain := fast.forward()
			if size <= 1e6 && !sameBits(y, plain) {
				t.Errorf("%s of activations up to %g is not what the fast mode gives", kind, size)
			}
			if size > 1e36 && overflows && !k.overflows(chunk) {
				t.Errorf("%s of activations near %g does not overflow without scaling either", kind,
					size)
			}
			d, want := k.backward(), func() kasminaGrads {
				exact.forward()
				return exact.backward()
			}()
			if e := distance(d.x, want.x); !(e < 1e-5) {
				t.Errorf("%s near %g: dx has error %g", kind, size, e)
			}
			if e := distance(d.weights, want.weights); !(e < 1e-5) && size < 1e36 {
				t.Errorf("%s near %g: dweights has error %g", kind, size, e)
			}
		}
	}
}

// overflows reports whether seed 0's transform overflows if its formula is evaluated literally in
// float32.
func (k *kasminaLayer) overflows(chunk int) bool {
	narrow := func(v []float64) []float32 {
		s := make([]float32, len(v))
		for i := range v {
			s[i] = float32(v[i])
		}
		return s
	}

	kind, y := k.forwardOp.Lattice.Report().Seeds[0].Kind, make([]float32, chunk)
	for row := range k.rows {
		x, w := narrow(k.x[row*k.dim:][:chunk]), narrow(k.weights[k.width:][:chunk])
		if err := blueprints.Apply(kind, y, x, w, float32(k.scale[1])); err != nil {
			k.t.Fatal(err)
		}
		if slices.ContainsFunc(y, func(v float32) bool { return v-v != 0 }) {
			return true
		}
	}

	return false
}

func TestKasminaGradClip(t *testing.T) {
	r := random(t)
	const seeds, chunk, rows, limit, eps = 3, 5, 40, 2.0, 0.125
	settings := []seedSetting{{"Grafting", "MLPExpansion", 1, 0.375}, {"Dormant", "Residual", 2, 0},
		{"Training", "AttentionGate", 2, 0}}
	l := newLattice(t, seeds*chunk, settings)
	k := newKasminaLayer(t, r, tensor.Float64, rows, 3, l, op.WithGradClip(limit),
		op.WithEpsilon(eps), op.WithStability(op.Fast))
	plain := newKasminaLayer(t, r, tensor.Float64, rows, 3, l, op.WithStability(op.Fast),
		op.WithoutTelemetry())
	plain.x, plain.weights, plain.scale, plain.g = k.x, k.weights, k.scale, slices.Clone(k.g)
	var clips [seeds]int
	for row := range rows {
		for s := range seeds {
			g := plain.g[row*k.dim+s*chunk:][:chunk]
			var sum float64
			for _, v := range g {
				sum += v * v
			}
			if by := limit / (math.Sqrt(sum) + eps); by < 1 {
				clips[s]++
				for i := range g {
					g[i] *= by
				}
			}
		}
	}

	plain.forward()
	k.forward()
	d, want := k.backward(), plain.backward()
	for what, e := range map[string]float64{"dx": distance(d.x, want.x),
		"dweights": distance(d.weights, want.weights), "dscales": distance(d.scales, want.scales)} {
		if !(e < 1e-13) {
			t.Errorf("%s has error %g", what, e)
		}
	}

	for s, seed := range l.Report().Seeds {
		if seed.Clips != clips[s] || clips[s] == 0 {
			t.Errorf("seed %d: %d rows clipped, want %d", s, seed.Clips, clips[s])
		}
	}
}

// TestKasminaAdaptiveGradClip checks that the adaptive limit is mean + n·σ of the norms of earlier
// passes, and that the gradient before clipping is reported.
func TestKasminaAdaptiveGradClip(t *testing.T) {
	r := random(t)
	const rows, deviations = 200, 1.5
	l := newLattice(t, 4, []seedSetting{{"Dormant", "Residual", 1, 0}})
	k := newKasminaLayer(t, r, tensor.Float64, rows, 2, l, op.WithAdaptiveGradClip(deviations))
	var norms []float64
	for step := range 3 {
		k.g = normal(r, rows*4)
		k.forward()
		d := k.backward()
		limit := math.Inf(1)
		if step > 0 {
			mean, variance := meanVariance(norms)
			limit = mean + deviations*math.Sqrt(variance)
		}
		clipped, total := 0, 0.0
		for row := range rows {
			g, dx := k.g[row*4:][:4], d.x[row*4:][:4]
			n := math.Sqrt(g[0]*g[0] + g[1]*g[1] + g[2]*g[2] + g[3]*g[3])
			norms = append(norms, n)
			total += n * n
			by := min(1, limit/(n+1e-8))
			if by < 1 {
				clipped++
			}
			for i := range g {
				if math.Abs(dx[i]-by*g[i]) > 1e-12 {
					t.Fatalf("step %d: dx is %v, want %v times %v", step, dx, by, g)
				}
			}
		}
		if (clipped > 0) != (step > 0) {
			t.Errorf("step %d: %d rows are clipped", step, clipped)
		}
		if got, want := l.Report().Seeds[0].Gradient.Norm,
			math.Sqrt(total); math.Abs(got-want) > 1e-6*want {
			t.Errorf("step %d: the reported norm is %v, want %v", step, got, want)
		}
	}
}

// TestKasminaIsDeterministic checks that results are bit-identical for any number of cores, and from
// run to run.
func TestKasminaIsDeterministic(t *testing.T) {
	r := random(t)
	for _, size := range []struct{ rows, seeds, chunk, slots int }{{300, 1, 96, 2}, {300, 40, 3, 5},
		{3, 5000, 1, 3}, {270, 2, 700, 2}} {
		settings := make([]seedSetting, size.seeds)
		for i := range settings {
			settings[i] = seedSetting{state.Stage(i % 8).String(), kasminaKinds[i%4],
				1 + i%(size.slots-1), 0.375}
		}
		settings[0].Stage = "Grafting"
		var first []float64
		for _, procs := range []int{1, 2, 5} {
			before := runtime.GOMAXPROCS(procs)
			l := newLattice(t, size.seeds*size.chunk, settings)
			k := newKasminaLayer(t, r, tensor.Float32, size.rows, size.slots, l, op.WithGradClip(1))
			k.x, k.g = fixed(len(k.x), 1), fixed(len(k.g), 2)
			k.weights, k.scale = fixed(len(k.weights), 3), fixed(len(k.scale), 4)
			all := k.forward()
			d := k.backward()
			all = slices.Concat(all, d.x, d.weights, d.scales)
			for _, s := range l.Report().Seeds {
				all = append(all, s.Health.Variance, s.Health.Mean, s.Health.SNR, s.Gradient.Norm)
			}
			runtime.GOMAXPROCS(before)
			if first == nil {
				first = all
			}
			if !sameBits(all, first) {
				t.Errorf("%+v: %d cores give other bits than 1", size, procs)
			}
		}
	}
}

// fixed returns the same pseudorandom numbers on every call.
func fixed(n, start int) []float64 {
	v := make([]float64, n)
	for i := range v {
		v[i] = float64(float32(math.Sin(float64(start) + 1.7*float64(i*i%9973))))
	}
	return v
}

// TestKasminaManyRows checks that gradients of the parameters over many rows, which are summed in blocks,
// equal the sums of the gradients over fewer rows.
func TestKasminaManyRows(t *testing.T) {
	r := random(t)
	const seeds, chunk, slots, part, parts = 6, 5, 3, 97, 9
	settings := make([]seedSetting, seeds)
	for i := range settings {
		settings[i] = seedSetting{"Grafting", kasminaKinds[i%4], 1 + i%2, 0.375}
	}

	l := newLattice(t, seeds*chunk, settings)
	all := newKasminaLayer(t, r, tensor.Float64, part*parts, slots, l, op.WithoutTelemetry())
	few := newKasminaLayer(t, r, tensor.Float64, part, slots, l, op.WithoutTelemetry())
	few.weights, few.scale = all.weights, all.scale
	y := all.forward()
	d := all.backward()
	want := kasminaGrads{weights: make([]float64, len(d.weights)), scales: make([]float64, slots)}
	for p := range parts {
		at := p * part * all.dim
		few.x, few.g = all.x[at:][:part*all.dim], all.g[at:][:part*all.dim]
		if !sameBits(few.forward(), y[at:][:part*all.dim]) {
			t.Errorf("y of part %d differs", p)
		}
		dp := few.backward()
		want.x = append(want.x, dp.x...)
		for i, v := range dp.weights {
			want.weights[i] += v
		}
		for i, v := range dp.scales {
			want.scales[i] += v
		}
	}

	if !sameBits(d.x, want.x) {
		t.Error("dx differs")
	}

	if e := distance(d.weights, want.weights); !(e < 1e-13) {
		t.Errorf("dweights has error %g", e)
	}

	if e := distance(d.scales, want.scales); !(e < 1e-13) {
		t.Errorf("dscales has error %g", e)
	}
}

func TestKasminaFloat32(t *testing.T) {
	r := random(t)
	for _, rows := range []int{1, 33, 2000} {
		settings := make([]seedSetting, 24)
		for i := range settings {
			settings[i] = seedSetting{state.Stage(i % 11).String(),
				kasminaKinds[r.IntN(4)], 1 + i%5, 0.375}
		}
		l := newLattice(t, 24*17, settings)
		single := newKasminaLayer(t, r, tensor.Float32, rows, 6, l)
		exact := newKasminaLayer(t, r, tensor.Float64, rows, 6, l)
		exact.x, exact.weights, exact.scale, exact.g = single.x, single.weights,
			single.scale, single.g
		y, wantY := single.forward(), exact.forward()
		d, want := single.backward(), exact.backward()
		for what, c := range map[string][2]float64{"y": {distance(y, wantY), 1e-6},
			"dx":       {distance(d.x, want.x), 1e-5},
			"dweights": {distance(d.weights, want.weights), 1e-5},
			"dscales":  {distance(d.scales, want.scales), 1e-5}} {
			if !(c[0] < c[1]) {
				t.Errorf("%d rows: %s has error %g, want less than %g", rows, what, c[0], c[1])
			}
		}
	}
}

// TestKasminaRegisteredKind checks that a registered blueprint works like a built-in one, and that its
// input is not scaled if the kind doesn't support that.
func TestKasminaRegisteredKind(t *testing.T) {
	name := fmt.Sprintf("Cubic%d", blueprints.Kinds())
	if _, err := blueprints.Register(blueprints.Blueprint{Name: name,
		Identity: func([]float64, int, *rand.Rand) float64 {
			return 0
		}, F32: cubic[float32](), F64: cubic[float64]()}); err != nil {
		t.Fatal(err)
	}

	l := newLattice(t, 6, []seedSetting{{"Grafting", name, 1, 0.375}, {"FineTuning", name, 1, 1}})
	k := newKasminaLayer(t, random(t), tensor.Float64, 4, 2, l, op.WithoutTelemetry())
	k.forward()
	d := k.backward()
	k.checkDifferences("dx", d.x, k.x)
	k.checkDifferences("dweights", d.weights, k.weights)
	k.checkDifferences("dscales", d.scales, k.scale)
	k.x[0] = 1e8
	want := k.x[0] + 0.375*k.scale[1]*math.Pow(k.x[0], 3)*k.weights[3]
	if y := k.forward(); math.Abs(y[0]-want) > 1e-12*math.Abs(want) {
		t.Errorf("y of 1e8 is %v, want %v", y[0], want)
	}
}

// cubic is t = x + a·w·x³.
func cubic[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Forward: func(t, x, w []T, a T) {
			for i, v := range x {
				t[i] = v + a*w[i]*v*v*v
			}
		},
		Backward: func(dx, dp, g, x, w []T, a T) (da float64) {
			for i, v := range x {
				dx[i] = g[i] * (1 + 3*a*w[i]*v*v)
				dp[i] += g[i] * a * v * v * v
				da += float64(g[i] * w[i] * v * v * v)
			}
			return da
		},
	}
}

// TestKasminaAtAlphaZero checks that at α = 0 the transform affects nothing, not even as 0·NaN.
func TestKasminaAtAlphaZero(t *testing.T) {
	r := random(t)
	for _, kind := range kasminaKinds {
		for _, stage := range []string{"Grafting", "Stabilization", "Evaluating"} {
			for stability := op.Adaptive; stability <= op.Strict; stability++ {
				l := newLattice(t, 5, []seedSetting{{stage, kind, 1, 0}})
				k := newKasminaLayer(t, r, tensor.Float64, 3, 2, l, op.WithStability(stability))
				k.x = mapped(k.x, awayFromZero)
				k.x[7] = 1e7 // large enough for the adaptive mode to scale
				k.weights, k.scale = mapped(k.weights, func(float64) float64 {
					return math.NaN()
				}), []float64{math.NaN(), math.Inf(1)}
				if y := k.forward(); !sameBits(y, k.x) {
					t.Errorf("%s in %s, %v: y is %v, want %v", kind, stage, stability, y, k.x)
				}
				if d := k.backward(); !sameBits(d.x, k.g) || !sameBits(d.weights,
					make([]float64, 10)) || !sameBits(d.scales, make([]float64, 2)) {
					t.Errorf("%s in %s, %v: gradients are %v", kind, stage, stability, d)
				}
			}
		}
	}
}

func TestKasminaSlotBeyondWeights(t *testing.T) {
	l := newLattice(t, 6, []seedSetting{{"Dormant", "Residual", 1, 0},
		{"Training", "Residual", 7, 0}, {"Dormant", "Residual", 1, 0}})
	k := newKasminaLayer(t, random(t), tensor.Float64, 2, 7, l)
	if _, err := k.tryForward(k.forwardOp); err == nil || !strings.Contains(err.Error(),
		"seed 1 has slot 7, but weights has 7 slots") {
		t.Errorf("error %v", err)
	}
}

// TestKasminaSlotZero checks that a seed without a slot is the identity in every stage.
func TestKasminaSlotZero(t *testing.T) {
	for stage, route := range routes {
		l, err := state.NewLattice(1, 3, state.WithoutGates())
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range route {
			if err := l.Transition(0, to); err != nil {
				t.Fatal(err)
			}
		}
		k := newKasminaLayer(t, random(t), tensor.Float64, 2, 1, l)
		if y := k.forward(); !sameBits(y, k.x) {
			t.Errorf("%v: y is not x", stage)
		}
		if d := k.backward(); !sameBits(d.x, k.g) || !sameBits(d.weights, make([]float64, 3)) ||
			!sameBits(d.scales, []float64{0}) {
			t.Errorf("%v: gradients are %v", stage, d)
		}
	}
}

func TestKasminaErrors(t *testing.T) {
	g, other := gorgonia.NewGraph(), gorgonia.NewGraph()
	node := func(g *gorgonia.ExprGraph, dt tensor.Dtype, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(fmt.Sprint(dt, shape)))
	}
	f64 := func(shape ...int) *gorgonia.Node { return node(g, tensor.Float64, shape...) }
	x, w, s := f64(4, 12), f64(5, 4), f64(5)
	l := newLattice(t, 12, make3())
	slotted := newLattice(t, 12, make3(), state.WithSlots(9))
	wide := newLattice(t, 12, make3(), state.WithWidth(8))
	mixing := newLattice(t, 12, []seedSetting{{"Dormant", "Residual", 1, 0},
		{"Training", "LowRank", 1, 0}, {"Dormant", "Residual", 1, 0}})
	for _, c := range []struct {
		x, w, s *gorgonia.Node
		l       *state.Lattice
		opt     op.KasminaOption
		want    string // substrings that the error must contain, separated by |
	}{
		{nil, w, s, l, nil, "x is nil"},
		{x, nil, s, l, nil, "weights is nil"},
		{x, w, nil, l, nil, "scales is nil"},
		{x, w, s, nil, nil, "lattice is nil"},
		{x, w, s, &state.Lattice{}, nil, "lattice has no seeds"},
		{f64(12), w, s, l, nil, "x has shape (12)|[rows, D]"},
		{f64(2, 3, 4), w, s, l, nil, "x has shape (2, 3, 4)|2 dimensions"},
		{f64(4, 13), w, s, l, nil, "x has 13 features|(4, 13)|3 seeds"},
		{f64(4, 15), w, s, l, nil, "x has 15 features|(4, 15)|12"},
		{x, f64(5), s, l, nil, "weights has shape (5)|[slots, W]"},
		{x, f64(5, 3), s, l, nil, "weights has shape (5, 3)|at least 4|12 features / 3 seeds"},
		{x, f64(5, 9), s, wide, nil, "weights has rows of 9|(5, 9)|8"},
		{x, f64(5, 7), s, mixing, nil,
			"weights has shape (5, 7)|seed 1|LowRank needs 8 weights|the slots have 7"},
		{x, w, f64(5, 1), l, nil, "scales has shape (5, 1)|[slots]"},
		{x, w, f64(6), l, nil, "scales has shape (6)|(5)|(5, 4)"},
		{x, w, s, slotted, nil, "weights has 5 slots|(5, 4)|9"},
		{x, node(g, tensor.Float32, 5, 4), s, l, nil, "weights|float32|x|float64"},
		{node(g, tensor.Int, 4, 12), w, s, l, nil, "x|int|float32 or float64"},
		{x, w, node(other, tensor.Float64, 5), l, nil, "scales|x|different graphs"},
		{x, w, s, l, op.WithEpsilon(0), "WithEpsilon|0"},
		{x, w, s, l, op.WithGradClip(-1), "WithGradClip|-1"},
		{x, w, s, l, op.WithAdaptiveGradClip(math.NaN()), "WithAdaptiveGradClip|NaN"},
		{x, w, s, l, op.WithStability(9), "WithStability|9"},
		{x, w, s, l, func(c *op.KasminaConfig) error {
			c.GradClip, c.AdaptiveClip = 1, 1
			return nil
		}, "exclude each other"},
	} {
		opts := []op.KasminaOption{op.WithStability(op.Fast)}
		if c.opt != nil {
			opts = append(opts, c.opt)
		}
		n, err := op.Kasmina(c.x, c.w, c.s, c.l, opts...)
		for _, word := range append(strings.Split(c.want, "|"), "op.Kasmina") {
			if n != nil || err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("error %q, want one with %q", err, word)
			}
		}
	}
}

func make3() []seedSetting { return slices.Repeat([]seedSetting{{"Dormant", "Residual", 1, 0}}, 3) }

// startLayer is a layer of two seeds over four positive features, with three slots of zeros, and a cost.
type startLayer struct {
	lattice            *state.Lattice
	x, weights, scales *gorgonia.Node
	y, cost            *gorgonia.Node
}

func newStartLayer(t *testing.T, dt tensor.Dtype, recompute bool) *startLayer {
	lattice, err := state.NewLattice(2, 4, state.WithoutGates(), state.WithWidth(8))
	require.NoError(t, err)
	l := &startLayer{lattice: lattice}
	g := gorgonia.NewGraph()
	input := func(name string, init gorgonia.InitWFn, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, dt, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithInit(init))
	}
	l.x = input("x", gorgonia.Uniform(0.5, 2), 3, 4) // relu is the identity for positive numbers
	l.weights = input("weights", gorgonia.Zeroes(), 3, 8)
	l.scales = input("scales", gorgonia.Zeroes(), 3)
	build := func(in gorgonia.Nodes) (*gorgonia.Node, error) {
		return op.Kasmina(in[0], in[1], in[2], l.lattice)
	}
	in := gorgonia.Nodes{l.x, l.weights, l.scales}
	if recompute {
		l.y, err = autodiff.Recompute(in, build)
	} else {
		l.y, err = build(in)
	}

	require.NoError(t, err)
	l.cost = must(t)(gorgonia.Sum(must(t)(gorgonia.Square(l.y))))
	return l
}

// machines lists the ways to run a graph with gradients of the parameters on a CPU.
var machines = map[string]func(t *testing.T, l *startLayer) gorgonia.VM{
	"tape": func(t *testing.T, l *startLayer) gorgonia.VM {
		_, err := gorgonia.Grad(l.cost, l.weights, l.scales)
		require.NoError(t, err)
		return gorgonia.NewTapeMachine(l.x.Graph(), gorgonia.BindDualValues(l.weights, l.scales))
	},
	"lisp": func(t *testing.T, l *startLayer) gorgonia.VM {
		return gorgonia.NewLispMachine(l.x.Graph())
	},
	"cpuops": func(t *testing.T, l *startLayer) gorgonia.VM {
		_, err := gorgonia.Grad(l.cost, l.weights, l.scales)
		require.NoError(t, err)
		m, err := cpuops.NewMachine(l.x.Graph(), cpuops.WithParams(l.weights, l.scales),
			cpuops.WithOutputs(l.y))
		require.NoError(t, err)
		return m
	},
}

func (l *startLayer) advance(t *testing.T, kind blueprints.Kind, slot int) {
	require.NoError(t, l.lattice.RequestGermination(1,
		state.GerminationRequest{Slot: slot, Kind: kind}))
	require.NoError(t, l.lattice.Transition(1, state.Training))
	require.NoError(t, l.lattice.Transition(1, state.Grafting))
	require.NoError(t, l.lattice.SetAlpha(1, 0.5))
}

// TestKasminaFreshWeights checks that on unwritten weights, which are all zero, every kind starts as
// the identity in the first pass that uses it, and learns from there.
func TestKasminaFreshWeights(t *testing.T) {
	for name, newMachine := range machines {
		for _, recompute := range []bool{false, true} {
			for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				for kind := range blueprints.ChunkMLP + 1 {
					l := newStartLayer(t, dt, recompute)
					l.advance(t, kind, 2)
					machine := newMachine(t, l)
					require.NoError(t, machine.RunAll(), name)
					x, y := floats(t, l.x.Value()), floats(t, l.y.Value())
					require.InDeltaSlice(t, x, y, 1e-6, "%s, recomputed %v: %v",
						name, recompute, kind)
					w, a := floats(t, l.weights.Value()), floats(t, l.scales.Value())
					require.NotZero(t, a[2], "%s, recomputed %v: %v", name, recompute, kind)
					require.Equal(t, make([]float64, 16), w[:16], "other slots")
					require.Equal(t, []float64{0, 0}, a[:2], "other slots")
					require.NoError(t, machine.Close())
					if name != "tape" || recompute {
						continue
					}
					var learns float64
					for _, p := range []*gorgonia.Node{l.weights, l.scales} {
						grad, err := p.Grad()
						require.NoError(t, err)
						for _, v := range floats(t, grad) {
							learns += math.Abs(v)
						}
					}
					require.Positive(t, learns, kind)
				}
			}
		}
	}
}

// TestKasminaFreshWeightsOnce checks that the identity start is the same in every run, differs
// between layers and slots, and never overwrites a written slot.
func TestKasminaFreshWeightsOnce(t *testing.T) {
	first := func(slot int, name string) []float64 {
		l := newStartLayer(t, tensor.Float64, false)
		gorgonia.WithName(name)(l.weights)
		l.advance(t, blueprints.LowRank, slot)
		require.NoError(t, tryRun(l.x.Graph()))
		return slices.Clone(floats(t, l.weights.Value())[8*slot:][:4])
	}

	require.Equal(t, first(2, "weights"), first(2, "weights"))
	require.NotEqual(t, first(2, "weights"), first(1, "weights"))
	require.NotEqual(t, first(2, "weights"), first(2, "other"))
	for i := range 3 { // a weight, a weight that the kind doesn't use, the scale
		l := newStartLayer(t, tensor.Float64, false)
		w, a := floats(t, l.weights.Value()), floats(t, l.scales.Value())
		*[]*float64{&w[16], &w[23], &a[2]}[i] = 1e-300
		before := append(slices.Clone(w), a...)
		l.advance(t, blueprints.AttentionGate, 2)
		require.NoError(t, tryRun(l.x.Graph()))
		require.Equal(t, before, append(slices.Clone(w), a...))
	}
}

// TestKasminaFreshWeightsPanic checks that a panic of a registered kind's Identity is returned as an
// error by the run.
func TestKasminaFreshWeightsPanic(t *testing.T) {
	l := newStartLayer(t, tensor.Float64, false)
	kind, ok := blueprints.ByName("FaultyStart")
	if !ok {
		var err error
		kind, err = blueprints.Register(blueprints.Blueprint{Name: "FaultyStart",
			F32: faultyRule[float32](), F64: faultyRule[float64](),
			Identity: faultyIdentity})
		require.NoError(t, err)
	}

	l.advance(t, kind, 2)
	err := op.RunError(tryRun(l.x.Graph()))
	require.ErrorIs(t, err, op.ErrBlueprint)
	require.ErrorContains(t, err, "seed 1")
	require.ErrorContains(t, err, "FaultyStart")
}

func faultyIdentity([]float64, int, *rand.Rand) float64 { panic("boom") }

// TestKasminaTiming checks that one pass in 128 is timed, forward and backward, unless the layer has no
// telemetry, and that a timed pass otherwise counts as a single pass.
func TestKasminaTiming(t *testing.T) {
	for name, c := range map[string]struct {
		mode  state.TelemetryMode
		opts  []op.KasminaOption
		timed int
	}{
		"production":        {state.Production, nil, 4},
		"debug":             {state.Debug, nil, 4},
		"off":               {state.Off, nil, 0},
		"without telemetry": {state.Production, []op.KasminaOption{op.WithoutTelemetry()}, 0},
	} {
		l, err := state.NewLattice(3, 12, state.WithTelemetry(state.Telemetry{Mode: c.mode}))
		if err != nil {
			t.Fatal(err)
		}
		k := newKasminaLayer(t, random(t), tensor.Float32, 400, 2, l, c.opts...)
		for range 130 {
			k.forward()
			k.backward()
		}
		r := l.Report()
		if r.Layer.Timed != c.timed || (r.Layer.Kernel > 0) != (c.timed > 0) ||
			(r.Layer.Bandwidth > 0) != (c.timed > 0) || r.Layer.Overhead < 0 {
			t.Errorf("%s: %+v, want %d timed", name, r.Layer, c.timed)
		}
		if len(c.opts) == 0 && r.Step != 130 {
			t.Errorf("%s: %d passes are counted, want 130", name, r.Step)
		}
	}
}

// faultyIn names the function of the blueprint "Faulty" that panics.
var faultyIn string

func fault(function string) {
	if faultyIn == function {
		panic("boom in " + function)
	}
}

func faultyRule[T blueprints.Float]() blueprints.Arithmetic[T] {
	return blueprints.Arithmetic[T]{
		Prepare: func(p, w []T) { fault("Prepare"); copy(p, w) },
		Forward: func(t, x, p []T, a T) { fault("Forward"); copy(t, x) },
		Backward: func(dx, dp, g, x, p []T, a T) float64 {
			fault("Backward")
			copy(dx, g)
			return 0
		},
		Finish: func(dp, p []T) { fault("Finish") },
	}
}

var _, errFaulty = blueprints.Register(blueprints.Blueprint{Name: "Faulty",
	Identity: func([]float64, int, *rand.Rand) float64 {
		return 1
	},
	F32: faultyRule[float32](), F64: faultyRule[float64]()})

// TestKasminaPanickingBlueprint checks that a panic in a blueprint's function, on any goroutine, is
// returned by the run as an error that names the function, the kind and the seed, and that the layer and
// its lattice remain usable.
func TestKasminaPanickingBlueprint(t *testing.T) {
	if errFaulty != nil {
		t.Fatal(errFaulty)
	}
	defer func() { faultyIn = "" }()

	r := random(t)
	for _, dt := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
		settings := []seedSetting{{"Dormant", "Residual", 1, 0}, {"Grafting", "ConvFilter", 1, 0.5},
			{"Grafting", "Faulty", 2, 0.5}, {"Training", "Residual", 1, 0}}
		l := newLattice(t, 4*16, settings)
		k := newKasminaLayer(t, r, dt, 5000, 3, l) // enough rows to use every core
		faultyIn = ""
		k.forward()
		for _, function := range []string{"Prepare", "Forward", "Backward", "Finish"} {
			faultyIn = function
			_, err := k.tryForward(k.forwardOp)
			if function == "Backward" || function == "Finish" {
				if err != nil {
					t.Fatal(err)
				}
				_, err = k.tryBackward()
			}
			if !errors.Is(err, op.ErrBlueprint) {
				t.Fatalf("%v: a panic in %s gives the error %v", dt, function, err)
			}
			for _, want := range []string{"seed 2", "Faulty",
				"boom in " + function, "op_test.fault"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v: the error does not hold %q: %v", dt, want, err)
				}
			}
		}
		faultyIn = ""
		again := newKasminaLayer(t, r, dt, 5000, 3, newLattice(t, 4*16, settings))
		again.x, again.g, again.weights, again.scale = k.x, k.g, k.weights, k.scale
		if !sameBits(k.forward(), again.forward()) || !sameBits(k.backward().weights,
			again.backward().weights) {
			t.Errorf("%v: after panics the layer computes something else", dt)
		}
		if err := l.Verify(); err != nil {
			t.Error(err)
		}
	}
}

// TestKasminaPanickingBlueprintInAGraph checks the same on Gorgonia's machine, which runs ops on a
// goroutine that callers cannot recover on.
func TestKasminaPanickingBlueprintInAGraph(t *testing.T) {
	defer func() { faultyIn = "" }()
	faultyIn = "Forward"
	l := newLattice(t, 4, []seedSetting{{"Fossilized", "Faulty", 1, 1}}, state.WithoutGates())
	g := gorgonia.NewGraph()
	input := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithName(name),
			gorgonia.WithShape(shape...), gorgonia.WithInit(gorgonia.Zeroes()))
	}
	must(t)(op.Kasmina(input("x", 300, 4), input("weights", 2, 4), input("scales", 2), l))
	if err := tryRun(g); err == nil || !strings.Contains(err.Error(), "boom in Forward") {
		t.Errorf("the run's error is %v", err)
	}
}
