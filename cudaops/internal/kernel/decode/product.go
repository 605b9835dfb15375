package decode

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Product is Y = X·Wᵀ + C of one row X [D], for W [Columns, D] and C [Columns], which may be null,
// or Y.
type Product struct {
	Y, X, W, C gpu.Ptr
	Columns, D int
	Steady     bool // W was there before the launch ahead of this one
	Type       gpu.DType
}

// Gated is H = gate(X·Gateᵀ) ⊙ X·Upᵀ of one row X [D], for W [2·F, D], which has Gate and below it
// Up. The gate is SiLU, or with GELU that by tanh.
type Gated struct {
	H, X, W gpu.Ptr
	F, D    int
	GELU    bool
	Steady  bool // as in Product
	Type    gpu.DType
}

// warps is kWarps of decode_product.cu.
const warps = 4

// Launch launches one kernel.
func (a Product) Launch(q *kernel.Queue) {
	launch(q, "decode_product", a.Columns, a.D, a.Type, a.X, a.W, a.Y, a.X, a.W, a.C,
		a.Columns, a.D, a.Steady)
}

// Launch launches one kernel.
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
