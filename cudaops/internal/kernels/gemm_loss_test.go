package kernels

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/internal/cpu"
)

// lossRig is a LinearCrossEntropy with random operands, and what it is to compute.
type lossRig struct {
	*rig
	a                              LinearCrossEntropy
	terms, scaled, factors, losses *buffer
	x, w                           []float64
	ids                            []int
	g                              float64
}

// newLoss uploads x with the given rows in place of random ones; logits have the standard deviation 4.
func (g *rig) newLoss(s LinearCrossEntropyShape, ids []int, rows map[int][]float64, wide bool) *lossRig {
	l := &lossRig{rig: g, ids: ids}
	x := make([]float64, s.Rows*s.D)
	for i := range x {
		x[i] = 4 * g.rand.NormFloat64()
	}
	for r, v := range rows {
		copy(x[r*s.D:], v)
	}
	dx, xr := g.upload(x, bf16, 0)
	w, wr := g.scaled(s.V*s.D, s.D, bf16)
	scale, sr := g.upload([]float64{1 / float64(s.Rows)}, f32, 0)
	grad, gr := g.upload([]float64{1 + g.rand.Float64()}, f32, 0)
	l.x, l.w, l.g = xr, wr, sr[0]*gr[0]
	l.terms, l.scaled = g.alloc(s.Rows*s.V, bf16, 0), g.alloc(s.Rows*s.D, bf16, 0)
	l.factors, l.losses = g.alloc(s.Rows, f32, 0), g.alloc(s.Rows, f32, 0)
	size := 4
	if wide {
		size = 8
	}
	l.a = LinearCrossEntropy{Terms: l.terms.Ptr, Scaled: l.scaled.Ptr, Factors: l.factors.Ptr, Losses: l.losses.Ptr, X: dx.Ptr, W: w.Ptr,
		Targets: Ints{Ptr: g.uploadInts(ids, size), Wide: wide}, Scale: scale.Ptr, Grad: grad.Ptr, LinearCrossEntropyShape: s,
		Workspace: g.alloc(g.LinearCrossEntropyWorkspace(s)/4, f32, 0).Ptr, Type: bf16}
	return l
}

// run returns the losses and the gradients of the logits.
func (l *lossRig) run() (losses, gradient []float64) {
	l.Helper()
	l.must(l.LinearCrossEntropy(l.stream, l.a))
	gradient, factors := l.read(l.terms), l.read(l.factors)
	for i := range gradient {
		gradient[i] *= factors[i/l.a.V]
	}
	return l.read(l.losses), gradient
}

// want is what run is to return.
func (l *lossRig) want() (losses, gradient []float64) {
	rows, v, d := l.a.Rows, l.a.V, l.a.D
	logits, lse := make([]float64, rows*v), make([]float64, rows)
	cpu.Linear(logits, l.x, l.w, rows, d, v)
	losses, gradient = make([]float64, rows), make([]float64, rows*v)
	cpu.CrossEntropy(lse, logits, l.ids, v)
	for r, id := range l.ids {
		if id >= 0 {
			losses[r] = lse[r] - logits[r*v+id]
		}
	}
	cpu.CrossEntropyBackward(gradient, logits, lse, l.ids, v, l.g)
	return losses, gradient
}

