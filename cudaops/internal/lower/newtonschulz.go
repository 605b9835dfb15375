package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/op"
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

// schulz is one step's matrices, of which a tall one is multiplied from the other side.
type schulz struct {
	tall       bool
	gram, poly *program.Array // A and B
}

// squares is the products that make A and B of x.
func (s schulz) squares(x *program.Array) []product {
	return []product{
		{d: s.gram, a: x, b: x, transA: s.tall, transB: !s.tall},
		{d: s.poly, a: s.gram, b: s.gram, c: s.gram, alpha: nsC, beta: nsB},
	}
}

// apply is d = square·x + beta·c, from the right for a tall x. transposed takes the square's
// transpose.
func (s schulz) apply(d, square, x, c *program.Array, beta float32, transposed bool) product {
	if s.tall {
		return product{d: d, a: x, b: square, c: c, beta: beta, transB: transposed}
	}
	return product{d: d, a: square, b: x, c: c, beta: beta, transA: transposed}
}

// step is the products of a step from x to y.
func (s schulz) step(y, x *program.Array) []product {
	return append(s.squares(x), s.apply(y, s.poly, x, x, nsA, false))
}

// newSchulz returns a step's matrices for x.
func (c *compiler) newSchulz(x *program.Array) schulz {
	side := min(x.Shape[0], x.Shape[1])
	return schulz{tall: x.Shape[0] > x.Shape[1], gram: c.NewArray(x.Type, side, side),
		poly: c.NewArray(x.Type, side, side)}
}

// normalized adds y = x/(‖x‖ + 1e-7).
func (c *compiler) normalized(n *gorgonia.Node, y, x *program.Array) *program.Call {
	a := normalize.Forward{N: x.Len(), YType: y.Type, XType: x.Type}
	return c.newCall(n, a, program.Writes("Y", y), program.Reads("X", x),
		program.Uses("Workspace", c.bytes(normalize.NormalizeWorkspace)))
}

func lowerNewtonSchulz(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	x := in[0]
	it, err := c.iterate(n, x.Shape, 1, n.Op().(*op.NewtonSchulzOp).Steps)
	if err != nil {
		return nil, err
	}
	c.Add(c.normalized(n, it.Start, x))
	c.Calls = append(c.Calls, it.Calls...)
	return c.act(n, it.Result.View(0, x.Shape...)), nil
}

// lowerNewtonSchulzGrad computes the steps again, and keeps what each began with.
func lowerNewtonSchulzGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array,
	error) {
	x, g := c.acts(n, in[0], in[1])
	chain := []*program.Array{c.like(x)}
	c.Add(c.normalized(n, chain[0], x))
	for range n.Op().(*op.NewtonSchulzGradOp).Forward.Steps - 1 {
		last, next := chain[len(chain)-1], c.like(x)
		c.matmuls(n, c.newSchulz(last).step(next, last))
		chain = append(chain, next)
	}
	for _, last := range slices.Backward(chain) {
		d := c.like(x)
		c.schulzGrad(n, d, g, last)
		g = d
	}
	dx := c.like(x)
	c.call(n, normalize.Backward{N: x.Len(), Type: x.Type}, program.Writes("DX", dx),
		program.Reads("G", g),
		program.Reads("X", x), program.Uses("Workspace", c.bytes(normalize.NormalizeWorkspace)))
	return packed(dx), nil
}

// schulzGrad adds the gradient dx of a step's x for that of its result, g.
func (c *compiler) schulzGrad(n *gorgonia.Node, dx, g, x *program.Array) {
	s := c.newSchulz(x)
	d, e := c.like(s.gram), c.like(s.gram)
	outer := product{d: d, a: g, b: x, transB: true}
	if s.tall {
		outer = product{d: d, a: x, b: g, transA: true}
	}
	c.matmuls(n, append(s.squares(x),
		s.apply(dx, s.poly, g, g, nsA, false),
		outer,
		product{d: e, a: d, b: s.gram, c: d, alpha: nsC, beta: nsB},
		product{d: e, a: s.gram, b: d, alpha: nsC, beta: 1},
		s.apply(dx, e, x, nil, 1, false),
		s.apply(dx, e, x, nil, 1, true)))
}

// The ways to compute the iteration: with products alone, with products of half of what is
// symmetric, and with several steps between products with X (see [gemm.NewtonSchulz]).
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

// NewIteration is the iteration of matrices in a program, of steps of an optimiser's.
func NewIteration(p *program.Program, o Options, rows, columns, batch,
	steps int) (Iteration, error) {
	c := newCompiler(o)
	c.Program = p
	return c.iterate(nil, []int{rows, columns}, batch, steps)
}

