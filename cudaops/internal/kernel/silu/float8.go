package silu

import (
	"errors"
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// float8 is Mul where rows are stored as float8 too.
func (a Mul) float8(k *kernel.Set, s gpu.Stream) error {
	if empty, err := checkGate("SiLUMul", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	if a.GELU {
		if a.H == 0 {
			return errors.New("kernels.SiLUMul: H is null, want memory: GELU forms it before " +
				"float8")
		}
		rows := quantize.Rows{Y: a.H8, Scale: a.Scale8, X: a.H, Rows: a.Rows, D: a.F,
			XStride: a.F, Type: a.Type}
		a.H8, a.Scale8 = 0, 0
		if err := a.Launch(k, s); err != nil {
			return err
		}
		return rows.Launch(k, s)
	}
	suf, err := kernel.Suffix("SiLUMul", a.Type)
	if err != nil {
		return err
	}
	var shape quantize.HeldShape
	if kernel.Packed(a.Type, a.F, a.H, a.A, a.B) && a.Stride%kernel.Vector(a.Type) == 0 &&
		quantize.Float8Packs(a.Type, a.H8) {
		shape = quantize.BestShape(a.F, a.Type, quantize.RowPacks...)
	}
	return shape.Enqueue(k, s, "silu_mul", suf, a.Rows, a.F,
		kernel.Args().Ptr(a.H8).Ptr(a.Scale8).Ptr(a.H).Ptr(a.A).Ptr(a.B), a.Stride)
}

// float8 is MulBackward where rows are stored as float8 too.
func (a MulBackward) float8(k *kernel.Set, s gpu.Stream) error {
	if empty, err := checkGate("SiLUMulBackward", a.Rows, a.F, &a.Stride); empty || err != nil {
		return err
	}
	if a.DB != a.DA.Offset(a.F*a.Type.Size()) || a.GradStride < 2*a.F {
		return fmt.Errorf("kernels.SiLUMulBackward: DB is %d bytes behind DA, of %d elements a "+
			"row; for DAB8 they must lie side by side, %d bytes apart in rows of %d "+
			"elements", int64(a.DB)-int64(a.DA), a.GradStride,
			a.F*a.Type.Size(), 2*a.F)
	}
	v := kernel.Vector(a.Type)
	var shape quantize.HeldShape
	if !a.GELU && kernel.Packed(a.Type, a.F, a.H, a.DA, a.DH, a.A, a.B) && a.Stride%v == 0 &&
		a.GradStride%v == 0 && quantize.Float8Packs(a.Type, a.DAB8) {
		shape = quantize.BestShape(a.F, a.Type, quantize.RowPacks...)
	}
	if shape.Packs == 0 {
		rows := quantize.Rows{Y: a.DAB8, Scale: a.Scale8, X: a.DA, Rows: a.Rows, D: 2 * a.F,
			XStride: a.GradStride, Type: a.Type}
		a.DAB8, a.Scale8 = 0, 0
		if err := a.Launch(k, s); err != nil {
			return err
		}
		return rows.Launch(k, s)
	}
	suf, err := kernel.Suffix("SiLUMulBackward", a.Type)
	if err != nil {
		return err
	}
	return shape.Enqueue(k, s, "silu_mul_backward", suf, a.Rows, a.F,
		kernel.Args().Ptr(a.DAB8).Ptr(a.Scale8).Ptr(a.H).Ptr(a.DA).Ptr(a.DB).Ptr(a.DH).Ptr(a.A).
			Ptr(a.B), a.Stride, a.GradStride)
}

// checkGate refuses sizes that no kernel takes, and sets a stride of 0 to what it means.
func checkGate(op string, rows, f int, stride *int) (empty bool, err error) {
	if empty, err := kernel.CheckInts(op, rows, 2*f); empty || err != nil {
		return empty, err
	}
	if *stride == 0 {
		*stride = f
	}
	_, err = kernel.CheckSizes(op, *stride)
	return false, err
}
