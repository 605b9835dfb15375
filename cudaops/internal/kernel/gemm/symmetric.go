package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Symmetric computes products that are known to be symmetric, with sums in float32,
//
//	D = Alpha·Left·Rightᵀ + Beta·C + Delta·I
//
// for Batch triples of matrices, one behind the other: Left and Right are [N, Depth] or, if Tall,
// stored as [Depth, N], C and D [N, N]. C may be null; where it is not, it is symmetric. D is none
// of the operands, and symmetric to the bit: of the product what is on the diagonal and below is
// computed.
type Symmetric struct {
	D, Left, Right, C  gpu.Ptr
	Alpha, Beta, Delta float32
	SymmetricShape
	Type gpu.DType
}

// SymmetricShape is the sizes of Symmetric's matrices.
type SymmetricShape struct {
	N, Depth, Batch int
	Tall            bool
}

// TakesSymmetric reports whether there is a kernel for Symmetric at addresses that are multiples of
// 16: Hopper has one for float16 and multiples of 8.
func TakesSymmetric(k *kernel.Set, a SymmetricShape, t gpu.DType) bool {
	const limit = 1 << 30
	return k.Info.Capability() == 90 && t == gpu.Float16 && a.N%8 == 0 && a.Depth%8 == 0 &&
		min(a.N, a.Depth, a.Batch) > 0 &&
		max(a.N, a.Depth, a.Batch) <= limit
}

// The columns of gemm_symmetric.cu's tiles, and its stages.
const symmetricColumns, symmetricStages = 160, 5

// Launch launches one kernel.
func (a Symmetric) Launch(k *kernel.Set, s gpu.Stream) error {
	const op = "Symmetric"
	if empty, err := kernel.CheckSizes(op, a.N, a.Depth, a.Batch); err != nil || empty {
		return err
	}
	if !TakesSymmetric(k, a.SymmetricShape, a.Type) || !kernel.Aligned(a.D, a.C) {
		return fmt.Errorf("kernels.%s: got %+v, %v, want compute capability 9.0, N and Depth "+
			"multiples of 8, float16, and addresses that are multiples of "+
			"16", op, a.SymmetricShape, a.Type)
	}
	clusters := 0 // as gemm_symmetric.cu counts them
	for row := gemmCluster * gemmRows; row < a.N+
		gemmCluster*gemmRows; row += gemmCluster * gemmRows {
		clusters += kernel.CeilDiv(min(row, a.N), symmetricColumns)
	}
	symbol, right := "gemm_symmetric", symmetricColumns
	if a.Tall {
		symbol, right = "gemm_symmetric_tall", kernel.CeilDiv(right, 64)*64
	}
	launch := kernel.Args().Struct(kernel.Args().Ptr(a.D).Ptr(a.C).Int32(a.N).Int32(a.Depth).Int32(
		clusters).Float32(a.Alpha).Float32(a.Beta).
		Float32(a.Delta).Packed(), 8)
	for i, ptr := range []gpu.Ptr{a.Left, a.Right} {
		m := gemmMatrix{ptr, [3]int{a.Depth, a.N, a.Batch},
			[2]uint64{uint64(a.Depth), uint64(a.Depth) * uint64(a.N)},
			[3]uint32{gemmDepth, uint32([]int{gemmRows, symmetricColumns / gemmCluster}[i]), 1}}
		if a.Tall {
			m.dims[0], m.dims[1], m.strides[0] = a.N, a.Depth, uint64(a.N)
			m.box = [3]uint32{64, uint32([]int{gemmDepth, gemmDepth / gemmCluster}[i]), 1}
		}
		encoded, err := k.Ctx.EncodeTiled(m.tiled(a.Type))
		if err != nil {
			return err
		}
		launch.Struct(encoded[:], 16)
	}
	l := kernel.Line(clusters*a.Batch*gemmCluster, 384)
	l.Cluster, l.Overlap = gpu.Dim{X: gemmCluster}, k.Overlaps()
	l.Shared = symmetricStages * (2*gemmDepth*(gemmRows+right) + 16)
	return k.Enqueue(s, "gemm_symmetric", symbol, l, launch)
}

// Ways lists the ways that take the launch.
func (a Symmetric) Ways(k *kernel.Set) []kernel.Way {
	if !TakesSymmetric(k, a.SymmetricShape, a.Type) {
		return nil
	}
	return []kernel.Way{{Family: "half"}}
}
