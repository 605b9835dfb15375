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
	Norm       Norm
	Type       gpu.DType
	Overlap
}

// Gated computes H = gate(X·Gateᵀ) ⊙ X·Upᵀ for a single row X [D]. W, [2·F, D], holds the rows of
// Gate followed by the rows of Up. The gate is SiLU or, if GELU is set, the tanh approximation of
// GELU.
type Gated struct {
	H, X, W gpu.Ptr
	F, D    int
	GELU    bool
	Norm    Norm
	Type    gpu.DType
	Overlap
}

// Norm is an RMSNorm of the row X of a product, X·W/sqrt(mean(X²) + Eps). The product applies it
// without rounding its result. W [D] is float32, and null if there is no norm.
type Norm struct {
	W   gpu.Ptr
	Eps float64
}

// Overlap describes how a launch overlaps with other launches on its stream.
type Overlap struct {
	// Steady means that the weights were complete before any launch began that may still be running.
	// The launch then loads its first weights without waiting for the preceding launch.
	Steady bool
	// Early lets the next launch start at once, rather than when the preceding launch has ended. Some
	// launch before this one must have waited for everything that other launches load early.
	Early bool
}

// These constants must match kWarps and kDeep in decode_product.cu.
const warps, deep = 4, 8

// Launch enqueues one kernel.
func (a Product) Launch(q *kernel.Queue) {
	launch(q, "decode_product", a.Columns, a.D, a.Type, a.Y, a.X, a.W, a.C, a.Norm, a.Overlap, false)
}

// Launch enqueues one kernel.
func (a Gated) Launch(q *kernel.Queue) {
	launch(q, "decode_gated", a.F, a.D, a.Type, a.H, a.X, a.W, 0, a.Norm, a.Overlap, a.GELU)
}

func launch(q *kernel.Queue, name string, rows, depth int, t gpu.DType, y, x, w, add gpu.Ptr, n Norm, o Overlap,
	gelu bool) {
	if s := (streamed{y, x, w, add, n, rows, depth, t, o, name == "decode_gated", gelu}); s.supported(q.Info) {
		s.launch(q)
		return
	}

	if n.W != 0 {
		name += "_normed"
	}
	switch packed := kernel.Packed(t, depth, x, w, n.W); {
	case packed && depth%(deep*32*kernel.Vector(t)) == 0:
		name += "_full"
	case packed:
		name += "_packs"
	default:
		name += "_elements"
	}

	c := kernel.Cover(rows, warps, 32*warps)
	c.Overlap = true
	q.Run("decode_product", name+kernel.Suffix(t), c, kernel.Struct{y, x, w, add, n.W, rows, depth,
		n.Eps, o.Steady, o.Early, gelu})
}
