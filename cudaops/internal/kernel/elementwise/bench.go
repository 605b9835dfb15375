package elementwise

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times sums, a function and a cast.
func Bench(b *bench.B) {
	const n, t = 1 << 27, gpu.BFloat16
	x, y, z := b.Normal(n, t), b.Normal(n, t), b.Alloc(n, t)
	add := Binary{Op: Add, Y: z, A: Operand{Ptr: x}, B: Operand{Ptr: y}, N: n, Type: t}
	b.Moves("add_32768x4096", 3*2*n, add)
	add.B = Operand{Ptr: b.Normal(4096, t), Period: 4096}
	b.Moves("add_row_32768x4096", 2*2*n, add)
	b.Moves("tanh_32768x4096", 2*2*n, Unary{Op: Tanh, Y: z, X: x, N: n, Type: t})
	b.Moves("cast_32768x4096", (4+2)*n, Cast{Y: z, YType: t, X: b.Normal(n, gpu.Float32),
		XType: gpu.Float32, N: n})
}
