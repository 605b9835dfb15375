package rope

import (
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/cpu/layer"
)

func TestRoPE(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, c := range []struct{ batch, seq, heads, headDim int }{
		{1, 1, 1, 2}, {2, 5, 3, 6}, {3, 7, 4, 10}, {2, 33, 12, 64}, {1, 9, 3, 128},
		{2, 17, 32, 128}, {1, 5, 8, 80},
		{1, 11, 4, 16}, {2, 3, 4, 256},
	} {
		for _, dt := range kerneltest.StorageTypes {
			for _, inverse := range []bool{false, true} {
				g.Scope(fmt.Sprintf("%+v/%v/%v", c, dt, inverse), func(g *kerneltest.Rig) {
					rows, d := c.batch*c.seq, c.heads*c.headDim
					x, xr := g.Normal(rows*d, dt, i%2)
					n := c.seq * c.headDim / 2
					cos, cr := g.Normal(n, kerneltest.F32, 0)
					sin, sr := g.Normal(n, kerneltest.F32, 0)
					y := x
					if inverse {
						y = g.Alloc(rows*d, dt, i%2)
					}
					a := Rotate{Y: y.Ptr, X: x.Ptr, Cos: cos.Ptr, Sin: sin.Ptr, Rows: rows,
						Seq: c.seq, Heads: c.heads,
						HeadDim: c.headDim, Inverse: inverse, Type: dt}
					g.Must(g.Launch(g.Stream, a))
					want := make([]float64, rows*d)
					layer.RoPE(want, xr, cr, sr, c.seq, c.heads, c.headDim, inverse)
					g.Near("y", y, want, kerneltest.Forward(dt))
				})
			}
		}
	}
}

// TestRoPEPartInPlace rotates the middle third of wider rows in place, and checks that the rest
// is unchanged.
func TestRoPEPartInPlace(t *testing.T) {
	g := kerneltest.NewRig(t)
	const rows, seq, heads, headDim, d = 12, 6, 4, 32, 4 * 32
	for _, dt := range kerneltest.StorageTypes {
		g.Scope(dt.String(), func(g *kerneltest.Rig) {
			x, xr := g.Normal(rows*3*d, dt, 0)
			cos, cr := g.Normal(seq*headDim/2, kerneltest.F32, 0)
			sin, sr := g.Normal(seq*headDim/2, kerneltest.F32, 0)
			part := x.Offset(d * dt.Size())
			g.Must(g.Launch(g.Stream, Rotate{Y: part, X: part, Cos: cos.Ptr, Sin: sin.Ptr,
				Rows: rows, Seq: seq, Heads: heads,
				HeadDim: headDim, XStride: 3 * d, YStride: 3 * d, Type: dt}))
			for r := range rows {
				row := xr[(3*r+1)*d:][:d]
				at := r % seq * headDim / 2
				turned := make([]float64, d)
				layer.RoPE(turned, row, cr[at:], sr[at:], 1, heads, headDim, false)
				copy(row, turned)
			}
			g.Near("y", x, xr, kerneltest.Forward(dt))
		})
	}
}

func TestConstantsMatchSources(t *testing.T) {
	kerneltest.MatchSource(t, "rope.cu", fmt.Sprintf("kThreads = %d;", ropeThreads))
}
