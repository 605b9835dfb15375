package decode

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Product computes Y = X·Wᵀ + C for a single row X [D], with W [Columns, D] and C [Columns]. C may
// be null, and it may be Y.
type Product struct {
	Y, X, W, C gpu.Ptr
	Columns, D int
	Steady     bool // W was complete before the preceding launch began
	Type       gpu.DType
}

// Gated computes H = gate(X·Gateᵀ) ⊙ X·Upᵀ for a single row X [D]. W, [2·F, D], holds the rows of
// Gate followed by the rows of Up. The gate is SiLU or, if GELU is set, the tanh approximation of
// GELU.
type Gated struct {
	H, X, W gpu.Ptr
	F, D    int
	GELU    bool
	Steady  bool // see Product
	Type    gpu.DType
}

// warps must match kWarps in decode_product.cu.
const warps = 4

// Launch enqueues one kernel.
func (a Product) Launch(q *kernel.Queue) {
	launch(q, "decode_product", a.Columns, a.D, a.Type, a.X, a.W, a.Y, a.X, a.W, a.C,
		a.Columns, a.D, a.Steady)
}

// Launch enqueues one kernel.
func (a Gated) Launch(q *kernel.Queue) {
	launch(q, "decode_gated", a.F, a.D, a.Type, a.X, a.W, a.H, a.X, a.W, a.F, a.D, a.GELU,
		a.Steady)
}

func launch(q *kernel.Queue, name string, rows, depth int, t gpu.DType, x, w gpu.Ptr,
	args ...any) {
	variant := "_elements"
	if kernel.Packed(t, depth, x, w) {
		variant = "_packs"
	}
	c := kernel.Cover(rows, warps, 32*warps)
	c.Overlap = true
	q.Run("decode_product", name+variant+kernel.Suffix(t), c, args...)
}
