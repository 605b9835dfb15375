package elementwise

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// UnaryOp is a function of one element, and for some of a number p that is the same for all.
type UnaryOp int

// The unary functions, in the order of elementwise.cu.
const (
	Identity UnaryOp = iota
	Neg
	Abs
	Square
	Sqrt
	InverseSqrt
	Inverse
	Exp
	Log
	Tanh
	Sigmoid
	SiLU
	Relu
	AddScalar // a + p
	MulScalar // a·p
	SubFrom   // p − a
	DivideInto
	PowScalar // aᵖ
	PowOf     // pᵃ
	MaxScalar
	MinScalar
	Sign
	Step // 1 where a > 0, else 0
	Cube
	Expm1
	Log1p
	Log2
	Sin
	Cos
	Softplus // log(1 + eᵃ)
	Gelu     // a·Φ(a), exactly
	Ceil
	Floor
	unaryOps
)

// BinaryOp is a function of two elements.
type BinaryOp int

// The binary functions, in the order of elementwise.cu. Comparisons give 1 or 0. TanhGrad,
// SigmoidGrad and ReluGrad take the function's output as a and its gradient as b.
const (
	Add BinaryOp = iota
	Sub
	Mul
	Div
	TanhGrad
	SigmoidGrad
	ReluGrad
	Pow
	Maximum
	Minimum
	Less
	LessEqual
	Greater
	GreaterEqual
	Equal
	NotEqual
	binaryOps
)

// What a block of elementwise.cu covers, but for binary functions, with one access of each operand
// a thread.
const (
	elementThreads  = 256
	elementAccesses = 2
)

// rowOps is the binary functions that kernels for a row for every row have: the first so many,
// which are compiled for speed.
const rowOps = ReluGrad + 1

// elementwise launches a kernel over n elements, perAccess of which are one access.
func elementwise(k *kernel.Set, s gpu.Stream, name string, n, perAccess int, a *gpu.Args) error {
	span := elementThreads * elementAccesses * perAccess
	return k.Enqueue(s, "elementwise", name, kernel.Line(kernel.CeilDiv(n, span), elementThreads),
		a)
}

// Launch computes y[i] = f(x[i], p) for n elements. y may be x.
func (p Unary) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("Unary", p.Type)
	if err != nil {
		return err
	}
	if p.Op < 0 || p.Op >= unaryOps {
		return fmt.Errorf("kernels.Unary: there is no function %d", p.Op)
	}
	if empty, err := kernel.CheckSizes("Unary", p.N); empty || err != nil {
		return err
	}
	const parameterAt = 0 // null: the kernel takes the parameter from its arguments
	a := kernel.Args().Ptr(p.Y).Ptr(p.X).Int32(int(p.Op)).Float32(float32(p.P)).Ptr(
		parameterAt).Int64(int64(p.N))
	return elementwise(k, s, "unary"+suf, p.N, kernel.Vector(p.Type), a)
}

// Operand is an argument of [Binary]: element i of the result takes element (i / Repeat) mod Period
// of it. A zero Repeat means 1 and a zero Period the number of elements of the result. So {Ptr: p}
// is a tensor of the result's shape, {Ptr: p, Period: 1} a scalar, {Ptr: p, Period: columns} a row
// for every row of the result, and {Ptr: p, Repeat: columns, Period: rows} a column for every
// column.
type Operand struct {
	Ptr            gpu.Ptr
	Repeat, Period int
}

// rows reports whether the operand is a row for every row of n elements.
func (o Operand) rows(n int) bool { return o.Repeat == 1 && 1 < o.Period && o.Period < n }

