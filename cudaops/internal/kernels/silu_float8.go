package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
)

// float8 is SiLUMul where rows are stored as float8 too.
func (a SiLUMul) float8(k *Kernels, s gpu.Stream) error {
	if empty, err := checkGate("SiLUMul", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	var shape heldShape
	if packed(a.Type, a.F, a.H, a.A, a.B) && a.Stride%vector(a.Type) == 0 && float8Packs(a.Type, a.H8) {
		shape = bestShape(a.F, a.Type)
	}
	return k.siluMulFloat8(s, a, shape)
}

// siluMulFloat8 has blocks of a shape, or for none takes the kernel for any row.
func (k *Kernels) siluMulFloat8(s gpu.Stream, a SiLUMul, shape heldShape) error {
	suf, err := suffix("SiLUMul", a.Type)
	if err != nil {
		return err
	}
	l := args().Ptr(a.H8).Ptr(a.Scale8).Ptr(a.H).Ptr(a.A).Ptr(a.B)
	if shape == (heldShape{}) {
		l.Int32(a.F).Int64(int64(a.Stride))
		return k.launch(s, "quantize", "silu_mul_any"+suf, line(a.Rows, rowThreads(a.F)), l)
	}
	l.Int64(int64(a.Rows)).Int32(a.F).Int64(int64(a.Stride))
	return k.launch(s, "quantize", fmt.Sprint("silu_mul_held", shape.packs, suf), shape.over(a.Rows), l)
}

// float8 is SiLUMulBackward where rows are stored as float8 too.
func (a SiLUMulBackward) float8(k *Kernels, s gpu.Stream) error {
	if empty, err := checkGate("SiLUMulBackward", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	if a.DB != a.DA.Offset(a.F*a.Type.Size()) || a.GradStride < 2*a.F {
		return fmt.Errorf("kernels.SiLUMulBackward: DB is %d bytes behind DA, of %d elements a row; for DAB8 they must lie side by side, "+
			"%d bytes apart in rows of %d elements", int64(a.DB)-int64(a.DA), a.GradStride, a.F*a.Type.Size(), 2*a.F)
	}
	v := vector(a.Type)
	var shape heldShape
	if packed(a.Type, a.F, a.H, a.DA, a.DH, a.A, a.B) && a.Stride%v == 0 && a.GradStride%v == 0 && float8Packs(a.Type, a.DAB8) {
		shape = bestShape(a.F, a.Type)
	}
	return k.siluMulBackwardFloat8(s, a, shape)
}

// siluMulBackwardFloat8 has blocks of a shape, or for none launches two kernels.
func (k *Kernels) siluMulBackwardFloat8(s gpu.Stream, a SiLUMulBackward, shape heldShape) error {
	if shape == (heldShape{}) {
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
	return k.launch(s, "quantize", fmt.Sprint("silu_mul_backward_held", shape.packs, suf), shape.over(a.Rows), l)
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
