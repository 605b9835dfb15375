package lower

import (
	"fmt"
	"slices"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/kernel/layout"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
)

// dimension is one of a copy: its size, and the elements from one index to the next in the result
// and in what is copied.
type dimension struct{ n, y, x int }

// maxDimensions is how many a copy may have.
const maxDimensions = 6

// move copies elements from one layout to another.
func (c *compiler) move(n *gorgonia.Node, y, x *program.Array, dims ...dimension) {
	a := layout.Copy{Size: y.Type.Size()}
	for _, d := range dims {
		a.Dims, a.YStrides, a.XStrides = append(a.Dims, d.n), append(a.YStrides, d.y),
			append(a.XStrides, d.x)
	}
	c.call(n, a, program.Writes("Y", y), program.Reads("X", x))
}

// stockReshape lowers Reshape: the same elements in another shape, without a copy.
func stockReshape(n *gorgonia.Node) lowering {
	if opbase.Size(graph.Children(n)[0].Shape()) != opbase.Size(n.Shape()) {
		return nil
	}
	return func(_ *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		return in[0].View(0, n.Shape()...), nil
	}
}

func stockTranspose(n *gorgonia.Node) lowering {
	axes, x := integers(fmt.Sprint(n.Op())), graph.Children(n)[0].Shape()
	if len(axes) > maxDimensions || len(axes) != len(x) || len(axes) != len(n.Shape()) {
		return nil
	}
	for i, axis := range axes {
		if axis >= len(x) || slices.Contains(axes[:i], axis) || n.Shape()[i] != x[axis] {
			return nil
		}
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		y := c.NewArray(in[0].Type, n.Shape()...)
		if isMatrixTranspose(n) && c.onlyUsedBy(n, c.isMatMul) {
			return y, nil // nobody reads it
		}
		ys, xs := tensor.Shape(y.Shape).CalcStrides(), x.CalcStrides()
		var dims []dimension
		for i, axis := range axes {
			dims = append(dims, dimension{y.Shape[i], ys[i], xs[axis]})
		}
		c.move(n, y, in[0], dims...)
		return y, nil
	}
}

// isMatrixTranspose reports whether n is the transpose of a matrix.
func isMatrixTranspose(n *gorgonia.Node) bool {
	return graph.OpType(n) == "gorgonia.transposeOp" && fmt.Sprint(n.Op()) == "Aᵀ{1, 0}"
}

// onlyUsedBy reports whether a node has users, all of which are of a kind, and no other use.
func (c *compiler) onlyUsedBy(n *gorgonia.Node, kind func(*gorgonia.Node) bool) bool {
	users := c.users[n]
	return len(users) > 0 && !c.kept[n] && !slices.ContainsFunc(users, func(u *gorgonia.Node) bool {
		return !kind(u)
	})
}

// part is what a slice takes: count indices of an axis, from the first on, every step-th.
type part struct{ axis, first, count, step int }

// stockSlice lowers Slice, and its gradient, whose inputs are what was sliced and the gradient of
// the part: zeros but for the part.
func stockSlice(n *gorgonia.Node) lowering {
	name := fmt.Sprint(n.Op())
	inside, _, ok := strings.Cut(strings.TrimPrefix(name, "T["), "...]")
	gradient := strings.HasSuffix(name, "+=...")
	nodes := graph.Children(n)
	x := nodes[0].Shape()
	p := part{axis: strings.Count(inside, ", "), step: 1}
	if !ok || p.axis >= len(x) {
		return nil
	}
	y := n.Shape()
	if gradient {
		y = nodes[1].Shape()
	}
	outer, along, inner := around(x, p.axis)
	p.count = along
	if limits := integers(inside); len(limits) == 3 {
		p.first, p.step = limits[0], max(1, limits[2])
		p.count = max(1, (min(limits[1], along)-p.first)/p.step) // as Gorgonia counts
	} else if len(limits) != 0 {
		return nil
	}
	if p.first+(p.count-1)*p.step >= along || outer*p.count*inner != opbase.Size(y) || gradient &&
		!slices.Equal(n.Shape(), x) {
		return nil
	}
	dims := []dimension{{outer, p.count * inner, along * inner}, {p.count, inner, p.step * inner},
		{inner, 1, 1}}
	if gradient {
		for i := range dims {
			dims[i].x, dims[i].y = dims[i].y, dims[i].x
		}
		return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
			y := c.NewArray(in[1].Type, n.Shape()...)
			c.clear(n, y)
			c.move(n, y.View(p.first*inner, y.Len()-p.first*inner), in[1], dims...)
			return y, nil
		}
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		if p.count == along {
			return in[0].View(0, n.Shape()...), nil
		}
		y := c.NewArray(in[0].Type, n.Shape()...)
		c.move(n, y, in[0].View(p.first*inner, in[0].Len()-p.first*inner), dims...)
		return y, nil
	}
}

