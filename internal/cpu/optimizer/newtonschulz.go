package optimizer

import (
	"math"

	"github.com/kasmina-go/kasmina/internal/cpu"
	"github.com/kasmina-go/kasmina/internal/cpu/array"
	"github.com/kasmina-go/kasmina/internal/cpu/gemm"
)

// The coefficients of the quintic are Keller Jordan's ("Muon: An optimizer for hidden layers in
// neural networks", 2024), chosen for the steepest slope at zero. Five steps map singular values in
// [1e-3, 1] to about [0.7, 1.2] rather than exactly 1.
const (
	nsA, nsB, nsC = 3.4445, -4.7750, 2.0315
	nsEps         = 1e-7 // keeps a zero matrix zero
)

// NewtonSchulz sets y to the approximate orthogonal factor U·Vᵀ of the rows×cols matrix x = U·Σ·Vᵀ:
//
//	X = x / (‖x‖ + 1e-7);   steps times:  A = X·Xᵀ,  X ← a·X + (b·A + c·A²)·X
//
// A tall matrix is transposed first, so that A has the smaller dimension. y must not overlap x.
func NewtonSchulz[T cpu.Float](y, x []T, rows, cols, steps int) {
	buf := cpu.GetBuffers[T]()
	defer cpu.PutBuffers(buf)
	room := buf.Elements(2*len(x) + nsRoom(rows, cols))
	n := newNSChain(rows, cols, room[2*len(x):])
	cur, next := room[:len(x)], room[len(x):2*len(x)]
	n.load(cur, x)
	array.ScaleBy(cur, 1/(math.Sqrt(array.SumSquares(x))+nsEps))
	for range steps {
		n.step(next, cur)
		cur, next = next, cur
	}

	n.store(y, cur)
}

// NewtonSchulzBackward sets dx to the gradient of x for the gradient g of NewtonSchulz's output. It
// recomputes the steps and stores every X, which takes steps+1 times the memory of x.
//
// The gradient of a step, with B = b·A + c·A² and the gradient dY of its output (A and B are
// symmetric), is
//
//	dB = dY·Xᵀ,  dA = b·dB + c·(dB·A + A·dB),  dX = a·dY + B·dY + (dA + dAᵀ)·X
//
// and the gradient of the normalization, with r = ‖x‖ + 1e-7, is dx = dX/r − x·⟨dX, x⟩/(r²·‖x‖).
func NewtonSchulzBackward[T cpu.Float](dx, x, g []T, rows, cols, steps int) {
	n := newNSChain(rows, cols, make([]T, nsRoom(rows, cols)))
	norm := math.Sqrt(array.SumSquares(x))
	r := norm + nsEps
	chain := make([][]T, steps+1)
	for i := range chain {
		chain[i] = make([]T, len(x))
	}

	n.load(chain[0], x)
	array.ScaleBy(chain[0], 1/r)
	for i := range steps {
		n.step(chain[i+1], chain[i])
	}

	// The last X is the output, which the gradient does not need, so its memory holds the running
	// gradient.
	dy, d := chain[steps], make([]T, len(x))
	n.load(dy, g)
	for i := steps - 1; i >= 0; i-- {
		n.stepBackward(d, dy, chain[i])
		d, dy = dy, d
	}

	n.store(dx, dy)
	var dot float64
	for i, v := range x {
		dot += float64(dx[i]) * float64(v)
	}

	var pull T
	if norm > 0 { // at zero the norm has no gradient, and the term's mean over all directions vanishes
		pull = T(dot / (r * r * norm))
	}

	inv := T(1 / r)
	for i, v := range x {
		dx[i] = dx[i]*inv - v*pull
	}
}

// nsChain is the working memory of an iteration over m×n matrices with m ≤ n.
type nsChain[T cpu.Float] struct {
	m, n      int
	transpose bool
	a, b, t   []T // m×m
}

// nsRoom returns the number of elements of working memory for rows×cols matrices.
func nsRoom(rows, cols int) int { return 3 * min(rows, cols) * min(rows, cols) }

// newNSChain returns an nsChain that uses room.
func newNSChain[T cpu.Float](rows, cols int, room []T) nsChain[T] {
	m, n := min(rows, cols), max(rows, cols)
	mm := m * m
	return nsChain[T]{m: m, n: n, transpose: rows > cols, a: room[:mm],
		b: room[mm : 2*mm], t: room[2*mm : 3*mm]}
}

// load copies a matrix of the caller's shape to one of the iteration's shape.
func (c *nsChain[T]) load(dst, src []T) {
	if !c.transpose {
		copy(dst, src)
		return
	}
	transpose(dst, src, c.n, c.m)
}

// store copies a matrix of the iteration's shape to one of the caller's shape.
func (c *nsChain[T]) store(dst, src []T) {
	if !c.transpose {
		copy(dst, src)
		return
	}
	transpose(dst, src, c.m, c.n)
}

// polynomial sets c.a = X·Xᵀ and c.b = b·A + c·A².
func (c *nsChain[T]) polynomial(x []T) {
	m, n := c.m, c.n
	gemm.Mul(false, true, m, m, n, 1, x, n, x, n, 0, c.a, m)
	copy(c.b, c.a)
	gemm.Mul(false, false, m, m, m, nsC, c.a, m, c.a, m, nsB, c.b, m)
}

// step sets y = a·X + B·X.
func (c *nsChain[T]) step(y, x []T) {
	m, n := c.m, c.n
	c.polynomial(x)
	copy(y, x)
	gemm.Mul(false, false, m, n, m, 1, c.b, m, x, n, nsA, y, n)
}

// stepBackward sets dx to the gradient of a step's input x for the gradient dy of its output.
func (c *nsChain[T]) stepBackward(dx, dy, x []T) {
	m, n := c.m, c.n
	c.polynomial(x)
	copy(dx, dy)
	gemm.Mul(false, false, m, n, m, 1, c.b, m, dy, n, nsA, dx, n)
	dB, dA := c.b, c.t
	gemm.Mul(false, true, m, m, n, 1, dy, n, x, n, 0, dB, m)
	copy(dA, dB)
	gemm.Mul(false, false, m, m, m, nsC, dB, m, c.a, m, nsB, dA, m)
	gemm.Mul(false, false, m, m, m, nsC, c.a, m, dB, m, 1, dA, m)
	gemm.Mul(false, false, m, n, m, 1, dA, m, x, n, 1, dx, n)
	gemm.Mul(true, false, m, n, m, 1, dA, m, x, n, 1, dx, n)
}

// transpose writes the transpose of src, rows×cols, to dst.
func transpose[T cpu.Float](dst, src []T, rows, cols int) {
	cpu.Spread(rows, transposeTile, transposition[T]{dst, src, rows, cols})
}

const transposeTile = 32 // square tiles, so that both sides stay in the cache

type transposition[T cpu.Float] struct {
	dst, src   []T
	rows, cols int
}

func (t *transposition[T]) Span(lo, hi int) {
	for c0 := 0; c0 < t.cols; c0 += transposeTile {
		for r := lo; r < hi; r++ {
			for c := c0; c < min(c0+transposeTile, t.cols); c++ {
				t.dst[c*t.rows+r] = t.src[r*t.cols+c]
			}
		}
	}
}
