package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/driver"
)

// float8 is SiLUMul where rows are stored as float8 too.
func (a SiLUMul) float8(k *Kernels, s driver.Stream) error {
	if empty, err := checkGate("SiLUMul", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	var shapes []heldShape
	if packed(a.Type, a.F, a.H, a.A, a.B) && a.Stride%vector(a.Type) == 0 && float8Packs(a.Type, a.H8) {
		shapes = heldShapes(a.F, a.Type)
	}
	return k.siluMulFloat8(s, a, shapes)
}

// siluMulFloat8 takes the first of the shapes, or the kernel for any row.
func (k *Kernels) siluMulFloat8(s driver.Stream, a SiLUMul, shapes []heldShape) error {
	suf, err := suffix("SiLUMul", a.Type)
	if err != nil {
		return err
	}
	l := args().Ptr(a.H8).Ptr(a.Scale8).Ptr(a.H).Ptr(a.A).Ptr(a.B)
	if len(shapes) == 0 {
		l.Int32(a.F).Int64(int64(a.Stride))
		return k.launch(s, "quantize", "silu_mul_any"+suf, line(a.Rows, rowThreads(a.F)), l)
	}
	l.Int64(int64(a.Rows)).Int32(a.F).Int64(int64(a.Stride))
	return k.launch(s, "quantize", fmt.Sprint("silu_mul_held", shapes[0].packs, suf), shapes[0].over(a.Rows), l)
}

// float8 is SiLUMulBackward where rows are stored as float8 too.
func (a SiLUMulBackward) float8(k *Kernels, s driver.Stream) error {
	if empty, err := checkGate("SiLUMulBackward", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	if a.DB != a.DA.Offset(a.F*a.Type.Size()) || a.GradStride < 2*a.F {
		return fmt.Errorf("kernels.SiLUMulBackward: DB is %d bytes behind DA, of %d elements a row; for DAB8 they must lie side by side, "+
			"%d bytes apart in rows of %d elements", int64(a.DB)-int64(a.DA), a.GradStride, a.F*a.Type.Size(), 2*a.F)
	}
	v := vector(a.Type)
	var shapes []heldShape
	if packed(a.Type, a.F, a.H, a.DA, a.DH, a.A, a.B) && a.Stride%v == 0 && a.GradStride%v == 0 && float8Packs(a.Type, a.DAB8) {
		shapes = heldShapes(a.F, a.Type)
	}
	return k.siluMulBackwardFloat8(s, a, shapes)
}

// siluMulBackwardFloat8 takes the first of the shapes, or launches two kernels.
func (k *Kernels) siluMulBackwardFloat8(s driver.Stream, a SiLUMulBackward, shapes []heldShape) error {
	if len(shapes) == 0 {
		rows := Quantize{Y: a.DAB8, Scale: a.Scale8, X: a.DA, Rows: a.Rows, D: 2 * a.F, XStride: a.GradStride, Type: a.Type}
		a.DAB8, a.Scale8 = 0, 0
		if err := k.SiLUMulBackward(s, a); err != nil {
			return err
		}
		return k.Quantize(s, rows)
	}
	suf, err := suffix("SiLUMulBackward", a.Type)
	if err != nil {
		return err
	}
	l := args().Ptr(a.DAB8).Ptr(a.Scale8).Ptr(a.H).Ptr(a.DA).Ptr(a.DB).Ptr(a.DH).Ptr(a.A).Ptr(a.B)
	l.Int64(int64(a.Rows)).Int32(a.F).Int64(int64(a.Stride)).Int64(int64(a.GradStride))
	return k.launch(s, "quantize", fmt.Sprint("silu_mul_backward_held", shapes[0].packs, suf), shapes[0].over(a.Rows), l)
}

// checkGate refuses sizes that no kernel takes, and sets a stride of 0 to what it means.
func checkGate(op string, rows, f int, stride *int) (empty bool, err error) {
	if empty, err := checkInts(op, rows, 2*f); empty || err != nil {
		return empty, err
	}
	if *stride == 0 {
		*stride = f
	}
	_, err = checkSizes(op, *stride)
	return false, err
}
