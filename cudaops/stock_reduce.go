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

// stockReduction lowers Sum and Max along any axes.
func stockReduction(n *gorgonia.Node) lowering {
	name := fmt.Sprint(n.Op())
	r := kernels.Sum
	if strings.HasPrefix(name, "Max") {
		r = kernels.Max
	}
	x, axes := opbase.Children(n)[0].Shape(), integers(name)
	slices.Sort(axes)
	axes = slices.Compact(axes)
	var left tensor.Shape
	for i, d := range x {
		if !slices.Contains(axes, i) {
			left = append(left, d)
		}
	}
	if !floats(n) || len(axes) == 0 || axes[len(axes)-1] >= len(x) || !slices.Equal(left, n.Shape()) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
		return c.reduce(n, r, in[0], axes).view(0, n.Shape()...), nil
	}
}

// reduce reduces along axes, which ascend and do not repeat: first along those that come last. Sums are float32.
func (c *compiler) reduce(n *gorgonia.Node, r kernels.Reduction, x *array, axes []int) *array {
	shape := slices.Clone(x.shape)
	for hi := len(axes); hi > 0; {
		lo := hi - 1
		for lo > 0 && axes[lo-1] == axes[lo]-1 {
			lo--
		}
		first, last := axes[lo], axes[hi-1]
		x = c.reduceMiddle(n, r, x, size(shape[:first]), size(shape[first:last+1]), size(shape[last+1:]))
		shape, hi = slices.Delete(shape, first, last+1), lo
	}
	return x
}

// reduceMiddle reduces x, as [outer, middle, inner], to [outer, inner].
func (c *compiler) reduceMiddle(n *gorgonia.Node, r kernels.Reduction, x *array, outer, middle, inner int) *array {
	e, m := x.elem, c.m
	if r == kernels.Sum {
		e = float32s
	}
	y := c.newArray(e, outer, inner)
	a := kernels.Reduce{Op: r, Outer: outer, N: middle, Inner: inner, YType: e.dtype(), XType: x.elem.dtype()}
	workspace := c.bytes(m.k.ReduceWorkspace(a))
	c.do(n, func() error {
		a.Y, a.X, a.Workspace = y.ptr(), x.ptr(), workspace.ptr()
		return m.k.Reduce(m.stream, a)
	}, x, y, workspace)
	return y
}

// stockSoftmax lowers SoftMax and LogSoftMax, and their gradients, whose inputs are x, y and the gradient of y.
func stockSoftmax(n *gorgonia.Node) lowering {
	var axis int
	var log bool
	name := fmt.Sprint(n.Op())
	_, config, _ := strings.Cut(name, "{")
	x := opbase.Children(n)[0].Shape()
	if _, err := fmt.Sscanf(config, "%d, %t}", &axis, &log); err != nil || !floats(n) || len(x) == 0 || axis >= len(x) ||
		!slices.Equal(x, n.Shape()) {
		return nil
	}
	if axis < 0 {
		axis = len(x) - 1
		if x.IsColVec() { // as Gorgonia does it
			axis = 0
		}
	}
	gradient := strings.HasPrefix(name, "SoftmaxDiff")
	return func(c *compiler, n *gorgonia.Node, in []*array) (*array, error) {
		outer, along, inner := around(x, axis)
		e := in[0].elem
		if gradient {
			e = in[1].elem
		}
		var rows []*array // the operands with the axis innermost
		for _, a := range in {
			rows = append(rows, c.inward(n, c.as(n, a, e), outer, along, inner))
		}
		var y *array
		switch {
		case log && gradient:
			y = c.logSoftmaxGrad(n, rows[1], rows[2])
		case log:
			y = c.logSoftmax(n, rows[0])
		case gradient:
			y = c.softmaxGrad(n, rows[1], rows[2])
		default:
			y = c.softmax(n, rows[0])
		}
		return c.outward(n, y, outer, along, inner).view(0, n.Shape()...), nil
	}
}

// inward returns x [outer, n, inner] as rows [outer·inner, n].
func (c *compiler) inward(node *gorgonia.Node, x *array, outer, n, inner int) *array {
	if inner == 1 {
		return x.view(0, outer, n)
	}
	y := c.newArray(x.elem, outer*inner, n)
	c.move(node, y, x, dimension{outer, n * inner, n * inner}, dimension{inner, n, 1}, dimension{n, 1, inner})
	return y
}

// outward is the inverse of inward.
func (c *compiler) outward(node *gorgonia.Node, x *array, outer, n, inner int) *array {
	if inner == 1 {
		return x
	}
	y := c.newArray(x.elem, outer, n, inner)
	c.move(node, y, x, dimension{outer, n * inner, n * inner}, dimension{n, inner, 1}, dimension{inner, 1, n})
	return y
}

func (c *compiler) softmax(n *gorgonia.Node, x *array) *array {
	y, m := c.like(x), c.m
	c.do(n, func() error { return m.k.Softmax(m.stream, y.ptr(), x.ptr(), x.shape[0], x.shape[1], x.elem.dtype()) }, x, y)
	return y
}

func (c *compiler) softmaxGrad(n *gorgonia.Node, y, g *array) *array {
	dx, m := c.like(y), c.m
	c.do(n, func() error {
		return m.k.SoftmaxBackward(m.stream, dx.ptr(), g.ptr(), y.ptr(), y.shape[0], y.shape[1], y.elem.dtype())
	}, y, g, dx)
	return dx
}

// logSoftmax is x − max − log Σ exp(x − max) for each row, in float32.
func (c *compiler) logSoftmax(n *gorgonia.Node, x *array) *array {
	wide := c.as(n, x, float32s)
	shifted := c.perRow(n, kernels.Sub, wide, c.reduce(n, kernels.Max, wide, []int{1}))
	sum := c.reduce(n, kernels.Sum, c.apply(n, kernels.Exp, shifted), []int{1})
	return c.as(n, c.perRow(n, kernels.Sub, shifted, c.apply(n, kernels.Log, sum)), x.elem)
}

// logSoftmaxGrad is g − exp(y)·Σg for each row, in float32.
func (c *compiler) logSoftmaxGrad(n *gorgonia.Node, y, g *array) *array {
	wide, up := c.as(n, y, float32s), c.as(n, g, float32s)
	share := c.perRow(n, kernels.Mul, c.apply(n, kernels.Exp, wide), c.reduce(n, kernels.Sum, up, []int{1}))
	dx, m := c.like(up), c.m
	c.do(n, func() error {
		return m.k.Binary(m.stream, kernels.Sub, dx.ptr(), operand(up, dx), operand(share, dx), dx.len(), dx.elem.dtype())
	}, up, share, dx)
	return c.as(n, dx, y.elem)
}

// apply computes a function of every element.
func (c *compiler) apply(n *gorgonia.Node, f kernels.UnaryOp, x *array) *array {
	y, m := c.like(x), c.m
	c.do(n, func() error { return m.k.Unary(m.stream, f, y.ptr(), x.ptr(), 0, y.len(), y.elem.dtype()) }, x, y)
	return y
}

// perRow computes a function of every element and the number that belongs to its row.
func (c *compiler) perRow(n *gorgonia.Node, f kernels.BinaryOp, x, numbers *array) *array {
	y, m := c.like(x), c.m
	c.do(n, func() error {
		return m.k.Binary(m.stream, f, y.ptr(), operand(x, y), kernels.Operand{Ptr: numbers.ptr(), Repeat: x.shape[1], Period: x.shape[0]},
			y.len(), y.elem.dtype())
	}, x, numbers, y)
	return y
}
