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
	if _, err := kernel.Suffix("Quantize", a.Type); err != nil {
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
		shape = BestShape(a.D, a.Type)
	}
	return Quantize(k, s, a, shape)
}

// Quantize has blocks of a shape, or for none takes the kernel for any row.
func Quantize(k *kernel.Set, s gpu.Stream, a Rows, shape HeldShape) error {
	suf, err := kernel.Suffix("Quantize", a.Type)
	if err != nil {
		return err
	}
	l := kernel.Args().Ptr(a.Y).Ptr(a.Scale).Ptr(a.X)
	if shape == (HeldShape{}) {
		l.Int32(a.D).Int64(int64(a.XStride))
		return k.Enqueue(s, "quantize", "quantize_any"+suf,
			kernel.Line(a.Rows, kernel.RowThreads(a.D)), l)
	}
	l.Int64(int64(a.Rows)).Int32(a.D).Int64(int64(a.XStride))
	return k.Enqueue(s, "quantize", fmt.Sprint("quantize_held", shape.Packs, suf),
		shape.Over(a.Rows), l)
}

// HeldShape is how the threads of a block hold rows in registers: packs of 16 bytes a thread,
// threads across a row, and rows.
type HeldShape struct{ Packs, Across, Rows int }

// HeldShapes lists the shapes for rows of d elements, which are whole packs, the fastest first: one
// pack a thread is for short rows, as all threads of a row compute its scale, and four for long
// ones.
func HeldShapes(d int, t gpu.DType) (shapes []HeldShape) {
	for _, packs := range []int{2, 1, 4} {
		across := kernel.CeilDiv(d, 32*packs*kernel.Vector(t)) * 32
		// too few threads, or more packs than there are
		if across > HeldThreads || packs > 1 && d <= 32*kernel.Vector(t)*packs/2 {
			continue
		}
		shapes = append(shapes, HeldShape{packs, across, max(1, 128/across)})
	}
	return shapes
}

// BestShape is the first of the shapes, or none where rows are too long.
func BestShape(d int, t gpu.DType) HeldShape {
	if shapes := HeldShapes(d, t); len(shapes) > 0 {
		return shapes[0]
	}
	return HeldShape{}
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

// The columns of a block that looks for the largest, those and the rows of a tile that is turned
// round, and the threads of either: as in quantize.cu.
const largestColumns, tileColumns, tileRows, columnThreads = 256, 64, 128, 256

// columnSections is the parts of the rows of which the largest are found at once: two blocks a
// multiprocessor, of at least 32 rows.
func columnSections(k *kernel.Set, rows, d int) int {
	return max(1, min(32, kernel.CeilDiv(rows, 32),
		2*k.Info.SMs/max(1, kernel.CeilDiv(d, largestColumns))))
}

// QuantizeColumnsWorkspace is the bytes of workspace that [QuantizeColumns] takes.
func QuantizeColumnsWorkspace(k *kernel.Set, rows, d int) int {
	return 4 * d * columnSections(k, rows, d)
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
	return QuantizeColumnsWorkspace(kernel.Sized(d), a.Rows, a.D)
}

// HeldThreads is the most threads of a block that holds rows in registers.
const HeldThreads = 512
