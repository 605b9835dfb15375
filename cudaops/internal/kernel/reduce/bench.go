package reduce

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times sums of everything, of rows and of columns.
func Bench(b *bench.B) {
	const rows, n = 32768, 4096
	x, y := b.Normal(rows*n, gpu.BFloat16), b.Alloc(rows, gpu.Float32)
	for _, r := range []struct {
		name string
		Reduce
	}{
		{"sum_32768x4096", Reduce{Outer: 1, N: rows * n, Inner: 1}},
		{"sum_rows_32768x4096", Reduce{Outer: rows, N: n, Inner: 1}},
		{"sum_columns_32768x4096", Reduce{Outer: 1, N: rows, Inner: n}},
	} {
		a := r.Reduce
		a.Op, a.Y, a.X, a.YType, a.XType = Sum, y, x, gpu.Float32, gpu.BFloat16
		a.Workspace = b.Alloc(a.WorkspaceBytes(b.Info)/4, gpu.Float32)
		b.Time(bench.Measurement{Name: r.name, Bytes: 2 * rows * n}, func() error {
			return a.Launch(b.Set, b.Stream)
		})
	}
}