func TestLinearCrossEntropy(t *testing.T) {
	g := newHopperRig(t)
	for i, s := range []LinearCrossEntropyShape{{1, 8, 8}, {5, 264, 456}, {130, 1000, 520}, {300, 776, 768}, {129, 4104, 584}, {2100, 5000, 640}} {
		if testing.Short() && s.Rows*s.V > 1e6 {
			continue
		}
		g.scope(fmt.Sprintf("%+v", s), func(g *rig) {
			ids := g.classes(s.Rows, s.V)
			ids[s.Rows-1] = s.V - 1
			if s.Rows > 2 {
				ids[1] = 0
			}
			l := g.newLoss(s, ids, nil, i%2 == 1)
			want, wantGrad := l.want()
			losses, gradient := l.run()
			if e := distance(losses, want); !(e < 1e-3) {
				g.Errorf("losses: relative error %.3g", e)
			}
			if e := distance(gradient, wantGrad); !(e < backward(bf16)) {
				g.Errorf("gradient: relative error %.3g", e)
			}
			factors, wantScaled := l.read(l.factors), slices.Clone(l.x)
			for i := range wantScaled {
				wantScaled[i] *= factors[i/s.D]
			}
			g.near("scaled", l.scaled, wantScaled, forward(bf16))
			dx, dxr := g.normal(s.Rows*s.D, bf16, 0)
			for i := range dxr {
				dxr[i] *= factors[i/s.D]
			}
			g.must(g.ScaleRows(g.stream, dx.Ptr, l.a.Factors, s.Rows, s.D))
			g.near("rows", dx, dxr, forward(bf16))
			again, gradientAgain := l.run()
			if !slices.Equal(losses, again) || !slices.Equal(gradient, gradientAgain) {
				g.Error("results differ from run to run")
			}
		})
	}
}

// Rows whose losses are too large for terms without a maximum, whose numbers are none, and that do not count.
func TestLinearCrossEntropyExtremes(t *testing.T) {
	g := newHopperRig(t)
	s := LinearCrossEntropyShape{Rows: 140, V: 520, D: 512}
	special := map[int][]float64{}
	for r, size := range map[int]float64{2: 60, 3: 300, 70: 1e4, 71: math.NaN(), 72: math.Inf(1), 73: 1e30, 74: math.NaN(), 139: 1e3} {
		row := make([]float64, s.D)
		for i := range row {
			row[i] = g.rand.NormFloat64() * size
		}
		special[r] = row
	}
	ids := g.classes(s.Rows, s.V)
	for r := range special {
		ids[r] = g.rand.IntN(s.V)
	}
	ids[73], ids[74], ids[75] = -1, -5, s.V // the last is refused elsewhere, and gives NaN
	l := g.newLoss(s, ids, special, true)
	losses, gradient := l.run()
	known := slices.Clone(ids)
	known[75] = 0
	l.ids = known
	want, wantGrad := l.want()
	for r := range s.Rows {
		row, wantRow := gradient[r*s.V:][:s.V], wantGrad[r*s.V:][:s.V]
		switch {
		case r == 71 || r == 72 || r == 75:
			if losses[r] == losses[r] || row[0] == row[0] || row[s.V-1] == row[s.V-1] {
				t.Errorf("row %d: loss %g, gradient %g, want NaN", r, losses[r], row[0])
			}
		case r == 73 || r == 74:
			if losses[r] != 0 || slices.ContainsFunc(row, func(v float64) bool { return v != 0 }) {
				t.Errorf("row %d without target: loss %g, gradient %g, want 0", r, losses[r], row[0])
			}
		case !(math.Abs(losses[r]-want[r]) <= 1e-3*(1+math.Abs(want[r]))) ||
			want[r] > 1 && !(distance(row, wantRow) < 2*backward(bf16)):
			t.Errorf("row %d: loss %g, want %g; relative error of the gradient %.3g", r, losses[r], want[r], distance(row, wantRow))
		}
	}
}

