package gemm

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// RowProduct computes Y = Scale·X·W or, with TransW, Y = Scale·X·Wᵀ, where Y has few columns. X is
// [Rows, D], W is [D, Columns] or, with TransW, [Columns, D], and Y is [Rows, Columns]. If Scaled is not
// null, it receives Y with each row multiplied by its entry in Factors, float32 [Rows].
type RowProduct struct {
	Y, X, W          gpu.Ptr
	Scaled, Factors  gpu.Ptr
	Rows, Columns, D int
	TransW           bool
	Scale            float64
	Type             gpu.DType
	Variant          kernel.Variant
}

// ColumnProduct computes Y = Xᵀ·V or, with Transposed, Y = Vᵀ·X, where V has few columns. X is [Rows,
// Columns], V is [Rows, Narrow], and Y is [Columns, Narrow] or, with Transposed, [Narrow, Columns]. If
// Factors, float32 [Columns], is not null, the columns of X are multiplied by their entries.
type ColumnProduct struct {
	Y, X, V, Workspace    gpu.Ptr
	Factors               gpu.Ptr
	Rows, Columns, Narrow int
	Transposed            bool
	Type, YType           gpu.DType // YType is Float32 or BFloat16
	Variant               kernel.Variant
}

// The shape of gemm_hopper_narrow.cu: the rows and columns of a panel, the stages, the panels of a block
// of columns, and the number of columns above which a matrix is not narrow.
const (
	narrowSide, narrowRowsStages, narrowColumnsStages = 64, 6, 5
	narrowColumnsPanels                               = 4
	narrowMost                                        = 256
)

// narrow is the variant of gemm_hopper_narrow.cu.
var narrow = kernel.Variant{Family: "narrow"}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper has
// one for 2-byte types if Columns and D are multiples of 8, and Columns is at most 256.
func (a RowProduct) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, narrow, a.Type.Size() == 2 && a.Columns%8 == 0 && a.Columns <= narrowMost && a.D%8 == 0)
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper has
// one for 2-byte types if Columns and Narrow are multiples of 8, and Narrow is at most 256.
func (a ColumnProduct) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, narrow, a.Type.Size() == 2 && a.Columns%8 == 0 && a.Narrow%8 == 0 &&
		a.Narrow <= narrowMost && (a.YType == gpu.Float32 || a.YType == gpu.BFloat16))
}

// panels returns the descriptor of a matrix that the copy engine moves in panels.
func panels(q *kernel.Queue, p gpu.Ptr, rows, columns int, t gpu.DType) gpu.TensorMap {
	return q.Tiled(gpu.TiledTensor{Type: t, Address: p, Box: []uint32{narrowSide, narrowSide},
		Dims: []uint64{uint64(columns), uint64(rows)}, Strides: []uint64{uint64(columns * t.Size())}})
}

// narrowShared returns the shared memory of a block with the given stages of panels.
func narrowShared(stages, each int) int { return stages * (each*narrowSide*narrowSide*2 + 16) }

// Launch enqueues one kernel.
func (a RowProduct) Launch(q *kernel.Queue) {
	name, w := "gemm_hopper_narrow_nn", panels(q, a.W, a.D, a.Columns, a.Type)
	if a.TransW {
		name, w = "gemm_hopper_narrow_nt", panels(q, a.W, a.Columns, a.D, a.Type)
	}
	c := kernel.Grid(kernel.CeilDiv(a.Rows, narrowSide), kernel.CeilDiv(a.Columns, narrowSide), 160, 1)
	c.Shared = narrowShared(narrowRowsStages, 2)
	q.Run("gemm_hopper_narrow", name+kernel.Suffix(a.Type), c,
		kernel.Struct{a.Y, a.Scaled, a.Factors, a.Rows, a.Columns, a.D, a.Scale}, panels(q, a.X, a.Rows, a.D, a.Type), w)
}

// parts returns the number of parts into which the rows are divided, and the rows of a part.
func (a ColumnProduct) parts(d gpu.DeviceInfo) (n, step int) {
	blocks := kernel.CeilDiv(a.Columns, narrowColumnsPanels*narrowSide) * kernel.CeilDiv(a.Narrow, narrowSide)
	steps := kernel.CeilDiv(a.Rows, narrowSide)
	each := kernel.CeilDiv(steps, max(1, min(steps, d.SMs/blocks)))
	return kernel.CeilDiv(steps, each), each * narrowSide
}

