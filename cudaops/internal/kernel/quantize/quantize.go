package quantize

import (
	"cmp"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// Rows stores each row of X [Rows, D] as float8 E4M3, whose largest number is 448, with a scale:
//
//	Scale[r] = max_c |X[r, c]| / 448,  Y[r, c] = X[r, c]/Scale[r]
//
// rounded to nearest, ties to even; the quotient is X[r, c] times the inverse of Scale[r]. XStride
// is the elements from one row of X to the next, 0 means D. A row of zeros has scale 1, and no
// scale is below 2⁻¹²⁶, whose inverse is still a number. If a row has NaN its Scale is NaN. If it
// has an infinity the Scale is infinite and Y is NaN there: a product of either is NaN. Scale
// [Rows] is float32, X of Type.
type Rows struct {
	Y, Scale         gpu.Ptr
	X                gpu.Ptr
	Rows, D, XStride int
	Type             gpu.DType
}

// Launch launches one kernel.
func (a Rows) Launch(q *kernel.Queue) {
	a.XStride = cmp.Or(a.XStride, a.D)
	shape := HeldRows(a.Type, a.D, a.Y, a.X)
	if a.XStride%kernel.Vector(a.Type) != 0 {
		shape = HeldShape{}
	}
	shape.Run(q, "quantize", a.Rows, a.D, a.Type, []any{a.Y, a.Scale, a.X}, a.XStride)
}

// Beside enqueues [Rows] of x [rows, d], where y is not null.
func Beside(q *kernel.Queue, y, scale, x gpu.Ptr, rows, d int, t gpu.DType) {
	if y != 0 {
		Rows{Y: y, Scale: scale, X: x, Rows: rows, D: d, Type: t}.Launch(q)
	}
}

// HeldRows is the fastest shape for rows of d elements at some addresses that are rounded to
// float8: none where they are not aligned or too long.
func HeldRows(t gpu.DType, d int, float8 gpu.Ptr, ps ...gpu.Ptr) (h HeldShape) {
	if !Packed(t, d, float8, ps...) {
		return h
	}
	return BestShape(d, t, 2, 1, 4)
}

// HeldShape is how the threads of a block hold rows in registers: packs of 16 bytes a thread,
// threads across a row, and rows.
type HeldShape struct{ Packs, Across, Rows int }

// BestShape is the fastest shape for rows of d elements, which are whole packs. It is of the first
// of some numbers of packs a thread that fits, none where rows are too long. One pack is for short
// rows, as all threads of a row compute its scale, and four for long ones.
func BestShape(d int, t gpu.DType, packs ...int) HeldShape {
	for _, n := range packs {
		across := kernel.CeilDiv(d, 32*n*kernel.Vector(t)) * 32
		// else too few threads, or more packs than there are
		if across <= HeldThreads && (n == 1 || d > 32*kernel.Vector(t)*n/2) {
			return HeldShape{n, across, max(1, 128/across)}
		}
	}
	return HeldShape{}
}

// Run enqueues a kernel over rows that may be held in registers: that of a shape, or for no
// shape the one for any row. Strides are the elements from one row to the next in some arrays.
func (h HeldShape) Run(q *kernel.Queue, name string, rows, d int, t gpu.DType, args []any,
	strides ...int) {
	variant, c := "_any", kernel.Line(rows, kernel.RowThreads(d))
	if h.Packs > 0 {
		variant, c = fmt.Sprint("_held", h.Packs), h.Over(rows)
		args = append(args, int64(rows))
	}
	args = append(args, d)
	for _, stride := range strides {
		args = append(args, int64(stride))
	}
	q.Run("quantize", name+variant+kernel.Suffix(t), c, args...)
}

func (h HeldShape) Over(rows int) gpu.LaunchConfig {
	return kernel.Grid(kernel.CeilDiv(rows, h.Rows), 1, h.Across, h.Rows)
}

// Packed reports whether rows of d elements at some addresses can be moved 16 bytes at a time, and
// as many elements be stored at once as float8.
func Packed(t gpu.DType, d int, float8 gpu.Ptr, ps ...gpu.Ptr) bool {
	return kernel.Packed(t, d, ps...) && float8%gpu.Ptr(kernel.Vector(t)) == 0
}

// Columns stores each column of X [Rows, D] as float8 E4M3 with a scale, as [Rows] does rows, and
// turned round:
//
//	Scale[c] = max_r |X[r, c]| / 448,  Y[c, r] = X[r, c]/Scale[c]
//
// Y is [D, Rows] and Scale [D]. Workspace is memory of WorkspaceBytes.
type Columns struct {
	Y, Scale, X, Workspace gpu.Ptr
	Rows, D                int
	Type                   gpu.DType
}

// As in quantize.cu: the columns of a block that looks for the largest. Of a tile that is turned
// round: columns and rows. Then the threads of either.
const largestColumns, tileColumns, tileRows, columnThreads = 256, 64, 128, 256

// sections is the parts of the rows of which the largest are found at once: two blocks a
// multiprocessor, of at least 32 rows.
func (a Columns) sections(d gpu.DeviceInfo) int {
	return max(1, min(32, kernel.CeilDiv(a.Rows, 32), 2*d.SMs/kernel.CeilDiv(a.D, largestColumns)))
}

// Launch launches two kernels.
func (a Columns) Launch(q *kernel.Queue) {
	sections := a.sections(q.Info)
	c := kernel.Grid(kernel.CeilDiv(a.D, largestColumns), sections, columnThreads, 1)
	q.Run("quantize", "quantize_columns_largest"+kernel.Suffix(a.Type), c, a.Workspace, a.X, a.Rows,
		a.D)
	c.Grid = gpu.Dim{X: kernel.CeilDiv(a.D, tileColumns), Y: kernel.CeilDiv(a.Rows, tileRows)}
	c.Overlap = true
	q.Run("quantize", "quantize_columns"+kernel.Suffix(a.Type), c, a.Y, a.Scale, a.X, a.Workspace,
		sections, a.Rows, a.D)
}

// WorkspaceBytes is the size of Workspace.
func (a Columns) WorkspaceBytes(d gpu.DeviceInfo) int {
	return 4 * a.D * a.sections(d)
}

// HeldThreads is the most threads of a block that holds rows in registers.
const HeldThreads = 512

// WorkspaceField implements [kernel.Workspaced].
func (a *Columns) WorkspaceField() *gpu.Ptr { return &a.Workspace }
