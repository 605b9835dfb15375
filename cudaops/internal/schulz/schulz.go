// Package schulz makes the calls of Newton-Schulz iterations, and chooses how they are computed.
package schulz

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// The Newton-Schulz iteration begins with X = x/(‖x‖ + 1e-7); every step is
//
//	A = X·Xᵀ,  B = b·A + c·A²,  Y = a·X + B·X
//
// and for a tall X, with the smaller square, A = Xᵀ·X, Y = a·X + X·B. Backwards, with the gradient
// G of Y,
//
//	D = G·Xᵀ,  E = b·D + c·(D·A + A·D),  dX = a·G + B·G + (E + Eᵀ)·X
//
// and D = Xᵀ·G, dX = a·G + G·B + X·(E + Eᵀ) for a tall one.
const nsA, nsB, nsC = gemm.SchulzA, gemm.SchulzB, gemm.SchulzC

// step is one step's matrices, of which a tall one is multiplied from the other side.
type step struct {
	tall       bool
	gram, poly *program.Array // A and B
}

// squares is the products that make A and B of x.
func (s step) squares(x *program.Array) []program.Product {
	return []program.Product{
		{D: s.gram, A: x, B: x, TransA: s.tall, TransB: !s.tall},
		{D: s.poly, A: s.gram, B: s.gram, C: s.gram, Alpha: nsC, Beta: nsB},
	}
}

// apply is d = square·x + beta·c, from the right for a tall x. transposed takes the square's
// transpose.
func (s step) apply(d, square, x, c *program.Array, beta float32, transposed bool) program.Product {
	if s.tall {
		return program.Product{D: d, A: x, B: square, C: c, Beta: beta, TransB: transposed}
	}
	return program.Product{D: d, A: square, B: x, C: c, Beta: beta, TransA: transposed}
}

// next is the products of a step from x to y.
func (s step) next(y, x *program.Array) []program.Product {
	return append(s.squares(x), s.apply(y, s.poly, x, x, nsA, false))
}

// The ways to compute the iteration. There are products alone, products of half of what is
// symmetric, and several steps between products with X (see [gemm.NewtonSchulz]).
const (
	byProducts = "products"
	bySymmetry = "symmetric"
	byGram     = "gram"
)

// gramSteps is how many steps go together.
const gramSteps = 3

// Iteration is the iteration of matrices of one shape that lie one behind the other. Of 16-bit
// types it takes float16, since no number is large.
type Iteration struct {
	// where the normalised matrices are to be, and what becomes of them
	Start, Result *program.Array
	Calls         []*program.Call
}

// Builder adds calls to a program.
type Builder struct {
	*program.Program
	program.Chooser
	Activation gpu.DType // of the program
	// Call names a call.
	Call func(params any, args ...program.Arg) *program.Call
}

func (b Builder) like(a *program.Array) *program.Array { return b.NewArray(a.Type, a.Shape...) }

// bytes is workspace.
func (b Builder) bytes(n int) *program.Array { return b.NewArray(gpu.Float32, (n+3)/4) }

// product is the call of a matrix product.
func (b Builder) product(p program.Product) *program.Call {
	return b.Call(p.Params(), p.Args()...)
}

// products adds matrix products.
func (b Builder) products(all ...program.Product) {
	for _, p := range all {
		b.Add(b.product(p))
	}
}

// newStep returns a step's matrices for x.
func (b Builder) newStep(x *program.Array) step {
	side := min(x.Shape[0], x.Shape[1])
	return step{tall: x.Shape[0] > x.Shape[1], gram: b.NewArray(x.Type, side, side),
		poly: b.NewArray(x.Type, side, side)}
}

// Normalized is the call that makes y = x/(‖x‖ + 1e-7).
func (b Builder) Normalized(y, x *program.Array) *program.Call {
	a := normalize.Forward{N: x.Len(), YType: y.Type, XType: x.Type}
	return b.Call(a, program.Writes("Y", y), program.Reads("X", x),
		program.Uses("Workspace", b.bytes(normalize.NormalizeWorkspace)))
}

// Gradient adds the gradient of x for that of the result of so many steps, g. It computes the steps
// again, and keeps what each began with.
func (b Builder) Gradient(x, g *program.Array, steps int) *program.Array {
	chain := []*program.Array{b.like(x)}
	b.Add(b.Normalized(chain[0], x))
	for range steps - 1 {
		last, next := chain[len(chain)-1], b.like(x)
		b.products(b.newStep(last).next(next, last)...)
		chain = append(chain, next)
	}
	for _, last := range slices.Backward(chain) {
		d := b.like(x)
		b.stepGradient(d, g, last)
		g = d
	}
	dx := b.like(x)
	b.Add(b.Call(normalize.Backward{N: x.Len(), Type: x.Type}, program.Writes("DX", dx),
		program.Reads("G", g), program.Reads("X", x),
		program.Uses("Workspace", b.bytes(normalize.NormalizeWorkspace))))
	return dx
}

// stepGradient adds the gradient dx of a step's x for that of its result, g.
func (b Builder) stepGradient(dx, g, x *program.Array) {
	s := b.newStep(x)
	d, e := b.like(s.gram), b.like(s.gram)
	outer := program.Product{D: d, A: g, B: x, TransB: true}
	if s.tall {
		outer = program.Product{D: d, A: x, B: g, TransA: true}
	}
	b.products(append(s.squares(x),
		s.apply(dx, s.poly, g, g, nsA, false),
		outer,
		program.Product{D: e, A: d, B: s.gram, C: d, Alpha: nsC, Beta: nsB},
		program.Product{D: e, A: s.gram, B: d, Alpha: nsC, Beta: 1},
		s.apply(dx, e, x, nil, 1, false),
		s.apply(dx, e, x, nil, 1, true))...)
}

