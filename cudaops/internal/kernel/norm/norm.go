package norm

import (
	"fmt"
	"strconv"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// RMSNorm normalises the rows of X [Rows, D]: Rstd = 1/sqrt(mean(X²) + Eps) and Y = X·Rstd ⊙ W.
// Where Residual is not null, it does so to Sum = X + Residual, which it writes; Sum may be the
// memory of either. Rstd [Rows] and W [D] are float32, the others of the same type; Rstd may be
// null.
//
// Where Y8 is not null it is Y, as rounded to Type, with Scale8 [Rows] as [quantize.Rows] stores
// its rows. Type is then a 16-bit one.
//
// Rows are taken from the last to the first, as most kernels write the last ones last, and the
// cache still holds these. Ascending is for an X whose first rows were written last.
type RMSNorm struct {
	Y, Rstd, Sum, X, Residual, W gpu.Ptr
	Rows, D                      int
	Eps                          float64
	Type                         gpu.DType
	Y8, Scale8                   gpu.Ptr
	Ascending                    bool
}

// held is how threads hold rows in registers: the zero shape where rows are not aligned or too
// long. What is best without a residual, two packs, would be too much in flight with one.
func (a RMSNorm) held() (h quantize.HeldShape) {
	if !quantize.Packed(a.Type, a.D, a.Y8, a.Y, a.Sum, a.X, a.Residual, a.W) {
		return h
	}
	if a.Residual != 0 {
		return quantize.BestShape(a.D, a.Type, 1, 2, 4)
	}
	if h = quantize.BestShape(a.D, a.Type, 2, 1, 4); h.Across > 128 {
		h.Rows = max(1, quantize.HeldThreads/h.Across)
	}
	return h
}

// Launch launches one kernel: that of rows held in registers or, where these cannot be, one in
// which a row is a block's. Behind the latter a second one makes Y8.
func (a RMSNorm) Launch(q *kernel.Queue) {
	h, suf := a.held(), kernel.Suffix(a.Type)
	args := []any{a.Y, a.Rstd, a.Sum, a.X, a.Residual, a.W}
	if h.Packs == 0 {
		q.Run("norm", "rmsnorm_any"+suf, kernel.Line(a.Rows, kernel.RowThreads(a.D)),
			append(args, a.D, a.Eps)...)
		quantize.Beside(q, a.Y8, a.Scale8, a.Y, a.Rows, a.D, a.Type)
		return
	}

	if a.Y8 != 0 {
		args = append([]any{a.Y8, a.Scale8}, args...)
		suf = "_float8" + suf
	}

	name := "rmsnorm_held"
	if a.Residual != 0 {
		name = "rmsnorm_add_held"
	}

	q.Run("norm", fmt.Sprint(name, h.Packs, suf), h.Over(a.Rows),
		append(args, int64(a.Rows), a.D, a.Eps, a.Ascending)...)
}

// walkStages is the rows on their way of each group of threads that walks down them, kStages of
// norm.cu.
const walkStages = 3

// walk is the launch of the backward kernel whose blocks walk down the rows. It has no name where
// the kernel does not take the arguments or the GPU has no room for so many rows.
func (a RMSNormBackward) walk(q *kernel.Queue) (name string, c gpu.LaunchConfig) {
	across := kernel.CeilDiv(a.D, 32*kernel.Vector(a.Type)) * 32
	down := max(1, 512/across)
	c = gpu.LaunchConfig{Block: gpu.Dim{X: across, Y: down},
		Shared: max(walkStages*a.arrays()*16*across, 4*a.D) * down}
	if !a.packed() || across > 1024 ||
		c.Shared > q.Info.SharedPerBlock-1024 { // beside what the kernel itself declares
		return "", c
	}

	name = a.kernel("")
	c.Grid.X = min(q.Resident("norm", name, c), kernel.CeilDiv(a.Rows, down), a.parts(q.Info))
	return name, c
}

// ownWarps is the most warps of a block that take rows of their own, by the packs of a row that a
// lane holds. It is kOwn of norm.cu.
var ownWarps = map[int]int{1: 16, 2: 16, 3: 16, 4: 12}

// ownStages is the rows on their way of each of these warps, kOwnStages of norm.cu.
const ownStages = 2

// own is the launch of the backward kernel whose rows are the own of a warp or, longer ones, of
// two. It has no name where the kernel does not take the arguments or the GPU has no room for so
// many rows.
func (a RMSNormBackward) own(k *kernel.Set) (name string, c gpu.LaunchConfig) {
	packs, across := kernel.CeilDiv(a.D, 32*kernel.Vector(a.Type)), 1
	name = "_own"
	if packs > 4 {
		packs, across, name = kernel.CeilDiv(packs, 2), 2, "_pair"
	}

	most, ok := ownWarps[packs]
	if !ok || !a.packed() {
		return "", c
	}

	perWarp := ownStages * a.arrays() * packs * 512 // which its part of a row of floats fits in
	warps := min(most, (k.Info.SharedPerBlock-1024)/perWarp)
	if warps < 4 {
		return "", c
	}

	down := warps / across
	return a.kernel(name + strconv.Itoa(packs)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: min(k.Info.SMs, kernel.CeilDiv(a.Rows, down))},
			Block: gpu.Dim{X: 32 * across, Y: down}, Shared: down * across * perWarp}
}

