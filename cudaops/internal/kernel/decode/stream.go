package decode

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// streamed is a product or a gated product of one row, computed by decode_stream.cu.
type streamed struct {
	y, x, w, add gpu.Ptr
	norm         Norm
	rows, depth  int
	t            gpu.DType
	Overlap
	gated, gelu bool
}

// These constants must match decode_stream.cu and decode_stream.cuh.
const (
	streamWarps   = 8
	streamRows    = 16
	streamColumns = 64
	streamStages  = 5
	streamBatch   = 8
	streamNormed  = 2 * 8 * 32 * streamWarps // the largest depth with a norm

	streamRings = streamWarps * streamStages * streamRows * streamColumns * 2 // bytes in a block
)

// shared returns the number of bytes of shared memory of a block.
func (s streamed) shared() int {
	n := streamRings + 4*streamBatch*streamWarps*streamRows + 128 + 2*s.depth + 64
	if s.norm.W != 0 {
		n += 2 * s.depth
	}
	return n
}

func (s streamed) supported(d gpu.DeviceInfo) bool {
	return d.Overlaps() && (s.t == gpu.BFloat16 || s.t == gpu.Float16) && s.depth%streamColumns == 0 &&
		kernel.Aligned(s.x, s.w, s.norm.W) && (s.norm.W == 0 || s.depth <= streamNormed) && s.shared() <= d.SharedPerBlock
}

func (s streamed) launch(q *kernel.Queue) {
	name := "decode_stream"
	if s.gated {
		name += "_gated"
	}
	if s.norm.W != 0 {
		name += "_normed"
	}
	weights := 2 * s.rows * s.depth
	if s.gated {
		weights *= 2
	}
	c := kernel.Line(min(q.Info.SMs, s.rows), 32*streamWarps)
	c.Shared, c.Overlap, c.MaxShared = spread(s.shared(), s.norm, weights, streamRings, q.Info), true, true
	q.Run("decode_stream", name+kernel.Suffix(s.t), c, kernel.Struct{s.y, s.x, s.w, s.add, s.norm.W, s.rows, s.depth,
		s.norm.Eps, s.Steady, s.Early, s.gelu})
}

// spread returns the number of bytes of shared memory that each block of a product requests: at least shared, which is
// what it needs.
//
// A large product with a norm requests more than half of a multiprocessor's shared memory, so that no two of its blocks
// fit on the same multiprocessor. It has one block per multiprocessor, so every multiprocessor then runs one. The other
// half is enough for a block of the product before or after it, because products with and without a norm alternate in a
// model.
//
// Without this, the GPU would place two blocks on some multiprocessors and none on others. It begins with attention,
// which occupies only part of the multiprocessors: the next product, which starts before attention has ended, goes to the
// others in pairs. The product after that finds memory only where the preceding one has no blocks, and again goes there
// in pairs. Until the end of the token, each product would read its weights with half of the multiprocessors.
//
// If all weights of a product fit in the rings of its blocks, it requests only the memory that it needs, so that more of
// these small products can overlap.
func spread(shared int, n Norm, weights, rings int, d gpu.DeviceInfo) int {
	const reserved, unit = 1024, 128 // bytes that the driver adds for each block, and the granularity of requests
	if n.W == 0 || weights <= rings*d.SMs {
		return shared
	}

	half := (d.SharedPerBlock + reserved) / 2
	return max(shared, half-reserved+unit)
}