// WorkspaceBytes implements [kernel.Workspaced].
func (a ColumnProduct) WorkspaceBytes(d gpu.DeviceInfo) int {
	n, _ := a.parts(d)
	return 4 * n * a.Columns * a.Narrow
}

// WorkspaceField implements [kernel.Workspaced].
func (a *ColumnProduct) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// Launch enqueues two kernels.
func (a ColumnProduct) Launch(q *kernel.Queue) {
	n, step := a.parts(q.Info)
	c := kernel.Grid(kernel.CeilDiv(a.Columns, narrowColumnsPanels*narrowSide), n, 288, 1)
	c.Grid.Z, c.Shared = kernel.CeilDiv(a.Narrow, narrowSide), narrowShared(narrowColumnsStages, narrowColumnsPanels+1)
	q.Run("gemm_hopper_narrow", "gemm_hopper_narrow_columns"+kernel.Suffix(a.Type), c,
		kernel.Struct{a.Workspace, a.Rows, a.Columns, a.Narrow, step}, panels(q, a.X, a.Rows, a.Columns, a.Type),
		panels(q, a.V, a.Rows, a.Narrow, a.Type))
	q.Run("gemm_hopper_narrow", "gemm_hopper_narrow_sum"+kernel.Suffix(a.YType),
		kernel.Cover(a.Columns*a.Narrow, 256, 256), a.Y, a.Workspace, a.Factors, n, a.Columns, a.Narrow,
		a.Transposed)
}

// Tuning implements [kernel.Tuned].
func (a RowProduct) Tuning() (op, shape string) {
	return "RowProduct", fmt.Sprintf("%dx%dx%d %v", a.Rows, a.Columns, a.D, a.Type) +
		kernel.With(a.TransW, "transposed") + kernel.With(a.Scaled != 0, "and scaled")
}

// Tuning implements [kernel.Tuned].
func (a ColumnProduct) Tuning() (op, shape string) {
	return "ColumnProduct", fmt.Sprintf("%dx%dx%d %v %v", a.Rows, a.Columns, a.Narrow, a.Type, a.YType) +
		kernel.With(a.Transposed, "transposed")
}

// SetVariant sets the variant chosen by tuning.
func (a *RowProduct) SetVariant(w kernel.Variant) { a.Variant = w }

// SetVariant sets the variant chosen by tuning.
func (a *ColumnProduct) SetVariant(w kernel.Variant) { a.Variant = w }

// ScaledRows multiplies each row of X [Rows, Columns] by its entry in Factors, float32 [Rows].
type ScaledRows struct {
	Y, X, Factors gpu.Ptr
	Rows, Columns int
	Type          gpu.DType
}

// Launch enqueues one kernel.
func (a ScaledRows) Launch(q *kernel.Queue) {
	n := a.Rows * a.Columns
	q.Run("gemm_hopper_narrow", "gemm_hopper_narrow_scale"+kernel.Suffix(a.Type), kernel.Cover(n, 256, 256),
		a.Y, a.X, a.Factors, int64(n), a.Columns)
}

// MaxBlocks is the number of blocks of a [BlockDiagonal].
const MaxBlocks = 3

// BlockDiagonal fills the matrix Y with blocks along its diagonal and zeros elsewhere or, with Back, copies
// the blocks of Y to Blocks. Block i is [Rows[i], Columns[i]]. It is null if it has no columns; Y then has
// rows of zeros.
type BlockDiagonal struct {
	Y             gpu.Ptr
	Blocks        [MaxBlocks]gpu.Ptr
	Rows, Columns [MaxBlocks]int
	Size          int // bytes of an element: 2 or 4
	Back          bool
}

// Launch enqueues one kernel.
func (a BlockDiagonal) Launch(q *kernel.Queue) {
	var blocks, rows, columns kernel.Struct
	height, width := 0, 0
	for i, p := range a.Blocks {
		blocks, rows, columns = append(blocks, p), append(rows, a.Rows[i]), append(columns, a.Columns[i])
		height, width = height+a.Rows[i], width+a.Columns[i]
	}

	name := "gemm_hopper_narrow_blocks"
	if a.Back {
		name += "_back"
	}
	n := height * width
	q.Run("gemm_hopper_narrow", fmt.Sprintf("%s_%d", name, a.Size), kernel.Cover(n, 256, 256),
		slices.Concat(blocks, rows, columns, kernel.Struct{n, width}), a.Y)
}

