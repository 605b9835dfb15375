// Package schulz builds the calls of Newton-Schulz iterations and chooses among their variants.
package schulz

import (
	"fmt"
	"slices"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/gemm"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/normalize"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// The Newton-Schulz iteration starts with X = x/(‖x‖ + 1e-7). Each step computes
//
//	A = X·Xᵀ,  B = b·A + c·A²,  Y = a·X + B·X
//
// and, for a tall X, A = Xᵀ·X and Y = a·X + X·B, because this square is smaller. The backward pass
// computes, from the gradient G of Y,
//
//	D = G·Xᵀ,  E = b·D + c·(D·A + A·D),  dX = a·G + B·G + (E + Eᵀ)·X
//
// and, for a tall X, D = Xᵀ·G and dX = a·G + G·B + X·(E + Eᵀ).
const nsA, nsB, nsC = gemm.SchulzA, gemm.SchulzB, gemm.SchulzC

// step holds the square matrices of a step. A tall X is multiplied from the right.
type step struct {
	tall       bool
	gram, poly *program.Array // A and B
}

// squares returns the products that compute A and B from x.
func (s step) squares(x *program.Array) []program.Product {
	return []program.Product{
		s.outer(s.gram, x, x),
		{D: s.poly, A: s.gram, B: s.gram, C: s.gram, Alpha: nsC, Beta: nsB},
	}
}

// outer returns the product d = left·rightᵀ, or d = rightᵀ·left if tall.
func (s step) outer(d, left, right *program.Array) program.Product {
	if s.tall {
		return program.Product{D: d, A: right, B: left, TransA: true}
	}
	return program.Product{D: d, A: left, B: right, TransB: true}
}

// apply returns the product d = square·x + beta·c, or d = x·square + beta·c if tall. If transposed is
// set, the square is transposed.
func (s step) apply(d, square, x, c *program.Array, beta float32, transposed bool) program.Product {
	if s.tall {
		return program.Product{D: d, A: x, B: square, C: c, Beta: beta, TransB: transposed}
	}
	return program.Product{D: d, A: square, B: x, C: c, Beta: beta, TransA: transposed}
}

// next returns the products of a step from x to y.
func (s step) next(y, x *program.Array) []program.Product {
	return append(s.squares(x), s.apply(y, s.poly, x, x, nsA, false))
}

// variantNames maps the number of steps combined between products with X to the name of the variant:
// plain products, products that compute half of a symmetric result, and several steps combined through
// their squares (see [gemm.NewtonSchulz]).
var variantNames = map[int]string{0: "products", 1: "symmetric", 3: "gram"}

// Iteration is the iteration of a batch of equally shaped matrices stored contiguously. If the program's
// activations have a 16-bit type, it uses float16, since all its numbers are small.
type Iteration struct {
	// the normalized matrices, and the matrices after the iteration
	Start, Result *program.Array
	Calls         []*program.Call
}

// Builder adds calls to a program.
type Builder struct {
	*program.Program
	program.Chooser
	Activation gpu.DType // activation type of the program
	// Name sets the name of a call for profiles and errors.
	Name func(*program.Call) *program.Call
}

// square returns an array for one square matrix per matrix of x, with the length of its shorter side.
func (b Builder) square(x *program.Array) *program.Array {
	matrix := len(x.Shape) - 2
	side := slices.Min(x.Shape[matrix:])
	return b.NewArray(x.Type, slices.Concat(x.Shape[:matrix], []int{side, side})...)
}

// newStep returns the matrices of a step for x.
func (b Builder) newStep(x *program.Array) step {
	matrix := x.Shape[len(x.Shape)-2:]
	return step{tall: matrix[0] > matrix[1], gram: b.square(x), poly: b.square(x)}
}

// products returns calls that compute the given products.
func (b Builder) products(all ...program.Product) (calls []*program.Call) {
	for _, p := range all {
		calls = append(calls, b.Name(p.Call()))
	}
	return calls
}

// Normalized returns a call that computes y = x/(‖x‖ + 1e-7).
func (b Builder) Normalized(y, x *program.Array) *program.Call {
	a := normalize.Forward{N: x.Len(), YType: y.Type, XType: x.Type}
	return b.Name(program.NewCall(&a, program.Writes(&a.Y, y), program.Reads(&a.X, x),
		program.Uses(&a.Workspace, b.Workspace(normalize.WorkspaceBytes))))
}

// Gradient adds calls that compute the gradient of x from g, the gradient of the result after the given
// number of steps. The calls repeat the forward steps, and store the input of each.
func (b Builder) Gradient(x, g *program.Array, steps int) *program.Array {
	s, d, e := b.newStep(x), b.square(x), b.square(x)
	chain := []*program.Array{b.Like(x)}
	b.Add(b.Normalized(chain[0], x))
	for i := range steps - 1 {
		chain = append(chain, b.Like(x))
		b.Calls = append(b.Calls, b.products(s.next(chain[i+1], chain[i])...)...)
	}

	for _, x := range slices.Backward(chain) {
		dx := b.Like(x)
		b.Calls = append(b.Calls, b.products(append(s.squares(x),
			s.apply(dx, s.poly, g, g, nsA, false),
			s.outer(d, g, x),
			program.Product{D: e, A: d, B: s.gram, C: d, Alpha: nsC, Beta: nsB},
			program.Product{D: e, A: s.gram, B: d, Alpha: nsC, Beta: 1},
			s.apply(dx, e, x, nil, 1, false),
			s.apply(dx, e, x, nil, 1, true))...)...)
		g = dx
	}

	dx := b.Like(x)
	a := normalize.Backward{N: x.Len(), Type: x.Type}
	b.Add(b.Name(program.NewCall(&a, program.Writes(&a.DX, dx), program.Reads(&a.G, g),
		program.Reads(&a.X, x),
		program.Uses(&a.Workspace, b.Workspace(normalize.WorkspaceBytes)))))
	return dx
}

// Iterate returns the iteration of a batch of equally shaped matrices in the chosen variant. The calls
// are not yet part of the program.
func (b Builder) Iterate(shape []int, batch, steps int) (Iteration, error) {
	t := gpu.Float16
	if b.Activation == gpu.Float32 {
		t = gpu.Float32
	}

	n := gemm.NewtonSchulz{Rows: shape[0], Columns: shape[1], Batch: batch, Steps: steps, Type: t}
	x := b.NewArray(t, batch, shape[0], shape[1])
	xs := [2]*program.Array{b.Like(x), b.Like(x)}
	g := program.Group{Op: "NewtonSchulz", Results: xs[1:],
		Shape: fmt.Sprintf("%d of %dx%d %v, %d steps", batch, shape[0], shape[1], t, steps)}
	var all []Iteration
	for i, together := range b.variants(n) {
		n.Together = together
		turns, calls := n.Steps, b.plain
		if together > 0 {
			turns, calls = n.Segments(), b.symmetric
		} else {
			g.Plain = i
		}
		start := 1 - turns%2 // chosen so that the last turn writes to the second array
		one := Iteration{xs[start], xs[1], calls(n, xs[start], xs[1-start])}
		all = append(all, one)
		timed := append([]*program.Call{b.Normalized(one.Start, x)}, one.Calls...)
		g.Alternatives = append(g.Alternatives, program.Alternative{Name: variantNames[together],
			Calls: timed})
	}

	for _, c := range all[g.Plain].Calls {
		g.FLOPs += c.FLOPs
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

// variants returns the variants that the GPU and the shape support, with the rule of thumb's preference
// first.
func (b Builder) variants(n gemm.NewtonSchulz) []int {
	if square, gram := n.Symmetric(); len(b.Variants(square)) == 0 || len(b.Variants(gram)) == 0 {
		return []int{0}
	}

	together := gemm.NewtonSchulzTogether(n.Rows, n.Columns)
	switch {
	case b.Tunes() || together == 0:
		return []int{0, 1, 3}
	case together == 1:
		return []int{1, 3, 0}
	}

	return []int{3, 1, 0}
}

// plain returns the calls of the iteration with plain products. They alternate between x and y.
func (b Builder) plain(n gemm.NewtonSchulz, x, y *program.Array) (calls []*program.Call) {
	s := b.newStep(x)
	for range n.Steps {
		calls = append(calls, b.products(s.next(y, x)...)...)
		x, y = y, x
	}
	return calls
}

// symmetric returns the calls of the iteration with products that compute half of a symmetric result.
// They alternate between x and y.
func (b Builder) symmetric(n gemm.NewtonSchulz, x, y *program.Array) (calls []*program.Call) {
	places := map[gpu.Ptr]*program.Array{1: x, 2: y} // the numbers represent the arrays in Run
	n.X = [2]gpu.Ptr{1, 2}
	for i := range n.Squares {
		n.Squares[i] = gpu.Ptr(3 + i)
		places[n.Squares[i]] = b.square(x)
	}

	multiply := func(a gemm.Symmetric) {
		args := []program.Arg{program.Writes(&a.D, places[a.D]),
			program.Reads(&a.Left, places[a.Left]),
			program.Reads(&a.Right, places[a.Right]), program.Reads(&a.C, places[a.C])}
		a.D, a.Left, a.Right, a.C = 0, 0, 0, 0
		call := b.Name(program.NewCall(&a, args...))
		call.FLOPs = 2 * float64(a.Batch) * float64(a.N) * float64(a.N) * float64(a.Depth)
		calls = append(calls, call)
	}

	apply := func(y, q, x gpu.Ptr) {
		p := step{tall: n.Rows > n.Columns}.apply(places[y], places[q], places[x], nil, 0, false)
		calls = append(calls, b.products(p)...)
	}
	n.Run(multiply, apply)
	return calls
}
