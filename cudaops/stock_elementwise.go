package cudaops

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/kernels"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

var (
	unaryOps = map[string]kernels.UnaryOp{
		"abs": kernels.Abs, "sign": kernels.Sign, "ceil": kernels.Ceil, "floor": kernels.Floor, "sin": kernels.Sin,
		"cos": kernels.Cos, "exp": kernels.Exp, "ln": kernels.Log, "log2": kernels.Log2, "neg": kernels.Neg,
		"square": kernels.Square, "sqrt": kernels.Sqrt, "inv": kernels.Inverse, "invSqrt": kernels.InverseSqrt,
		"cube": kernels.Cube, "tanh": kernels.Tanh, "sigmoid": kernels.Sigmoid, "log1p": kernels.Log1p,
		"expm1": kernels.Expm1, "softplus": kernels.Softplus,
	}
	binaryOps = map[string]kernels.BinaryOp{
		"+": kernels.Add, "-": kernels.Sub, "⊙": kernels.Mul, "÷": kernels.Div, "^": kernels.Pow, "<": kernels.Less,
		">": kernels.Greater, "<=": kernels.LessEqual, ">=": kernels.GreaterEqual, "==": kernels.Equal, "!=": kernels.NotEqual,
		"MinBetween": kernels.Minimum, "MaxBetween": kernels.Maximum,
	}
	// withLeft and withRight are the binary ops as unary ones, where that operand is a number known beforehand.
	withLeft = map[kernels.BinaryOp]kernels.UnaryOp{kernels.Add: kernels.AddScalar, kernels.Sub: kernels.SubFrom,
		kernels.Mul: kernels.MulScalar, kernels.Div: kernels.DivideInto, kernels.Pow: kernels.PowOf}
	withRight = map[kernels.BinaryOp]kernels.UnaryOp{kernels.Add: kernels.AddScalar, kernels.Mul: kernels.MulScalar,
		kernels.Pow: kernels.PowScalar}
)

func stockUnary(n *gorgonia.Node) lowering {
	f, ok := unaryOps[fmt.Sprint(n.Op())]
	if !ok || !floats(n) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) { return c.unary(n, f, in[0], 0), nil }
}

// readsSpread reports whether a node is an elementwise op that reads what its operands repeat.
func (c *compiler) readsSpread(n *gorgonia.Node) bool {
	switch fmt.Sprintf("%T", n.Op()) {
	case "gorgonia.elemBinOp", "gorgonia.minBetween", "gorgonia.maxBetween":
		isNumber := func(n *gorgonia.Node) bool { _, ok := number(n); return ok }
		return c.hasKernel(n) && !slices.ContainsFunc(opbase.Children(n), isNumber)
	}
	return false
}

// stockBinary lowers arithmetic and those comparisons whose result is of the operands' type, 1 or 0.
func stockBinary(n *gorgonia.Node) lowering {
	symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " ")
	f, ok := binaryOps[symbol]
	if !ok || !floats(n) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) { return c.binary(n, f, in[0], in[1]) }
}

func (c *compiler) unary(n *gorgonia.Node, f kernels.UnaryOp, x *array, p float64) *array {
	y, m := c.newArray(x.elem, n.Shape()...), c.m
	c.do(n, func() error { return m.k.Unary(m.stream, f, y.ptr(), x.ptr(), p, y.len(), y.elem.dtype()) }, x, y)
	return y
}

// binary computes elementwise; an operand of one element goes with every element of the other, and one that a node repeats
// is read as often from what the node repeats. Where the operands' types differ, float32 wins: it is that of gradients of
// parameters and of scalars, but a scalar does not widen a tensor.
func (c *compiler) binary(n *gorgonia.Node, f kernels.BinaryOp, a, b *array) (*array, error) {
	nodes := opbase.Children(n)
	if p, ok := c.number(n, 0); ok {
		if u, ok := withLeft[f]; ok {
			return c.unary(n, u, b, p), nil
		}
	}
	if p, ok := c.number(n, 1); ok {
		switch u, ok := withRight[f]; {
		case ok:
			return c.unary(n, u, a, p), nil
		case f == kernels.Sub:
			return c.unary(n, kernels.AddScalar, a, -p), nil
		case f == kernels.Div && a.elem != float32s: // rounds less than a divisor of that type would
			return c.unary(n, kernels.MulScalar, a, 1/p), nil
		}
	}
	in := [2]*array{a, b}
	var spreads [2]spread
	for i, child := range nodes {
		if s, ok := spreadOf(child); ok {
			in[i], spreads[i] = c.fed(n, c.operand(child, 0)), s
		}
	}
	e := in[0].elem
	switch {
	case len(in[0].shape) == 0 && len(in[1].shape) > 0:
		e = in[1].elem
	case len(in[1].shape) > 0 && in[1].elem == float32s:
		e = float32s
	}
	y, m := c.newArray(e, n.Shape()...), c.m
	x, z := c.as(n, in[0], e), c.as(n, in[1], e)
	c.do(n, func() error {
		return m.k.Binary(m.stream, f, y.ptr(), spreads[0].operand(x, y), spreads[1].operand(z, y), y.len(), y.elem.dtype())
	}, x, z, y)
	return y, nil
}

// spread is how elements are repeated, as in kernels.Operand.
type spread struct{ repeat, period int }

func (s spread) operand(a, like *array) kernels.Operand {
	if s.period == 0 {
		return operand(a, like)
	}
	return kernels.Operand{Ptr: a.ptr(), Repeat: s.repeat, Period: s.period}
}

// spreadOf returns the repetition that a node is, if an elementwise op can read its input in its place.
func spreadOf(n *gorgonia.Node) (spread, bool) {
	r, ok := repetitionOf(n)
	switch {
	case !ok || r.times == 1 || !floats(n):
		return spread{}, false
	case r.inner == 1:
		return spread{repeat: r.times, period: r.outer * r.along}, true
	case r.outer*r.along == 1:
		return spread{repeat: 1, period: r.inner}, true
	}
	return spread{}, false
}

// number is the value of an input that is a number known beforehand, which the scaled gradient of the loss is not.
func (c *compiler) number(n *gorgonia.Node, input int) (float64, bool) {
	if c.scaling != nil && c.scaling.edges[edge{n, input}] {
		return 0, false
	}
	return number(opbase.Children(n)[input])
}

// number is the value of a node that is a number known beforehand: a constant, or the size of a dimension.
func number(n *gorgonia.Node) (float64, bool) {
	if !n.IsScalar() || n.Dtype() != tensor.Float32 {
		return 0, false
	}
	if opbase.IsConstant(n) {
		if flat, err := opbase.Flat(n.Value()); err == nil {
			if x, ok := flat.([]float32); ok && len(x) == 1 {
				return float64(x[0]), true
			}
		}
		return 0, false
	}
	v, ok := sizeOf(n)
	return float64(v), ok
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
