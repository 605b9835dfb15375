package gemm

import (
	"errors"
	"math"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Products of float32 matrices can round their operands to bfloat16, because an AVX512-BF16
// instruction performs twice as many multiplications. Sums remain float32. The instruction treats
// numbers below 2⁻¹²⁶ as zero.

// ErrNoBFloat16 reports that the CPU cannot multiply in bfloat16.
var ErrNoBFloat16 = errors.New("the CPU has no AVX512-BF16, or KASMINA_CPU forbids it")

// rounding reports whether large products round their operands.
var rounding atomic.Bool

// UseBFloat16 enables or disables rounding of the operands of large float32 products in [Mul]. If
// the CPU does not support it, enabling returns ErrNoBFloat16 and changes nothing. The environment
// variable KASMINA_CPU_BF16=1 enables rounding at startup if the CPU supports it.
func UseBFloat16(on bool) error {
	if on && (kernelsBF16 == nil || cpu.Level() != cpu.AVX512) {
		return ErrNoBFloat16
	}
	rounding.Store(on)
	return nil
}

// RoundsToBFloat16 reports whether [Mul] rounds the operands of large products.
func RoundsToBFloat16() bool { return rounding.Load() && cpu.Level() == cpu.AVX512 }

// kernelsBF16 are the kernels that round, or nil if the CPU does not support them.
var kernelsBF16 *kernels[float32]

// roundedLeast is the minimum number of multiplications to round operands, because it costs time
// for each element of both operands.
const roundedLeast = 1 << 20

// Rounds reports whether [Mul] rounds the operands of a float32 product of an m×k and a k×n matrix.
func Rounds(m, n, k int) bool {
	return RoundsToBFloat16() && m >= 16 && n >= 16 && m*n*k >= roundedLeast
}

// rounded computes g with rounded operands if rounding is enabled, supported and worthwhile. It
// reports whether it did.
func rounded[T cpu.Float](g *operands[T]) bool {
	f, ok := any(g).(*operands[float32])
	if !ok || !Rounds(f.m, f.n, f.k) {
		return false
	}
	run(engine32.take(kernelsBF16), *f, true)
	return true
}

// lastPair returns a bfloat16 pair consisting of v, rounded to nearest even, and zero.
func lastPair(v float32) float32 {
	b := math.Float32bits(v)
	if v != v {
		return math.Float32frombits(b>>16 | 0x40)
	}
	return math.Float32frombits((b + 0x7fff + b>>16&1) >> 16)
}
