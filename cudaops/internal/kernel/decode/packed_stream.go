package decode

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// These constants must match decode_stream_packed.cu. The number of warps, the rows of a tile and the largest depth with a
// norm are those of decode_stream.cuh: streamWarps, streamRows and streamNormed.
const (
	packedStreamBytes  = 128 // bytes of codes of a row in a piece
	packedStreamBatch  = 4
	packedStreamFloat8 = 4 // stages; one less without a norm
	packedStreamNF4    = 3
)

// Streams reports whether decode_stream_packed.cu computes the product on a GPU.
func (a PackedProduct) Streams(d gpu.DeviceInfo) bool {
	piece := packedStreamBytes // elements of a row
	if a.NF4 {
		piece *= 2
	}
	_, shared := a.streamShared()
	if !a.Supports() || a.Rows != 1 || !d.Overlaps() || a.D%piece != 0 || a.Norm.W != 0 && a.D > streamNormed ||
		shared > d.SharedPerBlock {
		return false
	}

	for _, p := range a.Parts {
		if !kernel.Aligned(p.Codes) || p.Nested%4 != 0 {
			return false
		}
	}
	return kernel.Aligned(a.X, a.Norm.W)
}

// streamShared returns the number of bytes of the rings and of all shared memory of a block.
func (a PackedProduct) streamShared() (rings, shared int) {
	stage, stages := streamRows*packedStreamBytes, packedStreamFloat8
	tables, columns := 0, 2 // columns of x
	if a.NF4 {
		stage += 2 * 4 * streamRows // the codes of the blocks' scales, and the scales of these codes
		stages = packedStreamNF4
		tables = 4*256*32 + 4*256 // for pairs of NF4 codes, and for the codes of scales
	}

	if a.Norm.W == 0 {
		stages--
		if a.NF4 { // a row in the storage type has no remainders
			columns = 1
		}
	}

	rings = streamWarps * stages * stage
	return rings, tables + rings + 4*packedStreamBatch*streamWarps*streamRows + 128 + 2*columns*a.D + 64
}

// stream enqueues the kernel of decode_stream_packed.cu.
func (a PackedProduct) stream(q *kernel.Queue) {
	name, weights := "decode_stream_packed_float8", a.Columns*a.D
	if a.NF4 {
		name, weights = "decode_stream_packed_nf4", weights/2
	}
	if a.Gate != GateNone {
		name, weights = name+"_gated", 2*weights
	}
	if a.Norm.W != 0 {
		name += "_normed"
	}

	rings, shared := a.streamShared()
	c := kernel.Line(min(q.Info.SMs, a.Columns), 32*streamWarps)
	c.Shared, c.Overlap, c.MaxShared = spread(shared, a.Norm, weights, rings, q.Info), true, true
	args := append(kernel.Struct{a.Y, a.X, a.C, a.Norm.W, a.Table}, a.parts()...)
	q.Run("decode_stream_packed", name+kernel.Suffix(a.Type), c, append(args, a.Columns, a.D, a.Norm.Eps, a.Steady, a.Early,
		a.Gate == GateGELU))
}
