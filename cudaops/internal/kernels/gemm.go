package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// SiLUProduct computes AB = X·Weightsᵀ and H = silu(A) ⊙ B, where A and B are the left and the right half of AB: X is
// [Rows, D], Weights [2F, D], AB [Rows, 2F] and H [Rows, F]. A and B are rounded before H is formed.
type SiLUProduct struct {
	H, AB, X, Weights driver.Ptr
	Rows, F, D        int
	Type              driver.DType
	Way               Way
}

// SiLUProductBackward computes DH = G·Down, which stays on the chip, the gradients DA = DH ⊙ B ⊙ σ(A)(1 + A(1 − σ(A))) and
// DB = DH ⊙ silu(A) side by side in DAB, and H again: G is [Rows, D], Down [D, F], AB and DAB [Rows, 2F] and H [Rows, F].
// DH is rounded before it is used. DAB may be the memory of AB.
type SiLUProductBackward struct {
	H, DAB, G, Down, AB driver.Ptr
	Rows, F, D          int
	Type                driver.DType
	Way                 Way
}

// SiLUProductWays lists the ways to compute SiLUProduct, or its backward pass, of these sizes at addresses that are multiples
// of 16, the fastest first: Hopper has some for two-byte types where F and D are multiples of 8. The number is that of the
// warps that finish what others have multiplied.
func (k *Kernels) SiLUProductWays(backward bool, rows, f, d int, t driver.DType) []Way {
	const limit = 1 << 30
	switch {
	case k.ctx.Device().Capability() != 90 || t.Size() != 2 || f%8 != 0 || d%8 != 0 || min(rows, f, d) < 1 || max(rows, f, d) > limit:
		return nil
	case backward:
		return []Way{{"fused", 7}, {"fused", 3}}
	}
	return []Way{{"fused", 3}}
}

// The shape of gemm_hopper.cuh: the rows of a block's tile, its depth, the blocks of a cluster, and the rows of clusters in a
// section; and of gemm_hopper.cu: the columns of a tile, the stages, and the bytes for rows of gate and up.
const (
	gemmRows, gemmDepth, gemmCluster, gemmSection = 128, 64, 2, 8
	gateColumns, gateStages, gateBytes            = 256, 3, 18 * 1024
)

// gemmShared is the shared memory of a block.
func gemmShared(columns, stages, extra int) int {
	return stages*(2*gemmDepth*(gemmRows+columns)+16) + 2*gemmRows*columns + extra + 2*16
}

// SiLUProduct launches one kernel.
func (k *Kernels) SiLUProduct(s driver.Stream, a SiLUProduct) error {
	c := gateCall{op: "SiLUProduct", kernel: "gemm_hopper_silu_mul", rows: a.Rows, f: a.F, d: a.D, dtype: a.Type, way: a.Way,
		ways: k.SiLUProductWays(false, a.Rows, a.F, a.D, a.Type), h: a.H}
	return c.launch(k, s, a.AB, []gemmMatrix{
		{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Weights, [3]int{a.D, a.F, 2}, [2]uint64{uint64(a.D), uint64(a.D) * uint64(a.F)}, [3]uint32{gemmDepth, gateColumns / 2, 1}},
		{a.AB, [3]int{a.F, 2, a.Rows}, [2]uint64{uint64(a.F), uint64(a.F) * 2}, [3]uint32{64, 1, 64}},
	})
}

// SiLUProductBackward launches one kernel.
func (k *Kernels) SiLUProductBackward(s driver.Stream, a SiLUProductBackward) error {
	c := gateCall{op: "SiLUProductBackward", kernel: "gemm_hopper_silu_mul_backward", rows: a.Rows, f: a.F, d: a.D, dtype: a.Type,
		way: a.Way, ways: k.SiLUProductWays(true, a.Rows, a.F, a.D, a.Type), h: a.H, ab: a.AB, dab: a.DAB}
	return c.launch(k, s, 0, []gemmMatrix{
		{a.G, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Down, [3]int{a.F, a.D, 1}, [2]uint64{uint64(a.F), 8}, [3]uint32{64, gemmDepth, 1}},
	})
}

