package silu

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/quantize"
)

// Mul computes H = silu(A) ⊙ B over [Rows, F], silu(a) = a·σ(a), or with GELU its approximation by
// tanh in silu's place. Stride is the elements from one
// row of A to the next, and of B; 0 means F. In [A | B] side by side it is 2·F, and B is A + F
// elements.
//
// Where H8 is not null it is H, as rounded to Type, with Scale8 [Rows] as [Quantize] stores its
// rows. H may then be null, but for GELU. Type is a 16-bit one.
type Mul struct {
	H, A, B         gpu.Ptr
	Rows, F, Stride int
	GELU            bool
	Type            gpu.DType
	H8, Scale8      gpu.Ptr
}

// Launch launches one kernel; with H8 and GELU two.
func (a Mul) Launch(k *kernel.Set, s gpu.Stream) error {
	if float8, err := quantize.Float8Rows("SiLUMul", a.Type, a.H8, a.Scale8); err != nil {
		return err
	} else if float8 {
		return a.float8(k, s)
	}
	l := kernel.Args().Ptr(a.H).Ptr(a.A).Ptr(a.B)
	return silu(k, s, "SiLUMul", gate(a.GELU)+"_mul", siluShape{a.Rows, a.F, a.Stride, 0, a.Type},
		false, l, a.H, a.A, a.B)
}

// MulBackward computes the gradients DA = DH ⊙ B ⊙ σ(A)(1 + A(1 − σ(A))) and DB = DH ⊙ silu(A), and
// H again unless it is null. With GELU they are the gradients of that. DA may be the memory of A or
// DH, and DB that of B. Stride is as in [Mul], GradStride the same for DA and DB.
//
// Where DAB8 [Rows, 2·F] is not null it is the rows of [DA | DB], as rounded to Type, with Scale8
// [Rows] as [Quantize] stores them. Then DB is DA + F elements, GradStride at least 2·F, and Type a
// 16-bit one.
type MulBackward struct {
	H, DA, DB, DH, A, B         gpu.Ptr
	Rows, F, Stride, GradStride int
	GELU                        bool
	Type                        gpu.DType
	DAB8, Scale8                gpu.Ptr
}

// Launch launches one kernel; with DAB8, where rows are not aligned or too long for registers, or
// for GELU, two.
func (a MulBackward) Launch(k *kernel.Set, s gpu.Stream) error {
	if float8, err := quantize.Float8Rows("SiLUMulBackward", a.Type, a.DAB8, a.Scale8); err != nil {
		return err
	} else if float8 {
		return a.float8(k, s)
	}
	l := kernel.Args().Ptr(a.H).Ptr(a.DA).Ptr(a.DB).Ptr(a.DH).Ptr(a.A).Ptr(a.B)
	shape := siluShape{a.Rows, a.F, a.Stride, a.GradStride, a.Type}
	return silu(k, s, "SiLUMulBackward", gate(a.GELU)+"_mul_backward", shape, true, l, a.H,
		a.DA, a.DB, a.DH, a.A, a.B)
}

// gate is how kernels of a gate are named.
func gate(gelu bool) string {
	if gelu {
		return "gelu"
	}
	return "silu"
}

type siluShape struct {
	rows, f, stride, gradStride int
	dtype                       gpu.DType
}

func silu(k *kernel.Set, s gpu.Stream, op, symbol string, a siluShape, backward bool, l *gpu.Args,
	ps ...gpu.Ptr) error {
	suf, err := kernel.Suffix(op, a.dtype)
	if err != nil {
		return err
	}
	if _, err := kernel.CheckSizes(op, a.rows, a.f, a.stride, a.gradStride); err != nil ||
		a.rows == 0 || a.f == 0 {
		return err
	}
	if a.stride == 0 {
		a.stride = a.f
	}
	if a.gradStride == 0 {
		a.gradStride = a.f
	}
	if a.stride == a.f && a.gradStride == a.f { // without gaps it is one long row
		if n := a.rows * a.f; n < 1<<31 {
			a.rows, a.f, a.stride, a.gradStride = 1, n, n, n
		}
	}
	variant, n := "_elements", 1
	if v := kernel.Vector(a.dtype); kernel.Packed(a.dtype, a.f, ps...) &&
		a.stride%v == 0 && a.gradStride%v == 0 {
		variant, n = "_packs", v
	}
	packs := a.rows * a.f / n
	if packs >= 1<<31 {
		return fmt.Errorf("kernels.%s: %d rows of %d elements are too many for one launch", op,
			a.rows, a.f)
	}
	l.Int64(int64(a.rows)).Int32(a.f).Int64(int64(a.stride))
	if backward {
		l.Int64(int64(a.gradStride))
	}
	return k.Enqueue(s, "silu", symbol+variant+suf, kernel.Line(kernel.CeilDiv(packs, 2*256), 256),
		l)
}
