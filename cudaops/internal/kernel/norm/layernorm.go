package norm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// LayerNormStats is the number of statistics per row: the mean, a correction of its rounding, and
// 1/sqrt(variance + Eps).
const LayerNormStats = 3

// LayerNorm normalizes the rows of X [Rows, D]:
//
//	Y = (X − mean(X)) / sqrt(var(X) + Eps) ⊙ W + B
//
// Stats [Rows, LayerNormStats], W and B [D] are float32, X and Y of type Type.
type LayerNorm struct {
	Y, Stats, X, W, B gpu.Ptr
	Rows, D           int
	Eps               float64
	Type              gpu.DType
}

// Launch enqueues one kernel. It holds rows in registers if it can; if rows are not aligned or too
// long, a block processes each row.
func (a LayerNorm) Launch(q *kernel.Queue) {
	args := []any{a.Y, a.Stats, a.X, a.W, a.B}
	if kernel.Packed(a.Type, a.D, a.Y, a.X, a.W, a.B) {
		if h := quantize.BestShape(a.D, a.Type, 1, 2, 4); h.Packs > 0 {
			q.Run("layernorm", fmt.Sprint("layernorm_held", h.Packs, kernel.Suffix(a.Type)),
				h.Over(a.Rows), append(args, int64(a.Rows), a.D, a.Eps)...)
			return
		}
	}
	q.Run("layernorm", "layernorm_any"+kernel.Suffix(a.Type),
		kernel.Line(a.Rows, kernel.RowThreads(a.D)), append(args, a.D, a.Eps)...)
}

// LayerNormBackward is the backward pass for G, the gradient of Y. With s = 1/sqrt(var(X) + Eps)
// and n = (X − mean(X))·s, it computes
//
//	DX = s·(G ⊙ W − mean(G ⊙ W) − n·mean(G ⊙ W ⊙ n)) + Add,
//	DW = Σ_rows G ⊙ n,  DB = Σ_rows G.
//
// Add is a gradient that reaches X on a path around the norm, or null. DX may be Add or G. DW and
// DB [D] are float32, or null if W or B does not learn, and Stats has been written by LayerNorm.
// Workspace has WorkspaceBytes bytes.
type LayerNormBackward struct {
	DX, DW, DB, G, X, W, Stats, Add gpu.Ptr
	Rows, D                         int
	Type                            gpu.DType
	Workspace                       gpu.Ptr
}

// layerNormBlocks is the largest number of blocks per multiprocessor that write partial sums.
const layerNormBlocks = 4

func (a LayerNormBackward) parts(d gpu.DeviceInfo) int { return layerNormBlocks * d.SMs }

// WorkspaceBytes returns the size of Workspace.
func (a LayerNormBackward) WorkspaceBytes(d gpu.DeviceInfo) int { return 2 * 4 * a.D * a.parts(d) }

// WorkspaceField implements [kernel.Workspaced].
func (a *LayerNormBackward) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// Launch enqueues a kernel that computes DX and partial sums of DW and DB, or two kernels if rows
// are not aligned or too long. Two more kernels add up the partial sums.
func (a LayerNormBackward) Launch(q *kernel.Queue) {
	weights := a.Workspace
	biases := weights.Offset(4 * a.D * a.parts(q.Info))
	args := []any{a.DX, weights, biases, a.G, a.X, a.W, a.Stats, a.Add}

	var h quantize.HeldShape
	if kernel.Packed(a.Type, a.D, a.DX, a.G, a.X, a.W, a.Add) {
		h = quantize.BestShape(a.D, a.Type, 1, 2)
	}

	var blocks int
	if h.Packs > 0 {
		blocks = min(a.parts(q.Info), kernel.CeilDiv(a.Rows, h.Rows))
		c := kernel.Grid(blocks, 1, h.Across, h.Rows)
		c.Shared = 4 * a.D * h.Rows
		q.Run("layernorm", fmt.Sprint("layernorm_backward_held", h.Packs, kernel.Suffix(a.Type)), c,
			append(args, int64(a.Rows), a.D)...)
	} else {
		blocks = a.runAny(q, weights, biases)
	}

	for _, sum := range [][2]gpu.Ptr{{a.DW, weights}, {a.DB, biases}} {
		if sum[0] == 0 {
			continue
		}
		c := kernel.Grid(kernel.CeilDiv(a.D, 32), 1, 32, 32)
		q.Run("norm", "rmsnorm_weight_sum", c, sum[0], sum[1], blocks, a.D)
	}
}

// runAny enqueues the kernels for arbitrary rows, and returns the number of partial sums. DX is
// written last, since it may be the memory of G.
func (a LayerNormBackward) runAny(q *kernel.Queue, weights, biases gpu.Ptr) (blocks int) {
	blocks = min(a.parts(q.Info), kernel.CeilDiv(a.Rows, 16))
	q.Run("layernorm", "layernorm_weight_any"+kernel.Suffix(a.Type),
		kernel.Grid(kernel.CeilDiv(a.D, 256), blocks, 256, 1), weights, biases, a.G, a.X, a.Stats,
		int64(a.Rows), a.D)
	q.Run("layernorm", "layernorm_backward_any"+kernel.Suffix(a.Type),
		kernel.Line(a.Rows, kernel.RowThreads(a.D)), a.DX, a.G, a.X, a.W, a.Stats, a.Add, a.D)
	return blocks
}
