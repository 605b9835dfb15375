package gemm

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// lossRig is a LinearCrossEntropy with random operands, and the data for its expected results.
type lossRig struct {
	*kerneltest.Rig
	a                              LinearCrossEntropy
	terms, scaled, factors, losses *kerneltest.Buffer
	x, w                           []float64
	ids                            []int
	g                              float64
}

type lossShape struct{ Rows, V, D int }

// newLoss returns a lossRig for the given targets. Random operands give logits with a standard
// deviation of 4; rows, if any, replaces rows of x.
func newLoss(g *kerneltest.Rig, s lossShape, ids []int, rows map[int][]float64) *lossRig {
	l := &lossRig{Rig: g, ids: ids}
	x := make([]float64, s.Rows*s.D)
	for i := range x {
		x[i] = 4 * g.Rand.NormFloat64()
	}

	for r, v := range rows {
		copy(x[r*s.D:], v)
	}

	dx, xr := g.Upload(x, kerneltest.Bf16, 0)
	w, wr := scaledNormal(g, s.V*s.D, s.D, kerneltest.Bf16)
	scale, sr := g.Upload([]float64{1 / float64(s.Rows)}, kerneltest.F32, 0)
	grad, gr := g.Upload([]float64{1 + g.Rand.Float64()}, kerneltest.F32, 0)
	l.x, l.w, l.g = xr, wr, sr[0]*gr[0]
	l.terms, l.scaled = g.Alloc(s.Rows*s.V, kerneltest.Bf16, 0),
		g.Alloc(s.Rows*s.D, kerneltest.Bf16, 0)
	l.factors, l.losses = g.Alloc(s.Rows, kerneltest.F32, 0), g.Alloc(s.Rows, kerneltest.F32, 0)
	l.a = LinearCrossEntropy{Terms: l.terms.Ptr, Scaled: l.scaled.Ptr, Factors: l.factors.Ptr,
		Losses: l.losses.Ptr, X: dx.Ptr, W: w.Ptr,
		Targets: g.UploadInts(ids), Scale: scale.Ptr,
		Grad: grad.Ptr, Rows: s.Rows, V: s.V, D: s.D, Type: kerneltest.Bf16}
	l.a.Workspace = g.Alloc(l.a.WorkspaceBytes(g.Info)/4, kerneltest.F32, 0).Ptr
	return l
}

// run returns the losses and the gradient of the logits.
func (l *lossRig) run() (losses, gradient []float64) {
	l.Helper()
	l.Must(l.Launch(l.Stream, l.a))
	gradient, factors := l.Read(l.terms), l.Read(l.factors)
	for i := range gradient {
		gradient[i] *= factors[i/l.a.V]
	}
	return l.Read(l.losses), gradient
}

// want returns the expected results of run.
func (l *lossRig) want() (losses, gradient []float64) {
	rows, v, d := l.a.Rows, l.a.V, l.a.D
	logits, normalizers := make([]float64, rows*v), make([]float64, 2*rows)
	cpugemm.Linear(logits, l.x, l.w, rows, d, v)
	losses, gradient = make([]float64, rows), make([]float64, rows*v)
	crossentropy.Forward(normalizers, logits, l.ids, v)
	for r, id := range l.ids {
		if id >= 0 {
			losses[r] = normalizers[2*r] - logits[r*v+id] + math.Log(normalizers[2*r+1])
		}
	}

	crossentropy.Backward(gradient, logits, normalizers, l.ids, v, l.g)
	return losses, gradient
}

// near fails the test unless ‖got − want‖ is at most tol·‖want‖ plus the rounding error of the
// rows. If a target is almost certain, its loss and gradient are small differences of numbers near
// 1, times size. With a single row of eight logits, that happens about once in 2000 draws.
func (l *lossRig) near(what string, got, want []float64, tol, size float64) {
	l.Helper()
	norm := math.Sqrt(array.SumSquares(want))
	rounding := 1e-6 * size * math.Sqrt(float64(l.a.Rows))
	if e := kerneltest.Distance(got, want) * norm; !(e <= tol*norm+rounding) {
		l.Errorf("%s: off by %.3g in norm, of %.3g", what, e, norm)
	}
}