func TestLinearCrossEntropyRefusals(t *testing.T) {
	for _, capability := range []int{89, 90} {
		k, c, p := fakeAttention(t, capability, 227<<10)
		ok := LinearCrossEntropy{Terms: p, Scaled: p, Factors: p, Losses: p, X: p, W: p, Targets: Ints{Ptr: p}, Scale: p, Workspace: p,
			Type: bf16, LinearCrossEntropyShape: LinearCrossEntropyShape{Rows: 3, V: 16, D: 512}}
		for what, change := range map[string]func(a *LinearCrossEntropy){
			"rows":    func(a *LinearCrossEntropy) { a.Rows = -1 },
			"v":       func(a *LinearCrossEntropy) { a.V = 12 },
			"d":       func(a *LinearCrossEntropy) { a.D = 516 },
			"aligned": func(a *LinearCrossEntropy) { a.Terms += 8 },
			"input":   func(a *LinearCrossEntropy) { a.X += 2 },
			"way":     func(a *LinearCrossEntropy) { a.Way = Way{Family: "fused", Size: 3} },
		} {
			a := ok
			change(&a)
			if k.LinearCrossEntropy(0, a) == nil {
				t.Errorf("capability %d, %s: no error", capability, what)
			}
		}
		for what, refused := range map[string]error{"d": k.ScaleRows(0, p, p, 3, 12), "x": k.ScaleRows(0, p+8, p, 3, 16)} {
			if refused == nil {
				t.Errorf("ScaleRows, %s: no error", what)
			}
		}
		c.ClearTrace()
		takes := len(k.LinearCrossEntropyWays(ok.LinearCrossEntropyShape, bf16)) == 1
		if takes != (capability == 90) || takes != (k.LinearCrossEntropy(0, ok) == nil) {
			t.Errorf("capability %d: takes it: %v", capability, takes)
		}
		if k.LinearCrossEntropyWays(ok.LinearCrossEntropyShape, f16) != nil {
			t.Error("there is a way for float16")
		}
		launched := 0
		for _, op := range c.Trace() {
			if op.Name == "" {
				continue
			}
			if launched++; op.Config.Shared > 227<<10 {
				t.Errorf("launched with %v", op.Config)
			}
		}
		if want := map[bool]int{true: 3}[takes]; launched != want {
			t.Errorf("capability %d: %d launches, want %d", capability, launched, want)
		}
	}
}

// TestLinearCrossEntropySpeed compares with cuBLASLt's product, in the fastest of its ways, and the kernel that works on logits.
func TestLinearCrossEntropySpeed(t *testing.T) {
	if !benchmark {
		t.Skip("set KASMINA_GPU_BENCH to run it")
	}
	g := newHopperRig(t)
	for _, s := range []LinearCrossEntropyShape{{11008, 50304, 768}, {8192, 50304, 1024}, {4096, 50304, 2048}} {
		g.scope(fmt.Sprintf("%+v", s), func(g *rig) {
			w, terms, scaled := g.random(s.V*s.D), g.random(s.Rows*s.V), g.random(s.Rows*s.D)
			x, _ := g.scaled(s.Rows*s.D, s.D/16, bf16)
			targets := Ints{Ptr: g.uploadInts(g.classes(s.Rows, s.V), 4)}
			factors, losses := g.alloc(s.Rows, f32, 0), g.alloc(s.Rows, f32, 0)
			scale, _ := g.upload([]float64{1 / float64(s.Rows)}, f32, 0)
			work := g.alloc(g.LinearCrossEntropyWorkspace(s)/4, f32, 0)
			product := g.fastestProduct(gpu.MatmulSpec{M: s.Rows, N: s.V, K: s.D, TransB: true, A: bf16, B: bf16, D: bf16}, x.Ptr, w, terms)
			show := func(what string, run func()) {
				took := g.time([]func(){run}).Seconds()
				g.Logf("%-32s %8.1f µs %6.0f TFLOP/s", what, took*1e6, 2*float64(s.Rows)*float64(s.V)*float64(s.D)/took/1e12)
			}
			a := LinearCrossEntropy{Terms: terms, Scaled: scaled, Factors: factors.Ptr, Losses: losses.Ptr, X: x.Ptr, W: w, Targets: targets,
				Scale: scale.Ptr, Workspace: work.Ptr, LinearCrossEntropyShape: s, Type: bf16}
			show("cuBLASLt alone", product)
			show("cuBLASLt, then cross-entropy", func() {
				product()
				g.must(g.CrossEntropy(g.stream, CrossEntropy{Logits: terms, Losses: losses.Ptr, Targets: targets, Scale: scale.Ptr, Rows: s.Rows,
					V: s.V, Type: bf16}))
			})
			show("fused", func() { g.must(g.LinearCrossEntropy(g.stream, a)) })
			show("fused, with the scaling of dX", func() {
				g.must(g.LinearCrossEntropy(g.stream, a))
				g.must(g.ScaleRows(g.stream, scaled, factors.Ptr, s.Rows, s.D))
			})
		})
	}
}