// gateCall is a launch of gemm_hopper.cu.
type gateCall struct {
	op, kernel string
	rows, f, d int
	dtype      driver.DType
	way        Way
	ways       []Way
	ab, dab, h driver.Ptr
}

// launch launches the kernel, whose copy engine stores [Rows, 2F] at stored, if that is not null.
func (c gateCall) launch(k *Kernels, s driver.Stream, stored driver.Ptr, matrices []gemmMatrix) error {
	if empty, err := checkSizes(c.op, c.rows, c.f, c.d); err != nil || empty {
		return err
	}
	if len(c.ways) == 0 || !aligned(c.ab, c.dab, c.h) {
		return fmt.Errorf("kernels.%s: got %d rows, F %d, D %d, %v, want compute capability 9.0, F and D multiples of 8, float16 or "+
			"bfloat16, and addresses that are multiples of 16", c.op, c.rows, c.f, c.d, c.dtype)
	}
	way, err := c.way.of(c.op, c.ways)
	if err != nil {
		return err
	}
	suf, err := suffix(c.op, c.dtype)
	if err != nil {
		return err
	}
	g := gemmLaunch{unit: "gemm_hopper", kernel: fmt.Sprintf("%s_%d%s", c.kernel, way.Size, suf), threads: 384,
		shared: gemmShared(gateColumns, gateStages, gateBytes), dtype: c.dtype, matrices: matrices, stored: stored, elements: 2 * c.rows * c.f,
		params: args().Ptr(c.ab).Ptr(c.dab).Ptr(c.h).Int32(c.rows).Int32(c.f).Int32(c.d).Int32(gemmSection)}
	if way.Size > 3 {
		g.threads = 512
	}
	return g.launch(k, s)
}

// gemmLaunch is a launch of a kernel that is built on gemm_hopper.cuh.
type gemmLaunch struct {
	unit, kernel    string
	threads, shared int
	params          *driver.Args
	dtype           driver.DType
	matrices        []gemmMatrix
	stored          driver.Ptr // what the copy engine stores, if it does: that many elements
	elements        int
}

// gemmMatrix is a matrix that the copy engine moves in boxes: its extents, innermost first, and elements from one index of the
// outer ones to the next.
type gemmMatrix struct {
	ptr     driver.Ptr
	dims    [3]int
	strides [2]uint64
	box     [3]uint32
}

func (g gemmLaunch) launch(k *Kernels, s driver.Stream) error {
	params := g.params.Packed()
	a := args().Struct(append(params, make([]byte, -len(params)&7)...), 8) // C fills structures up
	for i, m := range g.matrices {
		encoded, err := k.ctx.EncodeTiled(m.tiled(g.dtype))
		if err != nil {
			return err
		}
		align := 16 // in memory at multiples of 64 bytes; parameters begin at 0x210
		if i == 0 {
			align = 0x30 // behind params, which are at most as long
		}
		a.Struct(encoded[:], align)
	}
	l := line(gemmCluster, g.threads)
	l.Cluster, l.Shared = driver.Dim{X: gemmCluster}, g.shared
	n, err := k.clusters(g.unit, g.kernel, l)
	if err != nil {
		return err
	}
	l.Grid.X *= n
	if g.stored != 0 {
		if err := k.poison(s, g.stored, g.elements*g.dtype.Size()); err != nil {
			return err
		}
	}
	return k.launch(s, g.unit, g.kernel, l, a)
}

func (m gemmMatrix) tiled(dtype driver.DType) driver.TiledTensor {
	t := driver.TiledTensor{Type: dtype, Address: m.ptr, Box: m.box[:], Swizzle: driver.Swizzle128, Promotion: 256}
	for _, n := range m.dims {
		t.Dims = append(t.Dims, uint64(n))
	}
	for _, n := range m.strides {
		t.Strides = append(t.Strides, n*uint64(dtype.Size()))
	}
	return t
}
