package quantize

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// The threads of a block of dequantize.cu, and the elements of a thread.
const dequantizeThreads, dequantizeEach = 256, 8

// The elements of a thread that rounds a row to float8, and the side of a block that transposes a matrix.
const float8Each, float8Side = 16, 128

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

// NF4 is a matrix W [Rows, D] in NF4, as in [WidenNF4].
type NF4 struct {
	Codes, Nested, Scales, Table gpu.Ptr
	Offset                       float32
}

// Float8NF4 rounds a matrix in NF4 to E4M3. Rows and D are multiples of 16:
//
//	Y[r, c] = E4M3(W[r, c]·Factors[r])
type Float8NF4 struct {
	NF4
	Y, Factors gpu.Ptr
	Rows, D    int
}

// Launch enqueues one kernel.
func (a Float8NF4) Launch(q *kernel.Queue) {
	n := a.Rows * a.D
	q.Run("dequantize", "float8_nf4", kernel.Line(kernel.CeilDiv(n, dequantizeThreads*float8Each), dequantizeThreads),
		a.Y, a.Codes, a.Nested, a.Scales, a.Table, float64(a.Offset), a.Factors, int64(n), a.D)
}

// Float8Columns transposes a matrix W [Rows, D] and rounds it to E4M3. Codes are the codes of float8 without their
// scales or, if Nested is not null, codes of NF4. Rows, D and Stride, the number of elements between the starts of
// consecutive rows of Y, are multiples of 16:
//
//	Y[c, r] = E4M3(W[r, c]·Factors[r])
type Float8Columns struct {
	NF4
	Y, Factors      gpu.Ptr
	Rows, D, Stride int
}

// Launch enqueues one kernel.
func (a Float8Columns) Launch(q *kernel.Queue) {
	c := kernel.Grid(kernel.CeilDiv(a.D, float8Side), kernel.CeilDiv(a.Rows, float8Side), dequantizeThreads, 1)
	if a.Nested == 0 {
		q.Run("dequantize", "float8_columns_f8", c, a.Y, a.Codes, a.Factors, a.Rows, a.D, int64(a.Stride))
		return
	}
	q.Run("dequantize", "float8_columns_nf4", c, a.Y, a.Codes, a.Nested, a.Scales, a.Table, float64(a.Offset),
		a.Factors, a.Rows, a.D, int64(a.Stride))
}

// widening returns the configuration of a launch that computes n elements.
func widening(n int) gpu.LaunchConfig {
	return kernel.Line(kernel.CeilDiv(n, dequantizeThreads*dequantizeEach), dequantizeThreads)
}
