package gemm

import (
	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Product computes Y = (ScaleX·ScaleWᵀ) ⊙ (X·Wᵀ) + C, with X [Rows, D] and W [Columns, D] of
// Float8E4M3, and ScaleX [Rows] and ScaleW [Columns] of float32. X·Wᵀ is rounded before it is
// multiplied, and Y [Rows, Columns] once more. A null C is left out, and Y may be its memory.
type Product struct {
	Y, X, W, C     gpu.Ptr
	ScaleX, ScaleW gpu.Ptr
	ProductShape
	Type gpu.DType // of Y and C
}

// ProductShape is the sizes of a Product.
type ProductShape struct{ Rows, Columns, D int }

// The shape of gemm_hopper_plain.cu: the columns of a tile, the stages, and the bytes of a warp's
// panels.
const plainColumns, plainStages, plainWarpBytes = 256, 4, 2 * 16 * 128

// Ways lists the ways that take the launch at addresses that are multiples of 16, or none.
// Hopper has one for results of BFloat16, where Columns and D are multiples of 16 and D is more
// than 384. The number is the columns of a tile.
func (a Product) Ways(k *kernel.Set) []kernel.Way {
	if k.Info.Capability() != 90 || !float8Product(a.Columns, a.D, a.Type) {
		return nil
	}
	return []kernel.Way{{Family: "hopper", Size: plainColumns}}
}

// Launch launches one kernel.
func (a Product) Launch(k *kernel.Set, s gpu.Stream) error {
	d := a.D / 2 // two are an element
	result, symbol := matrix(a.Y, a.Columns, a.Rows, 64, 16), "gemm_hopper_plain_f8_bf16"
	added := result
	if a.C != 0 {
		symbol, added.ptr = "gemm_hopper_plain_f8_add_bf16", a.C
	}
	result.stored = a.C != a.Y // else what is added would be lost
	return gemmLaunch{unit: "gemm_hopper_plain", symbol: symbol, dtype: a.Type,
		shared: warpShared(plainColumns, plainStages, plainWarpBytes) + factorBytes(plainColumns),
		params: kernel.Struct{a.ScaleX, a.ScaleW, a.Rows, a.Columns, d, gemmSection},
		matrices: []gemmMatrix{matrix(a.X, d, a.Rows, gemmDepth, gemmRows),
			matrix(a.W, d, a.Columns, gemmDepth, plainColumns/gemmCluster), result, added},
	}.launch(k, s)
}
