// Package rope has the kernels of rotary position embedding.
package rope

import (
	"cmp"
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Rotate rotates the pairs (i, i+h), h = HeadDim/2, of every head in the rows of X [Rows,
// Heads·HeadDim]. The cosine and sine of a pair's angle are at [position·h + i] of the float32
// tables, where position = row mod Seq. With Inverse it rotates them back, which is also the
// gradient.
//
// Y may be X. XStride and YStride are the number of elements from one row to the next, or 0 if rows
// are contiguous, so a tensor may be part of a wider one.
type Rotate struct {
	Y, X, Cos, Sin      gpu.Ptr
	Rows                int
	Seq, Heads, HeadDim int
	XStride, YStride    int
	Inverse             bool
	Type                gpu.DType
}

// ropeThreads is the number of threads per block; must match kThreads in rope.cu.
const ropeThreads = 128

// Launch enqueues one kernel.
func (a Rotate) Launch(q *kernel.Queue) {
	width, h, n := a.Heads*a.HeadDim, a.HeadDim/2, kernel.Vector(a.Type)
	a.XStride, a.YStride = cmp.Or(a.XStride, width), cmp.Or(a.YStride, width)
	variant, threads := "rope_pairs", a.Rows*a.Heads*h
	if h%n == 0 && kernel.Packed(a.Type, a.XStride, a.X, a.Y, a.Cos, a.Sin) && a.YStride%n == 0 {
		lanes := a.HeadDim / n // per head, with 16 bytes each
		switch {
		case a.Heads%4 == 0 && lanes <= 32 && lanes&(lanes-1) == 0:
			variant, threads = "rope_exchange4", threads/n/2
		case a.Heads%2 == 0:
			variant, threads = "rope_heads2", threads/n/2
		default:
			variant, threads = "rope_heads1", threads/n
		}
	}

	if threads > math.MaxInt32 {
		q.Err = fmt.Errorf("kernels.RoPE: %d rows of %d heads are too many for one launch", a.Rows,
			a.Heads)
	}

	sign := 1.0
	if a.Inverse {
		sign = -1
	}

	q.Run("rope", variant+kernel.Suffix(a.Type),
		kernel.Cover(threads, ropeThreads, ropeThreads), a.Y, a.X, a.Cos, a.Sin,
		sign, int64(a.Rows), a.Heads, h, a.Seq, int64(a.XStride), int64(a.YStride))
}
