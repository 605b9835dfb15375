// Package elementwise has the kernels of elementwise arithmetic: functions of one array and of two
// arrays, casts, and scaled sums.
package elementwise

import (
	"cmp"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel"
)

// UnaryOp is a function of one element and, for some functions, of a number p.
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
	AddScalar // a + p
	MulScalar // a·p
	GELU      // a·Φ(a), in the tanh approximation
	SubFrom   // p − a
	DivideInto
	PowScalar // aᵖ
	PowOf     // pᵃ
	Sign
	Step // 1 if a > 0, otherwise 0
	Cube
	Expm1
	Log1p
	Log2
	Sin
	Cos
	Softplus // log(1 + eᵃ)
	Ceil
	Floor
)

// BinaryOp is a function of two elements.
type BinaryOp int

// The binary functions, in the order of elementwise.cu. Comparisons return 1 or 0.
const (
	Add BinaryOp = iota
	Sub
	Mul
	Div
	GELUGradient // a·gelu'(b)
	Pow
	Maximum
	Minimum
	Less
	LessEqual
	Greater
	GreaterEqual
	Equal
	NotEqual
)

// The size of a block in elementwise.cu. Binary functions use only one access per thread and
// operand.
const (
	threads  = 256
	accesses = 2
)

// rowOps is the number of binary functions, counting from the first, that are compiled for speed
// and have a kernel for an operand that is a row.
const rowOps = GELUGradient + 1

// elementwise launches a kernel over n elements, with perAccess elements per access.
func elementwise(q *kernel.Queue, name string, n, perAccess int, args ...any) {
	span := threads * accesses * perAccess
	q.Run("elementwise", name, kernel.Cover(n, span, threads), append(args, int64(n))...)
}

// Unary computes Y[i] = f(X[i], P) for N elements. Y may be X.
type Unary struct {
	Op   UnaryOp
	Y, X gpu.Ptr
	P    float64
	N    int
	Type gpu.DType
}

// Launch enqueues one kernel.
func (p Unary) Launch(q *kernel.Queue) {
	elementwise(q, "unary"+kernel.Suffix(p.Type), p.N, kernel.Vector(p.Type), p.Y, p.X, int(p.Op),
		p.P)
}

// Operand is an argument of [Binary]. Element i of the result uses element (i / Repeat) mod Period
// of the operand. A Repeat of 0 means 1, and a Period of 0 means the number of elements of the
// result. Therefore {Ptr: p} is a tensor with the result's shape, {Ptr: p, Period: 1} is a scalar,
// {Ptr: p, Period: columns} is a row that applies to every row of the result, and {Ptr: p, Repeat:
// columns, Period: rows} is a column that applies to every column.
type Operand struct {
	Ptr            gpu.Ptr
	Repeat, Period int
}

// rows reports whether the operand is a row that applies to every row of n elements.
func (o Operand) rows(n int) bool { return o.Repeat == 1 && 1 < o.Period && o.Period < n }

// Binary computes Y[i] = f(A, B) for N elements. Y may be an operand with the result's shape.
type Binary struct {
	Op   BinaryOp
	Y    gpu.Ptr
	A, B Operand
	N    int
	Type gpu.DType
}

// Launch enqueues one kernel.
func (p Binary) Launch(q *kernel.Queue) {
	for _, o := range []*Operand{&p.A, &p.B} {
		o.Repeat, o.Period = cmp.Or(o.Repeat, 1), cmp.Or(o.Period, p.N)
	}

	if (p.Op == Add || p.Op == Mul) && p.A.rows(p.N) {
		p.A, p.B = p.B, p.A
	}

	c := kernel.Cover(p.N, threads*kernel.Vector(p.Type), threads)
	if p.Op < rowOps && p.A.Repeat == 1 && p.A.Period == p.N && p.B.rows(p.N) &&
		kernel.Packed(p.Type, p.B.Period, p.Y, p.A.Ptr, p.B.Ptr) {
		q.Run("elementwise", "binary_row"+kernel.Suffix(p.Type), c, p.Y, p.A.Ptr, p.B.Ptr,
			int(p.Op), int64(p.B.Period), int64(p.N))
		return
	}

	q.Run("elementwise", "binary"+kernel.Suffix(p.Type), c, p.Y, p.A.Ptr, p.B.Ptr, int(p.Op),
		int64(p.A.Repeat), int64(p.A.Period), int64(p.B.Repeat), int64(p.B.Period), int64(p.N))
}

// Cast computes Y[i] = X[i] for N elements, rounded to nearest even if the type of Y is narrower.
type Cast struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	N            int
}

// Launch enqueues one kernel.
func (p Cast) Launch(q *kernel.Queue) {
	elementwise(q, "cast"+kernel.Suffix(p.YType, p.XType), p.N, 4, p.Y, p.X)
}

// Axpby computes Y[i] = Alpha·X[i] + Beta·Y[i] for N elements. If Beta is 0, Y is not read and may
// contain anything.
type Axpby struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	Alpha, Beta  float64
	N            int
}

// Launch enqueues one kernel.
func (p Axpby) Launch(q *kernel.Queue) {
	elementwise(q, "axpby"+kernel.Suffix(p.YType, p.XType), p.N, 4, p.Y, p.X, p.Alpha, p.Beta)
}
