package layout

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times a transposition.
func Bench(b *bench.B) {
	const rows, n, size = 32768, 4096, 2
	x, y := b.Normal(rows*n, gpu.BFloat16), b.Alloc(rows*n, gpu.BFloat16)
	b.Moves("transpose_32768x4096", 2*size*rows*n, Copy{Y: y, X: x, Dims: []int{n, rows},
		YStrides: []int{rows, 1}, XStrides: []int{1, n}, Size: size})
}
