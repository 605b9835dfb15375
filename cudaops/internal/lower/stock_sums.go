package lower

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// linalg is one of Gorgonia's linear algebra ops expressed as a product of matrices. Vectors become rows
// or columns.
type linalg struct {
	a, b, y        []int // shapes of the stored operands and of the result
	transA, transB bool
	matrices       bool
	sums           bool // sums over rows, or products of vectors, as in gradients of weights; the result is float32
}

// linalgOf returns the product computed by a node. Gorgonia mistakes some vectors for matrices, and
// accepts some shapes that don't match; linalgOf rejects these.
func linalgOf(n *gorgonia.Node) (p linalg, ok bool) {
	name := fmt.Sprint(n.Op())
	left, rest, _ := strings.Cut(name, " ")
	sign, right, _ := strings.Cut(rest, " ")
	if graph.OpType(n) != "gorgonia.linAlgBinOp" || !floats(n) {
		return p, false
	}

	a, b, y := graph.Children(n)[0].Shape(), graph.Children(n)[1].Shape(), n.Shape()
	p.transA, p.transB = left == "Aᵀ", right == "Bᵀ"
	vectorA, vectorB := left == "a", right == "b"
	p.matrices = sign == "×" && !vectorA && !vectorB
	p.sums = p.matrices && p.transA || vectorA && vectorB
	if vectorA != (len(a) == 1) || vectorB != (len(b) == 1) {
		return p, false
	}

	row := func(s tensor.Shape) tensor.Shape { return append(tensor.Shape{1}, s...) }
	switch {
	case sign == "⊗":
		a, b = append(a, 1), row(b)
	case vectorA:
		a, b, y = row(a), append(b, 1), append(row(y), 1)
	case vectorB:
		b, y = append(b, 1), append(y, 1)
	}

	last := len(a) - 2
	if last < 0 || len(b) != len(a) || (last > 0) != (sign == "×××") ||
		!slices.Equal(a[:last], b[:last]) {
		return p, false
	}

	m, k := flip(a[last:], p.transA)
	l, columns := flip(b[last:], p.transB)
	p.a, p.b, p.y = a, b, append(a[:last:last], m, columns)
	return p, k == l && slices.Equal(y, p.y)
}

// flip returns the rows and columns of a matrix or of its transpose.
func flip(s []int, transposed bool) (rows, columns int) {
	if transposed {
		return s[1], s[0]
	}
	return s[0], s[1]
}

func stockProduct(n *gorgonia.Node) lowering {
	p, ok := linalgOf(n)
	if !ok {
		return nil
	}

	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		a, transA := c.factor(n, 0, in[0], p.a, p.transA)
		b, transB := c.factor(n, 1, in[1], p.b, p.transB)
		y := c.NewArray(a.Type, n.Shape()...)
		if p.sums {
			y = c.aux(n.Shape()...)
		}
		c.matmul(n, program.Product{D: y.View(0, p.y...), A: a, B: b, TransA: transA,
			TransB: transB})
		return y
	}
}

// factor returns an operand of a product. For a transposed node it returns the original matrix.
func (c *compiler) factor(n *gorgonia.Node, i int, in *program.Array, shape []int,
	transposed bool) (*program.Array, bool) {
	if child := graph.Children(n)[i]; isMatrixTranspose(child) {
		in, transposed = c.operandOf(child, 0), !transposed
		shape = in.Shape
	}
	return c.asActivation(n, in).View(0, shape...), transposed
}

// isMatMul reports whether a node is a product of two matrices. Such products can transpose their
// operands themselves.
func (c *compiler) isMatMul(n *gorgonia.Node) bool {
	p, ok := linalgOf(n)
	return ok && p.matrices && c.hasKernel(n)
}

// stockReduction lowers Sum and Max along any axes.
func stockReduction(n *gorgonia.Node) lowering {
	name := fmt.Sprint(n.Op())
	r := reduce.Sum
	if strings.HasPrefix(name, "Max") {
		r = reduce.Max
	}

	x, axes := graph.Children(n)[0].Shape(), integers(name)
	slices.Sort(axes)
	axes = slices.Compact(axes)
	var left tensor.Shape
	for i, d := range x {
		if !slices.Contains(axes, i) {
			left = append(left, d)
		}
	}

	if !floats(n) || len(axes) == 0 || axes[len(axes)-1] >= len(x) ||
		!slices.Equal(left, n.Shape()) {
		return nil
	}

	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		return c.reduce(n, r, in[0], axes).View(0, n.Shape()...)
	}
}

// reduce reduces along distinct axes in ascending order, starting with the last. Sums are float32.
func (c *compiler) reduce(n *gorgonia.Node, r reduce.Reduction, x *program.Array,
	axes []int) *program.Array {
	shape := slices.Clone(x.Shape)
	for hi := len(axes); hi > 0; {
		lo := hi - 1
		for lo > 0 && axes[lo-1] == axes[lo]-1 {
			lo--
		}
		first, last := axes[lo], axes[hi-1]
		x = c.reduceMiddle(n, r, x, opbase.Size(shape[:first]), opbase.Size(shape[first:last+1]),
			opbase.Size(shape[last+1:]))
		shape, hi = slices.Delete(shape, first, last+1), lo
	}

	return x
}

// reduceMiddle reduces x, viewed as [outer, middle, inner], to [outer, inner].
func (c *compiler) reduceMiddle(n *gorgonia.Node, r reduce.Reduction, x *program.Array, outer,
	middle, inner int) *program.Array {
	t := x.Type
	if r == reduce.Sum {
		t = gpu.Float32
	}
	y := c.NewArray(t, outer, inner)
	a := reduce.Reduce{Op: r, Outer: outer, N: middle, Inner: inner, YType: t, XType: x.Type}
	addCall(c, n, &a, program.Reads(&a.X, x), program.Writes(&a.Y, y))
	return y
}

// stockSoftmax lowers SoftMax along the last axis, and its gradient. The gradient's inputs are x, y and
// the gradient of y.
func stockSoftmax(n *gorgonia.Node) lowering {
	var axis int
	var log bool
	name := fmt.Sprint(n.Op())
	_, config, _ := strings.Cut(name, "{")
	x := graph.Children(n)[0].Shape()
	last := len(x) - 1
	if _, err := fmt.Sscanf(config, "%d, %t}", &axis, &log); err != nil || log || !floats(n) ||
		last < 0 || axis >= 0 && axis != last || axis < 0 && x.IsColVec() || // Gorgonia treats column vectors differently
		!slices.Equal(x, n.Shape()) {
		return nil
	}

	rows := func(a *program.Array) *program.Array {
		return a.View(0, opbase.Size(x[:last]), x[last])
	}
	if strings.HasPrefix(name, "SoftmaxDiff") {
		return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
			y, g := rows(in[1]), rows(c.as(n, in[2], in[1].Type))
			dx := c.Like(y)
			l := softmax.Backward{Rows: y.Shape[0], N: y.Shape[1], Type: y.Type}
			addCall(c, n, &l, program.Reads(&l.Y, y), program.Reads(&l.G, g),
				program.Writes(&l.DX, dx))
			return dx.View(0, n.Shape()...)
		}
	}

	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		a := rows(in[0])
		y := c.Like(a)
		l := softmax.Forward{Rows: a.Shape[0], N: a.Shape[1], Type: a.Type}
		addCall(c, n, &l, program.Reads(&l.X, a), program.Writes(&l.Y, y))
		return y.View(0, n.Shape()...)
	}
}
