package norm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the norm and its backward pass, plain and with a residual.
func Bench(b *bench.B) {
	for _, shape := range [][2]int{{32768, 4096}, {32768, 768}, {16384, 1024}} {
		benchRMSNorm(b, shape[0], shape[1])
		b.Free()
	}
}

func benchRMSNorm(b *bench.B, rows, d int) {
	shape, size := fmt.Sprintf("%dx%d", rows, d), float64(2*rows*d)
	x, g, w := b.Normal(rows*d, gpu.BFloat16), b.Normal(rows*d, gpu.BFloat16),
		b.Normal(d, gpu.Float32)
	y, rstd, dx, dw := b.Alloc(rows*d, gpu.BFloat16), b.Alloc(rows, gpu.Float32),
		b.Alloc(rows*d, gpu.BFloat16), b.Alloc(d, gpu.Float32)
	workspace := b.Alloc(RMSNormBackward{D: d, Type: gpu.BFloat16}.WorkspaceBytes(b.Info)/4, gpu.Float32)
	b.Time(bench.Measurement{Name: "rmsnorm_fwd_" + shape, Bytes: 2 * size}, func() error {
		return RMSNorm{Y: y, Rstd: rstd, X: x, W: w, Rows: rows, D: d, Eps: 1e-5,
			Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	backward := RMSNormBackward{DX: dx, DW: dw, G: g, X: x, W: w, Rstd: rstd, Rows: rows, D: d,
		Type: gpu.BFloat16, DWType: gpu.Float32,
		Workspace: workspace}
	b.Time(bench.Measurement{Name: "rmsnorm_bwd_" + shape, Bytes: 3 * size}, func() error {
		return backward.Launch(b.Set, b.Stream)
	})
	sum, residual := b.Alloc(rows*d, gpu.BFloat16), b.Normal(rows*d, gpu.BFloat16)
	b.Time(bench.Measurement{Name: "add_rmsnorm_fwd_" + shape, Bytes: 4 * size}, func() error {
		return RMSNorm{Y: y, Rstd: rstd, Sum: sum, X: x, Residual: residual, W: w, Rows: rows, D: d,
			Eps: 1e-5, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	backward.Add = residual
	b.Time(bench.Measurement{Name: "add_rmsnorm_bwd_" + shape, Bytes: 4 * size}, func() error {
		return backward.Launch(b.Set, b.Stream)
	})
}