// clear fills an array with zeros.
func (c *compiler) clear(n *gorgonia.Node, a *program.Array) {
	c.call(n, program.Zero{Bytes: a.Extent()}, program.Writes("Ptr", a))
}

func stockConcat(n *gorgonia.Node) lowering {
	axes := integers(fmt.Sprint(n.Op()))
	if len(axes) != 1 || axes[0] >= n.Dims() {
		return nil
	}
	axis, total := axes[0], 0
	for _, child := range graph.Children(n) {
		s := child.Shape().Clone()
		if len(s) != n.Dims() {
			return nil
		}
		total += s[axis]
		s[axis] = n.Shape()[axis]
		if !slices.Equal(s, n.Shape()) {
			return nil
		}
	}
	if total != n.Shape()[axis] {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		e := in[0].Type
		for _, a := range in {
			if a.Type == gpu.Float32 {
				e = gpu.Float32
			}
		}
		y := c.NewArray(e, n.Shape()...)
		outer, along, inner := around(n.Shape(), axis)
		at := 0
		for _, a := range in {
			width := a.Shape[axis] * inner
			c.move(n, y.View(at, y.Len()-at), c.as(n, a, e), dimension{outer, along * inner, width},
				dimension{width, 1, 1})
			at += width
		}
		return y, nil
	}
}

// stockAt lowers At: one element.
func stockAt(n *gorgonia.Node) lowering {
	at, x := integers(fmt.Sprint(n.Op())), graph.Children(n)[0].Shape()
	if len(at) != len(x) {
		return nil
	}
	element := 0
	for i, stride := range x.CalcStrides() {
		if at[i] >= x[i] {
			return nil
		}
		element += at[i] * stride
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		y := c.NewArray(in[0].Type)
		c.move(n, y, in[0].View(element), dimension{1, 1, 1})
		return y, nil
	}
}

// repetition is of an axis, each index as often as times says.
type repetition struct{ outer, along, times, inner int }

// repetitionOf returns the repetition that a node is. How often is its second input's value, but
// the shapes say it too. A vector may be repeated along an axis that it lacks, and counts as a
// column then.
func repetitionOf(n *gorgonia.Node) (r repetition, ok bool) {
	if graph.OpType(n) != "*gorgonia.repeatOp" {
		return r, false
	}
	axes, y := integers(fmt.Sprint(n.Op())), n.Shape()
	x := graph.Children(n)[0].Shape()
	for len(x) < len(y) {
		x = append(x, 1)
	}
	if len(axes) != 1 || axes[0] >= len(x) || len(x) != len(y) || y[axes[0]]%x[axes[0]] != 0 {
		return r, false
	}
	axis := axes[0]
	r.outer, r.along, r.inner = around(x, axis)
	r.times = y[axis] / r.along
	x[axis] *= r.times
	return r, slices.Equal(x, y)
}

// stockRepeat lowers repetition along an axis.
func stockRepeat(n *gorgonia.Node) lowering {
	r, ok := repetitionOf(n)
	if !ok {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		x := c.fed(n, in[0])
		if r.times == 1 {
			return x.View(0, n.Shape()...), nil
		}
		y := c.NewArray(x.Type, n.Shape()...)
		if _, ok := spreadOf(n); ok && c.onlyUsedBy(n, c.readsSpread) {
			return y, nil // nobody reads it
		}
		c.move(n, y, x, dimension{r.outer, r.along * r.times * r.inner, r.along * r.inner},
			dimension{r.along, r.times * r.inner, r.inner},
			dimension{r.times, r.inner, 0}, dimension{r.inner, 1, 1})
		return y, nil
	}
}

