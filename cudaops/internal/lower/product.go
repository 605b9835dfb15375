package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
)

// product is d = alpha·op(a)·op(b) + beta·c, for row-major matrices without gaps; d's shape and a's
// give the sizes. A zero alpha counts as 1, and c is d where it is nil. Operands of float8 have a
// factor for each row of op(a) and each column of op(b).
type product struct {
	d, a, b, c     *program.Array
	scaleA, scaleB *program.Array
	transA, transB bool
	alpha, beta    float32
	batch          int // so many products, of matrices one behind the other; 0 counts as 1
}

// repeated is a batch of the product.
func (p product) repeated(batch int) product {
	p.batch = batch
	return p
}

// plus is the product with another matrix added, if there is one.
func (p product) plus(add *program.Array) product {
	if add != nil {
		p.c, p.beta = add, 1
	}
	return p
}

// depth is how many products are added up for an element.
func (p product) depth() int {
	if p.transA {
		return p.a.Shape[0]
	}
	return p.a.Shape[1]
}

// flops is the multiplications and additions of all products of a batch.
func (p product) flops() float64 {
	return 2 * float64(max(1, p.batch)) * float64(p.d.Shape[0]) *
		float64(p.d.Shape[1]) * float64(p.depth())
}

// spec is the product as cuBLASLt sees it.
func (p product) spec() gpu.MatmulSpec {
	at := p.a.At | p.b.At | p.d.At
	if p.c != nil {
		at |= p.c.At
	}
	spec := gpu.MatmulSpec{M: p.d.Shape[0], N: p.d.Shape[1], K: p.depth(),
		TransA: p.transA, TransB: p.transB,
		A: p.a.Type, B: p.b.Type, D: p.d.Type, Align: program.Alignment}
	if p.scaleA != nil {
		spec.Scaling, spec.FastAccumulation = gpu.ScaledRows, true
	}
	if p.batch > 1 {
		spec.Batch, spec.StrideA, spec.StrideB, spec.StrideD = p.batch,
			p.a.Len(), p.b.Len(), p.d.Len()
	}
	for spec.Align > 2 && at%spec.Align != 0 {
		spec.Align /= 2
	}
	return spec
}

// params is the product as a call's.
func (p product) params() program.Matmul {
	m := program.Matmul{Spec: p.spec(), Alpha: p.alpha, Beta: p.beta}
	if m.Alpha == 0 {
		m.Alpha = 1
	}
	return m
}

// args is the operands of the product's call.
func (p product) args() []program.Arg {
	if p.batch > 1 { // all matrices of an operand
		whole := func(a *program.Array) *program.Array {
			return a.View(0, p.batch, a.Shape[0], a.Shape[1])
		}
		if p.c == p.d {
			p.c = nil
		}
		p.d, p.a, p.b = whole(p.d), whole(p.a), whole(p.b)
		if p.c != nil {
			p.c = whole(p.c)
		}
	}
	d := program.Writes("D", p.d)
	if p.beta != 0 && (p.c == nil || p.c == p.d) {
		d.Role = program.Update
	}
	args := []program.Arg{d, program.Reads("A", p.a), program.Reads("B", p.b),
		program.Reads("ScaleA", p.scaleA), program.Reads("ScaleB", p.scaleB)}
	if p.beta != 0 && p.c != nil && p.c != p.d {
		args = append(args, program.Reads("C", p.c))
	}
	return args
}

// newProduct is the call of a matrix product.
func (c *compiler) newProduct(n *gorgonia.Node, p product) *program.Call {
	call := c.newCall(n, p.params(), p.args()...)
	call.FLOPs, call.Float8 = p.flops(), p.scaleA != nil
	return call
}

// matmul adds a matrix product.
func (c *compiler) matmul(n *gorgonia.Node, p product) { c.Add(c.newProduct(n, p)) }

// matmuls adds matrix products.
func (c *compiler) matmuls(n *gorgonia.Node, all []product) {
	for _, p := range all {
		c.matmul(n, p)
	}
}

func lowerLinear(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.linear(n, in, nil)
}

// linear adds a linear layer, to whose result it adds another matrix, if there is one.
func (c *compiler) linear(n *gorgonia.Node, in []*program.Array,
	add *program.Array) (*program.Array, error) {
	x, w := c.acts(n, in[0], in[1])
	y := c.NewArray(x.Type, n.Shape()...)
	c.linearProduct(n, y, x, w, add)
	return y, nil
}

func lowerLinearGrad(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
	return c.linearGrad(n, in, nil), nil
}

// linearGrad adds the gradients of a linear layer. To that of its input it adds another one, if
// there is one.
func (c *compiler) linearGrad(n *gorgonia.Node, in []*program.Array,
	add *program.Array) *program.Array {
	x, w := c.acts(n, in[0], in[1])
	g := c.act(n, in[2])
	dx, dw := c.like(x), c.weightGradient(w.Shape, c.partOf(n, x.Len()))
	c.linearProductGrad(n, dx, g, w, add)
	c.matmul(n, product{d: dw, a: g, b: x, transA: true})
	return packed(dx, dw)
}