// RMSNormBackward is the backward pass for G, the gradient of Y: with n = X·Rstd,
//
//	DX = Rstd·(G ⊙ W − n·mean(G ⊙ W ⊙ n)) + Add,  DW = Σ_rows G ⊙ n.
//
// Add, which may be null, is a gradient that reaches X past the norm; DX may be its memory, or G's.
// DW [D] is float32. Workspace is memory of WorkspaceBytes.
//
// Where DX8 is not null it is DX, as rounded to Type, with Scale8 [Rows] as [quantize.Rows] stores
// its rows. Type is then a 16-bit one.
type RMSNormBackward struct {
	DX, DW, G, X, W, Rstd, Add gpu.Ptr
	Rows, D                    int
	Type                       gpu.DType
	Workspace                  gpu.Ptr
	DX8, Scale8                gpu.Ptr
}

// packed reports whether rows can be moved 16 bytes at a time.
func (a RMSNormBackward) packed() bool {
	return quantize.Packed(a.Type, a.D, a.DX8, a.DX, a.G, a.X, a.W, a.Add)
}

// kernel is the name of a variant, which stores rows as float8 too if that is wanted.
func (a RMSNormBackward) kernel(variant string) string {
	if a.DX8 != 0 {
		variant += "_float8"
	}
	return "rmsnorm_backward" + variant + kernel.Suffix(a.Type)
}

// normBlocks is the most blocks a multiprocessor that leave partial sums.
const normBlocks = 4

// parts is how many partial sums the pass leaves at most. It is one a multiprocessor where warps
// may take rows of their own, since these are kept for long.
func (a RMSNormBackward) parts(d gpu.DeviceInfo) int {
	if n := kernel.Vector(a.Type); a.D%n == 0 && kernel.CeilDiv(a.D, 32*n) <= 2*len(ownWarps) {
		return d.SMs
	}
	return normBlocks * d.SMs
}

// Launch launches a kernel for DX and partial sums of DW. Warps or pairs of them take rows of their
// own, or blocks walk down longer ones. Where neither can be, each row has a block, and there are
// more kernels. Another one adds the sums up.
func (a RMSNormBackward) Launch(q *kernel.Queue) {
	name, c := a.own(q.Set)
	if name == "" {
		name, c = a.walk(q)
	}

	blocks := c.Grid.X
	if name == "" {
		blocks = a.runAny(q)
	} else {
		args := []any{a.DX, a.Workspace, a.G, a.X, a.W, a.Rstd, a.Add, int64(a.Rows), a.D}
		if a.DX8 != 0 {
			args = append([]any{a.DX8, a.Scale8}, args...)
		}
		q.Run("norm", name, c, args...)
	}

	c = kernel.Grid(kernel.CeilDiv(a.D, 32), 1, 32, 32)
	c.Overlap = true
	q.Run("norm", "rmsnorm_weight_sum", c, a.DW, a.Workspace, blocks, a.D)
}

// arrays is how many are read.
func (a RMSNormBackward) arrays() int {
	if a.Add != 0 {
		return 3
	}
	return 2
}

// runAny runs what takes any rows, and returns how many partial sums it leaves. DX comes last, as
// it may be G's memory.
func (a RMSNormBackward) runAny(q *kernel.Queue) (blocks int) {
	blocks = min(a.parts(q.Info), kernel.CeilDiv(a.Rows, 16))
	q.Run("norm", "rmsnorm_weight_any"+kernel.Suffix(a.Type),
		kernel.Grid(kernel.CeilDiv(a.D, 256), blocks, 256, 1), a.Workspace, a.G, a.X, a.Rstd,
		int64(a.Rows), a.D)
	q.Run("norm", "rmsnorm_backward_any"+kernel.Suffix(a.Type),
		kernel.Line(a.Rows, kernel.RowThreads(a.D)), a.DX, a.G, a.X, a.W, a.Rstd, a.Add, a.D)
	quantize.Beside(q, a.DX8, a.Scale8, a.DX, a.Rows, a.D, a.Type)
	return blocks
}

// WorkspaceBytes is the size of Workspace.
func (a RMSNormBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return 4 * a.D * a.parts(d)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *RMSNormBackward) WorkspaceField() *gpu.Ptr { return &a.Workspace }
