package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// SiLUProduct computes AB = X·Weightsᵀ and H = silu(A) ⊙ B, where A and B are the left and the
// right half of AB: X is [Rows, D], Weights [2F, D], AB [Rows, 2F] and H [Rows, F]. A and B are
// rounded before H is formed.
type SiLUProduct struct {
	H, AB, X, Weights gpu.Ptr
	Rows, F, D        int
	Type              gpu.DType
	Way               kernel.Way
}

// SiLUProductBackward computes DH = G·Down, which stays on the chip. It also computes the gradients
// DA = DH ⊙ B ⊙ σ(A)(1 + A(1 − σ(A))) and DB = DH ⊙ silu(A), side by side in DAB. It forms H again,
// unless that is null. G is [Rows, D], Down [D, F], AB and DAB [Rows, 2F] and H [Rows, F]. DH is
// rounded before it is used. DAB may be the memory of AB.
type SiLUProductBackward struct {
	H, DAB, G, Down, AB gpu.Ptr
	Rows, F, D          int
	KeepsH              bool // H is null, and the forward pass's is kept
	Type                gpu.DType
	Way                 kernel.Way
}

// gateWays lists the ways to compute SiLUProduct, and its backward pass, of these sizes at
// addresses that are multiples of 16, or none: Hopper has one for two-byte types where F and D are
// multiples of 8.
func gateWays(k *kernel.Set, rows, f, d int, t gpu.DType) []kernel.Way {
	const limit = 1 << 30
	if k.Info.Capability() != 90 || t.Size() != 2 || f%8 != 0 || d%8 != 0 || min(rows, f, d) < 1 ||
		max(rows, f, d) > limit {
		return nil
	}
	return []kernel.Way{{Family: "fused"}}
}

// The shape of gemm_hopper.cuh: the rows of a block's tile, its depth, the blocks of a cluster, and
// the rows of clusters in a section. Of gemm_hopper.cu: the columns of a tile, the stages, the
// bytes of a warp's panels, and the parts in which gate and up come.
const (
	gemmRows, gemmDepth, gemmCluster, gemmSection     = 128, 64, 2, 8
	gateColumns, gateStages, gateWarpBytes, gateParts = 256, 4, 2 * 16 * 128, 8
)

// warpShared is the shared memory of a block whose multiplying warps have so many bytes each.
func warpShared(columns, stages, warpBytes int) int {
	return stages*(2*gemmDepth*(gemmRows+columns)+16) + gemmRows/16*(warpBytes+16)
}

// float8Least is what the depth of a product of float8 must be more than. With fewer steps a tile
// than stages the copy engine would bring a tile's factors while others are read.
const float8Least = (plainStages - 1) * 2 * gemmDepth

// float8Product reports whether kernels built on gemm_hopper.cuh take a product of float8 of so
// many columns and that depth, with results of type t.
func float8Product(columns, d int, t gpu.DType) bool {
	return columns%16 == 0 && d%16 == 0 && d > float8Least && t == gpu.BFloat16
}

// factorBytes is the shared memory for the factors of the columns of two tiles.
func factorBytes(columns int) int { return 2 * 4 * columns }

// Launch launches one kernel.
func (a SiLUProduct) Launch(k *kernel.Set, s gpu.Stream) error {
	c := gateCall{op: "SiLUProduct", symbol: "gemm_hopper_silu_mul", rows: a.Rows, f: a.F, d: a.D,
		dtype: a.Type, way: a.Way, stored: a.AB, h: a.H}
	f := uint64(a.F)
	return c.launch(k, s, []gemmMatrix{
		{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Weights, [3]int{a.D, a.F, 2}, [2]uint64{uint64(a.D), uint64(a.D) * f},
			[3]uint32{gemmDepth, gateColumns / 2, 1}},
		{a.AB, [3]int{a.F, 2, a.Rows}, [2]uint64{f, 2 * f}, [3]uint32{64, 1, 16}},
		{a.H, [3]int{a.F, a.Rows, 1}, [2]uint64{f, 8}, [3]uint32{64, 16, 1}},
	})
}

// Launch launches one kernel.
func (a SiLUProductBackward) Launch(k *kernel.Set, s gpu.Stream) error {
	c := gateCall{op: "SiLUProductBackward", symbol: "gemm_hopper_silu_mul_backward",
		rows: a.Rows, f: a.F, d: a.D,
		dtype: a.Type, way: a.Way, ab: a.AB, stored: a.DAB, h: a.H}
	f := uint64(a.F)
	part := [3]uint32{gateColumns / gateParts, 1, 16}
	matrices := []gemmMatrix{
		{a.G, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Down, [3]int{a.F, a.D, 1}, [2]uint64{f, 8}, [3]uint32{64, gemmDepth, 1}},
		{a.AB, [3]int{a.F, 2, a.Rows}, [2]uint64{f, 2 * f}, part},
		{a.DAB, [3]int{a.F, 2, a.Rows}, [2]uint64{f, 2 * f}, part},
	}
	if a.H == 0 {
		c.symbol += "_without_h"
	} else {
		matrices = append(matrices, gemmMatrix{a.H, [3]int{a.F, a.Rows, 1}, [2]uint64{f, 8},
			[3]uint32{64, 16, 1}})
	}
	return c.launch(k, s, matrices)
}

