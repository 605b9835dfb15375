package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// LinearCrossEntropy computes the losses of the logits X·Wᵀ, like [crossentropy.Forward], and the
// factors of the products that give the gradients of X and W. Logits are never stored. With Z[r] =
// Σ_i exp(logits[r, i] − logits[r, Targets[r]]),
//
//	Losses[r] = log Z[r],  Terms[r, i] = exp(logits[r, i] − logits[r, Targets[r]]) − Z[r]·[i = Targets[r]]
//	Factors[r] = Scale[0]·Grad[0] / Z[r],  Scaled[r] = Factors[r]·X[r]
//	dX[r] = Factors[r]·(Terms·W)[r],  dW = Termsᵀ·Scaled
//
// A null Grad counts as 1. If the target of a row is negative, all four results of the row are 0.
// If Z is too large, Terms holds the unscaled gradient of the logits instead, and the factor is the
// scale alone.
//
// X and Scaled are [Rows, D], W [V, D] and Terms [Rows, V], all bfloat16; the other arrays are
// float32. The rows may be part of a batch; Scale applies to the whole batch.
type LinearCrossEntropy struct {
	Terms, Scaled, Factors, Losses gpu.Ptr
	X, W                           gpu.Ptr
	Targets                        gpu.Ptr // int64
	Scale, Grad                    gpu.Ptr
	Workspace                      gpu.Ptr // WorkspaceBytes bytes
	Rows, V, D                     int
	Type                           gpu.DType // of the matrices; must be bfloat16
	Variant                        kernel.Variant
}

// The shape of gemm_hopper_loss.cu: a tile's columns, the stages, the parts into which a tile is
// divided for storing, and the bytes of a warp's panel. For its other kernels: the rows per block
// and the warps per block.
const (
	lossColumns, lossStages, lossParts, lossTermBytes = 256, 4, 8, 16 * 128
	lossRows, lossWarps                               = 32, 8
)

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper
// has one for bfloat16 if V and D are multiples of 8.
func (a LinearCrossEntropy) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, fused, a.Type == gpu.BFloat16 && a.V%8 == 0 && a.D%8 == 0)
}

// Launch enqueues three kernels.
func (a LinearCrossEntropy) Launch(q *kernel.Queue) {
	const unit = "gemm_hopper_loss"
	shift := a.Workspace
	sums := shift.Offset(4 * a.Rows)
	lossArgs := kernel.Struct{a.X, a.W, a.Targets, shift, a.Terms, sums, a.Losses, a.Factors,
		a.Scaled, a.Scale, a.Grad, a.Rows, a.V, a.D}
	q.Run(unit, "gemm_hopper_loss_shift", kernel.Cover(a.Rows, lossWarps, 32*lossWarps), lossArgs)
	gemmLaunch{unit: unit, symbol: "gemm_hopper_loss_bf16", dtype: gpu.BFloat16,
		shared: warpShared(lossColumns, lossStages, lossTermBytes),
		params: kernel.Struct{shift, sums, a.Rows, a.V, a.D, gemmSection},
		matrices: []gemmMatrix{
			matrix(a.X, a.D, a.Rows, gemmDepth, gemmRows),
			matrix(a.W, a.D, a.V, gemmDepth, lossColumns/gemmCluster),
			matrix(a.Terms, a.V, a.Rows, 64, 16).storing(),
		}}.run(q)

	q.Run(unit, "gemm_hopper_loss_finish", kernel.Cover(a.Rows, lossRows, 32*lossWarps), lossArgs)
}

// ScaleRows multiplies each row of X [Rows, D], bfloat16, by its float32 factor. A factor of 0 sets
// the row to 0, whatever it holds. D must be a multiple of 8.
type ScaleRows struct {
	X, Factors gpu.Ptr
	Rows, D    int
}

// Launch enqueues one kernel.
func (p ScaleRows) Launch(q *kernel.Queue) {
	q.Run("gemm_hopper_loss", "gemm_hopper_loss_scale",
		kernel.Cover(p.Rows, lossWarps, 32*lossWarps), p.X, p.Factors, p.Rows, p.D)
}

// Tuning implements [kernel.Tuned].
func (a LinearCrossEntropy) Tuning() (op, shape string) {
	return "LinearCrossEntropy", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.V, a.D, a.Type)
}

// WorkspaceBytes returns the size of Workspace.
func (a LinearCrossEntropy) WorkspaceBytes(gpu.DeviceInfo) int {
	return 4 * a.Rows * (1 + kernel.CeilDiv(a.V, lossColumns))
}

// WorkspaceField implements [kernel.Workspaced].
func (a *LinearCrossEntropy) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// SetVariant sets the variant chosen by tuning.
func (a *LinearCrossEntropy) SetVariant(w kernel.Variant) { a.Variant = w }
