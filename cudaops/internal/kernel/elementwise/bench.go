package elementwise

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times sums, a function and a cast.
func Bench(b *bench.B) {
	const n = 1 << 27
	x, y, z, row := b.Normal(n, gpu.BFloat16), b.Normal(n, gpu.BFloat16), b.Alloc(n, gpu.BFloat16),
		b.Normal(4096, gpu.BFloat16)
	b.Time(bench.Measurement{Name: "add_32768x4096", Bytes: 3 * 2 * n}, func() error {
		return Binary{Op: Add, Y: z, A: Operand{Ptr: x}, B: Operand{Ptr: y}, N: n,
			Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	b.Time(bench.Measurement{Name: "add_row_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return Binary{Op: Add, Y: z, A: Operand{Ptr: x}, B: Operand{Ptr: row, Period: 4096}, N: n,
			Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	b.Time(bench.Measurement{Name: "tanh_32768x4096", Bytes: 2 * 2 * n}, func() error {
		return Unary{Op: Tanh, Y: z, X: x, P: 0, N: n, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	wide := b.Normal(n, gpu.Float32)
	b.Time(bench.Measurement{Name: "cast_32768x4096", Bytes: (4 + 2) * n}, func() error {
		return Cast{Y: z, YType: gpu.BFloat16, X: wide, XType: gpu.Float32,
			N: n}.Launch(b.Set, b.Stream)
	})
}
