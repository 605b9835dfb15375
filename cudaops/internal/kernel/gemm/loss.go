package gemm

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// LinearCrossEntropy computes the losses of the logits X·Wᵀ, as [CrossEntropy] does, and what the
// gradients of X and W are products of. Logits are never stored. With Z[r] = Σ_i exp(logits[r, i] −
// logits[r, Targets[r]]),
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
	Targets                        kernel.Ints
	Scale, Grad                    gpu.Ptr
	Workspace                      gpu.Ptr // of WorkspaceBytes
	LinearCrossEntropyShape
	Type gpu.DType // of the matrices: bfloat16
	Way  kernel.Way
}

// LinearCrossEntropyShape is the sizes of a LinearCrossEntropy.
type LinearCrossEntropyShape struct{ Rows, V, D int }

// The shape of gemm_hopper_loss.cu: a tile's columns, stages and parts in which it is brought to
// memory, and the bytes of a warp's panel. Of the other kernels: the rows of a block and its warps.
const (
	lossColumns, lossStages, lossParts, lossTermBytes = 256, 4, 8, 16 * 128
	lossRows, lossWarps                               = 32, 8
)

// Ways lists the ways that take the launch, or none: Hopper has one for bfloat16 where V and D are
// multiples of 8, and addresses are multiples of 16.
func (a LinearCrossEntropy) Ways(k *kernel.Set) []kernel.Way {
	const limit = 1 << 30
	if k.Info.Capability() != 90 || a.Type != gpu.BFloat16 || a.V%8 != 0 || a.D%8 != 0 ||
		min(a.Rows, a.V, a.D) < 1 || max(a.Rows, a.V, a.D) > limit {
		return nil
	}
	return []kernel.Way{{Family: "fused"}}
}

// Launch launches three kernels.
func (a LinearCrossEntropy) Launch(k *kernel.Set, s gpu.Stream) error {
	const op, unit = "LinearCrossEntropy", "gemm_hopper_loss"
	if empty, err := kernel.CheckInts(op, a.Rows, a.V, a.D); err != nil || empty {
		return err
	}
	ways := a.Ways(k)
	if len(ways) == 0 || !kernel.Aligned(a.Terms, a.Scaled, a.X, a.W) {
		return fmt.Errorf("kernels.%s: got %+v, want compute capability 9.0, V and D multiples "+
			"of 8, and addresses that are multiples of 16",
			op, a.LinearCrossEntropyShape)
	}
	if _, err := a.Way.Of(op, ways); err != nil {
		return err
	}
	shift, depth := a.Workspace, uint64(a.D)
	sums := shift.Offset(4 * a.Rows)
	others := func() *gpu.Args {
		p := kernel.Args().Ptr(a.X).Ptr(a.W).Ptr(a.Targets.Ptr).Ptr(shift).Ptr(a.Terms).Ptr(
			sums).Ptr(a.Losses).Ptr(a.Factors).Ptr(a.Scaled).
			Ptr(a.Scale).Ptr(a.Grad).Int32(a.Targets.Size()).Int32(a.Rows).Int32(a.V).Int32(a.D)
		return kernel.Args().Struct(p.Packed(), 8)
	}
	if err := k.Enqueue(s, unit, "gemm_hopper_loss_shift",
		kernel.Line(kernel.CeilDiv(a.Rows, lossWarps), 32*lossWarps), others()); err != nil {
		return err
	}
	product := gemmLaunch{unit: unit, symbol: "gemm_hopper_loss_bf16", threads: 384,
		dtype: gpu.BFloat16, stored: a.Terms,
		elements: a.Rows * a.V, shared: warpShared(lossColumns, lossStages, lossTermBytes),
		params: kernel.Args().Ptr(shift).Ptr(sums).Int32(a.Rows).Int32(a.V).Int32(
			a.D).Int32(gemmSection),
		matrices: []gemmMatrix{
			{a.X, [3]int{a.D, a.Rows, 1}, [2]uint64{depth, 8}, [3]uint32{gemmDepth, gemmRows, 1}},
			{a.W, [3]int{a.D, a.V, 1}, [2]uint64{depth, 8},
				[3]uint32{gemmDepth, lossColumns / gemmCluster, 1}},
			{a.Terms, [3]int{a.V, a.Rows, 1}, [2]uint64{uint64(a.V), 8}, [3]uint32{64, 16, 1}},
		}}
	if err := product.launch(k, s); err != nil {
		return err
	}
	return k.Enqueue(s, unit, "gemm_hopper_loss_finish",
		kernel.Line(kernel.CeilDiv(a.Rows, lossRows), 32*lossWarps), others())
}

// Launch multiplies each row of x [rows, d], bfloat16, by its factor, a float32, or sets it to 0
// where that is 0.
func (p ScaleRows) Launch(k *kernel.Set, s gpu.Stream) error {
	if empty, err := kernel.CheckInts("ScaleRows", p.Rows, p.D); err != nil || empty {
		return err
	}
	if p.D%8 != 0 || !kernel.Aligned(p.X) {
		return fmt.Errorf("kernels.ScaleRows: got rows of %d at %#x, want a multiple of 8 at a "+
			"multiple of 16", p.D, p.X)
	}
	l := kernel.Args().Ptr(p.X).Ptr(p.Factors).Int32(p.Rows).Int32(p.D)
	return k.Enqueue(s, "gemm_hopper_loss", "gemm_hopper_loss_scale",
		kernel.Line(kernel.CeilDiv(p.Rows, lossWarps), 32*lossWarps), l)
}

// ScaleRows multiplies each row of X [Rows, D] by its factor.
type ScaleRows struct {
	X, Factors gpu.Ptr
	Rows, D    int
}

// Shape is rows, vocabulary and features.
func (a LinearCrossEntropy) Shape() string {
	return fmt.Sprintf("%dx%dx%d %v", a.Rows, a.V, a.D, a.Type)
}

// Tuning is that of [kernel.Tuned].
func (a LinearCrossEntropy) Tuning() kernel.Tuning {
	return kernel.Tuning{Op: "LinearCrossEntropy", Units: []string{"gemm_hopper_loss", "crossentropy"}, Computes: true}
}

// WorkspaceBytes is the size of Workspace.
func (a LinearCrossEntropy) WorkspaceBytes(gpu.DeviceInfo) int {
	return 4 * a.Rows * (1 + kernel.CeilDiv(a.V, lossColumns))
}
