// Package softmax has the kernels of softmax over rows, and of its gradient.
package softmax

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Forward computes Y = exp(X − max) / Σ exp(X − max) for each of Rows rows of N elements. Y may be
// X.
type Forward struct {
	Y, X    gpu.Ptr
	Rows, N int
	Type    gpu.DType
}

// Launch enqueues one kernel.
func (p Forward) Launch(q *kernel.Queue) {
	softmax(q, "softmax", p.Rows, p.N, p.Type, kernel.Packed(p.Type, p.N, p.Y, p.X), p.Y, p.X)
}

// Backward computes DX = Y ⊙ (G − Σ G ⊙ Y) for each row, from the output Y of Forward and its
// gradient G. DX may be Y or G.
type Backward struct {
	DX, G, Y gpu.Ptr
	Rows, N  int
	Type     gpu.DType
}

// Launch enqueues one kernel.
func (p Backward) Launch(q *kernel.Queue) {
	softmax(q, "softmax_backward", p.Rows, p.N, p.Type, kernel.Packed(p.Type, p.N, p.DX, p.G, p.Y),
		p.DX, p.G, p.Y)
}

func softmax(q *kernel.Queue, name string, rows, n int, t gpu.DType, packed bool, args ...any) {
	c := kernel.Line(rows, kernel.LongRowThreads(n, t))
	variant := "_block"
	for _, packs := range []int{4, 2} { // per thread, for rows that a block holds
		if threads := kernel.CeilDiv(n, 32*packs*kernel.Vector(t)) * 32; packed && threads <= 512 {
			variant, c = fmt.Sprint("_held", packs), kernel.Line(rows, threads)
		}
	}

	if n <= 1024 && packed {
		variant, c = "_warp", kernel.Cover(rows, 4, 128)
		args = append(args, int64(rows))
	}

	q.Run("softmax", name+variant+kernel.Suffix(t), c, append(args, n)...)
}
