// Package reduce has the kernels that compute sums and maxima over rows, columns or whole arrays in
// a fixed order.
package reduce

import (
	"cmp"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Reduction is the operation of a Reduce.
type Reduction string

// Max returns NaN if there is a NaN.
const (
	Sum Reduction = "sum"
	Max Reduction = "max"
)

// Reduce reduces the middle dimension of X [Outer, N, Inner] to Y [Outer, Inner] and multiplies by
// Scale. Inner = 1 reduces the rows of a matrix, Outer = 1 its columns, and both reduce the whole
// matrix. A mean is a sum with a Scale of 1/N; a Scale of 0 counts as 1. The types are equal, or
// one is float32. Workspace has WorkspaceBytes bytes.
type Reduce struct {
	Op              Reduction
	Y, X, Workspace gpu.Ptr
	Outer, N, Inner int
	Scale           float64
	YType, XType    gpu.DType
}

// rowPart is the least number of elements of a row for a block, when few long rows have to fill the
// GPU. When reducing columns, columnPart is the least number of rows for a block, and columnRun,
// which must match kRun in reduce.cu, the number of rows for a block that starts late.
const (
	rowPart    = 1 << 15
	columnPart = 64
	columnRun  = 128
	rowUnroll  = 2 // accesses per thread; must match kRowUnroll in reduce.cu
)

// parts returns the number of parts into which the middle dimension is divided, and how many of
// them are late blocks.
//
// Blocks that reduce rows should fill the GPU twice, at eight blocks per multiprocessor. For
// columns, four blocks per multiprocessor have as much data in flight, and produce fewer results to
// combine. If there are enough rows, late blocks take a fifth of the rows, to even out the speed of
// multiprocessors.
func (a Reduce) parts(d gpu.DeviceInfo) (parts, late int) {
	if a.Inner == 1 {
		return max(1, min(kernel.CeilDiv(a.N, rowPart), kernel.CeilDiv(2*8*d.SMs, a.Outer))), 0
	}
	blocks := a.Outer * kernel.CeilDiv(a.Inner, 32*kernel.Vector(a.XType))
	parts = max(1, min(kernel.CeilDiv(a.N, columnPart), kernel.CeilDiv(4*d.SMs, blocks)))
	if parts > 1 && a.N >= 5*columnRun*parts {
		late = min(a.N/5/columnRun, 2*parts)
	}
	return parts + late, late
}

// WorkspaceBytes returns the size of Workspace, which may be 0.
func (a Reduce) WorkspaceBytes(d gpu.DeviceInfo) int {
	if a.Outer < 1 || a.N < 1 || a.Inner < 1 {
		return 0
	}
	if p, _ := a.parts(d); p > 1 {
		return 4 * a.Outer * p * a.Inner
	}
	return 0
}

// Launch enqueues one kernel, or two for a wide reduction. Reducing zero elements to a number is an
// error.
func (a Reduce) Launch(q *kernel.Queue) {
	switch {
	case a.Outer == 0 || a.Inner == 0:
		return
	case a.N == 0:
		q.Err = fmt.Errorf("kernels.Reduce: nothing to reduce, [%d, 0, %d]", a.Outer, a.Inner)
		return
	}

	a.Scale = cmp.Or(a.Scale, 1)
	parts, late := a.parts(q.Info)
	if parts > 1 {
		first := a
		first.Y, first.YType, first.Scale = a.Workspace, gpu.Float32, 1
		first.run(q, parts, late)
		a.X, a.XType, a.N = a.Workspace, gpu.Float32, parts
	}

	a.run(q, 1, 0)
}

// run enqueues one step. A step that reads the results of another one starts while that one ends.
func (a Reduce) run(q *kernel.Queue, parts, late int) {
	name, blocks, n := kernel.Suffix(a.YType, a.XType), a.Outer*parts, kernel.Vector(a.XType)
	if a.Inner == 1 {
		perPart := kernel.CeilDiv(kernel.CeilDiv(a.N, parts), n) * n
		c := kernel.Line(blocks, min(256, kernel.CeilDiv(perPart, rowUnroll*32*n)*32))
		c.Overlap = a.X == a.Workspace
		q.Run("reduce", string(a.Op)+"_rows"+name, c, a.Y, a.X, a.Scale, int64(a.N), parts,
			int64(perPart))
		return
	}

	variant := "_packs"
	if !kernel.Packed(a.XType, a.Inner, a.X) {
		variant, n = "_columns", 1
	}

	tiles := kernel.CeilDiv(a.Inner, 32*n)
	c := kernel.Grid(blocks*tiles, 1, 32, 8)
	c.Overlap = a.X == a.Workspace
	q.Run("reduce", string(a.Op)+variant+name, c, a.Y, a.X, a.Scale, int64(a.N), int64(a.Inner),
		parts, late, tiles)
}

// WorkspaceField implements [kernel.Workspaced].
func (a *Reduce) WorkspaceField() *gpu.Ptr { return &a.Workspace }
