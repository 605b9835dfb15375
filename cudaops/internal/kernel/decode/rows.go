package decode

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// RowsProduct computes Y = X·Wᵀ + C for 2 to MostRows rows X [Rows, D], with W [Columns, D] and Y and C [Rows, Columns].
// C may be null, and it may be Y. D is a multiple of 8, and X and W are aligned to 16 bytes. Type has 16 bits.
type RowsProduct struct {
	Y, X, W, C       gpu.Ptr
	Parts            gpu.Ptr // workspace of PartsBytes
	Arrived          gpu.Ptr // Counters elements of uint32, zero before and after a launch
	Rows, Columns, D int
	Steady           bool // see Product
	Type             gpu.DType
}

// MostRows is the largest number of rows of a RowsProduct.
const MostRows = 64

// These constants must match decode_rows.cu.
const (
	rowsTile    = 128
	rowsDepth   = 64
	rowsStages  = 4
	rowsThreads = 128
)

// Supports reports whether the kernel computes the product.
func (a RowsProduct) Supports() bool {
	return a.Rows >= 2 && a.Rows <= MostRows && (a.Type == gpu.BFloat16 || a.Type == gpu.Float16) && a.D%8 == 0 &&
		kernel.Aligned(a.X, a.W)
}

// tiles returns the number of tiles of W.
func (a RowsProduct) tiles() int { return kernel.CeilDiv(a.Columns, rowsTile) }

// ranges returns the number of ranges into which the depth is divided. Together with the tiles they fill the GPU, but
// a range has at least as many steps as the ring.
func (a RowsProduct) ranges(d gpu.DeviceInfo) int {
	steps := kernel.CeilDiv(a.D, rowsDepth)
	return max(1, min(steps/rowsStages, 2*max(1, d.SMs)/a.tiles()))
}

// PartsBytes returns the size of Parts in bytes.
func (a RowsProduct) PartsBytes(d gpu.DeviceInfo) int {
	if n := a.ranges(d); n > 1 {
		return 4 * n * a.Rows * a.Columns
	}
	return 4
}

// Counters returns the number of elements of Arrived.
func (a RowsProduct) Counters() int { return a.tiles() }

// Launch enqueues one kernel.
func (a RowsProduct) Launch(q *kernel.Queue) {
	if !a.Supports() {
		q.Err = fmt.Errorf("kernels.DecodeRows: %d rows of %d elements of type %v, want 2 to %d rows of a multiple of 8 "+
			"elements of 16 bits, aligned to 16 bytes", a.Rows, a.D, a.Type, MostRows)
		return
	}

	rows := 16
	for rows < a.Rows {
		rows *= 2
	}
	ranges := a.ranges(q.Info)
	q.Run("decode_rows", fmt.Sprintf("decode_rows_%d%s", rows, kernel.Suffix(a.Type)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: a.tiles(), Y: ranges}, Block: gpu.Dim{X: rowsThreads},
			Shared: rowsStages * (rowsTile + rows) * rowsDepth * 2, Overlap: true},
		kernel.Struct{a.Y, a.X, a.W, a.C, a.Parts, a.Arrived, a.Rows, a.Columns, a.D, ranges, a.Steady})
}
