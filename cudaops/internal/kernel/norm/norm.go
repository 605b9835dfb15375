// Package norm has the kernels of RMSNorm and LayerNorm, and of their gradients.
package norm

import (
	"fmt"
	"strconv"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// RMSNorm normalizes the rows of X [Rows, D]: Rstd = 1/sqrt(mean(X²) + Eps) and Y = X·Rstd ⊙ W. If
// Residual is not null, it normalizes Sum = X + Residual instead and also writes Sum, which may be
// X or Residual. Rstd [Rows] and W [D] are float32, and the other arrays have type Type; Rstd may
// be null.
//
// If Y8 is not null, RMSNorm also stores Y, as rounded to Type, in Y8 and Scale8 [Rows], like
// [quantize.Rows]. Type must then be a 16-bit type.
//
// Rows are processed from the last to the first, because most kernels write the last rows last, and
// these are still in the cache. Set Ascending if the first rows of X were written last.
type RMSNorm struct {
	Y, Rstd, Sum, X, Residual, W gpu.Ptr
	Rows, D                      int
	Eps                          float64
	Type                         gpu.DType
	Y8, Scale8                   gpu.Ptr
	Ascending                    bool
}

// held returns the shape of rows held in registers, or the zero shape if rows are not aligned or
// too long. Two packs are best without a residual, but with one they would be too much data in
// flight.
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

// Launch enqueues one kernel. It holds rows in registers if it can; otherwise a block processes
// each row, and a second kernel writes Y8.
func (a RMSNorm) Launch(q *kernel.Queue) {
	h, suf := a.held(), kernel.Suffix(a.Type)
	args := []any{a.Y, a.Rstd, a.Sum, a.X, a.Residual, a.W}
	if h.Packs == 0 {
		q.Run("norm", "rmsnorm_any"+suf, kernel.Line(a.Rows, kernel.RowThreads(a.D)),
			append(args, a.D, a.Eps)...)
		quantize.StoreRows(q, a.Y8, a.Scale8, a.Y, a.Rows, a.D, a.Type)
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

// walkStages is the number of rows in flight for each group of threads that walks down the rows;
// must match kStages in norm.cu.
const walkStages = 3

// walk returns the launch of the backward kernel with blocks that walk down the rows. The name is
// empty if the kernel does not accept the arguments, or if the GPU has no room for that many rows.
func (a RMSNormBackward) walk(q *kernel.Queue) (name string, c gpu.LaunchConfig) {
	across := kernel.CeilDiv(a.D, 32*kernel.Vector(a.Type)) * 32
	down := max(1, 512/across)
	c = gpu.LaunchConfig{Block: gpu.Dim{X: across, Y: down},
		Shared: max(walkStages*a.arrays()*16*across, 4*a.D) * down}
	if !a.packed() || across > 1024 ||
		c.Shared > q.Info.SharedPerBlock-1024 { // some is left for the kernel's static shared memory
		return "", c
	}

	name = a.kernel("")
	c.Grid.X = min(q.Resident("norm", name, c), kernel.CeilDiv(a.Rows, down), a.parts(q.Info))
	return name, c
}

// ownWarps is the largest number of warps in a block that process separate rows, by the number of
// packs of a row that a lane holds; must match kOwn in norm.cu.
var ownWarps = map[int]int{1: 16, 2: 16, 3: 16, 4: 12}

// ownStages is the number of rows in flight for each of these warps; must match kOwnStages in
// norm.cu.
const ownStages = 2

// own returns the launch of the backward kernel that assigns each row to one warp or, if it is
// longer, to two. The name is empty if the kernel does not accept the arguments, or if the GPU has
// no room for that many rows.
func (a RMSNormBackward) own(k *kernel.Set) (name string, c gpu.LaunchConfig) {
	packs, across := kernel.CeilDiv(a.D, 32*kernel.Vector(a.Type)), 1
	name = "_own"
	if packs > 4 {
		packs, across, name = kernel.CeilDiv(packs, 2), 2, "_pair"
	}

	maxWarps, ok := ownWarps[packs]
	if !ok || !a.packed() {
		return "", c
	}

	perWarp := ownStages * a.arrays() * packs * 512 // also enough for its part of a row of floats
	warps := min(maxWarps, (k.Info.SharedPerBlock-1024)/perWarp)
	if warps < 4 {
		return "", c
	}

	down := warps / across
	return a.kernel(name + strconv.Itoa(packs)),
		gpu.LaunchConfig{Grid: gpu.Dim{X: min(k.Info.SMs, kernel.CeilDiv(a.Rows, down))},
			Block: gpu.Dim{X: 32 * across, Y: down}, Shared: down * across * perWarp}
}

// RMSNormBackward is the backward pass for G, the gradient of Y. With n = X·Rstd, it computes
//
//	DX = Rstd·(G ⊙ W − n·mean(G ⊙ W ⊙ n)) + Add,  DW = Σ_rows G ⊙ n.
//
// Add is a gradient that reaches X on a path around the norm, or null. DX may be Add or G. DW [D]
// is float32, or null if W does not learn. Workspace has WorkspaceBytes bytes.
//
// If DX8 is not null, RMSNormBackward also stores DX, as rounded to Type, in DX8 and Scale8 [Rows],
// like [quantize.Rows]. Type must then be a 16-bit type.
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

// kernel returns the name of a variant of the kernel, with float8 results if there is a DX8.
func (a RMSNormBackward) kernel(variant string) string {
	if a.DX8 != 0 {
		variant += "_float8"
	}
	return "rmsnorm_backward" + variant + kernel.Suffix(a.Type)
}

// normBlocks is the largest number of blocks per multiprocessor that write partial sums.
const normBlocks = 4

// parts returns the largest number of partial sums of the pass. It is one per multiprocessor if
// warps may process separate rows, because their blocks run for a long time.
func (a RMSNormBackward) parts(d gpu.DeviceInfo) int {
	if n := kernel.Vector(a.Type); a.D%n == 0 && kernel.CeilDiv(a.D, 32*n) <= 2*len(ownWarps) {
		return d.SMs
	}
	return normBlocks * d.SMs
}

// Launch enqueues a kernel that computes DX and partial sums of DW. Each row belongs to one or two
// warps or, if rows are longer, blocks walk down the rows. If neither is possible, each row gets a
// block, which takes additional kernels. A final kernel adds up the partial sums, if there is a DW.
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

	if a.DW == 0 {
		return
	}
	c = kernel.Grid(kernel.CeilDiv(a.D, 32), 1, 32, 32)
	c.Overlap = true
	q.Run("norm", "rmsnorm_weight_sum", c, a.DW, a.Workspace, blocks, a.D)
}

// arrays returns the number of arrays that the kernel reads row by row.
func (a RMSNormBackward) arrays() int {
	if a.Add != 0 {
		return 3
	}
	return 2
}

// runAny enqueues the kernels for arbitrary rows, and returns the number of partial sums. DX is
// written last, since it may be the memory of G.
func (a RMSNormBackward) runAny(q *kernel.Queue) (blocks int) {
	blocks = min(a.parts(q.Info), kernel.CeilDiv(a.Rows, 16))
	if a.DW != 0 {
		q.Run("norm", "rmsnorm_weight_any"+kernel.Suffix(a.Type),
			kernel.Grid(kernel.CeilDiv(a.D, 256), blocks, 256, 1), a.Workspace, a.G, a.X, a.Rstd,
			int64(a.Rows), a.D)
	}
	q.Run("norm", "rmsnorm_backward_any"+kernel.Suffix(a.Type),
		kernel.Line(a.Rows, kernel.RowThreads(a.D)), a.DX, a.G, a.X, a.W, a.Rstd, a.Add, a.D)
	quantize.StoreRows(q, a.DX8, a.Scale8, a.DX, a.Rows, a.D, a.Type)
	return blocks
}

// WorkspaceBytes returns the size of Workspace.
func (a RMSNormBackward) WorkspaceBytes(d gpu.DeviceInfo) int {
	return 4 * a.D * a.parts(d)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *RMSNormBackward) WorkspaceField() *gpu.Ptr { return &a.Workspace }
