package elementwise

import (
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/internal/splitmix"
)

// Dropout sets elements of X to 0 with probability P and multiplies the remaining elements by 1/(1 − P),
// for N elements. Y may be X. The number at Key, an int64, and the salt determine the mask, as in
// op.Dropout.
type Dropout struct {
	Y, X, Key gpu.Ptr
	P         float64
	Salt      uint64
	N         int
	Type      gpu.DType
}

// dropoutSpan is the number of elements of a block in dropout.cu.
const dropoutSpan = threads * 8

// Launch enqueues one kernel.
func (p Dropout) Launch(q *kernel.Queue) {
	q.Run("dropout", "dropout"+kernel.Suffix(p.Type), kernel.Cover(p.N, dropoutSpan, threads), p.Y, p.X,
		p.Key, int64(splitmix.Mix(p.Salt)), int64(math.Ceil(p.P*(1<<53))), 1/(1-p.P), int64(p.N))
}