func TestLinearCrossEntropy(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []lossShape{{1, 8, 8}, {5, 264, 456}, {130, 1000, 520},
		{300, 776, 768}, {129, 4104, 584}, {2100, 5000, 640}} {
		if testing.Short() && s.Rows*s.V > 1e6 {
			continue
		}
		g.Scope(fmt.Sprintf("%+v", s), func(g *kerneltest.Rig) {
			ids := g.Classes(s.Rows, s.V)
			ids[s.Rows-1] = s.V - 1
			if s.Rows > 2 {
				ids[1] = 0
			}
			l := newLoss(g, s, ids, nil)
			want, wantGrad := l.want()
			losses, gradient := l.run()
			l.near("losses", losses, want, 1e-3, 1)
			l.near("gradient", gradient, wantGrad, kerneltest.Backward(kerneltest.Bf16), l.g)
			factors, wantScaled := l.Read(l.factors), slices.Clone(l.x)
			for i := range wantScaled {
				wantScaled[i] *= factors[i/s.D]
			}
			g.Near("scaled", l.scaled, wantScaled, kerneltest.Forward(kerneltest.Bf16))
			dx, dxr := g.Normal(s.Rows*s.D, kerneltest.Bf16, 0)
			for i := range dxr {
				dxr[i] *= factors[i/s.D]
			}
			g.Must(g.Launch(g.Stream, ScaleRows{X: dx.Ptr, Factors: l.a.Factors, Rows: s.Rows,
				D: s.D}))
			g.Near("rows", dx, dxr, kerneltest.Forward(kerneltest.Bf16))
			again, gradientAgain := l.run()
			if !slices.Equal(losses, again) || !slices.Equal(gradient, gradientAgain) {
				g.Error("results differ from run to run")
			}
		})
	}
}

// TestLinearCrossEntropyShift checks that if all logits of a row are equal, the losses and
// gradients don't depend on their size.
func TestLinearCrossEntropyShift(t *testing.T) {
	g := newHopperRig(t)
	s := lossShape{Rows: 130, V: 520, D: 512}
	ids, rows := g.Classes(s.Rows, s.V), map[int][]float64{}
	for r := range s.Rows {
		size := []float64{10, -100, 1e3, -1e4, 1e5, 1e6, -1e7, 1e8}[r%8]
		rows[r] = slices.Repeat([]float64{size * (1 + g.Rand.Float64())}, s.D)
	}

	l := newLoss(g, s, ids, rows)
	w, wr := g.Upload(slices.Repeat([]float64{1 / float64(s.D)}, s.V*s.D), kerneltest.Bf16, 0)
	l.a.W, l.w = w.Ptr, wr
	want, wantGrad := l.want()
	losses, gradient := l.run()
	require.Less(t, kerneltest.Distance(losses, want), 1e-3)
	require.Less(t, kerneltest.Distance(gradient, wantGrad), kerneltest.Backward(kerneltest.Bf16))
}

// TestLinearCrossEntropyExtremes checks rows whose exponentials would overflow if the row's maximum were not
// subtracted, rows with NaN or infinite numbers, and rows that don't count.
func TestLinearCrossEntropyExtremes(t *testing.T) {
	g := newHopperRig(t)
	s := lossShape{Rows: 140, V: 520, D: 512}
	special := map[int][]float64{}
	for r, size := range map[int]float64{2: 60, 3: 300, 70: 1e4, 71: math.NaN(), 72: math.Inf(1),
		73: 1e30, 74: math.NaN(), 139: 1e3} {
		row := make([]float64, s.D)
		for i := range row {
			row[i] = g.Rand.NormFloat64() * size
		}
		special[r] = row
	}

	ids := g.Classes(s.Rows, s.V)
	for r := range special {
		ids[r] = g.Rand.IntN(s.V)
	}

	ids[73], ids[74], ids[75] = -1, -5, s.V // the last is rejected elsewhere; here it gives NaN
	l := newLoss(g, s, ids, special)
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
			require.Zero(t, losses[r], row[0])
			require.False(t, slices.ContainsFunc(row, func(v float64) bool { return v != 0 }),
				row[0])
		case !(math.Abs(losses[r]-want[r]) <= 1e-3*(1+math.Abs(want[r]))) ||
			want[r] > 1 &&
				!(kerneltest.Distance(row, wantRow) < 2*kerneltest.Backward(kerneltest.Bf16)):
			t.Errorf("row %d: loss %g, want %g; relative error of the gradient %.3g", r, losses[r],
				want[r], kerneltest.Distance(row, wantRow))
		}
	}
}
