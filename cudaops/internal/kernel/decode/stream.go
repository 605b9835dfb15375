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

// These constants must match decode_stream.cu.
const (
	streamWarps   = 8
	streamRows    = 16
	streamColumns = 64
	streamStages  = 5
	streamBatch   = 8
	streamNormed  = 2 * 8 * 32 * streamWarps // the largest depth with a norm
)

// shared returns the number of bytes of shared memory of a block.
func (s streamed) shared() int {
	n := streamWarps*streamStages*streamRows*streamColumns*2 + 4*streamBatch*streamWarps*streamRows + 128 + 2*s.depth + 64
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
	c := kernel.Line(min(q.Info.SMs, s.rows), 32*streamWarps)
	c.Shared, c.Overlap, c.MaxShared = s.shared(), true, true
	q.Run("decode_stream", name+kernel.Suffix(s.t), c, kernel.Struct{s.y, s.x, s.w, s.add, s.norm.W, s.rows, s.depth,
		s.norm.Eps, s.Steady, s.Early, s.gelu})
}
