package softmax

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times both passes.
func Bench(b *bench.B) {
	const rows, n = 32768, 4096
	const size = 2 * rows * n
	x, g := b.Normal(rows*n, gpu.BFloat16), b.Normal(rows*n, gpu.BFloat16)
	y, dx := b.Alloc(rows*n, gpu.BFloat16), b.Alloc(rows*n, gpu.BFloat16)
	b.Time(bench.Measurement{Name: "softmax_fwd_32768x4096", Bytes: 2 * size}, func() error {
		return Forward{Y: y, X: x, Rows: rows, N: n, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	b.Time(bench.Measurement{Name: "softmax_bwd_32768x4096", Bytes: 3 * size}, func() error {
		return Backward{DX: dx, G: g, Y: y, Rows: rows, N: n, Type: gpu.BFloat16}.Launch(b.Set,
			b.Stream)
	})
}