// NarrowProducts computes V = Scale·X·W and DW = Xᵀ·U, where W and U have few columns, in one pass over X.
// X is [Rows, Columns], W and DW are [Columns, Narrow], and U and V are [Rows, Narrow]. If Scaled is not
// null, it receives V with each row multiplied by its entry in Factors, float32 [Rows].
type NarrowProducts struct {
	V, DW, X, W, U, Workspace gpu.Ptr
	Scaled, Factors           gpu.Ptr
	Rows, Columns, Narrow     int
	Scale                     float64
	Type, DWType              gpu.DType // DWType is Float32 or BFloat16
	Variant                   kernel.Variant
}

// The shape of the kernels that compute both products: the stages, and the sums of a row of a block.
const bothStages, bothSums = 8, 512

// width returns the number of narrow columns of the compiled kernel.
func (a NarrowProducts) width() int {
	if a.Narrow <= 32 {
		return 32
	}
	return 64
}

// Variants returns the variants that accept the launch if all addresses are multiples of 16. Hopper has
// one for 2-byte types if Columns and Narrow are multiples of 8, and Narrow is at most 64.
func (a NarrowProducts) Variants(k *kernel.Set) []kernel.Variant {
	return onHopper(k, narrow, a.Type.Size() == 2 && a.Columns%8 == 0 && a.Narrow%8 == 0 && a.Narrow <= 64 &&
		(a.DWType == gpu.Float32 || a.DWType == gpu.BFloat16))
}

// parts returns the number of parts into which the columns are divided, the number of parts of rows, and
// the rows of such a part.
func (a NarrowProducts) parts(d gpu.DeviceInfo) (columns, rows, step int) {
	columns = kernel.CeilDiv(a.Columns, bothSums/a.width()*narrowSide)
	steps := kernel.CeilDiv(a.Rows, narrowSide)
	each := kernel.CeilDiv(steps, max(1, min(steps, d.SMs/columns)))
	return columns, kernel.CeilDiv(steps, each), each * narrowSide
}

// workspace divides the workspace.
func (a NarrowProducts) workspace(d gpu.DeviceInfo) (v, dw, end gpu.Ptr) {
	columns, rows, _ := a.parts(d)
	c := kernel.Carve{At: a.Workspace}
	v = c.Take(4 * columns * a.Rows * a.Narrow)
	dw = c.Take(4 * rows * a.Columns * a.Narrow)
	return v, dw, c.At
}

// WorkspaceBytes implements [kernel.Workspaced].
func (a NarrowProducts) WorkspaceBytes(d gpu.DeviceInfo) int {
	a.Workspace = 0
	_, _, end := a.workspace(d)
	return int(end)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *NarrowProducts) WorkspaceField() *gpu.Ptr { return &a.Workspace }

// Launch enqueues three kernels.
func (a NarrowProducts) Launch(q *kernel.Queue) {
	columns, rows, step := a.parts(q.Info)
	v, dw, _ := a.workspace(q.Info)
	width := a.width()
	c := kernel.Grid(columns, rows, 384, 1)
	c.Shared = (bothStages+bothSums/width+2)*narrowSide*narrowSide*2 + 4*narrowSide*width + 16*bothStages + 40
	q.Run("gemm_hopper_narrow", fmt.Sprintf("gemm_hopper_narrow_both_%d%s", width, kernel.Suffix(a.Type)), c,
		kernel.Struct{v, dw, a.Rows, a.Columns, a.Narrow, step}, panels(q, a.X, a.Rows, a.Columns, a.Type),
		panels(q, a.W, a.Columns, a.Narrow, a.Type), panels(q, a.U, a.Rows, a.Narrow, a.Type))
	n := a.Rows * a.Narrow
	q.Run("gemm_hopper_narrow", "gemm_hopper_narrow_sum_rows"+kernel.Suffix(a.Type), kernel.Cover(n, 256, 256),
		a.V, a.Scaled, v, a.Factors, int64(n), columns, a.Narrow, a.Scale)
	q.Run("gemm_hopper_narrow", "gemm_hopper_narrow_sum"+kernel.Suffix(a.DWType),
		kernel.Cover(a.Columns*a.Narrow, 256, 256), a.DW, dw, gpu.Ptr(0), rows, a.Columns, a.Narrow, false)
}

// Tuning implements [kernel.Tuned].
func (a NarrowProducts) Tuning() (op, shape string) {
	return "NarrowProducts", fmt.Sprintf("%dx%dx%d %v %v", a.Rows, a.Columns, a.Narrow, a.Type, a.DWType) +
		kernel.With(a.Scaled != 0, "and scaled")
}

// SetVariant sets the variant chosen by tuning.
func (a *NarrowProducts) SetVariant(w kernel.Variant) { a.Variant = w }
