package lower

import (
	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/norm"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/cudaops/internal/schulz"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/op"
)

func init() {
	register[*op.RMSNormOp](lowerRMSNorm, nil)
	register[*op.RMSNormGradOp](lowerRMSNormGrad, linearIn(3))
	register[*op.NewtonSchulzOp](lowerNewtonSchulz, nil)
	register[*op.NewtonSchulzGradOp](lowerNewtonSchulzGrad, linearIn(1))
}

func lowerRMSNorm(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	o := n.Op().(*op.RMSNormOp)
	y, _ := c.norm(n, o, c.asActivation(n, in[0]), nil, in[1])
	return y
}

// normState holds data that a norm saves for its gradient, in float32: 1/rms of every row or head,
// and the factors of the features.
type normState struct{ rstd, factor *program.Array }

// norm adds the norm of x or, if residual is not nil, the norm of x + residual, and then also returns the
// sum.
func (c *compiler) norm(n *gorgonia.Node, o *op.RMSNormOp, x, residual, weight *program.Array) (y,
	sum *program.Array) {
	w := c.as(n, weight, gpu.Float32)
	if o.PlusOne {
		w = c.map1(n, elementwise.AddScalar, c.aux(w.Shape...), w, 1)
	}

	rows, d := x.Len()/w.Len(), w.Len()
	y, rstd := c.Like(x), c.aux(rows)
	c.saved[o] = normState{rstd, w}
	if residual != nil {
		sum = c.Like(x)
	}

	q := c.float8Output(y, d == x.Shape[1] && c.wantsFloat8(n))
	a := norm.RMSNorm{Rows: rows, D: d, Eps: o.Eps, Type: x.Type,
		// a Kasmina op writes its first rows last
		Ascending: residual == nil && isOp[*op.KasminaOp](graph.Children(n)[0])}
	addCall(c, n, &a, program.Writes(&a.Y, y), program.Writes(&a.Rstd, rstd),
		program.Reads(&a.X, x), program.Reads(&a.W, w), program.Reads(&a.Residual, residual),
		program.Writes(&a.Sum, sum), program.Writes(&a.Y8, q.Values),
		program.Writes(&a.Scale8, q.Scales))
	return y, sum
}

func lowerRMSNormGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.asActivation(n, in[0]), c.asActivation(n, in[3])
	saved := c.saved[n.Op().(*op.RMSNormGradOp).Forward].(normState)
	w := saved.factor
	rows, d := x.Len()/w.Len(), w.Len()
	dx := c.Like(x)
	dw, _ := c.normGrads(n, x, w)
	to, add := c.addend(c.partOf(n, 0), dx)
	q := c.float8Output(dx, d == x.Shape[1] && c.wantsFloat8(to))
	a := norm.RMSNormBackward{Rows: rows, D: d, Type: x.Type}
	addCall(c, n, &a, program.Writes(&a.DX, dx), program.Writes(&a.DW, dw),
		program.Reads(&a.G, g), program.Reads(&a.X, x), program.Reads(&a.W, w),
		program.Reads(&a.Rstd, saved.rstd), program.Reads(&a.Add, add),
		program.Writes(&a.DX8, q.Values), program.Writes(&a.Scale8, q.Scales))
	return packed(dx, dw)
}

// normGrads returns arrays for the gradients that n, the backward pass of a norm of x, computes: dw for the weights w, and
// db for biases of the same shape. An array that no node reads has no memory.
func (c *compiler) normGrads(n *gorgonia.Node, x, w *program.Array) (dw, db *program.Array) {
	of := func(offset int) *program.Array {
		if !c.lasting[n] && c.partOf(n, offset) == nil {
			return &program.Array{Shape: w.Shape}
		}
		return c.aux(w.Shape...)
	}
	return of(x.Len()), of(x.Len() + w.Len())
}

// schulz returns a builder for the calls of a node's Newton-Schulz iteration.
func (c *compiler) schulz(n *gorgonia.Node) schulz.Builder {
	return schulz.Builder{Program: c.Program, Chooser: c.o.Chooser, Activation: c.o.Activation,
		Name: func(call *program.Call) *program.Call { return c.named(n, call) }}
}

func lowerNewtonSchulz(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, b := in[0], c.schulz(n)
	it, err := b.Iterate(x.Shape, 1, n.Op().(*op.NewtonSchulzOp).Steps)
	if c.fail(err); err != nil {
		return nil
	}
	c.Add(b.Normalized(it.Start, x))
	c.Calls = append(c.Calls, it.Calls...)
	return c.asActivation(n, it.Result.View(0, x.Shape...))
}

func lowerNewtonSchulzGrad(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
	x, g := c.asActivations(n, in[0], in[1])
	steps := n.Op().(*op.NewtonSchulzGradOp).Forward.Steps
	return packed(c.schulz(n).Gradient(x, g, steps))
}
