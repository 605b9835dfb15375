package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Product computes Y = X·W + C or, with TransW, Y = X·Wᵀ + C, and rounds once. X is [Rows, D], W is
// [D, Columns] or, with TransW, [Columns, D]. C may be null, or the same memory as Y.
//
// With Float8 it computes Y = (ScaleX·ScaleWᵀ) ⊙ (X·Wᵀ) + C, where X and W are Float8E4M3, and
// ScaleX [Rows] and ScaleW [Columns] are float32. X·Wᵀ is rounded before it is scaled, and Y [Rows,
// Columns] is rounded again.
type Product struct {
	Y, X, W, C       gpu.Ptr
	ScaleX, ScaleW   gpu.Ptr // null without Float8
	Rows, Columns, D int
	TransW, Float8   bool
	Type             gpu.DType // of Y and C and, without Float8, of X and W
}

// The shape of gemm_hopper_plain.cu: the columns of a tile, the stages, and the bytes of a warp's
// panels.
const plainColumns, plainStages, plainWarpBytes = 256, 4, 2 * 16 * 128

// Variants returns the variants that accept the launch if all addresses are aligned to 16 bytes. Hopper
// has one for 2-byte types if Columns and D are multiples of 8. With Float8, it requires TransW and
// BFloat16 results, Columns and D must be multiples of 16, and D must exceed 384. The variant's
// size is the number of columns of a tile.
func (a Product) Variants(k *kernel.Set) []kernel.Variant {
	takes := a.Type.Size() == 2 && a.Columns%8 == 0 && a.D%8 == 0
	if a.Float8 {
		takes = a.TransW && float8Product(a.Columns, a.D, a.Type)
	}
	return onHopper(k, kernel.Variant{Family: "hopper", Size: plainColumns}, takes)
}

// Launch enqueues one kernel.
func (a Product) Launch(q *kernel.Queue) { a.launch(q, Term{}) }

// launch enqueues one kernel that computes the product plus a term.
func (a Product) launch(q *kernel.Queue, t Term) {
	d, shared := a.D, warpShared(plainColumns, plainStages, plainWarpBytes)
	symbol, right := "nn", matrix(a.W, a.Columns, a.D, 64, gemmDepth)
	more := matrix(t.W, a.Columns, t.D, 64, gemmDepth)
	if a.Float8 { // the copies treat pairs as one element
		d, shared = d/2, shared+factorBytes(plainColumns)
	}

	if a.TransW {
		symbol, right = "nt", matrix(a.W, d, a.Columns, gemmDepth, plainColumns/gemmCluster)
		more = matrix(t.W, t.D, a.Columns, gemmDepth, plainColumns/gemmCluster)
	}

	if a.Float8 {
		symbol = "f8"
	}

	result := matrix(a.Y, a.Columns, a.Rows, 64, 16)
	added := result
	if a.C != 0 {
		symbol, added.ptr = symbol+"_add", a.C
	}

	result.stored = a.C != a.Y // otherwise poisoning would destroy the input
	gemmLaunch{unit: "gemm_hopper_plain", dtype: a.Type, shared: shared,
		symbol: "gemm_hopper_plain_" + symbol + kernel.Suffix(a.Type),
		params: kernel.Struct{a.ScaleX, a.ScaleW, a.Rows, a.Columns, d, t.D, gemmSection},
		matrices: append([]gemmMatrix{matrix(a.X, d, a.Rows, gemmDepth, gemmRows), right, result, added},
			t.matrices(a.Rows, more, a.W)...),
	}.run(q)
}

// ProductSum computes the product plus a term, and rounds once: Y = X·Wᵀ + C + Term.X·Term.Wᵀ, or
// without transpositions. Float8 is not supported.
type ProductSum struct {
	Product
	Term    Term
	Variant kernel.Variant
}

// Variants returns the variants that accept the launch: those of the product if the depth of the term
// is a multiple of 8.
func (a ProductSum) Variants(k *kernel.Set) []kernel.Variant {
	if a.Float8 || !a.Term.takes() {
		return nil
	}
	return a.Product.Variants(k)
}

// Launch enqueues one kernel.
func (a ProductSum) Launch(q *kernel.Queue) { a.launch(q, a.Term) }

// Tuning implements [kernel.Tuned].
func (a ProductSum) Tuning() (op, shape string) {
	return "ProductSum", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.Columns, a.D, a.Type) + a.Term.shape() +
		kernel.With(a.TransW, "transposed") + kernel.With(a.C != 0, "with a matrix added")
}

// SetVariant sets the variant chosen by tuning.
func (a *ProductSum) SetVariant(w kernel.Variant) { a.Variant = w }
