package cpu

import (
	"errors"
	"math"
	"sync/atomic"
)

// Products of float32 matrices may round their operands to bfloat16: with AVX512-BF16 an instruction multiplies twice as many. Sums
// stay float32. The instruction takes numbers below 2⁻¹²⁶ for zero.

// ErrNoBFloat16 says that the CPU cannot multiply in bfloat16.
var ErrNoBFloat16 = errors.New("the CPU has no AVX512-BF16, or KASMINA_CPU forbids it")

// rounding is whether large products round their operands.
var rounding atomic.Bool

// UseBFloat16 makes [Gemm] round the operands of large float32 products to bfloat16, or makes it stop. It returns
// ErrNoBFloat16 where the CPU cannot, and changes nothing then. The environment variable KASMINA_CPU_BF16=1 turns it on from
// the start, where the CPU can.
func UseBFloat16(on bool) error {
	if on && (gemmBF16 == nil || level != avx512) {
		return ErrNoBFloat16
	}
	rounding.Store(on)
	return nil
}

// RoundsToBFloat16 reports whether [Gemm] rounds the operands of large products.
func RoundsToBFloat16() bool { return rounding.Load() && level == avx512 }

// bf16Kernels are the tile of a product whose operands are dwords of two bfloat16, neighbours along k, and what makes those.
type bf16Kernels struct {
	gemmKernels[float32]
	row  func(dst *uint32, src *float32, n int)           // from 2n neighbours
	rows func(dst *uint32, first, second *float32, n int) // from n elements of either
}

// gemmBF16 is nil where the CPU has none.
var gemmBF16 *bf16Kernels

// roundedLeast is the least number of multiplications for which rounding pays: it is a pass over both operands.
const roundedLeast = 1 << 20

// rounded computes g with rounded operands, if that is asked for, possible and worth it.
func rounded[T Float](g *gemmArgs[T]) bool {
	f, ok := any(g).(*gemmArgs[float32])
	if !ok || !rounding.Load() || level != avx512 || f.m < 16 || f.n < 16 || f.m*f.n*f.k < roundedLeast {
		return false
	}
	k := (f.k + 1) / 2
	b := getBuffers[float32]()
	defer putBuffers(b)
	room := b.elements((f.m + f.n) * k)
	h := *f
	h.k = k
	h.a, h.lda = pairUp(room[:f.m*k], f.a, f.lda, f.m, f.k, f.transA)
	h.b, h.ldb = pairUp(room[f.m*k:], f.b, f.ldb, f.n, f.k, !f.transB)
	run(gemm32.take(&gemmBF16.gemmKernels), h, true)
	return true
}

// pairUp writes the dwords of x to dst and returns them with their stride. x is width×k, or k×width if it lies across.
func pairUp(dst, x []float32, ld, width, k int, across bool) ([]float32, int) {
	pairs := (k + 1) / 2
	p := pairing{dst, x, ld, width, k, across}
	if across {
		parallel(pairs, grain(2*width), p)
		return dst, width
	}
	parallel(width, grain(k), p)
	return dst, pairs
}

type pairing struct {
	dst, x       []float32
	ld, width, k int
	across       bool
}

func (p *pairing) span(lo, hi int) {
	pairs := (p.k + 1) / 2
	for i := lo; i < hi; i++ {
		if !p.across {
			row := p.x[i*p.ld:][:p.k]
			dst := p.dst[i*pairs:][:pairs]
			if n := p.k / 2; n > 0 {
				gemmBF16.row(dwords(dst), p32(row), n)
			}
			if p.k%2 == 1 {
				dst[pairs-1] = lastPair(row[p.k-1])
			}
			continue
		}
		first := p.x[2*i*p.ld:][:p.width]
		if 2*i+1 < p.k {
			gemmBF16.rows(dwords(p.dst[i*p.width:]), p32(first), p32(p.x[(2*i+1)*p.ld:][:p.width]), p.width)
			continue
		}
		for j, v := range first {
			p.dst[i*p.width+j] = lastPair(v)
		}
	}
}

// lastPair is v as bfloat16, rounded to nearest even, beside a zero.
func lastPair(v float32) float32 {
	b := math.Float32bits(v)
	if v != v {
		return math.Float32frombits(b>>16 | 0x40)
	}
	return math.Float32frombits((b + 0x7fff + b>>16&1) >> 16)
}
