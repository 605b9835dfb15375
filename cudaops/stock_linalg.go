package cudaops

import (
	"fmt"
	"slices"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// linalg is one of Gorgonia's products.
type linalg struct {
	lower          func(c *compiler, n *gorgonia.Node, in []*array, p linalg) (*array, error)
	dims           [3]int // of the operands and of the result; 0 for any from three on
	transA, transB bool
}

// products holds the products by what their String says. Operands of the others are never transposed, as are vectors.
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
	return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) { return p.lower(c, n, in, p) }
}

// isMatMul reports whether a node is a product of two matrices, which transposes its operands itself.
func (c *compiler) isMatMul(n *gorgonia.Node) bool {
	p, ok := products[fmt.Sprint(n.Op())]
	return ok && p.dims == [3]int{2, 2, 2} && c.hasKernel(n)
}

// fits reports whether the nodes have the shapes of a product of this kind. Gorgonia takes some vectors for matrices and
// some shapes that do not fit.
func (p linalg) fits(n *gorgonia.Node) bool {
	a, b, y := opbase.Children(n)[0].Shape(), opbase.Children(n)[1].Shape(), n.Shape()
	if p.dims == [3]int{} {
		batch := len(a) - 2
		if batch < 1 || len(b) != len(a) || len(y) != len(a) || !slices.Equal(a[:batch], b[:batch]) || !slices.Equal(a[:batch], y[:batch]) {
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

// factor is an operand of a product. That of a transposed node is the matrix from which the node was made.
func (c *compiler) factor(n *gorgonia.Node, i int, in *array, transposed bool) (*array, bool) {
	if child := opbase.Children(n)[i]; isMatrixTranspose(child) {
		in, transposed = c.operand(child, 0), !transposed
	}
	return c.act(n, in), transposed
}

// lowerMatMul lowers a product of matrices. With A transposed it is a sum over rows, as gradients of weights are, and like
// these float32.
func lowerMatMul(c *compiler, n *gorgonia.Node, in []*array, p linalg) (*array, error) {
	a, transA := c.factor(n, 0, in[0], p.transA)
	b, transB := c.factor(n, 1, in[1], p.transB)
	e := a.elem
	if p.transA {
		e = float32s
	}
	y := c.newArray(e, n.Shape()...)
	return y, c.matmul(n, product{d: y, a: a, b: b, transA: transA, transB: transB})
}

func lowerMatVec(c *compiler, n *gorgonia.Node, in []*array, p linalg) (*array, error) {
	a, transA := c.factor(n, 0, in[0], p.transA)
	b := c.act(n, in[1])
	y := c.newArray(a.elem, n.Shape()...)
	return y, c.matmul(n, product{d: y.view(0, y.len(), 1), a: a, b: b.view(0, b.len(), 1), transA: transA})
}

func lowerDot(c *compiler, n *gorgonia.Node, in []*array, _ linalg) (*array, error) {
	a, b := c.lowerPair(n, in[0], in[1])
	y := c.aux()
	return y, c.matmul(n, product{d: y.view(0, 1, 1), a: a.view(0, 1, a.len()), b: b.view(0, b.len(), 1)})
}

// lowerOuter lowers aᵢbⱼ, the gradient of a matrix by whose product with a vector it comes.
func lowerOuter(c *compiler, n *gorgonia.Node, in []*array, _ linalg) (*array, error) {
	a, b, m := c.as(n, in[0], float32s), c.as(n, in[1], float32s), c.m
	y := c.aux(n.Shape()...)
	c.do(n, func() error {
		return m.k.Binary(m.stream, kernels.Mul, y.ptr(), kernels.Operand{Ptr: a.ptr(), Repeat: b.len(), Period: a.len()},
			kernels.Operand{Ptr: b.ptr(), Period: b.len()}, y.len(), y.elem.dtype())
	}, a, b, y)
	return y, nil
}

// lowerBatched lowers the products of the matrices that are the last two dimensions, one for each index before them.
func lowerBatched(c *compiler, n *gorgonia.Node, in []*array, p linalg) (*array, error) {
	a, b := c.lowerPair(n, in[0], in[1])
	y := c.newArray(a.elem, n.Shape()...)
	last := len(y.shape) - 2
	first := func(x *array) *array { return x.view(0, x.shape[last:]...) }
	all := product{d: first(y), a: first(a), b: first(b), transA: p.transA, transB: p.transB}.repeated(size(y.shape[:last]))
	run, err := c.m.blas.product(all, c.zeros)
	if err != nil {
		return nil, err
	}
	c.do(n, run, y, a, b)
	c.computes(all.flops())
	return y, nil
}
