package lower

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

var (
	unaryOps = map[string]elementwise.UnaryOp{
		"abs": elementwise.Abs, "sign": elementwise.Sign,
		"ceil": elementwise.Ceil, "floor": elementwise.Floor,
		"sin": elementwise.Sin,
		"cos": elementwise.Cos, "exp": elementwise.Exp, "ln": elementwise.Log,
		"log2": elementwise.Log2, "neg": elementwise.Neg,
		"square": elementwise.Square, "sqrt": elementwise.Sqrt,
		"inv": elementwise.Inverse, "invSqrt": elementwise.InverseSqrt,
		"cube": elementwise.Cube, "tanh": elementwise.Tanh,
		"sigmoid": elementwise.Sigmoid, "log1p": elementwise.Log1p,
		"expm1": elementwise.Expm1, "softplus": elementwise.Softplus,
	}
	binaryOps = map[string]elementwise.BinaryOp{
		"+": elementwise.Add, "-": elementwise.Sub, "⊙": elementwise.Mul,
		"÷": elementwise.Div, "^": elementwise.Pow, "<": elementwise.Less,
		">": elementwise.Greater, "<=": elementwise.LessEqual,
		">=": elementwise.GreaterEqual, "==": elementwise.Equal,
		"!=":         elementwise.NotEqual,
		"MinBetween": elementwise.Minimum, "MaxBetween": elementwise.Maximum,
	}
	// withLeft and withRight map binary ops to unary ops for the case that the left or right operand is a
	// known number.
	withLeft = map[elementwise.BinaryOp]elementwise.UnaryOp{
		elementwise.Add: elementwise.AddScalar, elementwise.Sub: elementwise.SubFrom,
		elementwise.Mul: elementwise.MulScalar, elementwise.Div: elementwise.DivideInto,
		elementwise.Pow: elementwise.PowOf}
	withRight = map[elementwise.BinaryOp]elementwise.UnaryOp{
		elementwise.Add: elementwise.AddScalar, elementwise.Mul: elementwise.MulScalar,
		elementwise.Pow: elementwise.PowScalar}
)

func stockUnary(n *gorgonia.Node) lowering {
	f, ok := unaryOps[fmt.Sprint(n.Op())]
	if !ok || !floats(n) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		return c.unary(n, f, in[0], 0)
	}
}

// readsSpread reports whether a node is an elementwise op that can read operands before they are
// repeated.
func (c *compiler) readsSpread(n *gorgonia.Node) bool {
	switch graph.OpType(n) {
	case "gorgonia.elemBinOp", "gorgonia.minBetween", "gorgonia.maxBetween":
		isNumber := func(n *gorgonia.Node) bool { _, ok := number(n); return ok }
		return c.hasKernel(n) && !slices.ContainsFunc(graph.Children(n), isNumber)
	}
	return false
}

// stockBinary lowers arithmetic ops, and comparisons that return 1 or 0 in the type of their operands.
func stockBinary(n *gorgonia.Node) lowering {
	symbol, _, _ := strings.Cut(fmt.Sprint(n.Op()), " ")
	f, ok := binaryOps[symbol]
	if !ok || !floats(n) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		return c.binary(n, f, in[0], in[1])
	}
}

func (c *compiler) unary(n *gorgonia.Node, f elementwise.UnaryOp, x *program.Array,
	p float64) *program.Array {
	return c.map1(n, f, c.NewArray(x.Type, n.Shape()...), x, p)
}

// map1 adds y = f(x) for every element, with parameter p of f.
func (c *compiler) map1(n *gorgonia.Node, f elementwise.UnaryOp, y, x *program.Array,
	p float64) *program.Array {
	a := elementwise.Unary{Op: f, P: p, N: y.Len(), Type: y.Type}
	addCall(c, n, &a, program.Reads(&a.X, x), program.Writes(&a.Y, y))
	return y
}

