package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// LinearCrossEntropy computes the losses of the logits X·Wᵀ, as [crossentropy.Forward] does, and
// what the gradients of X and W are products of. Logits are never stored. With Z[r] = Σ_i
// exp(logits[r, i] − logits[r, Targets[r]]),
//
//	Losses[r] = log Z[r],  Terms[r, i] = exp(logits[r, i] − logits[r, Targets[r]]) − Z[r]·[i = Targets[r]]
//	Factors[r] = Scale[0]·Grad[0] / Z[r],  Scaled[r] = Factors[r]·X[r]
//	dX[r] = Factors[r]·(Terms·W)[r],  dW = Termsᵀ·Scaled
//
// where a null Grad counts as 1. Of a row whose target is below 0 all four are 0. Rows whose Z
// would be too large for that have the gradient of the logits without its scale in place of terms.
// The scale is their factor. X and Scaled are [Rows, D], W [V, D] and Terms [Rows, V], bfloat16;
// all others are float32. The rows may be some of a batch's: Scale is for the batch.
type LinearCrossEntropy struct {
	Terms, Scaled, Factors, Losses gpu.Ptr
	X, W                           gpu.Ptr
	Targets                        gpu.Ptr // of int64
	Scale, Grad                    gpu.Ptr
	Workspace                      gpu.Ptr // of WorkspaceBytes
	Rows, V, D                     int
	Type                           gpu.DType // of the matrices: bfloat16
	Variant                        kernel.Variant
}

// The shape of gemm_hopper_loss.cu: a tile's columns, stages and parts in which it is brought to
// memory, and the bytes of a warp's panel. Of the other kernels: the rows of a block and its warps.
const (
	lossColumns, lossStages, lossParts, lossTermBytes = 256, 4, 8, 16 * 128
	lossRows, lossWarps                               = 32, 8
)

// Variants lists the variants that take the launch at addresses that are multiples of 16, or none: Hopper
// has one for bfloat16 where V and D are multiples of 8.
func (a LinearCrossEntropy) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, fused, a.Type == gpu.BFloat16 && a.V%8 == 0 && a.D%8 == 0)
}

// Launch launches three kernels.
func (a LinearCrossEntropy) Launch(q *kernel.Queue) {
	const unit = "gemm_hopper_loss"
	shift := a.Workspace
	sums := shift.Offset(4 * a.Rows)
	others := kernel.Struct{a.X, a.W, a.Targets, shift, a.Terms, sums, a.Losses, a.Factors,
		a.Scaled, a.Scale, a.Grad, a.Rows, a.V, a.D}
	q.Run(unit, "gemm_hopper_loss_shift", kernel.Cover(a.Rows, lossWarps, 32*lossWarps), others)
	gemmLaunch{unit: unit, symbol: "gemm_hopper_loss_bf16", dtype: gpu.BFloat16,
		shared: warpShared(lossColumns, lossStages, lossTermBytes),
		params: kernel.Struct{shift, sums, a.Rows, a.V, a.D, gemmSection},
		matrices: []gemmMatrix{
			matrix(a.X, a.D, a.Rows, gemmDepth, gemmRows),
			matrix(a.W, a.D, a.V, gemmDepth, lossColumns/gemmCluster),
			matrix(a.Terms, a.V, a.Rows, 64, 16).storing(),
		}}.run(q)

	q.Run(unit, "gemm_hopper_loss_finish", kernel.Cover(a.Rows, lossRows, 32*lossWarps), others)
}

// ScaleRows multiplies each row of X [Rows, D], bfloat16, by its factor, a float32, or sets it to 0
// where that is 0. D is a multiple of 8.
type ScaleRows struct {
	X, Factors gpu.Ptr
	Rows, D    int
}

// Launch launches one kernel.
func (p ScaleRows) Launch(q *kernel.Queue) {
	q.Run("gemm_hopper_loss", "gemm_hopper_loss_scale",
		kernel.Cover(p.Rows, lossWarps, 32*lossWarps), p.X, p.Factors, p.Rows, p.D)
}

// Tuning is that of [kernel.Tuned].
func (a LinearCrossEntropy) Tuning() (op, shape string) {
	return "LinearCrossEntropy", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.V, a.D, a.Type)
}

// WorkspaceBytes is the size of Workspace.
func (a LinearCrossEntropy) WorkspaceBytes(gpu.DeviceInfo) int {
	return 4 * a.Rows * (1 + kernel.CeilDiv(a.V, lossColumns))
}

// WorkspaceField implements [kernel.Workspaced].
func (a *LinearCrossEntropy) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// SetWay sets the variant in which the launch is computed.
func (a *LinearCrossEntropy) SetVariant(w kernel.Variant) { a.Variant = w }