// Iterate returns the iteration of a batch of matrices of one shape in the way that is chosen. Its
// calls are not added yet.
func (b Builder) Iterate(shape []int, batch, steps int) (Iteration, error) {
	t := gpu.Float16
	if b.Activation == gpu.Float32 {
		t = gpu.Float32
	}
	it := iteration{b: b,
		NewtonSchulz: gemm.NewtonSchulz{Rows: shape[0], Columns: shape[1],
			Batch: batch, Steps: steps, Type: t}}
	ways := it.ways()
	x := b.NewArray(t, batch, shape[0], shape[1])
	g := program.Group{Op: "NewtonSchulz", Plain: slices.Index(ways, byProducts), FLOPs: it.flops(),
		Units: []string{"gemm_hopper_plain", "gemm_symmetric"},
		Shape: fmt.Sprintf("%d of %dx%d %v, %d steps", batch, shape[0], shape[1], t, steps)}
	var all []Iteration
	xs := [2]*program.Array{b.like(x), b.like(x)}
	for _, way := range ways {
		one := it.in(way, xs)
		all, g.Results = append(all, one), []*program.Array{one.Result}
		timed := append([]*program.Call{b.Normalized(one.Start, x)}, one.Calls...)
		g.Alternatives = append(g.Alternatives, program.Alternative{Name: way, Calls: timed})
	}
	i, choice, err := b.Choose(g)
	if err != nil {
		return Iteration{}, err
	}
	if calls := all[i].Calls; len(calls) > 0 && calls[0].Choice == nil {
		calls[0].Choice = choice
	}
	return all[i], nil
}

// iteration makes the calls of an iteration.
type iteration struct {
	b Builder
	gemm.NewtonSchulz
}

// ways are those that the GPU and the shape allow, that of the rule of thumb first.
func (it iteration) ways() []string {
	for _, s := range it.Shapes() {
		if len(it.b.Ways(gemm.Symmetric{SymmetricShape: s, Type: it.Type})) == 0 {
			return []string{byProducts}
		}
	}
	together := gemm.NewtonSchulzTogether(it.Rows, it.Columns)
	switch {
	case it.b.Tunes() || together == 0:
		return []string{byProducts, bySymmetry, byGram}
	case together == 1:
		return []string{bySymmetry, byGram, byProducts}
	}
	return []string{byGram, bySymmetry, byProducts}
}

func (it iteration) side() int  { return min(it.Rows, it.Columns) }
func (it iteration) tall() bool { return it.Rows > it.Columns }

// flops is the operations of the iteration as it is written.
func (it iteration) flops() float64 {
	side, long := float64(it.side()), float64(max(it.Rows, it.Columns))
	return float64(it.Batch*it.Steps) * 2 * side * side * (2*long + side)
}

// in is the iteration in one of the ways, between two arrays, of which the second one has the
// result.
func (it iteration) in(way string, xs [2]*program.Array) Iteration {
	it.Together = 1
	turns := it.Steps
	if way == byGram {
		it.Together = gramSteps
	}
	if way != byProducts {
		turns = it.Segments()
	}
	if turns%2 == 0 {
		xs[0], xs[1] = xs[1], xs[0]
	}
	one := Iteration{Start: xs[0], Result: xs[turns%2]}
	if way == byProducts {
		one.Calls = it.products(xs)
	} else {
		one.Calls = it.symmetric(xs)
	}
	return one
}

// square is memory for a square of each matrix.
func (it iteration) square() *program.Array {
	return it.b.NewArray(it.Type, it.Batch, it.side(), it.side())
}

// products is the iteration by products alone.
func (it iteration) products(xs [2]*program.Array) (calls []*program.Call) {
	s := step{tall: it.tall(), gram: it.square(), poly: it.square()}
	x, y := xs[0], xs[1]
	for range it.Steps {
		for _, p := range s.next(y, x) {
			calls = append(calls, it.b.product(p))
		}
		x, y = y, x
	}
	return calls
}

// symmetric is the iteration by products of half of what is symmetric.
func (it iteration) symmetric(xs [2]*program.Array) (calls []*program.Call) {
	places := map[gpu.Ptr]*program.Array{1: xs[0], 2: xs[1]} // which stand for the arrays in Run
	it.X = [2]gpu.Ptr{1, 2}
	for i := range it.Squares {
		it.Squares[i] = gpu.Ptr(3 + i)
		places[it.Squares[i]] = it.square()
	}
	multiply := func(a gemm.Symmetric) {
		args := []program.Arg{program.Writes("D", places[a.D]),
			program.Reads("Left", places[a.Left]),
			program.Reads("Right", places[a.Right]), program.Reads("C", places[a.C])}
		a.D, a.Left, a.Right, a.C = 0, 0, 0, 0
		call := it.b.Call(a, args...)
		call.FLOPs = 2 * float64(a.Batch) * float64(a.N) * float64(a.N) * float64(a.Depth)
		calls = append(calls, call)
	}
	apply := func(y, q, x gpu.Ptr) {
		p := step{tall: it.tall()}.apply(places[y], places[q],
			places[x], nil, 0, false)
		calls = append(calls, it.b.product(p))
	}
	it.Run(multiply, apply)
	return calls
}
