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
func (a Product) Launch(k *kernel.Set, s gpu.Stream) error {
	l := kernel.Args().Ptr(a.Y).Ptr(a.X).Ptr(a.W).Ptr(a.C).Int32(a.Columns).Int32(a.D).
		Int32(int(kernel.Bit(a.Steady)))
	return launch(k, s, "DecodeProduct", "decode_product", a.Columns, a.D, a.Type, a.X, a.W, l)
}

// Launch launches one kernel.
func (a Gated) Launch(k *kernel.Set, s gpu.Stream) error {
	l := kernel.Args().Ptr(a.H).Ptr(a.X).Ptr(a.W).Int32(a.F).Int32(a.D).
		Int32(int(kernel.Bit(a.GELU))).Int32(int(kernel.Bit(a.Steady)))
	return launch(k, s, "DecodeGated", "decode_gated", a.F, a.D, a.Type, a.X, a.W, l)
}

func launch(k *kernel.Set, s gpu.Stream, op, name string, rows, depth int, t gpu.DType, x,
	w gpu.Ptr, l *gpu.Args) error {
	suffix, err := kernel.Suffix(op, t)
	if err != nil {
		return err
	}
	if _, err := kernel.CheckInts(op, rows, depth); err != nil || rows == 0 {
		return err
	}
	variant := "_elements"
	if kernel.Packed(t, depth, x, w) {
		variant = "_packs"
	}
	c := kernel.Line(kernel.CeilDiv(rows, warps), 32*warps)
	c.Overlap = k.Overlaps()
	return k.Enqueue(s, "decode_product", name+variant+suffix, c, l)
}