// iterate returns the iteration in the way that is chosen.
func (c *compiler) iterate(n *gorgonia.Node, shape []int, batch, steps int) (Iteration, error) {
	t := gpu.Float16
	if c.o.Activation == gpu.Float32 {
		t = gpu.Float32
	}
	it := schulzIteration{c: c, node: n,
		NewtonSchulz: gemm.NewtonSchulz{Rows: shape[0], Columns: shape[1],
			Batch: batch, Steps: steps, Type: t}}
	ways := it.ways()
	x := c.NewArray(t, batch, shape[0], shape[1])
	g := Group{Op: "NewtonSchulz", Plain: slices.Index(ways, byProducts), FLOPs: it.flops(),
		Units: []string{"gemm_hopper_plain", "gemm_symmetric"},
		Shape: fmt.Sprintf("%d of %dx%d %v, %d steps", batch, shape[0], shape[1], t, steps)}
	var all []Iteration
	xs := [2]*program.Array{c.like(x), c.like(x)}
	for _, way := range ways {
		one := it.in(way, xs)
		all, g.Results = append(all, one), []*program.Array{one.Result}
		timed := append([]*program.Call{c.normalized(n, one.Start, x)}, one.Calls...)
		g.Alternatives = append(g.Alternatives, Alternative{way, timed})
	}
	i, choice, err := c.o.Choose(g)
	if err != nil {
		return Iteration{}, err
	}
	if calls := all[i].Calls; len(calls) > 0 && calls[0].Choice == 0 {
		calls[0].Choice = choice
	}
	return all[i], nil
}

// schulzIteration makes the calls of an iteration.
type schulzIteration struct {
	c    *compiler
	node *gorgonia.Node
	gemm.NewtonSchulz
}

// ways are those that the GPU and the shape allow, that of the rule of thumb first.
func (it schulzIteration) ways() []string {
	for _, s := range it.Shapes() {
		if len(it.c.o.Ways(gemm.Symmetric{SymmetricShape: s, Type: it.Type})) == 0 {
			return []string{byProducts}
		}
	}
	together := gemm.NewtonSchulzTogether(it.Rows, it.Columns)
	switch {
	case it.c.o.Tunes() || together == 0:
		return []string{byProducts, bySymmetry, byGram}
	case together == 1:
		return []string{bySymmetry, byGram, byProducts}
	}
	return []string{byGram, bySymmetry, byProducts}
}

func (it schulzIteration) side() int  { return min(it.Rows, it.Columns) }
func (it schulzIteration) tall() bool { return it.Rows > it.Columns }

// flops is the operations of the iteration as it is written.
func (it schulzIteration) flops() float64 {
	side, long := float64(it.side()), float64(max(it.Rows, it.Columns))
	return float64(it.Batch*it.Steps) * 2 * side * side * (2*long + side)
}

// in is the iteration in one of the ways, between two arrays, of which the second one has the
// result.
func (it schulzIteration) in(way string, xs [2]*program.Array) Iteration {
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
func (it schulzIteration) square() *program.Array {
	return it.c.NewArray(it.Type, it.Batch, it.side(), it.side())
}

// matrix is an array of the iteration as one matrix, with the others behind it.
func matrix(a *program.Array) *program.Array { return a.View(0, a.Shape[1:]...) }

// products is the iteration by products alone.
func (it schulzIteration) products(xs [2]*program.Array) (calls []*program.Call) {
	s := schulz{tall: it.tall(), gram: matrix(it.square()), poly: matrix(it.square())}
	x, y := matrix(xs[0]), matrix(xs[1])
	for range it.Steps {
		for _, p := range s.step(y, x) {
			calls = append(calls, it.c.newProduct(it.node, p.repeated(it.Batch)))
		}
		x, y = y, x
	}
	return calls
}

// symmetric is the iteration by products of half of what is symmetric.
func (it schulzIteration) symmetric(xs [2]*program.Array) (calls []*program.Call) {
	places := map[gpu.Ptr]*program.Array{1: xs[0], 2: xs[1]} // which stand for the arrays in Run
	it.X = [2]gpu.Ptr{1, 2}
	for i := range it.Squares {
		it.Squares[i] = gpu.Ptr(3 + i)
		places[it.Squares[i]] = it.square()
	}
	multiply := func(a gemm.Symmetric) error {
		args := []program.Arg{program.Writes("D", places[a.D]),
			program.Reads("Left", places[a.Left]),
			program.Reads("Right", places[a.Right]), program.Reads("C", places[a.C])}
		a.D, a.Left, a.Right, a.C = 0, 0, 0, 0
		call := it.c.newCall(it.node, a, args...)
		call.FLOPs = 2 * float64(a.Batch) * float64(a.N) * float64(a.N) * float64(a.Depth)
		calls = append(calls, call)
		return nil
	}
	apply := func(y, q, x gpu.Ptr) error {
		p := schulz{tall: it.tall()}.apply(matrix(places[y]), matrix(places[q]),
			matrix(places[x]), nil, 0, false)
		calls = append(calls, it.c.newProduct(it.node, p.repeated(it.Batch)))
		return nil
	}
	if err := it.Run(multiply, apply); err != nil { // neither of the two fails
		panic(err)
	}
	return calls
}
