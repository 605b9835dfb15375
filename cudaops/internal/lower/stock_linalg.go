package lower

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// linalg is one of Gorgonia's products.
type linalg struct {
	lower func(c *compiler, n *gorgonia.Node, in []*program.Array,
		p linalg) (*program.Array, error)
	dims           [3]int // of the operands and of the result; 0 for any from three on
	transA, transB bool
}

// products holds the products by what their String says. Operands of the others are never
// transposed, as are vectors.
var products = map[string]linalg{
	"A × B":     {lower: lowerMatMul, dims: [3]int{2, 2, 2}},
	"Aᵀ × B":    {lower: lowerMatMul, dims: [3]int{2, 2, 2}, transA: true},
	"A × Bᵀ":    {lower: lowerMatMul, dims: [3]int{2, 2, 2}, transB: true},
	"Aᵀ × Bᵀ":   {lower: lowerMatMul, dims: [3]int{2, 2, 2}, transA: true, transB: true},
	"A × b":     {lower: lowerMatVec, dims: [3]int{2, 1, 1}},
	"Aᵀ × b":    {lower: lowerMatVec, dims: [3]int{2, 1, 1}, transA: true},
	"a ⋅ b":     {lower: lowerDot, dims: [3]int{1, 1, 0}},
	"a ⊗ b":     {lower: lowerOuter, dims: [3]int{1, 1, 2}},
	"A ××× B":   {lower: lowerBatched},
	"Aᵀ ××× B":  {lower: lowerBatched, transA: true},
	"A ××× Bᵀ":  {lower: lowerBatched, transB: true},
	"Aᵀ ××× Bᵀ": {lower: lowerBatched, transA: true, transB: true},
}

func stockProduct(n *gorgonia.Node) lowering {
	p, ok := products[fmt.Sprint(n.Op())]
	if !ok || !floats(n) || !p.fits(n) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		return p.lower(c, n, in, p)
	}
}

// isMatMul reports whether a node is a product of two matrices, which transposes its operands
// itself.
func (c *compiler) isMatMul(n *gorgonia.Node) bool {
	p, ok := products[fmt.Sprint(n.Op())]
	return ok && p.dims == [3]int{2, 2, 2} && c.hasKernel(n)
}

// fits reports whether the nodes have the shapes of a product of this kind. Gorgonia takes some
// vectors for matrices and some shapes that do not fit.
func (p linalg) fits(n *gorgonia.Node) bool {
	a, b, y := graph.Children(n)[0].Shape(), graph.Children(n)[1].Shape(), n.Shape()
	if p.dims == [3]int{} {
		batch := len(a) - 2
		if batch < 1 || len(b) != len(a) || len(y) != len(a) || !slices.Equal(a[:batch],
			b[:batch]) || !slices.Equal(a[:batch], y[:batch]) {
			return false
		}
		a, b, y = a[batch:], b[batch:], y[batch:]
	} else if p.dims != [3]int{len(a), len(b), len(y)} {
		return false
	}
	switch [2]int{len(a), len(b)} {
	case [2]int{2, 2}:
		m, k := flip(a, p.transA)
		l, n := flip(b, p.transB)
		return k == l && y[0] == m && y[1] == n
	case [2]int{2, 1}:
		m, k := flip(a, p.transA)
		return k == b[0] && y[0] == m
	}
	return len(y) == 2 && y[0] == a[0] && y[1] == b[0] || len(y) == 0 && a[0] == b[0]
}

// flip returns the rows and columns of a matrix, or of its transpose.
func flip(s tensor.Shape, transposed bool) (rows, columns int) {
	if transposed {
		return s[1], s[0]
	}
	return s[0], s[1]
}

// factor is an operand of a product. That of a transposed node is the matrix from which the node
// was made.
func (c *compiler) factor(n *gorgonia.Node, i int, in *program.Array,
	transposed bool) (*program.Array, bool) {
	if child := graph.Children(n)[i]; isMatrixTranspose(child) {
		in, transposed = c.operand(child, 0), !transposed
	}
	return c.act(n, in), transposed
}

// lowerMatMul lowers a product of matrices. With A transposed it is a sum over rows, as gradients
// of weights are, and like these float32.
func lowerMatMul(c *compiler, n *gorgonia.Node, in []*program.Array, p linalg) (*program.Array,
	error) {
	a, transA := c.factor(n, 0, in[0], p.transA)
	b, transB := c.factor(n, 1, in[1], p.transB)
	e := a.Type
	if p.transA {
		e = gpu.Float32
	}
	y := c.NewArray(e, n.Shape()...)
	c.matmul(n, program.Product{D: y, A: a, B: b, TransA: transA, TransB: transB})
	return y, nil
}

func lowerMatVec(c *compiler, n *gorgonia.Node, in []*program.Array, p linalg) (*program.Array,
	error) {
	a, transA := c.factor(n, 0, in[0], p.transA)
	b := c.act(n, in[1])
	y := c.NewArray(a.Type, n.Shape()...)
	c.matmul(n, program.Product{D: y.View(0, y.Len(), 1), A: a, B: b.View(0, b.Len(), 1), TransA: transA})
	return y, nil
}

func lowerDot(c *compiler, n *gorgonia.Node, in []*program.Array, _ linalg) (*program.Array,
	error) {
	a, b := c.acts(n, in[0], in[1])
	y := c.aux()
	c.matmul(n, program.Product{D: y.View(0, 1, 1), A: a.View(0, 1, a.Len()), B: b.View(0, b.Len(), 1)})
	return y, nil
}

// lowerOuter lowers aᵢbⱼ, the gradient of a matrix by whose product with a vector it comes.
func lowerOuter(c *compiler, n *gorgonia.Node, in []*program.Array, _ linalg) (*program.Array,
	error) {
	a, b := c.as(n, in[0], gpu.Float32), c.as(n, in[1], gpu.Float32)
	y := c.aux(n.Shape()...)
	return c.map2(n, elementwise.Mul, y, repeated{a, spread{b.Len(), a.Len()}},
		repeated{b, spread{0, b.Len()}}), nil
}

// lowerBatched lowers the products of the matrices that are the last two dimensions, one for each
// index before them.
func lowerBatched(c *compiler, n *gorgonia.Node, in []*program.Array, p linalg) (*program.Array,
	error) {
	a, b := c.acts(n, in[0], in[1])
	y := c.NewArray(a.Type, n.Shape()...)
	last := len(y.Shape) - 2
	one := func(x *program.Array) *program.Array { return x.View(0, x.Shape[last:]...) }
	c.matmul(n, program.Product{D: one(y), A: one(a), B: one(b), TransA: p.transA, TransB: p.transB}.
		Repeated(opbase.Size(y.Shape[:last])))
	return y, nil
}
