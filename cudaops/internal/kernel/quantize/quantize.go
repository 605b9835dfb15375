package quantize

import (
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
func (a Rows) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("Quantize", a.Type)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckInts("Quantize", a.Rows, a.D); empty || err != nil {
		return err
	}
	if _, err := kernel.CheckSizes("Quantize", a.XStride); err != nil {
		return err
	}
	if a.XStride == 0 {
		a.XStride = a.D
	}
	var shape HeldShape
	if kernel.Packed(a.Type, a.D, a.X) && a.XStride%kernel.Vector(a.Type) == 0 &&
		Float8Packs(a.Type, a.Y) {
		shape = BestShape(a.D, a.Type, RowPacks...)
	}
	return shape.Enqueue(k, s, "quantize", suf, a.Rows, a.D,
		kernel.Args().Ptr(a.Y).Ptr(a.Scale).Ptr(a.X), a.XStride)
}

// RowPacks are the packs a thread that rows are rounded with, the fastest first.
var RowPacks = []int{2, 1, 4}

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

// Enqueue launches a kernel over rows that may be held in registers: that of a shape, or for no
// shape the one for any row. Strides are the elements from one row to the next in some arrays.
func (h HeldShape) Enqueue(k *kernel.Set, s gpu.Stream, name, suf string, rows, d int, l *gpu.Args,
	strides ...int) error {
	c := kernel.Line(rows, kernel.RowThreads(d))
	if h.Packs > 0 {
		c = h.Over(rows)
		l.Int64(int64(rows))
	}
	l.Int32(d)
	for _, stride := range strides {
		l.Int64(int64(stride))
	}
	if h.Packs == 0 {
		return k.Enqueue(s, "quantize", name+"_any"+suf, c, l)
	}
	return k.Enqueue(s, "quantize", fmt.Sprint(name, "_held", h.Packs, suf), c, l)
}

func (h HeldShape) Over(rows int) gpu.LaunchConfig {
	return gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(rows, h.Rows)},
		Block: gpu.Dim{X: h.Across, Y: h.Rows}}
}

// Float8Packs reports whether a pack of 16 bytes of a type can be stored at once as float8.
func Float8Packs(t gpu.DType, p gpu.Ptr) bool { return p%gpu.Ptr(kernel.Vector(t)) == 0 }

// Float8Rows reports whether an op is to store rows as float8 too, and refuses what it cannot.
func Float8Rows(op string, t gpu.DType, y, scale gpu.Ptr) (bool, error) {
	switch {
	case y == 0 && scale == 0:
		return false, nil
	case y == 0 || scale == 0:
		return false,
			fmt.Errorf("kernels.%s: of float8 rows and their scales one is null, want both or "+
				"neither", op)
	case t.Size() != 2:
		return false,
			fmt.Errorf("kernels.%s: elements are of type %v, want float16 or bfloat16 where rows "+
				"are stored as float8 too", op, t)
	}
	return true, nil
}

// Columns stores each column of X [Rows, D] as float8 E4M3 with a scale, as [Rows] does rows, and
// turned round:
//
//	Scale[c] = max_r |X[r, c]| / 448,  Y[c, r] = X[r, c]/Scale[c]
//
// Y is [D, Rows] and Scale [D]. Workspace is memory of [QuantizeColumnsWorkspace] bytes.
type Columns struct {
	Y, Scale, X, Workspace gpu.Ptr
	Rows, D                int
	Type                   gpu.DType
}

// As in quantize.cu: the columns of a block that looks for the largest. Of a tile that is turned
// round: columns and rows. Then the threads of either.
const largestColumns, tileColumns, tileRows, columnThreads = 256, 64, 128, 256

// columnSections is the parts of the rows of which the largest are found at once: two blocks a
// multiprocessor, of at least 32 rows.
func columnSections(k *kernel.Set, rows, d int) int {
	return max(1, min(32, kernel.CeilDiv(rows, 32),
		2*k.Info.SMs/max(1, kernel.CeilDiv(d, largestColumns))))
}

// Launch launches two kernels.
func (a Columns) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("QuantizeColumns", a.Type)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckInts("QuantizeColumns", a.Rows, a.D); empty || err != nil {
		return err
	}
	tiles := gpu.Dim{X: kernel.CeilDiv(a.D, tileColumns), Y: kernel.CeilDiv(a.Rows, tileRows)}
	if tiles.Y > 1<<16-1 {
		return fmt.Errorf("kernels.QuantizeColumns: %d rows, want at most %d",
			a.Rows, tileRows*(1<<16-1))
	}
	sections := columnSections(k, a.Rows, a.D)
	c := gpu.LaunchConfig{Grid: gpu.Dim{X: kernel.CeilDiv(a.D, largestColumns), Y: sections},
		Block: gpu.Dim{X: columnThreads}}
	l := kernel.Args().Ptr(a.Workspace).Ptr(a.X).Int32(a.Rows).Int32(a.D)
	if err := k.Enqueue(s, "quantize", "quantize_columns_largest"+suf, c, l); err != nil {
		return err
	}
	c = gpu.LaunchConfig{Grid: tiles, Block: gpu.Dim{X: columnThreads}, Overlap: k.Overlaps()}
	l = kernel.Args().Ptr(a.Y).Ptr(a.Scale).Ptr(a.X).Ptr(a.Workspace).Int32(
		sections).Int32(a.Rows).Int32(a.D)
	return k.Enqueue(s, "quantize", "quantize_columns"+suf, c, l)
}

// WorkspaceBytes is the size of Workspace.
func (a Columns) WorkspaceBytes(d gpu.DeviceInfo) int {
	return 4 * a.D * columnSections(kernel.Sized(d), a.Rows, a.D)
}

// HeldThreads is the most threads of a block that holds rows in registers.
const HeldThreads = 512
