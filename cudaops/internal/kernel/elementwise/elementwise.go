package elementwise

import (
	"cmp"

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
	AddScalar // a + p
	MulScalar // a·p
	GELU      // a·Φ(a), in the approximation by tanh
	SubFrom   // p − a
	DivideInto
	PowScalar // aᵖ
	PowOf     // pᵃ
	Sign
	Step // 1 where a > 0, else 0
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

// The binary functions, in the order of elementwise.cu. Comparisons give 1 or 0.
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

// What a block of elementwise.cu covers, but for binary functions, with one access of each operand
// a thread.
const (
	threads  = 256
	accesses = 2
)

// rowOps is the binary functions that kernels for a row for every row have: the first so many,
// which are compiled for speed.
const rowOps = GELUGradient + 1

// elementwise launches a kernel over n elements, perAccess of which are one access.
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

// Launch launches one kernel.
func (p Unary) Launch(q *kernel.Queue) {
	elementwise(q, "unary"+kernel.Suffix(p.Type), p.N, kernel.Vector(p.Type), p.Y, p.X, int(p.Op),
		p.P)
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

// Binary computes Y[i] = f(A, B) for N elements. Y may be an operand of the result's shape.
type Binary struct {
	Op   BinaryOp
	Y    gpu.Ptr
	A, B Operand
	N    int
	Type gpu.DType
}

// Launch launches one kernel.
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

// Cast computes Y[i] = X[i] for N elements, rounded to nearest even where Y's type is narrower.
type Cast struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	N            int
}

// Launch launches one kernel.
func (p Cast) Launch(q *kernel.Queue) {
	elementwise(q, "cast"+kernel.Suffix(p.YType, p.XType), p.N, 4, p.Y, p.X)
}

// Axpby computes Y[i] = Alpha·X[i] + Beta·Y[i] for N elements. With a Beta of 0, Y is not read and
// may hold anything.
type Axpby struct {
	Y, X         gpu.Ptr
	YType, XType gpu.DType
	Alpha, Beta  float64
	N            int
}

// Launch launches one kernel.
func (p Axpby) Launch(q *kernel.Queue) {
	elementwise(q, "axpby"+kernel.Suffix(p.YType, p.XType), p.N, 4, p.Y, p.X, p.Alpha, p.Beta)
}
