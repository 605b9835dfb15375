package cudaops

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/op"
)

// The Newton-Schulz iteration begins with X = x/(‖x‖ + 1e-7); every step is
//
//	A = X·Xᵀ,  B = b·A + c·A²,  Y = a·X + B·X
//
// and for a tall X, with the smaller square, A = Xᵀ·X, Y = a·X + X·B. Backwards, with the gradient G of Y,
//
//	D = G·Xᵀ,  E = b·D + c·(D·A + A·D),  dX = a·G + B·G + (E + Eᵀ)·X
//
// and D = Xᵀ·G, dX = a·G + G·B + X·(E + Eᵀ) for a tall one.
const nsA, nsB, nsC = kernels.SchulzA, kernels.SchulzB, kernels.SchulzC

// schulz is one step's matrices, of which a tall one is multiplied from the other side.
type schulz struct {
	tall       bool
	gram, poly *array // A and B
}

// squares is the products that make A and B of x.
func (s schulz) squares(x *array) []product {
	return []product{
		{d: s.gram, a: x, b: x, transA: s.tall, transB: !s.tall},
		{d: s.poly, a: s.gram, b: s.gram, c: s.gram, alpha: nsC, beta: nsB},
	}
}

// apply is d = square·x + beta·c, from the right for a tall x. transposed takes the square's transpose.
func (s schulz) apply(d, square, x, c *array, beta float32, transposed bool) product {
	if s.tall {
		return product{d: d, a: x, b: square, c: c, beta: beta, transB: transposed}
	}
	return product{d: d, a: square, b: x, c: c, beta: beta, transA: transposed}
}

// step is the products of a step from x to y.
func (s schulz) step(y, x *array) []product {
	return append(s.squares(x), s.apply(y, s.poly, x, x, nsA, false))
}

// newSchulz returns a step's matrices for x.
func (c *compiler) newSchulz(x *array) schulz {
	side := min(x.shape[0], x.shape[1])
	return schulz{tall: x.shape[0] > x.shape[1], gram: c.newArray(x.elem, side, side), poly: c.newArray(x.elem, side, side)}
}

func (c *compiler) matmuls(n *gorgonia.Node, all []product) error {
	for _, p := range all {
		if err := c.matmul(n, p); err != nil {
			return err
		}
	}
	return nil
}

// normalized is x/(‖x‖ + 1e-7) in another type.
func (c *compiler) normalized(n *gorgonia.Node, x *array, e elem) *array {
	y, workspace, m := c.newArray(e, x.shape...), c.bytes(kernels.NormalizeWorkspace), c.m
	c.do(n, func() error {
		return m.k.Normalize(m.stream, kernels.Normalize{Y: y.ptr(), X: x.ptr(), Workspace: workspace.ptr(), N: x.len(),
			YType: y.elem.dtype(), XType: x.elem.dtype()})
	}, x, y, workspace)
	return y
}

func lowerNewtonSchulz(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x := in[0]
	it, err := c.m.newIteration(x.shape, 1, n.Op().(*op.NewtonSchulzOp).Steps)
	if err != nil {
		return nil, err
	}
	first, second := c.normalized(n, x, it.elem), c.newArray(it.elem, x.shape...)
	squares := c.newArray(it.elem, it.squares())
	run, result, err := it.bind(first, second, squares)
	if err != nil {
		return nil, err
	}
	c.do(n, run, second, first, squares)
	c.computes(it.flops())
	return c.act(n, result), nil
}

// lowerNewtonSchulzGrad computes the steps again, and keeps what each began with.
func lowerNewtonSchulzGrad(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
	x, g := c.act(n, in[0]), c.act(n, in[1])
	chain := []*array{c.normalized(n, x, x.elem)}
	for range n.Op().(*op.NewtonSchulzGradOp).Forward.Steps - 1 {
		last, next := chain[len(chain)-1], c.like(x)
		if err := c.matmuls(n, c.newSchulz(last).step(next, last)); err != nil {
			return nil, err
		}
		chain = append(chain, next)
	}
	for i := len(chain) - 1; i >= 0; i-- {
		d := c.like(x)
		if err := c.schulzGrad(n, d, g, chain[i]); err != nil {
			return nil, err
		}
		g = d
	}
	dx, workspace, m := c.like(x), c.bytes(kernels.NormalizeWorkspace), c.m
	c.do(n, func() error {
		return m.k.NormalizeBackward(m.stream, kernels.NormalizeBackward{DX: dx.ptr(), G: g.ptr(), X: x.ptr(), Workspace: workspace.ptr(),
			N: x.len(), Type: x.elem.dtype()})
	}, x, g, dx, workspace)
	return packed(dx), nil
}

// schulzGrad adds the gradient dx of a step's x for that of its result, g.
func (c *compiler) schulzGrad(n *gorgonia.Node, dx, g, x *array) error {
	s := c.newSchulz(x)
	d, e := c.like(s.gram), c.like(s.gram)
	outer := product{d: d, a: g, b: x, transB: true}
	if s.tall {
		outer = product{d: d, a: x, b: g, transA: true}
	}
	return c.matmuls(n, append(s.squares(x),
		s.apply(dx, s.poly, g, g, nsA, false),
		outer,
		product{d: e, a: d, b: s.gram, c: d, alpha: nsC, beta: nsB},
		product{d: e, a: s.gram, b: d, alpha: nsC, beta: 1},
		s.apply(dx, e, x, nil, 1, false),
		s.apply(dx, e, x, nil, 1, true)))
}
