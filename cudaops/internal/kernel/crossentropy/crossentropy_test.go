package crossentropy

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpucrossentropy "github.com/kasmina-go/kasmina/internal/cpu/crossentropy"
)

func TestCrossEntropy(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {5, 3}, {64, 256}, {33, 1001}, {20, 50304}, {7, 50257}} {
		for _, dt := range kerneltest.StorageTypes {
			rows, v := shape[0], shape[1]
			g.Scope(fmt.Sprintf("%dx%d/%v", rows, v, dt), func(g *kerneltest.Rig) {
				x := make([]float64, rows*v)
				for i := range x {
					x[i] = 3*g.Rand.NormFloat64() + 20
				}
				logits, xr := g.Upload(x, dt, i%2)
				ids := g.Classes(rows, v)
				targets := g.UploadInts(ids)
				// As with loss scaling: float16 could not represent 1/50304 of the gradient of a
				// mean.
				grad, gr := g.Upload([]float64{1024 * (1 + g.Rand.Float64())}, kerneltest.F32, 0)
				losses := g.Alloc(rows, kerneltest.F32, 0)
				normalizers := g.Alloc(2*rows, kerneltest.F32, 0)
				scale, mean := g.Alloc(1, kerneltest.F32, 0), g.Alloc(1, kerneltest.F32, 0)
				a := Forward{Logits: logits.Ptr, Losses: losses.Ptr, Normalizers: normalizers.Ptr,
					Targets: targets, Rows: rows, V: v, Type: dt}

				wantNormalizers, want := make([]float64, 2*rows), make([]float64, rows*v)
				wantMean := cpucrossentropy.Forward(wantNormalizers, xr, ids, v)
				cpucrossentropy.Backward(want, xr, wantNormalizers, ids, v, gr[0])
				for r, id := range ids {
					if id < 0 {
						wantNormalizers[2*r], wantNormalizers[2*r+1] = 0, 1
					}
				}

				g.Must(g.Launch(g.Stream, Scale{Scale: scale.Ptr, Targets: targets, Rows: rows}))
				g.Must(g.Launch(g.Stream, a))
				g.Must(g.Launch(g.Stream, Mean{Mean: mean.Ptr, Losses: losses.Ptr, Scale: scale.Ptr,
					Rows: rows}))
				g.Near("normalizers", normalizers, wantNormalizers, 1e-5)
				if v > 1 { // a small difference of large numbers if the target is the likeliest class
					g.Near("mean", mean, []float64{wantMean}, 1e-5)
				}

				out := g.Alloc(rows*v, dt, i%2)
				a.Scale, a.Grad = scale.Ptr, grad.Ptr
				for j := range want {
					want[j] /= float64(cpucrossentropy.Targets(ids))
				}
				check := func(what string, b *kerneltest.Buffer) {
					g.Helper()
					if v > 1 { // otherwise the gradient is zero except for rounding
						g.Near(what, b, want, kerneltest.Backward(dt))
					}
				}
				g.Must(g.Launch(g.Stream, Backward{Out: out.Ptr, Forward: a}))
				check("gradient", out)
				a.Losses = g.Alloc(rows, kerneltest.F32, 0).Ptr
				again := g.Bufs[len(g.Bufs)-1]
				g.Must(g.Launch(g.Stream, a)) // in place
				check("gradient in place", logits)
				require.Zero(t, kerneltest.Distance(g.Read(again), g.Read(losses)))
			})
		}
	}
}

