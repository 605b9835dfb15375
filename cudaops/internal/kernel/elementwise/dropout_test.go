package elementwise

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/kerneltest"
	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// TestDropout checks that the masks are those of the CPU.
func TestDropout(t *testing.T) {
	g := kerneltest.NewRig(t)
	for _, n := range elementCounts {
		for _, p := range []float64{0, 0.1, 0.5, 0.99} {
			for _, dt := range []gpu.DType{kerneltest.F32, kerneltest.Bf16, kerneltest.F16} {
				g.Scope(fmt.Sprintf("%d, p %v/%v", n, p, dt), func(g *kerneltest.Rig) {
					const number, salt = 123456789, 7
					x, xr := g.Normal(n, dt, 0)
					y, key := g.Alloc(n, dt, 0), g.Alloc(2, kerneltest.F32, 0)
					g.Must(g.Ctx.CopyToDevice(key.Ptr, binary.LittleEndian.AppendUint64(nil, number),
						g.Stream))
					g.Must(g.Launch(g.Stream, Dropout{Y: y.Ptr, X: x.Ptr, Key: key.Ptr, P: p, Salt: salt,
						N: n, Type: dt}))

					mask := splitmix.Mix(number) ^ splitmix.Mix(salt)
					want := make([]float64, n)
					for i, v := range xr {
						if float64(splitmix.Mix(mask+uint64(i))>>11) >= p*(1<<53) {
							want[i] = v / (1 - p)
						}
					}

					got := g.Read(y)
					for i := range want {
						if (got[i] == 0) != (want[i] == 0) && xr[i] != 0 {
							g.Fatalf("element %d is %v, want %v", i, got[i], want[i])
						}
					}
					g.Near("y", y, want, kerneltest.Forward(dt))
				})
			}
		}
	}
}