// stockSize lowers SizeOf, which is known beforehand.
func stockSize(n *gorgonia.Node) lowering {
	v, ok := sizeOf(n)
	if !ok || n.Dtype() != tensor.Float32 {
		return nil
	}
	return func(c *compiler, _ *gorgonia.Node, _ []*program.Array) (*program.Array, error) {
		return c.NewConstant([]float32{float32(v)}).View(0), nil
	}
}

// sizeOf is the size of a dimension, if that is what a node is.
func sizeOf(n *gorgonia.Node) (int, bool) {
	if graph.OpType(n) != "gorgonia.sizeOp" {
		return 0, false
	}
	name := fmt.Sprint(n.Op())
	v := integers(name)
	if len(v) != 1 {
		return 0, false
	}
	if strings.Contains(name, "=") {
		return v[0], true
	}
	x := graph.Children(n)[0].Shape()
	switch {
	case len(x) == 0:
		return 1, true
	case v[0] < len(x):
		return x[v[0]], true
	}
	return 0, false
}

// stockByIndices lowers ByIndices, whose inputs are x and the indices, and its gradient, whose
// inputs are x, the gradient of the result, and the indices. An index that does not exist gives NaN
// if it was computed; of those that are sent, the machine lets none pass.
func stockByIndices(n *gorgonia.Node) lowering {
	nodes, name := graph.Children(n), fmt.Sprint(n.Op())
	axes, x := integers(name), nodes[0].Shape()
	gradient := strings.HasPrefix(name, "ByIndicesOpDiff")
	indices, picked := nodes[len(nodes)-1], n.Shape().Clone()
	if gradient {
		picked = nodes[1].Shape().Clone()
	}
	if len(axes) != 1 || axes[0] >= len(x) || len(picked) != len(x) ||
		nodes[0].Dtype() != tensor.Float32 ||
		indices.Dtype() != tensor.Int || picked[axes[0]] != opbase.Size(indices.Shape()) {
		return nil
	}
	axis := axes[0]
	if picked[axis] = x[axis]; !slices.Equal(picked, x) {
		return nil
	}
	return func(c *compiler, n *gorgonia.Node, in []*program.Array) (*program.Array, error) {
		if gradient {
			return c.unpick(n, in[1], in[2], axis), nil
		}
		return c.pick(n, c.fed(n, in[0]), in[1], axis), nil
	}
}

// pick takes indices along an axis.
func (c *compiler) pick(n *gorgonia.Node, x, ids *program.Array, axis int) *program.Array {
	outer, vocab, inner := around(x.Shape, axis)
	c.bound(ids, program.IDRange{Op: "ByIndices", Argument: "indices", Vocab: vocab})
	d, rows := outer*inner, ids.Len()
	table := x
	if outer > 1 { // [vocab, outer, inner]
		table = c.NewArray(x.Type, vocab, d)
		c.move(n, table, x, dimension{vocab, d, inner}, dimension{outer, inner, vocab * inner},
			dimension{inner, 1, 1})
	}
	y := c.NewArray(x.Type, rows, d)
	c.embed(n, y, ids, table.View(0, vocab, d))
	if outer == 1 {
		return y.View(0, n.Shape()...)
	}
	z := c.NewArray(x.Type, n.Shape()...)
	c.move(n, z, y, dimension{outer, rows * inner, inner}, dimension{rows, inner, d},
		dimension{inner, 1, 1})
	return z
}

// unpick adds up the gradients of what pick took.
func (c *compiler) unpick(n *gorgonia.Node, g, ids *program.Array, axis int) *program.Array {
	outer, vocab, inner := around(n.Shape(), axis)
	d, rows := outer*inner, ids.Len()
	picked := g
	if outer > 1 { // [rows, outer, inner]
		picked = c.NewArray(g.Type, rows, d)
		c.move(n, picked, g, dimension{rows, d, inner}, dimension{outer, inner, rows * inner},
			dimension{inner, 1, 1})
	}
	sums := c.aux(vocab, d)
	c.embeddingGrad(n, ids, picked.View(0, rows, d), program.Writes("DT", sums))
	if outer == 1 {
		return sums.View(0, n.Shape()...)
	}
	y := c.aux(n.Shape()...)
	c.move(n, y, sums, dimension{outer, vocab * inner, inner}, dimension{vocab, inner, d},
		dimension{inner, 1, 1})
	return y
}
