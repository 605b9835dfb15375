package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/attention"
)

// StatisticsProduct computes G = X·W, the gradient of an attention's result Y. It also prepares
// Workspace like an [attention.Statistics] of G, Y and Normalizers. X is [Batch·Seq, D], W [D,
// Heads·HeadDim], and Y and G are [Batch·Seq, Heads·HeadDim]. Normalizers come from the forward
// pass.
type StatisticsProduct struct {
	G, X, W, Y, Normalizers, Workspace gpu.Ptr
	attention.Geometry
	D       int
	Type    gpu.DType
	Term    Term // added to X·W
	Variant kernel.Variant
}

// The shape of gemm_hopper_stats.cu: the columns of a tile, the stages, and the bytes of a warp's
// panels.
const statsColumns, statsStages, statsWarpBytes = 256, 4, 2 * 16 * 128

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper
// has one for 2-byte types if heads have 64 or 128 features, Seq is a multiple of 128, and D is a
// multiple of 8. With a negative scale no backward pass could use the result.
func (a StatisticsProduct) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, fused, a.Type.Size() == 2 && (a.HeadDim == 64 || a.HeadDim == 128) &&
		a.Seq%attention.StatisticsTile == 0 && a.D%8 == 0 && a.Scale >= 0 && a.Term.takes())
}

// Launch enqueues one kernel.
func (a StatisticsProduct) Launch(q *kernel.Queue) {
	rows, columns := a.Batch*a.Seq, a.Heads*a.HeadDim
	counters, n := a.Counters(a.Workspace)
	q.Poison(a.Workspace, 12*a.Heads*rows)
	q.Poison(counters, 4*n)
	gemmLaunch{unit: "gemm_hopper_stats", dtype: a.Type,
		symbol: fmt.Sprintf("gemm_hopper_stats_%d%s", a.HeadDim, kernel.Suffix(a.Type)),
		shared: warpShared(statsColumns, statsStages, statsWarpBytes),
		params: kernel.Struct{a.Normalizers, a.Workspace, counters, rows, columns, a.D, a.Term.D,
			a.Seq, gemmSection},
		matrices: append([]gemmMatrix{
			matrix(a.X, a.D, rows, gemmDepth, gemmRows),
			matrix(a.W, columns, a.D, 64, gemmDepth),
			matrix(a.G, columns, rows, 64, 16).storing(),
			matrix(a.Y, columns, rows, 64, 16),
		}, a.Term.matrices(rows, matrix(a.Term.W, columns, a.Term.D, 64, gemmDepth), a.W)...)}.run(q)
}

// Tuning implements [kernel.Tuned].
func (a StatisticsProduct) Tuning() (op, shape string) {
	return "StatisticsProduct", fmt.Sprintf("%dx%d, %d heads of %d, depth %d, %v", a.Batch, a.Seq,
		a.Heads, a.HeadDim, a.D, a.Type) + a.Term.shape()
}

// SetVariant sets the variant chosen by tuning.
func (a *StatisticsProduct) SetVariant(w kernel.Variant) { a.Variant = w }
