package op_test

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/internal/randtest"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/state"
)

// exactMoments computes mean and variance in 200-bit arithmetic.
func exactMoments(v []float64) (mean, variance float64) {
	wide := func(f float64) *big.Float { return new(big.Float).SetPrec(200).SetFloat64(f) }
	sum, n := wide(0), wide(float64(len(v)))
	for _, e := range v {
		sum.Add(sum, wide(e))
	}

	m := wide(0).Quo(sum, n)
	squares := wide(0)
	for _, e := range v {
		d := wide(0).Sub(wide(e), m)
		squares.Add(squares, wide(0).Mul(d, d))
	}

	mean, _ = m.Float64()
	variance, _ = squares.Quo(squares, n).Float64()
	return mean, variance
}

func referenceHealth(v []float64, eps float64) state.Health {
	h := state.Health{Min: math.Inf(1), Max: math.Inf(-1)}
	h.Mean, h.Variance = exactMoments(v)
	for _, e := range v {
		h.Min, h.Max = min(h.Min, e), max(h.Max, e)
		if math.Abs(e) < eps {
			h.DeadRatio += 1 / float64(len(v))
		}
	}
	h.SNR = math.Abs(h.Mean) / math.Sqrt(h.Variance+eps)
	return h
}

func referenceGradient(v []float64) (g state.Gradient) {
	_, g.Variance = exactMoments(v)
	for _, e := range v {
		g.Norm += e * e
		g.Max = max(g.Max, math.Abs(e))
	}
	g.Norm = math.Sqrt(g.Norm)
	return g
}

func healthFields(h state.Health) [6]float64 {
	return [6]float64{h.Variance, h.Mean, h.Min, h.Max, h.DeadRatio, h.SNR}
}

func gradientFields(g state.Gradient) [3]float64 { return [3]float64{g.Norm, g.Variance, g.Max} }

// healthCritical and gradientCritical mark the figures that are kept in float32. All other figures are
// bfloat16.
var (
	healthCritical   = [6]bool{0: true, 4: true}
	gradientCritical = [3]bool{0: true}
)