// map2 adds y = f(a, b) for every element. repeated gives the repetition of each operand; a single
// number is repeated for every element.
func (c *compiler) map2(n *gorgonia.Node, f elementwise.BinaryOp, y, a, b *program.Array,
	repeated ...elementwise.Operand) *program.Array {
	var as [2]elementwise.Operand
	copy(as[:], repeated)
	for i, x := range [...]*program.Array{a, b} {
		if as[i].Period == 0 && x.Len() == 1 {
			as[i].Period = 1
		}
	}

	l := elementwise.Binary{Op: f, A: as[0], B: as[1], N: y.Len(), Type: y.Type}
	addCall(c, n, &l, program.Reads(&l.A.Ptr, a), program.Reads(&l.B.Ptr, b),
		program.Writes(&l.Y, y))
	return y
}

// binary adds an elementwise op. An operand with a single element is combined with every element of the
// other. If an operand is the result of a repetition, the repetition's input is read instead. If the
// operand types differ, the result is float32, the type of scalars and of parameter gradients, except
// that a scalar doesn't change the type of a tensor.
func (c *compiler) binary(n *gorgonia.Node, f elementwise.BinaryOp,
	a, b *program.Array) *program.Array {
	nodes := graph.Children(n)
	if p, ok := c.number(n, 0); ok {
		if u, ok := withLeft[f]; ok {
			return c.unary(n, u, b, p)
		}
	}

	if p, ok := c.number(n, 1); ok {
		switch u, ok := withRight[f]; {
		case ok:
			return c.unary(n, u, a, p)
		case f == elementwise.Sub:
			return c.unary(n, elementwise.AddScalar, a, -p)
		case f == elementwise.Div && a.Type != gpu.Float32:
			// the reciprocal in float32 is more accurate than a divisor in a's type
			return c.unary(n, elementwise.MulScalar, a, 1/p)
		}
	}

	in := [2]*program.Array{a, b}
	var repeated [2]elementwise.Operand
	for i, child := range nodes {
		if s, ok := spreadOf(child); ok {
			in[i], repeated[i] = c.inputAsActivation(n, c.operandOf(child, 0)), s
		}
	}

	e := in[0].Type
	switch {
	case len(in[0].Shape) == 0 && len(in[1].Shape) > 0:
		e = in[1].Type
	case len(in[1].Shape) > 0 && in[1].Type == gpu.Float32:
		e = gpu.Float32
	}

	y := c.NewArray(e, n.Shape()...)
	x, z := c.as(n, in[0], e), c.as(n, in[1], e)
	return c.map2(n, f, y, x, z, repeated[:]...)
}

// spreadOf describes a node that is a repetition, if an elementwise op can read its input directly.
func spreadOf(n *gorgonia.Node) (o elementwise.Operand, ok bool) {
	r, ok := repetitionOf(n)
	switch {
	case !ok || r.times == 1 || !floats(n):
		return o, false
	case r.inner == 1:
		return elementwise.Operand{Repeat: r.times, Period: r.outer * r.along}, true
	case r.outer*r.along == 1:
		return rowOf(r.inner), true
	}
	return o, false
}

// rowOf describes a row that is repeated for every row of a matrix.
func rowOf(columns int) elementwise.Operand {
	return elementwise.Operand{Repeat: 1, Period: columns}
}

// number returns the value of an input that is a known number. The scaled gradient of the loss is not.
func (c *compiler) number(n *gorgonia.Node, input int) (float64, bool) {
	if c.Scaling.Edges[program.Edge{Node: n, Input: input}] {
		return 0, false
	}
	return number(graph.Children(n)[input])
}

// number returns the value of a node that is a known number: a constant or the size of a dimension.
func number(n *gorgonia.Node) (float64, bool) {
	if !n.IsScalar() || n.Dtype() != tensor.Float32 {
		return 0, false
	}

	if graph.IsConstant(n) {
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
