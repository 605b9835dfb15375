package cudaops

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
)

// Gorgonia does not export the types of its ops. They are told apart by their type's name and by what String says.
var (
	unaryOps = map[string]kernels.UnaryOp{
		"abs": kernels.Abs, "sign": kernels.Sign, "ceil": kernels.Ceil, "floor": kernels.Floor, "sin": kernels.Sin,
		"cos": kernels.Cos, "exp": kernels.Exp, "ln": kernels.Log, "log2": kernels.Log2, "neg": kernels.Neg,
		"square": kernels.Square, "sqrt": kernels.Sqrt, "inv": kernels.Inverse, "invSqrt": kernels.InverseSqrt,
		"cube": kernels.Cube, "tanh": kernels.Tanh, "sigmoid": kernels.Sigmoid, "log1p": kernels.Log1p,
		"expm1": kernels.Expm1, "softplus": kernels.Softplus,
	}
	binaryOps = map[string]kernels.BinaryOp{
		"+": kernels.Add, "-": kernels.Sub, "⊙": kernels.Mul, "÷": kernels.Div, "^": kernels.Pow,
	}
	products = map[string]struct{ transA, transB bool }{
		"A × B": {}, "Aᵀ × B": {transA: true}, "A × Bᵀ": {transB: true}, "Aᵀ × Bᵀ": {true, true},
	}
)

// stock returns the lowering of one of Gorgonia's own ops, nil if there is none.
func stock(n *gorgonia.Node) lowering {
	name := fmt.Sprint(n.Op())
	switch fmt.Sprintf("%T", n.Op()) {
	case "gorgonia.elemUnaryOp":
		if f, ok := unaryOps[name]; ok {
			return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) { return c.unary(n, f, in[0]) }
		}
	case "gorgonia.elemBinOp":
		symbol, _, _ := strings.Cut(name, " ")
		if f, ok := binaryOps[symbol]; ok {
			return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) { return c.binary(n, f, in[0], in[1]) }
		}
	case "gorgonia.linAlgBinOp":
		if t, ok := products[name]; ok && n.Dims() == 2 {
			return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
				x, w := c.lowerPair(n, in[0], in[1])
				y := c.newArray(x.elem, n.Shape()...)
				return y, c.matmul(n, product{d: y, a: x, b: w, transA: t.transA, transB: t.transB})
			}
		}
	}
	return nil
}

func (c *compiler) unary(n *gorgonia.Node, f kernels.UnaryOp, x *array) (*array, error) {
	y, m := c.newArray(x.elem, n.Shape()...), c.m
	c.do(n, func() error { return m.k.Unary(m.stream, f, y.ptr(), x.ptr(), 0, y.len(), y.elem.dtype()) }, x, y)
	return y, nil
}

// binary computes elementwise; an operand of one element goes with every element of the other. Where the operands' types
// differ, float32 wins: it is that of gradients of parameters and of scalars, but a scalar does not widen a tensor.
func (c *compiler) binary(n *gorgonia.Node, f kernels.BinaryOp, a, b *array) (*array, error) {
	e := a.elem
	switch {
	case len(a.shape) == 0 && len(b.shape) > 0:
		e = b.elem
	case len(b.shape) > 0 && b.elem == float32s:
		e = float32s
	}
	return c.elementwise(n, f, c.as(n, a, e), c.as(n, b, e), n.Shape())
}

// elementwise is binary for operands of one type.
func (c *compiler) elementwise(n *gorgonia.Node, f kernels.BinaryOp, a, b *array, shape tensor.Shape) (*array, error) {
	y, m := c.newArray(a.elem, shape...), c.m
	c.do(n, func() error {
		return m.k.Binary(m.stream, f, y.ptr(), operand(a, y), operand(b, y), y.len(), y.elem.dtype())
	}, a, b, y)
	return y, nil
}

func operand(a, like *array) kernels.Operand {
	o := kernels.Operand{Ptr: a.ptr()}
	if a.len() == 1 && like.len() != 1 {
		o.Period = 1
	}
	return o
}