func checkFigure(t *testing.T, what string, got, want float64, critical bool) {
	t.Helper()
	limit := 1e-6 * math.Abs(want)
	if !critical { // half a unit in the last place of a bfloat16, normal or subnormal
		limit = math.Max(math.Abs(want)*0x1.01p-8, 0x1.01p-134)
	}
	if !(math.Abs(got-want) <= limit) && got != want {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

// TestKasminaTelemetry compares the figures of every seed, in both passes and with every reduction, with
// a computation in 200 bits. The cases include a mean of ten thousand with a deviation of a millionth.
func TestKasminaTelemetry(t *testing.T) {
	r := random(t)
	const eps = 0.01
	for i, size := range []struct{ rows, seeds, chunk int }{{1, 1, 1}, {1, 3, 5}, {7, 1, 300},
		{600, 5, 3}, {33, 70, 1}, {5, 2, 2048}} {
		for j, data := range []struct {
			dt              tensor.Dtype
			mean, deviation float64
		}{
			{tensor.Float64, 0, 1}, {tensor.Float32, 0.5, 1}, {tensor.Float64, 1e4, 1e-2},
			{tensor.Float64, -1e4, 1e-6}, {tensor.Float32, 1e4, 1e-2},
			{tensor.Float32, 0, 1e-3}, {tensor.Float32, 1e4, 1e4},
		} {
			for reduction := state.Hierarchical; reduction <= state.MaxOfRows; reduction++ {
				if !randtest.Long() && (i+j+int(reduction))%3 != 0 {
					continue // each size and each kind of data meets one reduction
				}
				settings := make([]seedSetting, size.seeds)
				for i := range settings {
					settings[i] = seedSetting{state.Stage(i % 11).String(),
						kasminaKinds[i%4], 1, 0.375}
				}
				l := newLattice(t, size.seeds*size.chunk, settings,
					state.WithTelemetry(state.Telemetry{Reduction: reduction}))
				k := newKasminaLayer(t, r, data.dt, size.rows, 2, l, op.WithEpsilon(eps))
				for _, v := range [][]float64{k.x, k.g} {
					for i := range v {
						v[i] = data.mean + data.deviation*v[i]
						if data.dt == tensor.Float32 {
							v[i] = float64(float32(v[i]))
						}
					}
				}
				k.forward()
				k.backward()
				name := fmt.Sprintf("%+v of %+v, %v", size, data, reduction)
				for s, got := range l.Report().Seeds {
					wantHealth, wantGradient := k.referenceFigures(s, reduction, eps)
					for i, v := range healthFields(got.Health) {
						checkFigure(t, fmt.Sprintf("%s: health[%d] of seed %d", name, i, s), v,
							wantHealth[i], healthCritical[i])
					}
					for i, v := range gradientFields(got.Gradient) {
						checkFigure(t, fmt.Sprintf("%s: gradient[%d] of seed %d", name, i, s), v,
							wantGradient[i], gradientCritical[i])
					}
				}
				if t.Failed() {
					t.FailNow()
				}
			}
		}
	}
}

// referenceFigures reduces the figures of a seed according to the specification.
func (k *kasminaLayer) referenceFigures(seed int, reduction state.Reduction,
	eps float64) (health [6]float64, gradient [3]float64) {
	var xs, gs [][]float64
	for row := range k.rows {
		at := row*k.dim + seed*k.chunk
		xs, gs = append(xs, k.x[at:at+k.chunk]), append(gs, k.g[at:at+k.chunk])
	}

	if reduction == state.Hierarchical {
		return healthFields(referenceHealth(slices.Concat(xs...), eps)),
			gradientFields(referenceGradient(slices.Concat(gs...)))
	}

	for row := range k.rows {
		h, g := healthFields(referenceHealth(xs[row], eps)),
			gradientFields(referenceGradient(gs[row]))
		reduce := func(total, v []float64) {
			for i := range v {
				switch {
				case reduction == state.MeanOfRows:
					total[i] += v[i] / float64(k.rows)
				case row == 0:
					total[i] = v[i]
				default:
					total[i] = max(total[i], v[i])
				}
			}
		}
		reduce(health[:], h[:])
		reduce(gradient[:], g[:])
	}

	return health, gradient
}

// TestKasminaHealthIsOfTheInput checks that health is measured before the strict mode clamps the input.
func TestKasminaHealthIsOfTheInput(t *testing.T) {
	l := newLattice(t, 4, []seedSetting{{"Fossilized", "Residual", 1, 1}})
	k := newKasminaLayer(t, random(t), tensor.Float64, 1, 2, l, op.WithStability(op.Strict))
	k.x = []float64{1, 1, 1, 1}
	k.forward()
	k.x = []float64{1, 1, 1, 512}
	k.forward()
	if h := l.Report().Seeds[0].Health; h.Max != 512 {
		t.Errorf("the largest input is reported as %v, want 512", h.Max)
	}
}

// TestKasminaLimitsWithoutReports checks that unwatched passes aren't reported, but still determine
// the limits of the strict mode and of adaptive clipping.
func TestKasminaLimitsWithoutReports(t *testing.T) {
	r := random(t)
	for _, telemetry := range []state.Telemetry{{Mode: state.Off},
		{Mode: state.Sampling, Every: 1000}} {
		l := newLattice(t, 4, []seedSetting{{"Fossilized", "Residual", 1, 1}},
			state.WithTelemetry(telemetry))
		k := newKasminaLayer(t, r, tensor.Float64, 3, 2, l, op.WithStability(op.Strict),
			op.WithAdaptiveGradClip(1))
		k.weights = make([]float64, len(k.weights)) // the identity
		k.x, k.g = mapped(k.x, func(float64) float64 {
			return 4
		}), mapped(k.g, func(float64) float64 { return 1 })
		k.forward() // the pass that sampling mode reports
		k.backward()
		reported := l.Report().Seeds[0]
		k.x, k.g = mapped(k.x, func(float64) float64 {
			return 5
		}), mapped(k.g, func(float64) float64 { return 2 })
		if y := k.forward(); y[0] != 4 {
			t.Errorf("%+v: 5 is clamped to %v, want 4", telemetry, y[0])
		}
		if k.backward(); l.Report().Seeds[0].Clips != 3 {
			t.Errorf("%+v: %d rows are clipped, want 3", telemetry, l.Report().Seeds[0].Clips)
		}
		if y := k.forward(); y[0] != 5 {
			t.Errorf("%+v: 5 after 5 is clamped to %v", telemetry, y[0])
		}
		if now := l.Report().Seeds[0]; now.Health != reported.Health ||
			now.Gradient != reported.Gradient {
			t.Errorf("%+v: a pass that is not watched is reported: %+v", telemetry, now)
		}
		if telemetry.Mode == state.Off && reported.Health != (state.Health{}) {
			t.Errorf("with telemetry off, %+v is reported", reported.Health)
		}
	}
}

// TestKasminaNonFinite checks that NaN and Inf are counted in every stage and mode of a layer with telemetry,
// named, and stop the step on request, and that they don't distort the other figures.
func TestKasminaNonFinite(t *testing.T) {
	r := random(t)
	bad := []float64{math.NaN(), math.Inf(1), math.Inf(-1)}
	for _, mode := range []state.TelemetryMode{state.Production, state.Sampling,
		state.Debug, state.Off} {
		for _, opts := range [][]op.KasminaOption{
			{}, {op.WithStability(op.Strict)}, {op.WithStability(op.Fast)}, {op.WithoutTelemetry()},
			{op.WithGradClip(1)}, {op.WithAdaptiveGradClip(2)},
			{op.StopOnNonFinite()}, {op.StopOnNonFinite(), op.WithoutTelemetry()},
		} {
			settings := make([]seedSetting, 11)
			for i := range settings {
				settings[i] = seedSetting{state.Stage(i).String(), kasminaKinds[i%4], 1, 0.375}
			}
			l := newLattice(t, 11*3, settings,
				state.WithTelemetry(state.Telemetry{Mode: mode, Every: 2, Share: 0.5}))
			k := newKasminaLayer(t, r, tensor.Float32, 9, 2, l, opts...)
			seed, other := 1+r.IntN(10), 0
			k.x[4*k.dim+3*seed+1], k.x[8*k.dim+3*seed] = bad[r.IntN(3)], bad[r.IntN(3)]
			k.g[2*k.dim+3*seed+2], k.g[3*other] = bad[r.IntN(3)], bad[r.IntN(3)]
			y, err := k.tryForward(k.forwardOp)
			if k.forwardOp.Config.StopOnNonFinite {
				if want := fmt.Sprintf(
					"in x: 2 elements in the chunks of 1 seeds, the first of them seed %d",
					seed); !errors.Is(err, op.ErrNonFinite) ||
					!strings.Contains(err.Error(), want) {
					t.Errorf("forward: error %v, want %q", err, want)
				}
			} else if err != nil {
				t.Error(err)
			} else if stage := state.Stage(seed); !stage.Blends() &&
				!math.IsNaN(y[4*k.dim+3*seed+1]) && !math.IsInf(y[4*k.dim+3*seed+1], 0) {
				t.Errorf("%v hides a NaN: y is %v", stage, y[4*k.dim+3*seed+1])
			}
			_, err = k.tryBackward()
			if k.forwardOp.Config.StopOnNonFinite {
				if want := "in the gradient of y: 2 elements in the chunks of 2 seeds, the first " +
					"of them seed 0"; !errors.Is(err, op.ErrNonFinite) ||
					!strings.Contains(err.Error(), want) {
					t.Errorf("backward: error %v, want %q", err, want)
				}
			} else if err != nil {
				t.Error(err)
			}
			for s, got := range l.Report().Seeds {
				x, g := map[bool]int{true: 2}[s == seed],
					map[bool]int{true: 1}[s == seed || s == other]
				if k.forwardOp.Config.NoTelemetry {
					x, g = 0, 0
				}
				if got.NonFiniteX != x || got.NonFiniteG != g {
					t.Errorf("%v %+v: seed %d counts %d and %d, want %d and %d", mode,
						k.forwardOp.Config, s, got.NonFiniteX, got.NonFiniteG, x, g)
				}
				health, gradient := healthFields(got.Health), gradientFields(got.Gradient)
				for _, v := range slices.Concat(health[:], gradient[:]) {
					if math.IsNaN(v) || math.IsInf(v, 0) {
						t.Errorf("%v: seed %d reports %+v and %+v", mode, s,
							got.Health, got.Gradient)
					}
				}
			}
			if events, err := l.StepEpoch(state.Metrics{}); k.forwardOp.Config.NoTelemetry {
				if err != nil || len(events) != 0 {
					t.Errorf("events %+v (%v) of a layer without telemetry, want none", events, err)
				}
			} else if err != nil || len(events) != 2 ||
				events[1].Kind != state.NonFinite || events[1].Seed != seed ||
				events[1].Value != 3 {
				t.Errorf("events %+v (%v), want three NaN or Inf in seed %d", events, err, seed)
			}
		}
	}
}

// TestKasminaBackwardGoesByTheForwardPass checks that changes of the lattice between a forward pass and
// its backward pass don't affect the backward pass.
func TestKasminaBackwardGoesByTheForwardPass(t *testing.T) {
	r := random(t)
	settings := []seedSetting{{"Grafting", "ConvFilter", 1, 0.375}, {"Training", "Residual", 2, 0},
		{"Evaluating", "MLPExpansion", 1, 0.75}}
	commands := func(l *state.Lattice) error {
		return errors.Join(l.SetAlpha(0, 0.9), l.Transition(0, state.RolledBack),
			l.Transition(1, state.Culled), l.Transition(2, state.FineTuning))
	}
	for _, opt := range []op.KasminaOption{op.WithStability(op.Strict),
		op.WithAdaptiveGradClip(0.5)} {
		run := func(meddle bool) kasminaGrads {
			l := newLattice(t, 9, settings)
			k := newKasminaLayer(t, r, tensor.Float64, 6, 3, l, opt)
			k.x, k.g, k.weights, k.scale = fixed(54, 1), fixed(54, 2), fixed(9, 3), fixed(3, 4)
			k.forward()
			k.backward()
			k.x, k.g = fixed(54, 5), mapped(fixed(54, 6), func(v float64) float64 { return 3 * v })
			k.forward()
			if meddle {
				if err := commands(l); err != nil {
					t.Fatal(err)
				}
				// A pass of another graph runs in between.
				other := newKasminaLayer(t, r, tensor.Float64, 6, 3, l)
				other.forward()
				other.backward()
			}
			return k.backward()
		}
		alone, meddled := run(false), run(true)
		if !sameBits(alone.x, meddled.x) || !sameBits(alone.weights, meddled.weights) ||
			!sameBits(alone.scales, meddled.scales) {
			t.Error("commands between the passes change the gradients")
		}
	}
}

// TestKasminaReplay checks that replaying a snapshot is bit-identical to the first run and records
// nothing.
func TestKasminaReplay(t *testing.T) {
	r := random(t)
	l := newLattice(t, 8, []seedSetting{{"Grafting", "ConvFilter", 1, 0.375},
		{"Fossilized", "AttentionGate", 2, 1}})
	k := newKasminaLayer(t, r, tensor.Float64, 6, 3, l, op.WithStability(op.Strict))
	var _ op.Replayer = k.forwardOp
	replay := k.forwardOp.Replay().(*op.KasminaOp)
	if replay.Hashcode() == k.forwardOp.Hashcode() {
		t.Error("the replay has the hash of the op")
	}

	if _, err := k.tryForward(replay); err == nil || !strings.Contains(err.Error(), "has not run") {
		t.Errorf("a replay of nothing: error %v", err)
	}

	if _, err := k.tryBackward(); err == nil || !strings.Contains(err.Error(), "has not run") {
		t.Errorf("a backward pass of nothing: error %v", err)
	}

	k.forward()
	k.x[3] = 1e3 // exceeds the clamp now
	y := k.forward()
	if err := errors.Join(l.SetAlpha(0, 1), l.Transition(0, state.RolledBack)); err != nil {
		t.Fatal(err)
	}

	before := marshal(t, l)
	again, err := k.tryForward(replay)
	if err != nil {
		t.Fatal(err)
	}

	if !sameBits(y, again) {
		t.Error("the replay gives other bits")
	}

	if marshal(t, l) != before {
		t.Error("the replay changes the lattice")
	}
}

func marshal(t testing.TB, l *state.Lattice) string {
	t.Helper()
	b, err := l.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestKasminaWithoutTelemetry(t *testing.T) {
	l := newLattice(t, 8, []seedSetting{{"Grafting", "ConvFilter", 1, 0.375},
		{"Dormant", "AttentionGate", 2, 1}})
	k := newKasminaLayer(t, random(t), tensor.Float32, 6, 3, l, op.WithoutTelemetry(),
		op.WithStability(op.Strict), op.WithAdaptiveGradClip(1))
	before := marshal(t, l)
	k.forward()
	k.backward()
	if marshal(t, l) != before {
		t.Error("a layer without telemetry changes the lattice")
	}
}

func TestKasminaHistogram(t *testing.T) {
	l := newLattice(t, 6, []seedSetting{{"Dormant", "Residual", 1, 0},
		{"Dormant", "Residual", 1, 0}}, state.WithTelemetry(state.Telemetry{Mode: state.Debug}))
	k := newKasminaLayer(t, random(t), tensor.Float64, 2, 2, l)
	k.x = []float64{1, -1.5, 2, 0, 1e-30, 1e30, 0.75, 3, math.NaN(), math.Inf(1), 5e-324, -1e300}
	k.forward()
	reports := l.History()
	seeds := reports[len(reports)-1].Seeds
	for s, want := range []state.Histogram{{23: 1, 24: 2, 25: 2},
		{0: 3, state.HistogramBins - 1: 2}} {
		if *seeds[s].Histogram != want {
			t.Errorf("histogram of seed %d is %v, want %v", s, *seeds[s].Histogram, want)
		}
	}
}

// TestKasminaHashes checks that two layers are merged into one node only if they are equal in every
// respect.
func TestKasminaHashes(t *testing.T) {
	g := gorgonia.NewGraph()
	node := func(name string, shape ...int) *gorgonia.Node {
		return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
			gorgonia.WithName(name))
	}
	x, w, s := node("x", 2, 6), node("w", 3, 3), node("s", 3)
	settings := []seedSetting{{"Dormant", "Residual", 1, 0}, {"Dormant", "Residual", 1, 0}}
	l, twin := newLattice(t, 6, settings), newLattice(t, 6, settings)
	seen := map[*gorgonia.Node]int{}
	add := func(i int, l *state.Lattice, opts ...op.KasminaOption) *gorgonia.Node {
		n := must(t)(op.Kasmina(x, w, s, l, opts...))
		if first, ok := seen[n]; ok {
			t.Errorf("layers %d and %d are merged", first, i)
		}
		seen[n] = i
		return n
	}

	first := add(0, l)
	for i, c := range []struct {
		l    *state.Lattice
		opts []op.KasminaOption
	}{
		{twin, nil}, {l, []op.KasminaOption{op.WithStability(op.Strict)}},
		{l, []op.KasminaOption{op.WithStability(op.Fast)}},
		{l, []op.KasminaOption{op.WithEpsilon(1e-7)}}, {l, []op.KasminaOption{op.WithGradClip(1)}},
		{l, []op.KasminaOption{op.WithGradClip(1.0000001)}},
		{l, []op.KasminaOption{op.WithAdaptiveGradClip(1)}},
		{l, []op.KasminaOption{op.StopOnNonFinite()}},
		{l, []op.KasminaOption{op.WithoutTelemetry()}},
	} {
		add(i+1, c.l, c.opts...)
	}

	if again := must(t)(op.Kasmina(x, w, s, l)); again != first {
		t.Error("the same layer twice is two nodes")
	}
}

// TestKasminaInAGraph checks that gradients add up over the uses of a node, and that the layer works with
// Gorgonia's own ops.
func TestKasminaInAGraph(t *testing.T) {
	r := random(t)
	l := newLattice(t, 6, []seedSetting{{"Grafting", "ConvFilter", 1, 0.375},
		{"FineTuning", "AttentionGate", 2, 1}})
	xv, wv, sv := normal(r, 24), normal(r, 9), normal(r, 3)
	build := func() (cost *gorgonia.Node, in gorgonia.Nodes, g *gorgonia.ExprGraph) {
		g = gorgonia.NewGraph()
		node := func(name string, v []float64, shape ...int) *gorgonia.Node {
			return gorgonia.NewTensor(g, tensor.Float64, len(shape), gorgonia.WithShape(shape...),
				gorgonia.WithName(name), gorgonia.WithValue(dense(tensor.Float64, v, shape...)))
		}
		x, w, s := node("x", xv, 4, 6), node("w", wv, 3, 3), node("s", sv, 3)
		y := must(t)(op.Kasmina(x, w, s, l, op.WithoutTelemetry()))
		// The parameters and y are both used twice.
		z := must(t)(op.Kasmina(must(t)(gorgonia.Tanh(y)), w, s, l, op.WithoutTelemetry()))
		cost =
			must(
				t)(gorgonia.Sum(
				must(t)(gorgonia.Square(must(t)(gorgonia.Add(must(t)(gorgonia.HadamardProd(y, z)),
					x))))))
		return cost, gorgonia.Nodes{x, w, s}, g
	}

	evaluate := func() float64 {
		cost, _, g := build()
		var v gorgonia.Value
		gorgonia.Read(cost, &v)
		run(t, g)
		return floats(t, v)[0]
	}

	cost, in, g := build()
	grads, err := gorgonia.Grad(cost, in...)
	if err != nil {
		t.Fatal(err)
	}

	values := make([]gorgonia.Value, 3)
	for i, n := range grads {
		gorgonia.Read(n, &values[i])
	}

	run(t, g)
	for i, v := range [][]float64{xv, wv, sv} {
		got := floats(t, values[i])
		for j := range v {
			const h = 1e-5
			kept := v[j]
			v[j] = kept + h
			up := evaluate()
			v[j] = kept - h
			want := (up - evaluate()) / (2 * h)
			v[j] = kept
			if math.Abs(got[j]-want) > 1e-6*max(1, math.Abs(want)) {
				t.Errorf("gradient of input %d at %d is %v, central differences give %v", i, j,
					got[j], want)
			}
		}
	}
}

// TestKasmina100000Seeds runs 100,000 seeds in mixed stages in one call, and checks their recorded
// figures.
func TestKasmina100000Seeds(t *testing.T) {
	r := random(t)
	const chunk, rows, slots = 4, 8, 1000
	seeds, sample := 10_000, 50
	if randtest.Long() {
		seeds, sample = 100_000, 200
	}

	l, err := state.NewLattice(seeds, seeds*chunk, state.WithoutGates(), state.WithHistory(0))
	if err != nil {
		t.Fatal(err)
	}

	for s := range seeds {
		if s%3 == 0 {
			continue
		}
		if err := place(l, s, seedSetting{state.Stage(2 + s%6).String(), kasminaKinds[s%4],
			1 + s%(slots-1), 0.375}); err != nil {
			t.Fatal(err)
		}
	}

	k := newKasminaLayer(t, r, tensor.Float32, rows, slots, l)
	in := k.params()
	start := time.Now()
	y, err := k.forwardOp.UsePreallocDo(k.poisoned(rows, k.dim), in...)
	if err != nil {
		t.Fatal(err)
	}

	t.Logf("forward %v", time.Since(start))
	k.backward()
	got, reports := floats(t, y), l.Report().Seeds
	for range sample { // compare with a lattice of a single seed
		s := r.IntN(seeds)
		report := reports[s]
		one := newLattice(t, chunk, []seedSetting{{report.Stage.String(), report.Kind.String(),
			max(report.Slot, 1), 0.375}})
		single := newKasminaLayer(t, r, tensor.Float32, rows, slots, one)
		single.weights, single.scale = k.weights, k.scale
		var want []float64
		for row := range rows {
			copy(single.x[row*chunk:], k.x[row*k.dim+s*chunk:][:chunk])
			want = append(want, got[row*k.dim+s*chunk:][:chunk]...)
		}
		if y := single.forward(); !sameBits(y, want) {
			t.Fatalf("seed %d, %v of %v, gives %v in the crowd and %v alone", s,
				report.Stage, report.Kind, want, y)
		}
		if h := one.Report().Seeds[0].Health; h != report.Health {
			t.Fatalf("seed %d has health %+v in the crowd and %+v alone", s, report.Health, h)
		}
	}

	if err := l.Verify(); err != nil {
		t.Error(err)
	}
}

// TestKasminaUnderCommands issues commands while the layer runs.
func TestKasminaUnderCommands(t *testing.T) {
	r := random(t)
	settings := make([]seedSetting, 16)
	for i := range settings {
		settings[i] = seedSetting{"Dormant", "Residual", 1, 0}
		if i%2 == 0 {
			settings[i] = seedSetting{"Grafting", kasminaKinds[i/2%4], 1 + i/2, 0.25}
		}
	}

	l := newLattice(t, 64, settings)
	k := newKasminaLayer(t, r, tensor.Float32, 32, 9, l, op.WithStability(op.Strict),
		op.WithAdaptiveGradClip(2))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Add(1)
	go func() {
		defer wg.Done()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			err := errors.Join(l.SetAlpha(i%16, float64(i%5)/4),
				l.SetTelemetry(state.Telemetry{Mode: state.TelemetryMode(i % 4),
					Reduction: state.Reduction(i % 3)}))
			if _, stepped := l.StepEpoch(state.Metrics{Loss: 1}); errors.Join(err, stepped) != nil {
				t.Error(err, stepped)
			}
			l.Report()
		}
	}()

	for range 50 {
		k.forward()
		k.backward()
	}

	close(stop)
	wg.Wait()
	if err := l.Verify(); err != nil {
		t.Error(err)
	}
}

func BenchmarkKasmina(b *testing.B) {
	for _, c := range []struct {
		name               string
		rows, seeds, chunk int
		telemetry          state.TelemetryMode
		mixed              bool
	}{
		{"dormant/2048x8x32", 2048, 8, 32, state.Production, false},
		{"dormant-off/2048x8x32", 2048, 8, 32, state.Off, false},
		{"mixed/2048x8x32", 2048, 8, 32, state.Production, true},
		{"mixed/64x1000x4", 64, 1000, 4, state.Production, true},
		{"mixed/8x100000x4", 8, 100_000, 4, state.Production, true},
		{"mixed/2048x1x1024", 2048, 1, 1024, state.Production, true},
	} {
		l, err := state.NewLattice(c.seeds, c.seeds*c.chunk, state.WithoutGates(),
			state.WithHistory(0), state.WithTelemetry(state.Telemetry{Mode: c.telemetry}))
		if err != nil {
			b.Fatal(err)
		}
		for s := range c.seeds {
			if c.mixed {
				if err := place(l, s, seedSetting{"Grafting", kasminaKinds[s%4],
					1 + s%8, 0.5}); err != nil {
					b.Fatal(err)
				}
			}
		}
		k := newKasminaLayer(b, random(b), tensor.Float32, c.rows, 9, l)
		in, y := k.params(), k.poisoned(k.rows, k.dim)
		g := dense(k.dt, k.g, k.rows, k.dim)
		packed := k.poisoned(len(k.x) + len(k.weights) + len(k.scale))
		backward := k.backwardOp.(gorgonia.UsePreallocDoer)
		b.Run("forward/"+c.name, func(b *testing.B) {
			b.SetBytes(int64(8 * len(k.x)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := k.forwardOp.UsePreallocDo(y, in...); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("backward/"+c.name, func(b *testing.B) {
			b.SetBytes(int64(12 * len(k.x)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := backward.UsePreallocDo(packed, append(in, y, g)...); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
