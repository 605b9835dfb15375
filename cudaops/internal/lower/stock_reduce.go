package lower

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/elementwise"
	reducekernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/reduce"
	softmaxkernel "github.com/kasmina-go/kasmina/cudaops/internal/kernel/softmax"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// stockReduction lowers Sum and Max along any axes.
func stockReduction(n *gorgonia.Node) lowering {
	name := fmt.Sprint(n.Op())
	r := reducekernel.Sum
	if strings.HasPrefix(name, "Max") {
		r = reducekernel.Max
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
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		return c.reduce(n, r, in[0], axes).View(0, n.Shape()...), nil
	}
}

// reduce reduces along axes, which ascend and do not repeat: first along those that come last. Sums
// are float32.
func (c *compiler) reduce(n *gorgonia.Node, r reducekernel.Reduction, x *program.Array,
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

// reduceMiddle reduces x, as [outer, middle, inner], to [outer, inner].
func (c *compiler) reduceMiddle(n *gorgonia.Node, r reducekernel.Reduction, x *program.Array, outer,
	middle, inner int) *program.Array {
	t := x.Type
	if r == reducekernel.Sum {
		t = gpu.Float32
	}
	y := c.NewArray(t, outer, inner)
	a := reducekernel.Reduce{Op: r, Outer: outer, N: middle, Inner: inner, YType: t, XType: x.Type}
	c.call(n, a, program.Reads("X", x), program.Writes("Y", y),
		program.Uses("Workspace", c.bytes(a.WorkspaceBytes(c.o.Device))))
	return y
}

// stockSoftmax lowers SoftMax and LogSoftMax, and their gradients, whose inputs are x, y and the
// gradient of y.
func stockSoftmax(n *gorgonia.Node) lowering {
	var axis int
	var log bool
	name := fmt.Sprint(n.Op())
	_, config, _ := strings.Cut(name, "{")
	x := graph.Children(n)[0].Shape()
	if _, err := fmt.Sscanf(config, "%d, %t}", &axis, &log); err != nil || !floats(n) ||
		len(x) == 0 || axis >= len(x) ||
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
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		outer, along, inner := around(x, axis)
		e := in[0].Type
		if gradient {
			e = in[1].Type
		}
		var rows []*program.Array // the operands with the axis innermost
		for _, a := range in {
			rows = append(rows, c.inward(n, c.as(n, a, e), outer, along, inner))
		}
		var y *program.Array
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
		return c.outward(n, y, outer, along, inner).View(0, n.Shape()...), nil
	}
}

// inward returns x [outer, n, inner] as rows [outer·inner, n].
func (c *compiler) inward(node *gorgonia.Node, x *program.Array, outer, n,
	inner int) *program.Array {
	if inner == 1 {
		return x.View(0, outer, n)
	}
	y := c.NewArray(x.Type, outer*inner, n)
	c.move(node, y, x, dimension{outer, n * inner, n * inner}, dimension{inner, n, 1},
		dimension{n, 1, inner})
	return y
}

// outward is the inverse of inward.
func (c *compiler) outward(node *gorgonia.Node, x *program.Array, outer, n,
	inner int) *program.Array {
	if inner == 1 {
		return x
	}
	y := c.NewArray(x.Type, outer, n, inner)
	c.move(node, y, x, dimension{outer, n * inner, n * inner}, dimension{n, inner, 1},
		dimension{inner, 1, n})
	return y
}

func (c *compiler) softmax(n *gorgonia.Node, x *program.Array) *program.Array {
	y := c.like(x)
	c.call(n, softmaxkernel.Forward{Rows: x.Shape[0], N: x.Shape[1], Type: x.Type},
		program.Reads("X", x), program.Writes("Y", y))
	return y
}

func (c *compiler) softmaxGrad(n *gorgonia.Node, y, g *program.Array) *program.Array {
	dx := c.like(y)
	c.call(n, softmaxkernel.Backward{Rows: y.Shape[0], N: y.Shape[1], Type: y.Type},
		program.Reads("Y", y), program.Reads("G", g), program.Writes("DX", dx))
	return dx
}

// logSoftmax is x − max − log Σ exp(x − max) for each row, in float32.
func (c *compiler) logSoftmax(n *gorgonia.Node, x *program.Array) *program.Array {
	wide := c.as(n, x, gpu.Float32)
	shifted := c.perRow(n, elementwise.Sub, wide, c.reduce(n, reducekernel.Max, wide, []int{1}))
	sum := c.reduce(n, reducekernel.Sum, c.apply(n, elementwise.Exp, shifted), []int{1})
	return c.as(n, c.perRow(n, elementwise.Sub, shifted, c.apply(n, elementwise.Log, sum)), x.Type)
}

// logSoftmaxGrad is g − exp(y)·Σg for each row, in float32.
func (c *compiler) logSoftmaxGrad(n *gorgonia.Node, y, g *program.Array) *program.Array {
	wide, up := c.as(n, y, gpu.Float32), c.as(n, g, gpu.Float32)
	share := c.perRow(n, elementwise.Mul, c.apply(n, elementwise.Exp, wide),
		c.reduce(n, reducekernel.Sum, up, []int{1}))
	dx := c.map2(n, elementwise.Sub, c.like(up), repeated{Array: up}, repeated{Array: share})
	return c.as(n, dx, y.Type)
}

// apply computes a function of every element.
func (c *compiler) apply(n *gorgonia.Node, f elementwise.UnaryOp, x *program.Array) *program.Array {
	return c.map1(n, f, c.like(x), x, 0)
}

// perRow computes a function of every element and the number that belongs to its row.
func (c *compiler) perRow(n *gorgonia.Node, f elementwise.BinaryOp, x,
	numbers *program.Array) *program.Array {
	return c.map2(n, f, c.like(x), repeated{Array: x},
		repeated{numbers, spread{x.Shape[1], x.Shape[0]}})
}
