package gemm

import "github.com/kasmina-go/kasmina/internal/cpu"

// Linear computes y = x·wᵀ, where x is rows×in, w is out×in and y is rows×out.
func Linear[T cpu.Float](y, x, w []T, rows, in, out int) {
	Mul(false, true, rows, out, in, 1, x, in, w, in, 0, y, out)
}

// LinearUntil is like Linear, but returns early if stop requests it.
func LinearUntil[T cpu.Float](stop *cpu.Stop, y, x, w []T, rows, in, out int) {
	multiply(true, operands[T]{false, true, rows, out, in, 1, x, in, w, in, 0, y, out, nil, stop})
}

// LinearAdd computes y = x·wᵀ + d in one pass over y. The result is bit-identical to Linear followed
// by an addition. LinearAdd returns early if stop requests it.
func LinearAdd[T cpu.Float](stop *cpu.Stop, y, d, x, w []T, rows, in, out int) {
	multiply(true, operands[T]{false, true, rows, out, in, 1, x, in, w, in, 0, y, out, d, stop})
}

// LinearBackward computes dx = g·w and dw = gᵀ·x, the gradients of Linear for the output gradient
// g.
func LinearBackward[T cpu.Float](dx, dw, g, x, w []T, rows, in, out int) {
	Mul(false, false, rows, in, out, 1, g, out, w, in, 0, dx, in)
	Mul(true, false, out, in, rows, 1, g, out, x, in, 0, dw, in)
}
