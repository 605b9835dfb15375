package gemm

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	cpugemm "github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// TestSymmetric multiplies matrices with an asymmetric product, and checks that both halves of the
// result hold the part below the diagonal.
func TestSymmetric(t *testing.T) {
	g := newHopperRig(t)
	for _, s := range []Symmetric{{N: 8, Depth: 8, Batch: 1}, {N: 72, Depth: 520, Batch: 2},
		{N: 128, Depth: 64, Batch: 1},
		{N: 168, Depth: 72, Batch: 3}, {N: 264, Depth: 200, Batch: 1},
		{N: 776, Depth: 328, Batch: 2}, {N: 1304, Depth: 136, Batch: 1},
		{N: 1800, Depth: 24, Batch: 1}} {
		if testing.Short() && s.N > 800 {
			continue
		}
		for _, s.Tall = range []bool{false, true} {
			g.Scope(fmt.Sprintf("%+v", s), func(g *kerneltest.Rig) { testSymmetric(g, s) })
		}
	}
}

func testSymmetric(g *kerneltest.Rig, s Symmetric) {
	g.Helper()
	n, depth := s.N, s.Depth
	left, lr := scaledNormal(g, s.Batch*n*depth, depth, kerneltest.F16)
	right, rr := g.Normal(s.Batch*n*depth, kerneltest.F16, 0)
	c := make([]float64, s.Batch*n*n)
	for b := range s.Batch {
		for i := range n {
			for j := range i + 1 {
				v := g.Rand.NormFloat64()
				c[(b*n+i)*n+j], c[(b*n+j)*n+i] = v, v
			}
		}
	}

	addend, cr := g.Upload(c, kerneltest.F16, 0)
	wide := n // elements per row of left and right
	if !s.Tall {
		wide = depth
	}

	plain := make([]float64, s.Batch*n*n)
	for b := range s.Batch {
		part := plain[b*n*n:][:n*n]
		cpugemm.Mul(s.Tall, !s.Tall, n, n, depth, 1, lr[b*n*depth:], wide,
			rr[b*n*depth:], wide, 0, part, n)
		for i := range n {
			for j := range i {
				part[j*n+i] = part[i*n+j]
			}
		}
	}

	alone, added := s, s
	alone.Alpha = 1
	added.Alpha, added.Beta, added.Delta, added.C = 2.0315, -4.775, 3.4445, addend.Ptr
	for _, a := range []Symmetric{alone, added} {
		want := slices.Clone(plain)
		for i := range want {
			want[i] *= float64(a.Alpha)
			if a.C != 0 {
				want[i] += float64(a.Beta) * cr[i]
			}
			if i%(n*n)%(n+1) == 0 {
				want[i] += float64(a.Delta)
			}
		}
		a.Type, a.Left, a.Right = kerneltest.F16, left.Ptr, right.Ptr
		var bits []float64
		for range 2 {
			d := g.Alloc(s.Batch*n*n, kerneltest.F16, 0)
			a.D = d.Ptr
			g.Must(g.Launch(g.Stream, a))
			g.Near(fmt.Sprint("alpha ", a.Alpha), d, want, kerneltest.Forward(kerneltest.F16))
			got := g.Read(d)
			if bits == nil {
				bits = got
			} else if !slices.Equal(bits, got) {
				g.Error("results differ from run to run")
			}
		}
		for i, v := range bits {
			b, r, col := i/(n*n), i/n%n, i%n
			if v != bits[(b*n+col)*n+r] {
				g.Fatalf("not symmetric at %d, %d", r, col)
			}
		}
	}
}

// TestSymmetricOverlap runs overlapping products, each reading the result of the preceding one, and
// compares with separate runs.
func TestSymmetricOverlap(t *testing.T) {
	g := newHopperRig(t)
	for _, n := range []int{264, 1304} {
		g.Scope(fmt.Sprint(n), func(g *kerneltest.Rig) {
			// products with x are as large as the other factor
			x, _ := scaledNormal(g, n*n, n, kerneltest.F16)
			var want []float64
			for overlapping := range 2 {
				from := x.Ptr
				var d *kerneltest.Buffer
				for range 7 {
					d = g.Alloc(n*n, kerneltest.F16, 0)
					g.Must(g.Launch(g.Stream, Symmetric{D: d.Ptr, Left: from, Right: x.Ptr,
						Alpha: 1, N: n, Depth: n, Batch: 1, Type: kerneltest.F16}))
					if from = d.Ptr; overlapping == 0 {
						g.Must(g.Ctx.SyncStream(g.Stream))
					}
				}
				if got := g.Read(d); want == nil {
					want = got
				} else if !slices.Equal(want, got) {
					g.Error("results differ where products overlap")
				}
			}
		})
	}
}
