package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// RoPEProduct computes Y = X·Weightsᵀ, of whose columns the first Turned are heads that RoPE turns:
// X is [Rows, D], Weights [Columns, D], Y [Rows, Columns] and Angles a table of [RoPEAngles]. The
// product is rounded before it is turned. With Float8 X and Weights are of Float8E4M3, and what
// their rows are multiplied by, ScaleX [Rows] and ScaleWeights [Columns], is float32. The product
// is rounded, then multiplied by them and turned.
type RoPEProduct struct {
	Y, X, Weights, Angles gpu.Ptr
	ScaleX, ScaleWeights  gpu.Ptr // null without Float8
	RoPEProductShape
	Type gpu.DType // of Y, and without Float8 of X and Weights
	Way  kernel.Way
}

// RoPEProductShape is the sizes of a RoPEProduct. Row r has position r mod Seq.
type RoPEProductShape struct {
	Rows, Columns, D, Turned, Seq, HeadDim int
	Float8                                 bool
}

// RoPEAngles returns the table of a RoPEProduct: cosines and sines, [Seq, h] for heads of 2h
// features. Their order is that in which gemm_hopper_rope.cu asks for them.
func RoPEAngles(cos, sin []float32, h int) []float32 {
	table := make([]float32, RoPEAnglesLen(len(cos)/h, h))
	for i := range cos {
		at := RoPEAngleAt(i/h, i%h, h)
		table[at], table[at+2] = cos[i], sin[i]
	}
	return table
}

// RoPEAnglesLen is the length of the table of seq positions.
func RoPEAnglesLen(seq, h int) int { return 16 * 8 * kernel.CeilDiv(seq, 8) * kernel.CeilDiv(h, 8) }

// RoPEAngleAt is where the table has the cosine of a pair at a position; the sine is 2 behind it.
func RoPEAngleAt(position, pair, h int) int {
	return 16*((position/8*kernel.CeilDiv(h, 8)+pair/8)*8+position%8) + pair%8/2*4 + pair%2
}

// Ways lists the ways that take the launch at addresses that are multiples of 16, or none.
// Hopper has one for two-byte types. There D and Columns must be multiples of 8, and heads must
// have 64, 96 or 128 features. With Float8 the type must be BFloat16. D and Columns must then be
// multiples of 16, D must exceed 384, and heads must have 64 or 128 features.
func (a RoPEProduct) Ways(k *kernel.Set) []kernel.Way {
	const limit = 1 << 30
	tile := turnedTiles[a.HeadDim]
	if tile.columns == 0 || k.Info.Capability() != 90 || a.Type.Size() != 2 || a.Turned < 0 ||
		a.Turned%a.HeadDim != 0 ||
		a.Turned > a.Columns || a.Columns%8 != 0 || a.D%8 != 0 ||
		min(a.Rows, a.Columns, a.D, a.Seq) < 1 || max(a.Rows, a.Columns, a.D,
		a.Seq*a.HeadDim) > limit ||
		a.Float8 && !(a.HeadDim != 96 && float8Product(a.Columns, a.D, a.Type)) {
		return nil
	}
	return []kernel.Way{{Family: "fused"}}
}

// turnedTiles is the shape of gemm_hopper_rope.cu by the features of a head: the columns of a tile,
// and the stages. A warp brings turnedRows rows to memory at once.
var turnedTiles = map[int]struct{ columns, stages int }{64: {256, 4}, 96: {192, 5}, 128: {256, 4}}

const turnedRows = 8

// Launch launches one kernel.
func (a RoPEProduct) Launch(k *kernel.Set, s gpu.Stream) error {
	const op = "RoPEProduct"
	if empty, err := kernel.CheckSizes(op, a.Rows, a.Columns, a.D); err != nil || empty {
		return err
	}
	ways := a.Ways(k)
	if len(ways) == 0 || !kernel.Aligned(a.Angles, a.ScaleX, a.ScaleWeights) ||
		a.Float8 != (a.ScaleX != 0) || a.Float8 != (a.ScaleWeights != 0) {
		return fmt.Errorf("kernels.%s: got %+v, %v, want compute capability 9.0, D and Columns "+
			"multiples of 8, HeadDim 64, 96 or 128, "+
			"Turned a multiple of it and at most Columns, a positive Seq, float16 or bfloat16, with Float8, and only then, factors, multiples of 16, "+
			"D above %d, HeadDim not 96 and bfloat16, and angles and factors at multiples of 16",
			op, a.RoPEProductShape, a.Type, float8Least)
	}
	if _, err := a.Way.Of(op, ways); err != nil {
		return err
	}
	suf, err := kernel.Suffix(op, a.Type)
	if err != nil {
		return err
	}
	tile, d, symbol := turnedTiles[a.HeadDim], a.D,
		fmt.Sprintf("gemm_hopper_rope_%d%s", a.HeadDim, suf)
	shared := warpShared(tile.columns, tile.stages, turnedRows*2*tile.columns)
	if a.Float8 { // two are an element
		d, shared, symbol = d/2, shared+factorBytes(tile.columns),
			fmt.Sprintf("gemm_hopper_rope_f8_%d%s", a.HeadDim, suf)
	}
	depth := uint64(d)
	return gemmLaunch{unit: "gemm_hopper_rope", symbol: symbol, threads: 384,
		shared: shared, dtype: a.Type, stored: a.Y, elements: a.Rows * a.Columns,
		params: kernel.Args().Ptr(a.Angles).Ptr(a.ScaleX).Ptr(a.ScaleWeights).Int32(a.Rows).Int32(
			a.Columns).Int32(d).Int32(a.Turned).Int32(a.Seq).Int32(gemmSection),
		matrices: []gemmMatrix{
			{a.X, [3]int{d, a.Rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}},
			{a.Weights, [3]int{d, a.Columns, 1}, [2]uint64{depth, 8},
				[3]uint32{gemmDepth, uint32(tile.columns / gemmCluster), 1}},
			{a.Y, [3]int{a.Columns, a.Rows, 1}, [2]uint64{uint64(a.Columns), 8},
				[3]uint32{64, turnedRows, 1}},
		}}.launch(k, s)
}

// Shape is the product's sizes, and what is turned.
func (a RoPEProduct) Shape() string {
	return fmt.Sprintf("%dx%dx%d, %d turned of %d, sequences of %d, %v",
		a.RoPEProductShape.Rows, a.Columns, a.D,
		a.Turned, a.HeadDim, a.Seq, a.Type) + kernel.With(a.Float8, "of float8")
}

// Tuning is that of [kernel.Tuned].
func (a RoPEProduct) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "RoPEProduct", Units: []string{"gemm_hopper_rope", "rope"}, Computes: true}
}
