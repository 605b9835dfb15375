package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// Symmetric computes products that are known to be symmetric, with sums in float32,
//
//	D = Alpha·Left·Rightᵀ + Beta·C + Delta·I
//
// for Batch triples of matrices, one behind the other: Left and Right are [N, Depth] or, if Tall, stored as [Depth, N], C and D
// [N, N]. C may be null; where it is not, it is symmetric. D is none of the operands, and symmetric to the bit: of the product
// what is on the diagonal and below is computed.
type Symmetric struct {
	D, Left, Right, C  driver.Ptr
	Alpha, Beta, Delta float32
	SymmetricShape
	Type driver.DType
	Way  Way
}

// SymmetricShape is the sizes of Symmetric's matrices.
type SymmetricShape struct {
	N, Depth, Batch int
	Tall            bool
}

// SymmetricWays lists the ways to compute Symmetric at addresses that are multiples of 16: Hopper has some for float16 and multiples
// of 8. The number is that of a cluster's blocks.
func (k *Kernels) SymmetricWays(a SymmetricShape, t driver.DType) []Way {
	const limit = 1 << 30
	if k.ctx.Device().Capability() != 90 || t != driver.Float16 || a.N%8 != 0 || a.Depth%8 != 0 || min(a.N, a.Depth, a.Batch) < 1 ||
		max(a.N, a.Depth, a.Batch) > limit {
		return nil
	}
	return []Way{{"symmetric", 2}, {"symmetric", 4}}
}

// The stages of gemm_symmetric.cu, and the columns of its tiles by the blocks of a cluster.
const symmetricStages = 5

var symmetricColumns = map[int]int{2: 160, 4: 176}

// Symmetric launches one kernel.
func (k *Kernels) Symmetric(s driver.Stream, a Symmetric) error {
	const op = "Symmetric"
	if empty, err := checkSizes(op, a.N, a.Depth, a.Batch); err != nil || empty {
		return err
	}
	ways := k.SymmetricWays(a.SymmetricShape, a.Type)
	if len(ways) == 0 || !aligned(a.D, a.C) {
		return fmt.Errorf("kernels.%s: got %+v, %v, want compute capability 9.0, N and Depth multiples of 8, float16, and addresses that "+
			"are multiples of 16", op, a.SymmetricShape, a.Type)
	}
	way, err := a.Way.of(op, ways)
	if err != nil {
		return err
	}
	// What blocks with the same rows, or columns, have in common they copy in parts: of the rows, or for a tall matrix of the depth.
	across, columns := way.Size/2, symmetricColumns[way.Size]
	clusters := 0 // as gemm_symmetric.cu counts them
	for row := 2 * gemmRows; row < a.N+2*gemmRows; row += 2 * gemmRows {
		clusters += ceilDiv(min(row, a.N), across*columns)
	}
	kernel, right := "gemm_symmetric_", columns
	if a.Tall {
		kernel, right = "gemm_symmetric_tall_", ceilDiv(right, 64)*64
	}
	launch := args().Struct(args().Ptr(a.D).Ptr(a.C).Int32(a.N).Int32(a.Depth).Int32(clusters).Float32(a.Alpha).Float32(a.Beta).
		Float32(a.Delta).Packed(), 8)
	for i, ptr := range []driver.Ptr{a.Left, a.Right} {
		m := gemmMatrix{ptr, [3]int{a.Depth, a.N, a.Batch}, [2]uint64{uint64(a.Depth), uint64(a.Depth) * uint64(a.N)},
			[3]uint32{gemmDepth, uint32([]int{gemmRows / across, columns / 2}[i]), 1}}
		if a.Tall {
			m.dims[0], m.dims[1], m.strides[0] = a.N, a.Depth, uint64(a.N)
			m.box = [3]uint32{64, uint32([]int{gemmDepth / across, gemmDepth / 2}[i]), 1}
		}
		encoded, err := k.ctx.EncodeTiled(m.tiled(a.Type))
		if err != nil {
			return err
		}
		launch.Struct(encoded[:], 16)
	}
	l := line(clusters*a.Batch*way.Size, 384)
	l.Cluster, l.Overlap = driver.Dim{X: way.Size}, k.overlaps()
	l.Shared = symmetricStages * (2*gemmDepth*(gemmRows+right) + 16)
	return k.launch(s, "gemm_symmetric", fmt.Sprint(kernel, way.Size), l, launch)
}
