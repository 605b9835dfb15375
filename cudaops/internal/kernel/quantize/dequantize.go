package quantize

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// The threads of a block of dequantize.cu, and the elements of a thread.
const dequantizeThreads, dequantizeEach = 256, 8

// WidenFloat8 widens a matrix Codes [Rows, D] of E4M3 with float32 scales [Rows] to type Type:
//
//	Y[r, c] = Codes[r, c]·Scales[r]
type WidenFloat8 struct {
	Y, Codes, Scales gpu.Ptr
	Rows, D          int
	Type             gpu.DType
}

// Launch enqueues one kernel.
func (a WidenFloat8) Launch(q *kernel.Queue) {
	n := a.Rows * a.D
	q.Run("dequantize", "dequantize_f8"+kernel.Suffix(a.Type), widening(n), a.Y, a.Codes, a.Scales, int64(n), a.D)
}

// WidenNF4 widens N weights in NF4 to type Type. Two codes share a byte, the first in its upper half.
// Each block of 64 weights shares a scale. Nested holds a code for the scale, which Table maps to a
// number. The scale is this number times an element of Scales, shared by 256 blocks, plus Offset (see
// internal/quant):
//
//	Y[i] = NF4(Codes[i])·(Table[Nested[i/64]]·Scales[i/64/256] + Offset)
type WidenNF4 struct {
	Y, Codes, Nested, Scales, Table gpu.Ptr
	Offset                          float32
	N                               int
	Type                            gpu.DType
}

// Launch enqueues one kernel.
func (a WidenNF4) Launch(q *kernel.Queue) {
	q.Run("dequantize", "dequantize_nf4"+kernel.Suffix(a.Type), widening(a.N), a.Y, a.Codes, a.Nested, a.Scales,
		a.Table, float64(a.Offset), int64(a.N))
}

// widening returns the configuration of a launch that computes n elements.
func widening(n int) gpu.LaunchConfig {
	return kernel.Line(kernel.CeilDiv(n, dequantizeThreads*dequantizeEach), dequantizeThreads)
}
