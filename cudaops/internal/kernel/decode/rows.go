package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// RowsProduct computes Y = X·Wᵀ + C for 2 to MostRows rows X [Rows, D], with W [Columns, D] and Y and C [Rows, Columns].
// C may be null, and it may be Y. D is a multiple of 8, and X and W are aligned to 16 bytes. Type has 16 bits.
//
// If Gate is not GateNone, it computes Y = gate(X·Gateᵀ) ⊙ X·Upᵀ instead. W, [2·Columns, D], holds the rows of Gate
// followed by the rows of Up, and C is null.
type RowsProduct struct {
	Y, X, W, C       gpu.Ptr
	Rows, Columns, D int
	Gate             Gate
	Type             gpu.DType
	Overlap
}

// Gate is the function of a gated product.
type Gate uint8

// The gates. GateGELU is the tanh approximation.
const (
	GateNone Gate = iota
	GateSiLU
	GateGELU
)

// MostRows is the largest number of rows of a RowsProduct.
const MostRows = 64

// These constants must match decode_rows.cu.
const (
	rowsTile    = 128
	rowsDepth   = 64
	rowsStages  = 4
	rowsThreads = 128
)

// mostRanges is the largest number of ranges. The blocks of the ranges form a cluster.
const mostRanges = 8

// Supports reports whether the kernel computes the product.
func (a RowsProduct) Supports() bool {
	return a.Rows >= 2 && a.Rows <= MostRows && (a.Type == gpu.BFloat16 || a.Type == gpu.Float16) && a.D%8 == 0 &&
		kernel.Aligned(a.X, a.W)
}

// tiles returns the number of tiles of W.
func (a RowsProduct) tiles() int {
	if a.Gate != GateNone {
		return kernel.CeilDiv(2*a.Columns, rowsTile)
	}
	return kernel.CeilDiv(a.Columns, rowsTile)
}

// ranges returns the number of ranges into which the depth is divided, a power of two. Together with the tiles they
// fill the GPU, but a range has at least as many steps as the ring. fit returns the number of clusters of that many
// blocks that run on the GPU at the same time: if the last clusters had to wait for the first ones, the product would
// take almost twice as long.
func (a RowsProduct) ranges(d gpu.DeviceInfo, fit func(ranges int) int) int {
	if !d.Overlaps() {
		return 1 // without clusters
	}

	best, steps := 1, kernel.CeilDiv(a.D, rowsDepth)
	for n := 2; n <= min(mostRanges, steps/rowsStages, 2*max(1, d.SMs)/a.tiles()); n *= 2 {
		if fit(n) >= a.tiles() {
			best = n
		}
	}
	return best
}

// Launch enqueues one kernel.
func (a RowsProduct) Launch(q *kernel.Queue) {
	if !a.Supports() {
		q.Err = fmt.Errorf("kernels.DecodeRows: %d rows of %d elements of type %v, want 2 to %d rows of a multiple of 8 "+
			"elements of 16 bits, aligned to 16 bytes", a.Rows, a.D, a.Type, MostRows)
		return
	}

	rows, name := 16, "decode_rows"
	for rows < a.Rows {
		rows *= 2
	}
	if a.Gate != GateNone {
		name += "_gated"
	}
	name += fmt.Sprint("_", rows, kernel.Suffix(a.Type))

	launch := func(ranges int) gpu.LaunchConfig {
		c := gpu.LaunchConfig{Grid: gpu.Dim{X: a.tiles(), Y: ranges}, Block: gpu.Dim{X: rowsThreads},
			Shared: rowsStages * (rowsTile + rows) * rowsDepth * 2}
		if ranges > 1 {
			c.Cluster = gpu.Dim{X: 1, Y: ranges}
		}
		return c
	}
	ranges := a.ranges(q.Info, func(n int) int { return q.Resident("decode_rows", name, launch(n)) })
	c := launch(ranges)
	c.Overlap = true
	q.Run("decode_rows", name, c, kernel.Struct{a.Y, a.X, a.W, a.C, a.Rows, a.Columns, a.D, ranges, a.Steady, a.Early,
		a.Gate == GateGELU})
}

// NormRows normalizes the rows of X [Rows, D]: Y = X·W/sqrt(mean(X²) + Eps). W [D] is float32.
type NormRows struct {
	Y, X, W gpu.Ptr
	Rows, D int
	Eps     float64
	Type    gpu.DType
	Early   bool // see Overlap
}

// normThreads must match kThreads in decode_norm.cu.
const normThreads = 256

// Launch enqueues one kernel.
func (a NormRows) Launch(q *kernel.Queue) {
	variant := "elements"
	if kernel.Packed(a.Type, a.D, a.Y, a.X, a.W) {
		variant = "packs"
	}
	c := kernel.Line(a.Rows, normThreads)
	c.Overlap = true
	q.Run("decode_norm", "decode_norm_"+variant+kernel.Suffix(a.Type), c, kernel.Struct{a.Y, a.X, a.W, a.D, a.Eps, a.Early})
}
