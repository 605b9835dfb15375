package gemm

import (
	"fmt"

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
	Way  kernel.Way
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
	const limit = 1 << 30
	if k.Info.Capability() != 90 || min(a.Rows, a.Columns, a.D) < 1 ||
		max(a.Rows, a.Columns, a.D) > limit ||
		!float8Product(a.Columns, a.D, a.Type) {
		return nil
	}
	return []kernel.Way{{Family: "hopper", Size: plainColumns}}
}

// Launch launches one kernel.
func (a Product) Launch(k *kernel.Set, s gpu.Stream) error {
	const op = "Product"
	if empty, err := kernel.CheckSizes(op, a.Rows, a.Columns, a.D); err != nil || empty {
		return err
	}
	ways := a.Ways(k)
	if len(ways) == 0 || !kernel.Aligned(a.Y, a.X, a.W, a.C, a.ScaleX, a.ScaleW) ||
		a.ScaleX == 0 || a.ScaleW == 0 {
		return fmt.Errorf("kernels.%s: got %+v, %v, want compute capability 9.0, bfloat16, "+
			"Columns and D multiples of 16, D above %d, factors, and addresses that are "+
			"multiples of 16", op,
			a.ProductShape, a.Type, float8Least)
	}
	if _, err := a.Way.Of(op, ways); err != nil {
		return err
	}
	d := a.D / 2 // two are an element
	result := gemmMatrix{a.Y, [3]int{a.Columns, a.Rows, 1}, [2]uint64{uint64(a.Columns), 8},
		[3]uint32{64, 16, 1}}
	added := result
	g := gemmLaunch{unit: "gemm_hopper_plain", symbol: "gemm_hopper_plain_f8_bf16",
		threads: 384, dtype: a.Type,
		shared: warpShared(plainColumns, plainStages, plainWarpBytes) + factorBytes(plainColumns),
		params: kernel.Args().Ptr(a.ScaleX).Ptr(a.ScaleW).Int32(a.Rows).Int32(a.Columns).Int32(
			d).Int32(gemmSection)}
	if a.C != 0 {
		g.symbol = "gemm_hopper_plain_f8_add_bf16"
		added.ptr = a.C
	}
	if a.C != a.Y { // else what is stored to would be lost
		g.stored, g.elements = a.Y, a.Rows*a.Columns
	}
	depth := uint64(d)
	g.matrices = []gemmMatrix{{a.X, [3]int{d, a.Rows, 1}, [2]uint64{depth, 8},
		[3]uint32{gemmDepth, gemmRows, 1}},
		{a.W, [3]int{d, a.Columns, 1}, [2]uint64{depth, 8},
			[3]uint32{gemmDepth, plainColumns / gemmCluster, 1}}, result, added}
	return g.launch(k, s)
}