// Launch computes y[i] = f(a, b) for n elements. y may be an operand of the result's shape.
func (p Binary) Launch(k *kernel.Set, s gpu.Stream) error {
	suf, err := kernel.Suffix("Binary", p.Type)
	if err != nil {
		return err
	}
	if p.Op < 0 || p.Op >= binaryOps {
		return fmt.Errorf("kernels.Binary: there is no function %d", p.Op)
	}
	if _, err := kernel.CheckSizes("Binary", p.N, p.A.Repeat, p.A.Period, p.B.Repeat,
		p.B.Period); err != nil || p.N == 0 {
		return err
	}
	for _, o := range []*Operand{&p.A, &p.B} {
		o.Repeat = max(o.Repeat, 1)
		if o.Period == 0 {
			o.Period = p.N
		}
	}
	if (p.Op == Add || p.Op == Mul) && p.A.rows(p.N) {
		p.A, p.B = p.B, p.A
	}
	c := kernel.Line(kernel.CeilDiv(p.N, elementThreads*kernel.Vector(p.Type)), elementThreads)
	if p.Op < rowOps && p.A.Repeat == 1 && p.A.Period == p.N && p.B.rows(p.N) &&
		kernel.Packed(p.Type, p.B.Period, p.Y, p.A.Ptr, p.B.Ptr) {
		l := kernel.Args().Ptr(p.Y).Ptr(p.A.Ptr).Ptr(p.B.Ptr).Int32(int(p.Op)).Int64(
			int64(p.B.Period)).Int64(int64(p.N))
		return k.Enqueue(s, "elementwise", "binary_row"+suf, c, l)
	}
	l := kernel.Args().Ptr(p.Y).Ptr(p.A.Ptr).Ptr(p.B.Ptr).Int32(int(p.Op)).Int64(
		int64(p.A.Repeat)).Int64(int64(p.A.Period)).
		Int64(int64(p.B.Repeat)).Int64(int64(p.B.Period)).Int64(int64(p.N))
	return k.Enqueue(s, "elementwise", "binary"+suf, c, l)
}

// Launch computes y[i] = x[i] for n elements, rounded to nearest even where y's type is narrower.
func (p Cast) Launch(k *kernel.Set, s gpu.Stream) error {
	name, err := kernel.Suffixes("Cast", "cast", p.YType, p.XType)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckSizes("Cast", p.N); empty || err != nil {
		return err
	}
	return elementwise(k, s, name, p.N, 4, kernel.Args().Ptr(p.Y).Ptr(p.X).Int64(int64(p.N)))
}

// Launch computes y[i] = alpha·x[i] + beta·y[i] for n elements. With a beta of 0, y is not read and
// may hold anything.
func (p Axpby) Launch(k *kernel.Set, s gpu.Stream) error {
	name, err := kernel.Suffixes("Axpby", "axpby", p.YType, p.XType)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckSizes("Axpby", p.N); empty || err != nil {
		return err
	}
	a := kernel.Args().Ptr(p.Y).Ptr(p.X).Float32(float32(p.Alpha)).Float32(
		float32(p.Beta)).Int64(int64(p.N))
	return elementwise(k, s, name, p.N, 4, a)
}

// Fill sets n elements to v.
func Fill(k *kernel.Set, s gpu.Stream, y gpu.Ptr, v float64, n int, t gpu.DType) error {
	suf, err := kernel.Suffix("Fill", t)
	if err != nil {
		return err
	}
	if empty, err := kernel.CheckSizes("Fill", n); empty || err != nil {
		return err
	}
	return elementwise(k, s, "fill"+suf, n, 16/t.Size(),
		kernel.Args().Ptr(y).Float32(float32(v)).Int64(int64(n)))
}

// Unary computes Y[i] = f(X[i], P) for N elements.
type Unary struct {
	Op   UnaryOp
	Y, X gpu.Ptr
	P    float64
	N    int
	Type gpu.DType
}

// Binary computes Y[i] = f(A, B) for N elements.
type Binary struct {
	Op   BinaryOp
	Y    gpu.Ptr
	A, B Operand
	N    int
	Type gpu.DType
}

// Cast computes Y[i] = X[i] for N elements.
type Cast struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	N            int
}

// Axpby computes Y[i] = Alpha·X[i] + Beta·Y[i] for N elements.
type Axpby struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	Alpha, Beta  float64
	N            int
}
