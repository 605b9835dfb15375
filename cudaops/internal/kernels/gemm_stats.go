package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// AttentionGradProduct computes G = X·W, the gradient of an attention's result Y, and what AttentionBackward begins with otherwise: the
// statistics and the counters in its workspace, Stats. Where that is done, [AttentionShape.HasStatistics] says so. X is [Batch·Seq, D],
// W [D, Heads·HeadDim], Y and G [Batch·Seq, Heads·HeadDim], and LSE the forward pass's.
type AttentionGradProduct struct {
	G, X, W, Y, LSE, Stats driver.Ptr
	AttentionShape
	D    int
	Type driver.DType
	Way  Way
}

// The shape of gemm_hopper_stats.cu: the columns of a tile, the stages, and the bytes of a warp's panels.
const statsColumns, statsStages, statsWarpBytes = 256, 4, 2 * 16 * 128

// AttentionGradProductWays lists the ways to compute AttentionGradProduct at addresses that are multiples of 16, or none: Hopper has one for
// two-byte types, heads of 64 and 128, sequences of a multiple of 128 and a D that is a multiple of 8, unless the scale is negative: then
// no backward pass begins with it.
func (k *Kernels) AttentionGradProductWays(a AttentionShape, d int, t driver.DType) []Way {
	const limit = 1 << 30
	rows, columns := a.Batch*a.Seq, a.Heads*a.HeadDim
	if k.ctx.Device().Capability() != 90 || t.Size() != 2 || a.HeadDim != 64 && a.HeadDim != 128 || a.Seq%attentionStatsTile != 0 || d%8 != 0 ||
		a.Scale < 0 || min(rows, columns, d) < 1 || max(rows, columns, d) > limit {
		return nil
	}
	return []Way{{Family: "fused"}}
}

// AttentionGradProduct launches one kernel.
func (k *Kernels) AttentionGradProduct(s driver.Stream, a AttentionGradProduct) error {
	const op = "AttentionGradProduct"
	if empty, err := checkSizes(op, a.Batch, a.Seq, a.Heads, a.HeadDim, a.D); err != nil || empty {
		return err
	}
	ways := k.AttentionGradProductWays(a.AttentionShape, a.D, a.Type)
	if len(ways) == 0 || !aligned(a.G, a.X, a.W, a.Y, a.LSE, a.Stats) {
		return fmt.Errorf("kernels.%s: got %+v, D %d, %v, want compute capability 9.0, HeadDim 64 or 128, Seq a multiple of %d, D of 8, a Scale "+
			"that is not negative, float16 or bfloat16, and addresses that are multiples of 16", op, a.AttentionShape, a.D, a.Type, attentionStatsTile)
	}
	if _, err := a.Way.of(op, ways); err != nil {
		return err
	}
	suf, err := suffix(op, a.Type)
	if err != nil {
		return err
	}
	_, counters, n := a.fusedWorkspace(a.Stats)
	if err := k.poison(s, a.Stats, 8*a.Batch*a.Heads*a.Seq); err != nil {
		return err
	}
	if err := k.poison(s, counters, 4*n); err != nil {
		return err
	}
	rows, width := a.Batch*a.Seq, a.Heads*a.HeadDim
	columns, depth := uint64(width), uint64(a.D)
	result := gemmMatrix{a.G, [3]int{width, rows, 1}, [2]uint64{columns, 8}, [3]uint32{64, 16, 1}}
	y := result
	y.ptr = a.Y
	return gemmLaunch{unit: "gemm_hopper_stats", kernel: fmt.Sprintf("gemm_hopper_stats_%d%s", a.HeadDim, suf), threads: 384, dtype: a.Type,
		shared: warpShared(statsColumns, statsStages, statsWarpBytes), stored: a.G, elements: rows * width,
		params: args().Ptr(a.LSE).Ptr(a.Stats).Ptr(counters).Int32(rows).Int32(width).Int32(a.D).Int32(a.Seq).Int32(gemmSection),
		matrices: []gemmMatrix{
			{a.X, [3]int{a.D, rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}},
			{a.W, [3]int{width, a.D, 1}, [2]uint64{columns, 8}, [3]uint32{64, gemmDepth, 1}},
			result, y,
		}}.launch(k, s)
}