// gateCall is a launch of gemm_hopper.cu. It reads ab, and has the copy engine store [Rows, 2F] and
// h. The first and the last may be null.
type gateCall struct {
	op, symbol    string
	rows, f, d    int
	dtype         gpu.DType
	way           kernel.Way
	ab, stored, h gpu.Ptr
}

func (c gateCall) launch(k *kernel.Set, s gpu.Stream, matrices []gemmMatrix) error {
	ways := gateWays(k, c.rows, c.f, c.d, c.dtype)
	if empty, err := kernel.CheckSizes(c.op, c.rows, c.f, c.d); err != nil || empty {
		return err
	}
	if len(ways) == 0 || !kernel.Aligned(c.ab, c.stored, c.h) {
		return fmt.Errorf("kernels.%s: got %d rows, F %d, D %d, %v, want compute capability 9.0, "+
			"F and D multiples of 8, float16 or bfloat16, and addresses that are multiples of "+
			"16", c.op, c.rows, c.f, c.d, c.dtype)
	}
	if _, err := c.way.Of(c.op, ways); err != nil {
		return err
	}
	suf, err := kernel.Suffix(c.op, c.dtype)
	if err != nil {
		return err
	}
	g := gemmLaunch{unit: "gemm_hopper", symbol: c.symbol + suf, threads: 384, dtype: c.dtype,
		matrices: matrices, stored: c.h,
		elements: c.rows * c.f, shared: warpShared(gateColumns, gateStages, gateWarpBytes),
		params: kernel.Args().Int32(c.rows).Int32(c.f).Int32(c.d).Int32(gemmSection)}
	if c.stored != c.ab {
		if err := k.Poison(s, c.stored, 2*c.rows*c.f*c.dtype.Size()); err != nil {
			return err
		}
	}
	return g.launch(k, s)
}

// gemmLaunch is a launch of a kernel that is built on gemm_hopper.cuh.
type gemmLaunch struct {
	unit, symbol    string
	threads, shared int
	params          *gpu.Args
	dtype           gpu.DType
	matrices        []gemmMatrix
	stored          gpu.Ptr // what the copy engine stores, if it does: that many elements
	elements        int
}

// gemmMatrix is a matrix that the copy engine moves in boxes. It has extents, innermost first, and
// elements from one index of the outer ones to the next.
type gemmMatrix struct {
	ptr     gpu.Ptr
	dims    [3]int
	strides [2]uint64
	box     [3]uint32
}

func (g gemmLaunch) launch(k *kernel.Set, s gpu.Stream) error {
	params := g.params.Packed()
	// C fills structures up
	a := kernel.Args().Struct(append(params, make([]byte, -len(params)&7)...), 8)
	for i, m := range g.matrices {
		encoded, err := k.Ctx.EncodeTiled(m.tiled(g.dtype))
		if err != nil {
			return err
		}
		align := 16 // in memory at multiples of 64 bytes; parameters begin at 0x210
		if i == 0 {
			align = 0x30 // behind params, which are at most as long
		}
		a.Struct(encoded[:], align)
	}
	l := kernel.Line(gemmCluster, g.threads)
	l.Cluster, l.Shared = gpu.Dim{X: gemmCluster}, g.shared
	n, err := k.Clusters(g.unit, g.symbol, l)
	if err != nil {
		return err
	}
	l.Grid.X *= n
	if g.stored != 0 {
		if err := k.Poison(s, g.stored, g.elements*g.dtype.Size()); err != nil {
			return err
		}
	}
	return k.Enqueue(s, g.unit, g.symbol, l, a)
}

func (m gemmMatrix) tiled(dtype gpu.DType) gpu.TiledTensor {
	t := gpu.TiledTensor{Type: dtype, Address: m.ptr, Box: m.box[:],
		Swizzle: gpu.Swizzle128, Promotion: 256}
	if int(m.box[0])*dtype.Size() == 64 {
		t.Swizzle = gpu.Swizzle64
	}
	for _, n := range m.dims {
		t.Dims = append(t.Dims, uint64(n))
	}
	for _, n := range m.strides {
		t.Strides = append(t.Strides, n*uint64(dtype.Size()))
	}
	return t
}

// Shape is rows, F and D.
func (a SiLUProduct) Shape() string { return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) }

// Shape is rows, F and D.
func (a SiLUProductBackward) Shape() string {
	return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.F, a.D, a.Type) + kernel.With(a.KeepsH, "without h")
}

// Tuning is that of [kernel.Tuned].
func (a SiLUProduct) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "SiLUProduct", Units: []string{"gemm_hopper", "silu"}, Computes: true}
}

// Tuning is that of [kernel.Tuned].
func (a SiLUProductBackward) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "SiLUProductBackward", Units: []string{"gemm_hopper", "silu"}, Computes: true}
}

// Ways lists the ways that take the launch.
func (a SiLUProduct) Ways(k *kernel.Set) []kernel.Way {
	return gateWays(k, a.Rows, a.F, a.D, a.Type)
}

// Ways lists the ways that take the launch.
func (a SiLUProductBackward) Ways(k *kernel.Set) []kernel.Way {
	return gateWays(k, a.Rows, a.F, a.D, a.Type)
}
