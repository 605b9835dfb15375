package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// Quantize stores each row of X [Rows, D] as float8 E4M3, whose largest number is 448, with a scale:
//
//	Scale[r] = max_c |X[r, c]| / 448,  Y[r, c] = X[r, c]/Scale[r]
//
// rounded to nearest, ties to even; the quotient is X[r, c] times the inverse of Scale[r]. XStride is the elements from one row of
// X to the next, 0 means D. A row of zeros has scale 1, and no scale is below 2⁻¹²⁶, whose inverse is still a number. If a row has
// NaN its Scale is NaN; if it has an infinity the Scale is infinite and Y is NaN there: a product of either is NaN. Scale [Rows] is
// float32, X of Type.
type Quantize struct {
	Y, Scale         gpu.Ptr
	X                gpu.Ptr
	Rows, D, XStride int
	Type             gpu.DType
}

// Quantize launches one kernel.
func (k *Kernels) Quantize(s gpu.Stream, a Quantize) error {
	if _, err := suffix("Quantize", a.Type); err != nil {
		return err
	}
	if empty, err := checkInts("Quantize", a.Rows, a.D); empty || err != nil {
		return err
	}
	if _, err := checkSizes("Quantize", a.XStride); err != nil {
		return err
	}
	if a.XStride == 0 {
		a.XStride = a.D
	}
	var shape heldShape
	if packed(a.Type, a.D, a.X) && a.XStride%vector(a.Type) == 0 && float8Packs(a.Type, a.Y) {
		shape = bestShape(a.D, a.Type)
	}
	return k.quantize(s, a, shape)
}

// quantize has blocks of a shape, or for none takes the kernel for any row.
func (k *Kernels) quantize(s gpu.Stream, a Quantize, shape heldShape) error {
	suf, err := suffix("Quantize", a.Type)
	if err != nil {
		return err
	}
	l := args().Ptr(a.Y).Ptr(a.Scale).Ptr(a.X)
	if shape == (heldShape{}) {
		l.Int32(a.D).Int64(int64(a.XStride))
		return k.launch(s, "quantize", "quantize_any"+suf, line(a.Rows, rowThreads(a.D)), l)
	}
	l.Int64(int64(a.Rows)).Int32(a.D).Int64(int64(a.XStride))
	return k.launch(s, "quantize", fmt.Sprint("quantize_held", shape.packs, suf), shape.over(a.Rows), l)
}

// heldShape is how the threads of a block hold rows in registers: packs of 16 bytes a thread, threads across a row, and rows.
type heldShape struct{ packs, across, rows int }

// heldShapes lists the shapes for rows of d elements, which are whole packs, the fastest first: one pack a thread is for short rows,
// as all threads of a row compute its scale, and four for long ones.
func heldShapes(d int, t gpu.DType) (shapes []heldShape) {
	for _, packs := range []int{2, 1, 4} {
		across := ceilDiv(d, 32*packs*vector(t)) * 32
		if across > heldThreads || packs > 1 && d <= 32*vector(t)*packs/2 { // too few threads, or more packs than there are
			continue
		}
		shapes = append(shapes, heldShape{packs, across, max(1, 128/across)})
	}
	return shapes
}

// bestShape is the first of the shapes, or none where rows are too long.
func bestShape(d int, t gpu.DType) heldShape {
	if shapes := heldShapes(d, t); len(shapes) > 0 {
		return shapes[0]
	}
	return heldShape{}
}

func (h heldShape) over(rows int) gpu.LaunchConfig {
	return gpu.LaunchConfig{Grid: gpu.Dim{X: ceilDiv(rows, h.rows)}, Block: gpu.Dim{X: h.across, Y: h.rows}}
}

// float8Packs reports whether a pack of 16 bytes of a type can be stored at once as float8.
func float8Packs(t gpu.DType, p gpu.Ptr) bool { return p%gpu.Ptr(vector(t)) == 0 }

// float8Rows reports whether an op is to store rows as float8 too, and refuses what it cannot.
func float8Rows(op string, t gpu.DType, y, scale gpu.Ptr) (bool, error) {
	switch {
	case y == 0 && scale == 0:
		return false, nil
	case y == 0 || scale == 0:
		return false, fmt.Errorf("kernels.%s: of float8 rows and their scales one is null, want both or neither", op)
	case t.Size() != 2:
		return false, fmt.Errorf("kernels.%s: elements are of type %v, want float16 or bfloat16 where rows are stored as float8 too", op, t)
	}
	return true, nil
}

// QuantizeColumns stores each column of X [Rows, D] as float8 E4M3 with a scale, as [Quantize] does rows, and turned round:
//
//	Scale[c] = max_r |X[r, c]| / 448,  Y[c, r] = X[r, c]/Scale[c]
//
// Y is [D, Rows] and Scale [D]. Workspace is memory of [Kernels.QuantizeColumnsWorkspace] bytes.
type QuantizeColumns struct {
	Y, Scale, X, Workspace gpu.Ptr
	Rows, D                int
	Type                   gpu.DType
}

// The columns of a block that looks for the largest, those and the rows of a tile that is turned round, and the threads of either:
// as in quantize.cu.
const largestColumns, tileColumns, tileRows, columnThreads = 256, 64, 128, 256

// columnSections is the parts of the rows of which the largest are found at once: two blocks a multiprocessor, of at least 32 rows.
func (k *Kernels) columnSections(rows, d int) int {
	return max(1, min(32, ceilDiv(rows, 32), 2*k.info.SMs/max(1, ceilDiv(d, largestColumns))))
}

// QuantizeColumnsWorkspace is the bytes of workspace that [Kernels.QuantizeColumns] takes.
func (k *Kernels) QuantizeColumnsWorkspace(rows, d int) int { return 4 * d * k.columnSections(rows, d) }

// QuantizeColumns launches two kernels.
func (k *Kernels) QuantizeColumns(s gpu.Stream, a QuantizeColumns) error {
	suf, err := suffix("QuantizeColumns", a.Type)
	if err != nil {
		return err
	}
	if empty, err := checkInts("QuantizeColumns", a.Rows, a.D); empty || err != nil {
		return err
	}
	tiles := gpu.Dim{X: ceilDiv(a.D, tileColumns), Y: ceilDiv(a.Rows, tileRows)}
	if tiles.Y > 1<<16-1 {
		return fmt.Errorf("kernels.QuantizeColumns: %d rows, want at most %d", a.Rows, tileRows*(1<<16-1))
	}
	sections := k.columnSections(a.Rows, a.D)
	c := gpu.LaunchConfig{Grid: gpu.Dim{X: ceilDiv(a.D, largestColumns), Y: sections}, Block: gpu.Dim{X: columnThreads}}
	l := args().Ptr(a.Workspace).Ptr(a.X).Int32(a.Rows).Int32(a.D)
	if err := k.launch(s, "quantize", "quantize_columns_largest"+suf, c, l); err != nil {
		return err
	}
	c = gpu.LaunchConfig{Grid: tiles, Block: gpu.Dim{X: columnThreads}, Overlap: k.overlaps()}
	l = args().Ptr(a.Y).Ptr(a.Scale).Ptr(a.X).Ptr(a.Workspace).Int32(sections).Int32(a.Rows).Int32(a.D)
	return k.launch(s, "quantize", "quantize_columns"+suf, c, l)
}

// WorkspaceBytes is the size of Workspace.
func (a QuantizeColumns) WorkspaceBytes(d gpu.DeviceInfo) int {
	return sized(d).QuantizeColumnsWorkspace(a.Rows, a.D)
}

// heldThreads is the most threads of a block that holds rows in registers.
const heldThreads = 512