// TestCrossEntropyShift checks that if all logits of a row are equal, the losses and gradients
// don't depend on their size.
func TestCrossEntropyShift(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, v := range []int{2, 1000, 5001} {
		for _, dt := range kerneltest.StorageTypes {
			sizes := []float64{0, 100, -1e4, 5e4, 1e5, 1e6, -1e7, 1e8}
			if dt == kerneltest.F16 { // beyond float16
				sizes = sizes[:4]
			}
			rows := len(sizes)
			x, ids := make([]float64, rows*v), make([]int, rows)
			wantLosses, want := make([]float64, rows), make([]float64, rows*v)
			for r, size := range sizes {
				ids[r], wantLosses[r] = r%v, math.Log(float64(v))
				for i := range v {
					x[r*v+i], want[r*v+i] = size*1.1, 1/float64(v)
				}
				want[r*v+ids[r]]--
			}
			g.Scope(fmt.Sprintf("%d/%v", v, dt), func(g *kerneltest.Rig) {
				logits, _ := g.Upload(x, dt, 0)
				targets, one := g.UploadInts(ids), must(g.Upload([]float64{1}, kerneltest.F32, 0))
				losses, out := g.Alloc(rows, kerneltest.F32, 0), g.Alloc(rows*v, dt, 0)
				a := Forward{Logits: logits.Ptr, Losses: losses.Ptr, Targets: targets, Rows: rows,
					V: v, Type: dt, Normalizers: g.Alloc(2*rows, kerneltest.F32, 0).Ptr}
				g.Must(g.Launch(g.Stream, a))
				g.Near("losses", losses, wantLosses, 1e-5)
				a.Scale = one.Ptr
				g.Must(g.Launch(g.Stream, Backward{Out: out.Ptr, Forward: a}))
				g.Near("gradient", out, want, kerneltest.Backward(dt))
				g.Must(g.Launch(g.Stream, a))
				g.Near("gradient in place", logits, want, kerneltest.Backward(dt))
			})
		}
	}
}

func must(b *kerneltest.Buffer, _ []float64) *kerneltest.Buffer { return b }

func TestCrossEntropyExtremes(t *testing.T) {
	g := kerneltest.NewRig(t)
	inf, nan := math.Inf(1), math.NaN()
	rows := [][]float64{{inf, 0, 0}, {-inf, 0, -inf}, {nan, 0, 0}, {3e4, -3e4, 0},
		{-inf, -inf, -inf}, {0, 0, 0}}
	want := []float64{nan, 0, nan, 6e4, nan, nan}
	targets := []int{0, 1, 1, 1, 1, 3}
	for _, dt := range kerneltest.StorageTypes {
		var flat []float64
		for _, r := range rows {
			flat = append(flat, r...)
		}
		logits, _ := g.Upload(flat, dt, 0)
		losses := g.Alloc(len(rows), kerneltest.F32, 0)
		g.Must(g.Launch(g.Stream, Forward{Logits: logits.Ptr, Losses: losses.Ptr,
			Targets: g.UploadInts(targets), Rows: len(rows), V: 3,
			Type: dt}))
		require.Less(t, kerneltest.Distance(g.Read(losses), want), 5e-3, dt)
	}
}

// TestCrossEntropyRows checks the number of targets and the sum of losses, including for more rows
// than a block takes at a time.
func TestCrossEntropyRows(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, rows := range []int{1, 511, 513, 8191, 8193, 16384, 20011} {
		g.Scope(fmt.Sprint(rows), func(g *kerneltest.Rig) {
			ids := g.Classes(rows, 1000)
			targets := g.UploadInts(ids)
			losses, values := g.Normal(rows, kerneltest.F32, 0)
			scale, mean, again := g.Alloc(1, kerneltest.F32, 0), g.Alloc(1, kerneltest.F32, 0),
				g.Alloc(1, kerneltest.F32, 0)
			g.Must(g.Launch(g.Stream, Scale{Scale: scale.Ptr, Targets: targets, Rows: rows}))
			want, sum, size := 1/float64(cpucrossentropy.Targets(ids)), 0.0, 0.0
			g.Near("scale", scale, []float64{want}, 1e-7)
			for _, v := range values {
				sum, size = sum+v, size+math.Abs(v)
			}
			g.Must(g.Launch(g.Stream, Mean{Mean: mean.Ptr, Losses: losses.Ptr, Scale: scale.Ptr,
				Rows: rows}))
			require.LessOrEqual(t, math.Abs(g.Read(mean)[0]-sum*want), 1e-6*size*want, rows)
			g.Must(g.Launch(g.Stream, Mean{Mean: again.Ptr, Losses: losses.Ptr, Scale: scale.Ptr,
				Rows: rows}))
			require.Zero(t, kerneltest.Distance(g.Read(again), g.Read(mean)), rows)
		})
	}
}
