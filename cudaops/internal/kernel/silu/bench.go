package silu

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the gate. Its inputs lie side by side in rows of 2·F, as the product of gate and up
// projection leaves them.
func Bench(b *bench.B) {
	const rows, f = 16384, 11008
	const size = 2 * rows * f
	ab, dh := b.Normal(2*rows*f, gpu.BFloat16), b.Normal(rows*f, gpu.BFloat16)
	h, dab := b.Alloc(rows*f, gpu.BFloat16), b.Alloc(2*rows*f, gpu.BFloat16)
	b.Time(bench.Measurement{Name: "silumul_fwd_16384x11008", Bytes: 3 * size}, func() error {
		return Mul{H: h, A: ab, B: ab.Offset(2 * f), Rows: rows, F: f, Stride: 2 * f, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
	b.Time(bench.Measurement{Name: "silumul_bwd_16384x11008", Bytes: 5 * size}, func() error {
		return MulBackward{DA: dab, DB: dab.Offset(2 * f), DH: dh, A: ab, B: ab.Offset(2 * f),
			Rows: rows, F: f, Stride: 2 * f, GradStride: 2 * f, Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
	})
}
