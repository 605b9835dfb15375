package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// RoPEProduct computes Y = X·Weightsᵀ and applies RoPE to the heads in the first Turned columns. X
// is [Rows, D], Weights [Columns, D] and Y [Rows, Columns]; Angles is a table of [RoPEAngles]. The
// product is rounded before it is rotated.
//
// With Float8, X and Weights are Float8E4M3 with the float32 scales ScaleX [Rows] and ScaleWeights
// [Columns]. The product is rounded, scaled, and then rotated.
type RoPEProduct struct {
	Y, X, Weights, Angles gpu.Ptr
	ScaleX, ScaleWeights  gpu.Ptr // null without Float8
	Rows, Columns, D      int
	Turned, Seq, HeadDim  int // row r has position r mod Seq
	Float8                bool
	Type                  gpu.DType // of Y and, without Float8, of X and Weights
	Term                  Term      // added to X·Weightsᵀ; not with Float8
	Variant               kernel.Variant
}

// RoPEAngles returns the table for a RoPEProduct of cosines and sines, [Seq, h], for heads with 2h
// features. Its order matches the reads of gemm_hopper_rope.cu.
func RoPEAngles(cos, sin []float32, h int) []float32 {
	table := make([]float32, RoPEAnglesLen(len(cos)/h, h))
	for i := range cos {
		at := RoPEAngleAt(i/h, i%h, h)
		table[at], table[at+2] = cos[i], sin[i]
	}
	return table
}

// RoPEAnglesLen returns the length of the table for seq positions.
func RoPEAnglesLen(seq, h int) int { return 16 * 8 * kernel.CeilDiv(seq, 8) * kernel.CeilDiv(h, 8) }

// RoPEAngleAt returns the index of the cosine of a pair at a position. The sine follows 2 elements
// later.
func RoPEAngleAt(position, pair, h int) int {
	return 16*((position/8*kernel.CeilDiv(h, 8)+pair/8)*8+position%8) + pair%8/2*4 + pair%2
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper
// has one for 2-byte types if D and Columns are multiples of 8 and heads have 64, 96 or 128
// features. With Float8, the type must be BFloat16, D and Columns must be multiples of 16, D must
// exceed 384, and heads must have 64 or 128 features.
func (a RoPEProduct) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, fused, turnedTiles[a.HeadDim].columns > 0 &&
		a.Type.Size() == 2 && a.Columns%8 == 0 && a.D%8 == 0 && a.Term.takes() &&
		(a.Term.D == 0 || !a.Float8) && (!a.Float8 || a.HeadDim != 96 && float8Product(a.Columns, a.D, a.Type)))
}

// turnedTiles is the shape of gemm_hopper_rope.cu by head dimension: the columns of a tile and the
// stages. A warp stores turnedRows rows at a time.
var turnedTiles = map[int]struct{ columns, stages int }{64: {256, 4}, 96: {192, 5}, 128: {256, 4}}

const turnedRows = 8

// Launch enqueues one kernel.
func (a RoPEProduct) Launch(q *kernel.Queue) {
	tile, d, symbol := turnedTiles[a.HeadDim], a.D, "gemm_hopper_rope"
	shared := warpShared(tile.columns, tile.stages, turnedRows*2*tile.columns)
	if a.Float8 { // the copies treat pairs as one element
		d, shared, symbol = d/2, shared+factorBytes(tile.columns), "gemm_hopper_rope_f8"
	}

	more := matrix(a.Term.W, a.Term.D, a.Columns, gemmDepth, tile.columns/gemmCluster)
	gemmLaunch{unit: "gemm_hopper_rope", shared: shared, dtype: a.Type,
		symbol: fmt.Sprintf("%s_%d%s", symbol, a.HeadDim, kernel.Suffix(a.Type)),
		params: kernel.Struct{a.Angles, a.ScaleX, a.ScaleWeights, a.Rows, a.Columns, d, a.Term.D,
			a.Turned, a.Seq, gemmSection},
		matrices: append([]gemmMatrix{
			matrix(a.X, d, a.Rows, gemmDepth, gemmRows),
			matrix(a.Weights, d, a.Columns, gemmDepth, tile.columns/gemmCluster),
			matrix(a.Y, a.Columns, a.Rows, 64, turnedRows).storing(),
		}, a.Term.matrices(a.Rows, more, a.Weights)...)}.run(q)
}

// Tuning implements [kernel.Tuned].
func (a RoPEProduct) Tuning() (op, shape string) {
	return "RoPEProduct", fmt.Sprintf("%dx%dx%d, %d turned of %d, sequences of %d, %v", a.Rows,
		a.Columns, a.D, a.Turned, a.HeadDim, a.Seq, a.Type) + kernel.With(a.Float8, "of float8") +
		a.Term.shape()
}

// SetVariant sets the variant chosen by tuning.
func (a *RoPEProduct) SetVariant(w kernel.Variant) { a.Variant = w }
