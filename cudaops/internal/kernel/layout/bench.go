package layout

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times a transposition.
func Bench(b *bench.B) {
	const rows, n = 32768, 4096
	x, y := b.Normal(rows*n, gpu.BFloat16), b.Alloc(rows*n, gpu.BFloat16)
	b.Time(bench.Measurement{Name: "transpose_32768x4096", Bytes: 2 * 2 * rows * n}, func() error {
		return Copy{Y: y, X: x, Dims: []int{n, rows}, YStrides: []int{rows, 1},
			XStrides: []int{1, n},
			Size:     gpu.BFloat16.Size()}.Launch(b.Set, b.Stream)
	})
}
