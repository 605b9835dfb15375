package softmax

import (
	"fmt"
	"math"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
)

func TestSoftmax(t *testing.T) {
	g := kerneltest.NewRig(t)
	for i, shape := range [][2]int{{1, 1}, {5, 3}, {33, 32}, {9, 1000}, {6, 1024}, {5, 1025},
		{7, 4096}, {3, 50257}, {4, 9000}} {
		for _, dt := range kerneltest.StorageTypes {
			g.Scope(fmt.Sprintf("%v/%v", shape, dt), func(g *kerneltest.Rig) {
				rows, n := shape[0], shape[1]
				x, xr := g.Normal(rows*n, dt, i%2)
				dy, gr := g.Normal(rows*n, dt, i%2)
				want := make([]float64, rows*n)
				for r := range rows {
					var sum float64
					for k, v := range xr[r*n:][:n] {
						want[r*n+k] = math.Exp(v)
						sum += want[r*n+k]
					}
					for k := range n {
						want[r*n+k] /= sum
					}
				}
				g.Must(g.Launch(g.Stream, Forward{Y: x.Ptr, X: x.Ptr, Rows: rows, N: n, Type: dt}))
				g.Near("y", x, want, kerneltest.Forward(dt))
				yr := g.Read(x)
				for r := range rows {
					var dot float64
					for k := r * n; k < (r+1)*n; k++ {
						dot += yr[k] * gr[k]
					}
					for k := r * n; k < (r+1)*n; k++ {
						want[k] = yr[k] * (gr[k] - dot)
					}
				}
				g.Must(g.Launch(g.Stream, Backward{DX: dy.Ptr, G: dy.Ptr, Y: x.Ptr, Rows: rows,
					N: n, Type: dt}))
				if n > 1 { // otherwise it is zero except for rounding
					g.Near("dx", dy, want, kerneltest.Backward(dt))
				}
			})
		}
	}
}
