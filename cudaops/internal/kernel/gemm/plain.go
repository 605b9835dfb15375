package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Product computes Y = X·W + C, or X·Wᵀ + C with TransW, and rounds once: X is [Rows, D], W [D, Columns] or with TransW
// [Columns, D], Y and C [Rows, Columns]. A null C is left out. Y may be the memory of C. With Float8 X and W are of Float8E4M3, and what
// their rows are multiplied by, ScaleX [Rows] and ScaleW [Columns], is float32: X·Wᵀ is rounded before it is multiplied, and Y once more.
type Product struct {
	Y, X, W, C     gpu.Ptr
	ScaleX, ScaleW gpu.Ptr // null without Float8
	ProductShape
	Type gpu.DType // of Y and C, and without Float8 of X and W
	Way  kernel.Way
}

// ProductShape is the sizes of a Product.
type ProductShape struct {
	Rows, Columns, D int
	TransW, Float8   bool
}

// The shape of gemm_hopper_plain.cu: the columns of a tile, the stages, and the bytes of a warp's panels.
const plainColumns, plainStages, plainWarpBytes = 256, 4, 2 * 16 * 128

// ProductWays lists the ways to compute Product at addresses that are multiples of 16, or none: Hopper has one for two-byte types
// where Columns and D are multiples of 8, and with Float8 one for TransW and results of BFloat16 where they are multiples of 16 and D is
// more than 384. The number is the columns of a tile.
func ProductWays(k *kernel.Set, a ProductShape, t gpu.DType) []kernel.Way {
	const limit = 1 << 30
	if k.Info.Capability() != 90 || t.Size() != 2 || a.Columns%8 != 0 || a.D%8 != 0 ||
		min(a.Rows, a.Columns, a.D) < 1 || max(a.Rows, a.Columns, a.D) > limit || a.Float8 && !(a.TransW && float8Product(a.Columns, a.D, t)) {
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
	ways := ProductWays(k, a.ProductShape, a.Type)
	if len(ways) == 0 || !kernel.Aligned(a.Y, a.X, a.W, a.C, a.ScaleX, a.ScaleW) || a.Float8 != (a.ScaleX != 0) || a.Float8 != (a.ScaleW != 0) {
		return fmt.Errorf("kernels.%s: got %+v, %v, want compute capability 9.0, Columns and D multiples of 8, float16 or bfloat16, "+
			"with Float8, and only then, factors, TransW, multiples of 16, D above %d and bfloat16, and addresses that are multiples of 16", op,
			a.ProductShape, a.Type, float8Least)
	}
	if _, err := a.Way.Of(op, ways); err != nil {
		return err
	}
	suf, err := kernel.Suffix(op, a.Type)
	if err != nil {
		return err
	}
	d, shared := a.D, warpShared(plainColumns, plainStages, plainWarpBytes)
	if a.Float8 { // two are an element
		d, shared = d/2, shared+factorBytes(plainColumns)
	}
	symbol, depth, columns := "gemm_hopper_plain_nn", uint64(d), uint64(a.Columns)
	right := gemmMatrix{a.W, [3]int{a.Columns, d, 1}, [2]uint64{columns, 8}, [3]uint32{64, gemmDepth, 1}}
	if a.TransW {
		if symbol = "gemm_hopper_plain_nt"; a.Float8 {
			symbol = "gemm_hopper_plain_f8"
		}
		right = gemmMatrix{a.W, [3]int{d, a.Columns, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, plainColumns / gemmCluster, 1}}
	}
	result := gemmMatrix{a.Y, [3]int{a.Columns, a.Rows, 1}, [2]uint64{columns, 8}, [3]uint32{64, 16, 1}}
	added := result
	g := gemmLaunch{unit: "gemm_hopper_plain", threads: 384, dtype: a.Type, shared: shared,
		params: kernel.Args().Ptr(a.ScaleX).Ptr(a.ScaleW).Int32(a.Rows).Int32(a.Columns).Int32(d).Int32(gemmSection)}
	if a.C != 0 {
		symbol += "_add"
		added.ptr = a.C
	}
	if a.C != a.Y { // else what is stored to would be lost
		g.stored, g.elements = a.Y, a.Rows*a.Columns
	}
	g.symbol = symbol + suf
	g.matrices = []gemmMatrix{{a.X, [3]int{d, a.Rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}}, right, result, added}
	return g.launch(k, s)
}

// Ways lists the ways that take the launch.
func (a Product) Ways(k *kernel.Set) []kernel.Way { return ProductWays(k, a.ProductShape, a.Type) }
