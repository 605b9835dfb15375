package silu

import (
	"fmt"

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
	for _, gelu := range []bool{false, true} {
		name := func(pass string) string {
			return fmt.Sprintf("%smul_%s_16384x11008", gate(gelu), pass)
		}
		b.Time(bench.Measurement{Name: name("fwd"), Bytes: 3 * size}, func() error {
			return Mul{H: h, A: ab, B: ab.Offset(2 * f), Rows: rows, F: f,
				Stride: 2 * f, GELU: gelu,
				Type: gpu.BFloat16}.Launch(b.Set, b.Stream)
		})
		b.Time(bench.Measurement{Name: name("bwd"), Bytes: 5 * size}, func() error {
			return MulBackward{DA: dab, DB: dab.Offset(2 * f), DH: dh, A: ab,
				B: ab.Offset(2 * f), Rows: rows, F: f,
				Stride: 2 * f, GradStride: 2 * f, GELU: gelu, Type: gpu.BFloat16}.Launch(b.Set,
				b.Stream)
		})
	}
}
