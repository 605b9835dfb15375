package silu

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/bench"
)

// Bench times the gate.
func Bench(b *bench.B) {
	const rows, f, t = 16384, 11008, gpu.BFloat16
	const size = 2 * rows * f
	ab, dh := b.Normal(2*rows*f, t), b.Normal(rows*f, t)
	h, dab := b.Alloc(rows*f, t), b.Alloc(2*rows*f, t)
	for _, gelu := range []bool{false, true} {
		b.Moves(fmt.Sprintf("%smul_fwd_16384x11008", gate(gelu)), 3*size,
			Mul{H: h, AB: ab, Rows: rows, F: f, GELU: gelu, Type: t})
		b.Moves(fmt.Sprintf("%smul_bwd_16384x11008", gate(gelu)), 5*size,
			MulBackward{DAB: dab, DH: dh, AB: ab, Rows: rows, F: f, GELU: gelu, Type: t})
	}
}
