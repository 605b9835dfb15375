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

// reduce reduces along axes, which ascend and do not repeat: first along those that come last. Sums
// are float32.
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

// reduceMiddle reduces x, as [outer, middle, inner], to [outer, inner].
func (c *compiler) reduceMiddle(n *gorgonia.Node, r reduce.Reduction, x *program.Array, outer,
	middle, inner int) *program.Array {
	t := x.Type
	if r == reduce.Sum {
		t = gpu.Float32
	}
	y := c.NewArray(t, outer, inner)
	a := reduce.Reduce{Op: r, Outer: outer, N: middle, Inner: inner, YType: t, XType: x.Type}
	c.call(n, a, program.Reads("X", x), program.Writes("Y", y),
		program.Uses("Workspace", c.bytes(a.WorkspaceBytes(c.o.Device))))
	return y
}

// stockSoftmax lowers SoftMax along the last axis, and its gradient, whose inputs are x, y and the
// gradient of y.
func stockSoftmax(n *gorgonia.Node) lowering {
	var axis int
	var log bool
	name := fmt.Sprint(n.Op())
	_, config, _ := strings.Cut(name, "{")
	x := graph.Children(n)[0].Shape()
	last := len(x) - 1
	if _, err := fmt.Sscanf(config, "%d, %t}", &axis, &log); err != nil || log || !floats(n) ||
		last < 0 || axis >= 0 && axis != last || axis < 0 && x.IsColVec() || // as Gorgonia does it
		!slices.Equal(x, n.Shape()) {
		return nil
	}
	rows := func(a *program.Array) *program.Array {
		return a.View(0, opbase.Size(x[:last]), x[last])
	}
	if strings.HasPrefix(name, "SoftmaxDiff") {
		return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
			y, g := rows(in[1]), rows(c.as(n, in[2], in[1].Type))
			dx := c.like(y)
			c.call(n, softmax.Backward{Rows: y.Shape[0], N: y.Shape[1], Type: y.Type},
				program.Reads("Y", y), program.Reads("G", g), program.Writes("DX", dx))
			return dx.View(0, n.Shape()...)
		}
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
		a := rows(in[0])
		y := c.like(a)
		c.call(n, softmax.Forward{Rows: a.Shape[0], N: a.Shape[1], Type: a.Type},
			program.Reads("X", a), program.Writes("Y", y))
		return y.View(0, n.Shape()...)
	}
}
