// Package quantize has the kernels that round matrices to float8 with a scale for each row ([Rows])
// or column ([Columns]), and all weights of a model at once ([Weights]).
package quantize

import (
	"cmp"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Rows stores each row of X [Rows, D] as float8 E4M3 with a scale. The largest number in E4M3 is
// 448:
//
//	Scale[r] = max_c |X[r, c]| / 448,  Y[r, c] = X[r, c]/Scale[r]
//
// Y is computed by multiplying with the inverse of Scale[r] and rounded to nearest even. X has type
// Type, and Scale [Rows] is float32. XStride is the number of elements from one row of X to the
// next; 0 means D.
//
// A row of zeros has scale 1, and no scale is less than 2⁻¹²⁶, so that its inverse is finite. If a
// row has a NaN, its Scale is NaN. If it has an infinity, its Scale is infinite and that element of
// Y is NaN. A product with either is NaN.
type Rows struct {
	Y, Scale         gpu.Ptr
	X                gpu.Ptr
	Rows, D, XStride int
	Type             gpu.DType
}

// Launch enqueues one kernel.
func (a Rows) Launch(q *kernel.Queue) {
	a.XStride = cmp.Or(a.XStride, a.D)
	shape := HeldRows(a.Type, a.D, a.Y, a.X)
	if a.XStride%kernel.Vector(a.Type) != 0 {
		shape = HeldShape{}
	}
	shape.Run(q, "quantize", a.Rows, a.D, a.Type, []any{a.Y, a.Scale, a.X}, a.XStride)
}

// StoreRows enqueues [Rows] for x [rows, d], unless y is null.
func StoreRows(q *kernel.Queue, y, scale, x gpu.Ptr, rows, d int, t gpu.DType) {
	if y != 0 {
		Rows{Y: y, Scale: scale, X: x, Rows: rows, D: d, Type: t}.Launch(q)
	}
}

// HeldRows returns the fastest shape for rows of d elements at the given addresses that are rounded
// to float8. It returns the zero shape if rows are not aligned or too long.
func HeldRows(t gpu.DType, d int, float8 gpu.Ptr, ps ...gpu.Ptr) (h HeldShape) {
	if !Packed(t, d, float8, ps...) {
		return h
	}
	return BestShape(d, t, 2, 1, 4)
}

// HeldShape describes how the threads of a block hold rows in registers: the packs of 16 bytes per
// thread, the threads across a row, and the rows per block.
type HeldShape struct{ Packs, Across, Rows int }

// HeldThreads is the largest number of threads in a block that holds rows in registers.
const HeldThreads = 512

// BestShape returns the fastest shape for rows of d elements, which must be whole packs. The caller lists
// numbers of packs per thread, the fastest first, and BestShape uses the first that suits rows of this
// length. It returns the zero shape if none suits them, because they are too long.
//
// One pack suits short rows, because many threads then share the computation of a row's scale. Four packs
// suit long rows.
func BestShape(d int, t gpu.DType, packs ...int) HeldShape {
	const warp = 32
	const smallBlock = 128 // threads; several rows share a block if a row has fewer

	for _, n := range packs {
		warpElements := warp * n * kernel.Vector(t)
		across := kernel.CeilDiv(d, warpElements) * warp
		if across > HeldThreads {
			continue // the row is too long for n packs per thread
		}
		if n > 1 && d <= warpElements/2 {
			continue // n packs per thread would leave half of a warp without elements
		}

		return HeldShape{n, across, max(1, smallBlock/across)}
	}

	return HeldShape{}
}

// Run enqueues the kernel for the shape or, for the zero shape, the kernel for arbitrary rows.
// strides are the row strides, in elements, of arrays that need them.
func (h HeldShape) Run(q *kernel.Queue, name string, rows, d int, t gpu.DType, args []any,
	strides ...int) {
	variant, config := "_any", kernel.Line(rows, kernel.RowThreads(d)) // one block per row
	if h.Packs > 0 {
		variant, config = fmt.Sprint("_held", h.Packs), h.Over(rows)
		args = append(args, int64(rows)) // the last block may have fewer rows
	}

	args = append(args, d)
	for _, stride := range strides {
		args = append(args, int64(stride))
	}
	q.Run("quantize", name+variant+kernel.Suffix(t), config, args...)
}

// Over returns the configuration of a launch over the given number of rows.
func (h HeldShape) Over(rows int) gpu.LaunchConfig {
	return kernel.Grid(kernel.CeilDiv(rows, h.Rows), 1, h.Across, h.Rows)
}

// Packed reports whether rows of d elements at the given addresses can be moved 16 bytes at a time,
// and the same number of elements stored at once as float8.
func Packed(t gpu.DType, d int, float8 gpu.Ptr, ps ...gpu.Ptr) bool {
	return kernel.Packed(t, d, ps...) && float8%gpu.Ptr(kernel.Vector(t)) == 0
}

// Columns stores each column of X [Rows, D] as float8 E4M3 with a scale, like [Rows] does for rows,
// and transposes the result:
//
//	Scale[c] = max_r |X[r, c]| / 448,  Y[c, r] = X[r, c]/Scale[c]
//
// Y is [D, Rows] and Scale [D]. Workspace has WorkspaceBytes bytes.
type Columns struct {
	Y, Scale, X, Workspace gpu.Ptr
	Rows, D                int
	Type                   gpu.DType
}

// Constants of quantize.cu: the columns of a block that searches for the largest elements, the
// columns and rows of a tile that is transposed, and the threads of both.
const largestColumns, tileColumns, tileRows, columnThreads = 256, 64, 128, 256

// sections returns the number of parts into which the rows are divided to search for the largest
// elements. It aims at two blocks per multiprocessor with at least 32 rows each, but at most at 32 parts.
func (a Columns) sections(d gpu.DeviceInfo) int {
	blocksAcross := kernel.CeilDiv(a.D, largestColumns)
	return max(1, min(32, kernel.CeilDiv(a.Rows, 32), 2*d.SMs/blocksAcross))
}

// Launch enqueues two kernels.
func (a Columns) Launch(q *kernel.Queue) {
	// The first kernel stores the largest element of each column and section in the workspace.
	sections := a.sections(q.Info)
	c := kernel.Grid(kernel.CeilDiv(a.D, largestColumns), sections, columnThreads, 1)
	q.Run("quantize", "quantize_columns_largest"+kernel.Suffix(a.Type), c, a.Workspace, a.X, a.Rows,
		a.D)

	// The second kernel may start early, because it waits for the first before it reads the workspace.
	c.Grid = gpu.Dim{X: kernel.CeilDiv(a.D, tileColumns), Y: kernel.CeilDiv(a.Rows, tileRows)}
	c.Overlap = true
	q.Run("quantize", "quantize_columns"+kernel.Suffix(a.Type), c, a.Y, a.Scale, a.X, a.Workspace,
		sections, a.Rows, a.D)
}

// WorkspaceBytes returns the size of Workspace.
func (a Columns) WorkspaceBytes(d gpu.DeviceInfo) int {
	return 4 * a.D * a.sections(d)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *Columns) WorkspaceField() *gpu.Ptr { return &a.Workspace }
