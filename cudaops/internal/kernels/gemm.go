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

// The shape of gemm_hopper.cu: a block's tile, its depth, the stages, the blocks of a cluster, the rows of clusters in a
// section, and the shared memory of a block.
const (
	gemmRows, gemmColumns, gemmDepth        = 128, 256, 64
	gemmStages, gemmCluster, gemmSection    = 3, 2, 8
	gemmStageBytes, gemmSumBytes, gemmGates = 2*gemmDepth*(gemmRows+gemmColumns) + 16, 2 * gemmRows * gemmColumns, 18 * 1024
	gemmShared                              = gemmStages*gemmStageBytes + gemmSumBytes + gemmGates + 2*16
)

// SiLUProduct launches one kernel.
func (k *Kernels) SiLUProduct(s driver.Stream, a SiLUProduct) error {
	c := gemmCall{op: "SiLUProduct", kernel: "gemm_hopper_silu_mul", rows: a.Rows, f: a.F, d: a.D, dtype: a.Type, way: a.Way,
		ab: a.AB}
	wide := uint64(a.F) * 2
	return c.launch(k, s, k.SiLUProductWays(false, a.Rows, a.F, a.D, a.Type), 0, 0, a.H, []gemmMatrix{
		{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Weights, [3]int{a.D, a.F, 2}, [2]uint64{uint64(a.D), uint64(a.D) * uint64(a.F)}, [3]uint32{gemmDepth, gemmColumns / 2, 1}},
		{a.AB, [3]int{a.F, 2, a.Rows}, [2]uint64{uint64(a.F), wide}, [3]uint32{64, 1, 64}},
	})
}

// SiLUProductBackward launches one kernel.
func (k *Kernels) SiLUProductBackward(s driver.Stream, a SiLUProductBackward) error {
	c := gemmCall{op: "SiLUProductBackward", kernel: "gemm_hopper_silu_mul_backward", rows: a.Rows, f: a.F, d: a.D, dtype: a.Type,
		way: a.Way}
	return c.launch(k, s, k.SiLUProductWays(true, a.Rows, a.F, a.D, a.Type), a.AB, a.DAB, a.H, []gemmMatrix{
		{a.G, [3]int{a.D, a.Rows, 1}, [2]uint64{uint64(a.D), 8}, [3]uint32{gemmDepth, gemmRows, 1}},
		{a.Down, [3]int{a.F, a.D, 1}, [2]uint64{uint64(a.F), 8}, [3]uint32{64, gemmDepth, 1}},
	})
}

// gemmCall is a launch of gemm_hopper.cu.
type gemmCall struct {
	op, kernel string
	rows, f, d int
	dtype      driver.DType
	way        Way
	ab         driver.Ptr // if the copy engine stores it
}

// gemmMatrix is a matrix that the copy engine moves in boxes: its extents, innermost first, and elements from one index of the
// outer ones to the next.
type gemmMatrix struct {
	ptr     driver.Ptr
	dims    [3]int
	strides [2]uint64
	box     [3]uint32
}

func (c gemmCall) launch(k *Kernels, s driver.Stream, ways []Way, ab, dab, h driver.Ptr, matrices []gemmMatrix) error {
	if empty, err := checkSizes(c.op, c.rows, c.f, c.d); err != nil || empty {
		return err
	}
	if len(ways) == 0 || !aligned(ab, dab, h) {
		return fmt.Errorf("kernels.%s: got %d rows, F %d, D %d, %v, want compute capability 9.0, F and D multiples of 8, float16 or "+
			"bfloat16, and addresses that are multiples of 16", c.op, c.rows, c.f, c.d, c.dtype)
	}
	way, err := c.way.of(c.op, ways)
	if err != nil {
		return err
	}
	suf, err := suffix(c.op, c.dtype)
	if err != nil {
		return err
	}
	a := args().Struct(args().Ptr(ab).Ptr(dab).Ptr(h).Int32(c.rows).Int32(c.f).Int32(c.d).Int32(gemmSection).Packed(), 8)
	for _, m := range matrices {
		encoded, err := k.ctx.EncodeTiled(m.tiled(c.dtype))
		if err != nil {
			return err
		}
		a.Struct(encoded[:], 16) // at multiples of 64 bytes in memory, where parameters begin at 0x210
	}
	const unit = "gemm_hopper"
	name := fmt.Sprintf("%s_%d%s", c.kernel, way.Size, suf)
	l := line(gemmCluster, 384)
	if way.Size > 3 {
		l.Block.X = 512
	}
	l.Cluster, l.Shared = driver.Dim{X: gemmCluster}, gemmShared
	n, err := k.clusters(unit, name, l)
	if err != nil {
		return err
	}
	l.Grid.X *= n
	if driver.PoisonProducts && c.ab != 0 {
		if err := k.ctx.Memset8(c.ab, 0xff, 2*c.rows*c.f*c.dtype.Size(), s); err != nil {
			return err
		}
	}
	return k.launch(s, unit, name, l, a)
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
