package kernels

import (
	"fmt"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
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

// The binary functions, in the order of elementwise.cu. Comparisons give 1 or 0. TanhGrad, SigmoidGrad and ReluGrad take the
// function's output as a and its gradient as b.
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

// What a block of elementwise.cu covers, but for binary functions, with one access of each operand a thread.
const (
	elementThreads  = 256
	elementAccesses = 2
)

// rowOps is the binary functions that kernels for a row for every row have: the first so many, which are compiled for speed.
const rowOps = ReluGrad + 1

// elementwise launches a kernel over n elements, perAccess of which are one access.
func (k *Kernels) elementwise(s gpu.Stream, name string, n, perAccess int, a *gpu.Args) error {
	span := elementThreads * elementAccesses * perAccess
	return k.launch(s, "elementwise", name, line(ceilDiv(n, span), elementThreads), a)
}

// Unary computes y[i] = f(x[i], p) for n elements. y may be x.
func (k *Kernels) Unary(s gpu.Stream, op UnaryOp, y, x gpu.Ptr, p float64, n int, t gpu.DType) error {
	return k.unary(s, op, y, x, p, 0, n, t)
}

// UnaryAt is Unary with p read from device memory, where it is an element of type t.
func (k *Kernels) UnaryAt(s gpu.Stream, op UnaryOp, y, x, p gpu.Ptr, n int, t gpu.DType) error {
	return k.unary(s, op, y, x, 0, p, n, t)
}

func (k *Kernels) unary(s gpu.Stream, op UnaryOp, y, x gpu.Ptr, p float64, at gpu.Ptr, n int, t gpu.DType) error {
	suf, err := suffix("Unary", t)
	if err != nil {
		return err
	}
	if op < 0 || op >= unaryOps {
		return fmt.Errorf("kernels.Unary: there is no function %d", op)
	}
	if empty, err := checkSizes("Unary", n); empty || err != nil {
		return err
	}
	a := args().Ptr(y).Ptr(x).Int32(int(op)).Float32(float32(p)).Ptr(at).Int64(int64(n))
	return k.elementwise(s, "unary"+suf, n, 16/t.Size(), a)
}

// Operand is an argument of [Kernels.Binary]: element i of the result takes element (i / Repeat) mod Period of it. A zero
// Repeat means 1 and a zero Period the number of elements of the result. So {Ptr: p} is a tensor of the result's shape,
// {Ptr: p, Period: 1} a scalar, {Ptr: p, Period: columns} a row for every row of the result, and
// {Ptr: p, Repeat: columns, Period: rows} a column for every column.
type Operand struct {
	Ptr            gpu.Ptr
	Repeat, Period int
}

// rows reports whether the operand is a row for every row of n elements.
func (o Operand) rows(n int) bool { return o.Repeat == 1 && 1 < o.Period && o.Period < n }

// Binary computes y[i] = f(a, b) for n elements. y may be an operand of the result's shape.
func (k *Kernels) Binary(s gpu.Stream, op BinaryOp, y gpu.Ptr, a, b Operand, n int, t gpu.DType) error {
	suf, err := suffix("Binary", t)
	if err != nil {
		return err
	}
	if op < 0 || op >= binaryOps {
		return fmt.Errorf("kernels.Binary: there is no function %d", op)
	}
	if _, err := checkSizes("Binary", n, a.Repeat, a.Period, b.Repeat, b.Period); err != nil || n == 0 {
		return err
	}
	for _, o := range []*Operand{&a, &b} {
		o.Repeat = max(o.Repeat, 1)
		if o.Period == 0 {
			o.Period = n
		}
	}
	if (op == Add || op == Mul) && a.rows(n) {
		a, b = b, a
	}
	c := line(ceilDiv(n, elementThreads*vector(t)), elementThreads)
	if op < rowOps && a.Repeat == 1 && a.Period == n && b.rows(n) && packed(t, b.Period, y, a.Ptr, b.Ptr) {
		l := args().Ptr(y).Ptr(a.Ptr).Ptr(b.Ptr).Int32(int(op)).Int64(int64(b.Period)).Int64(int64(n))
		return k.launch(s, "elementwise", "binary_row"+suf, c, l)
	}
	l := args().Ptr(y).Ptr(a.Ptr).Ptr(b.Ptr).Int32(int(op)).Int64(int64(a.Repeat)).Int64(int64(a.Period)).
		Int64(int64(b.Repeat)).Int64(int64(b.Period)).Int64(int64(n))
	return k.launch(s, "elementwise", "binary"+suf, c, l)
}

// Cast computes y[i] = x[i] for n elements, rounded to nearest even where y's type is narrower.
func (k *Kernels) Cast(s gpu.Stream, y gpu.Ptr, yt gpu.DType, x gpu.Ptr, xt gpu.DType, n int) error {
	name, err := suffixes("Cast", "cast", yt, xt)
	if err != nil {
		return err
	}
	if empty, err := checkSizes("Cast", n); empty || err != nil {
		return err
	}
	return k.elementwise(s, name, n, 4, args().Ptr(y).Ptr(x).Int64(int64(n)))
}

// Axpby computes y[i] = alpha·x[i] + beta·y[i] for n elements. With a beta of 0, y is not read and may hold anything.
func (k *Kernels) Axpby(s gpu.Stream, y gpu.Ptr, yt gpu.DType, alpha float64, x gpu.Ptr, xt gpu.DType,
	beta float64, n int) error {
	name, err := suffixes("Axpby", "axpby", yt, xt)
	if err != nil {
		return err
	}
	if empty, err := checkSizes("Axpby", n); empty || err != nil {
		return err
	}
	a := args().Ptr(y).Ptr(x).Float32(float32(alpha)).Float32(float32(beta)).Int64(int64(n))
	return k.elementwise(s, name, n, 4, a)
}

// Fill sets n elements to v.
func (k *Kernels) Fill(s gpu.Stream, y gpu.Ptr, v float64, n int, t gpu.DType) error {
	suf, err := suffix("Fill", t)
	if err != nil {
		return err
	}
	if empty, err := checkSizes("Fill", n); empty || err != nil {
		return err
	}
	return k.elementwise(s, "fill"+suf, n, 16/t.Size(), args().Ptr(y).Float32(float32(v)).Int64(int64(n)))
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
