package softmax

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times both passes.
func Bench(b *bench.B) {
	const rows, n, t = 32768, 4096, gpu.BFloat16
	const size = 2 * rows * n
	x, g := b.Normal(rows*n, t), b.Normal(rows*n, t)
	y, dx := b.Alloc(rows*n, t), b.Alloc(rows*n, t)
	b.Moves("softmax_fwd_32768x4096", 2*size, Forward{Y: y, X: x, Rows: rows, N: n, Type: t})
	b.Moves("softmax_bwd_32768x4096", 3*size,
		Backward{DX: dx, G: g, Y: y, Rows: rows, N: n, Type: t})
}
