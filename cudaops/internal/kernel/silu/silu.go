// Package silu has the kernels of the gates SiLU and GELU, and of their gradients.
package silu

import (
	"fmt"
	"math"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// Mul computes H = silu(A) ⊙ B over [Rows, F], where silu(a) = a·σ(a). With GELU it uses the tanh
// approximation of GELU instead. A and B are the halves of the rows of AB [Rows, 2·F].
//
// If H8 is not null, Mul also stores H, as rounded to Type, in H8 and Scale8 [Rows], like
// [quantize.Rows]. H may then be null, except with GELU. Type must be a 16-bit type.
type Mul struct {
	H, AB      gpu.Ptr
	Rows, F    int
	GELU       bool
	Type       gpu.DType
	H8, Scale8 gpu.Ptr
}

// Launch enqueues one kernel, or two with both H8 and GELU.
func (a Mul) Launch(q *kernel.Queue) {
	b := a.AB.Offset(a.F * a.Type.Size())
	if a.H8 != 0 && !a.GELU {
		quantize.HeldRows(a.Type, a.F, a.H8, a.H, a.AB).Run(q, "silu_mul", a.Rows, a.F, a.Type,
			[]any{a.H8, a.Scale8, a.H, a.AB, b}, 2*a.F)
		return
	}
	launch(q, "_mul", a.GELU, a.Rows, a.F, a.Type, kernel.Packed(a.Type, a.F, a.H, a.AB), a.H,
		a.AB, b, int64(a.Rows), a.F, int64(2*a.F))
	quantize.StoreRows(q, a.H8, a.Scale8, a.H, a.Rows, a.F, a.Type)
}

// MulBackward computes the gradients DA = DH ⊙ B ⊙ σ(A)(1 + A(1 − σ(A))) and DB = DH ⊙ silu(A), the
// halves of the rows of DAB [Rows, 2·F], and recomputes H unless it is null. With GELU it uses that
// gate instead. DAB may be AB.
//
// If DAB8 [Rows, 2·F] is not null, MulBackward also stores DAB, as rounded to Type, in DAB8 and
// Scale8 [Rows], like [quantize.Rows]. Type must then be a 16-bit type.
type MulBackward struct {
	H, DAB, DH, AB gpu.Ptr
	Rows, F        int
	GELU           bool
	Type           gpu.DType
	DAB8, Scale8   gpu.Ptr
}

// Launch enqueues one kernel. With DAB8 it enqueues two if rows are not aligned or too long for
// registers, or for GELU.
func (a MulBackward) Launch(q *kernel.Queue) {
	half, stride := a.F*a.Type.Size(), 2*a.F
	b, db := a.AB.Offset(half), a.DAB.Offset(half)
	if !a.GELU && a.DAB8 != 0 {
		shape := quantize.HeldRows(a.Type, a.F, a.DAB8, a.H, a.DAB, a.DH, a.AB)
		if shape.Packs > 0 {
			shape.Run(q, "silu_mul_backward", a.Rows, a.F, a.Type,
				[]any{a.DAB8, a.Scale8, a.H, a.DAB, db, a.DH, a.AB, b}, stride, stride)
			return
		}
	}

	launch(q, "_mul_backward", a.GELU, a.Rows, a.F, a.Type,
		kernel.Packed(a.Type, a.F, a.H, a.DAB, a.DH, a.AB), a.H, a.DAB, db, a.DH, a.AB, b,
		int64(a.Rows), a.F, int64(stride), int64(stride))
	quantize.StoreRows(q, a.DAB8, a.Scale8, a.DAB, a.Rows, stride, a.Type)
}

func launch(q *kernel.Queue, name string, gelu bool, rows, f int, t gpu.DType, packed bool,
	args ...any) {
	symbol, variant, packs := "silu", "_elements", rows*f
	if gelu {
		symbol = "gelu"
	}

	if packed {
		variant, packs = "_packs", packs/kernel.Vector(t)
	}

	if packs > math.MaxInt32 {
		q.Err = fmt.Errorf("kernels.SiLUMul: %d rows of %d elements are too many for one launch",
			rows, f)
	}

	q.Run("silu", symbol+name+variant+kernel.Suffix(t), kernel.Cover(packs, 2*256, 256), args...)
}
