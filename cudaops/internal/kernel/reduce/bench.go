package reduce

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times sums of everything, of rows and of columns.
func Bench(b *bench.B) {
	const rows, n = 32768, 4096
	a := Reduce{Op: Sum, Y: b.Alloc(rows, gpu.Float32), X: b.Normal(rows*n, gpu.BFloat16),
		YType: gpu.Float32, XType: gpu.BFloat16}
	time := func(name string, outer, middle, inner int) {
		a.Outer, a.N, a.Inner = outer, middle, inner
		a.Workspace = b.Alloc(a.WorkspaceBytes(b.Info)/4, gpu.Float32)
		b.Moves(name, 2*rows*n, a)
	}
	time("sum_32768x4096", 1, rows*n, 1)
	time("sum_rows_32768x4096", rows, n, 1)
	time("sum_columns_32768x4096", 1, rows, n)
}
