package gemm

import (
	"errors"
	"math"
	"sync/atomic"

	"github.com/kasmina-go/kasmina/internal/cpu"
)

// Products of float32 matrices may round their operands to bfloat16: with AVX512-BF16 an
// instruction multiplies twice as many. Sums stay float32. The instruction takes numbers below
// 2⁻¹²⁶ for zero.

// ErrNoBFloat16 says that the CPU cannot multiply in bfloat16.
var ErrNoBFloat16 = errors.New("the CPU has no AVX512-BF16, or KASMINA_CPU forbids it")

// rounding is whether large products round their operands.
var rounding atomic.Bool

// UseBFloat16 makes [Mul] round the operands of large float32 products to bfloat16, or makes it
// stop. It returns ErrNoBFloat16 where the CPU cannot, and changes nothing then. The environment
// variable KASMINA_CPU_BF16=1 turns it on from the start, where the CPU can.
func UseBFloat16(on bool) error {
	if on && (kernelsBF16 == nil || cpu.Level() != cpu.AVX512) {
		return ErrNoBFloat16
	}
	rounding.Store(on)
	return nil
}

// RoundsToBFloat16 reports whether [Mul] rounds the operands of large products.
func RoundsToBFloat16() bool { return rounding.Load() && cpu.Level() == cpu.AVX512 }

// kernelsBF16 are the kernels that round: nil where the CPU has none.
var kernelsBF16 *kernels[float32]

// roundedLeast is the least number of multiplications for which rounding pays: it is work for each
// element of both operands.
const roundedLeast = 1 << 20

// Rounds reports whether [Mul] rounds the operands of a product of float32 matrices, m×k by k×n.
func Rounds(m, n, k int) bool {
	return RoundsToBFloat16() && m >= 16 && n >= 16 && m*n*k >= roundedLeast
}

// rounded computes g with rounded operands, if that is asked for, possible and worth it.
func rounded[T cpu.Float](g *operands[T]) bool {
	f, ok := any(g).(*operands[float32])
	if !ok || !Rounds(f.m, f.n, f.k) {
		return false
	}
	run(engine32.take(kernelsBF16), *f, true)
	return true
}

// lastPair is v as bfloat16, rounded to nearest even, beside a zero.
func lastPair(v float32) float32 {
	b := math.Float32bits(v)
	if v != v {
		return math.Float32frombits(b>>16 | 0x40)
	}
	return math.Float32frombits((b + 0x7fff + b>>16&1) >> 16)
}
