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

// Ops that only move elements are lowered to strided copies from inputs to parts of the result.

// moves describes such an op. If copies is empty, the result is a reshaped view of the first input.
type moves struct {
	copies []strided
	zeros  bool // elements that are not copied are zero
}

// strided is a copy from input, starting at element x, to the result, starting at element y. The
// addresses are not set.
type strided struct {
	input, x, y int
	layout.Copy
}

// maxDimensions is the maximum number of dimensions of a copy.
const maxDimensions = 6

// stockMoves returns a function that lowers nodes with a description from find.
func stockMoves(find func(n *gorgonia.Node) (moves, bool)) func(*gorgonia.Node) lowering {
	return func(n *gorgonia.Node) lowering {
		m, ok := find(n)
		if !ok {
			return nil
		}
		return func(c *compiler, n *gorgonia.Node, in []*program.Array) *program.Array {
			return c.move(n, in, m)
		}
	}
}

// move adds the copies of a node. The result is float32 if any input is.
func (c *compiler) move(n *gorgonia.Node, in []*program.Array, m moves) *program.Array {
	if isRepeat(n) {
		in[0] = c.inputAsActivation(n, in[0])
	}

	if len(m.copies) == 0 {
		return in[0].View(0, n.Shape()...)
	}

	e := in[m.copies[0].input].Type
	for _, s := range m.copies {
		if in[s.input].Type == gpu.Float32 {
			e = gpu.Float32
		}
	}

	y := c.NewArray(e, n.Shape()...)
	if c.unread(n) {
		return y
	}

	if m.zeros {
		z := program.Zero{Bytes: y.Extent()}
		addCall(c, n, &z, program.Writes(&z.Ptr, y))
	}

	for _, s := range m.copies {
		x := c.as(n, in[s.input], e)
		s.Size = e.Size()
		addCall(c, n, &s.Copy, program.Writes(&s.Copy.Y, y.View(s.y, y.Len()-s.y)),
			program.Reads(&s.Copy.X, x.View(s.x, x.Len()-s.x)))
	}

	return y
}

// unread reports whether all users of a node read its input directly. Products do so for a transposed
// matrix, and elementwise ops for repeated operands.
func (c *compiler) unread(n *gorgonia.Node) bool {
	_, repeats := spreadOf(n)
	return isMatrixTranspose(n) && c.onlyUsedBy(n, c.isMatMul) ||
		repeats && c.onlyUsedBy(n, c.readsSpread)
}

// reshaped describes Reshape, which keeps the elements and changes the shape.
func reshaped(n *gorgonia.Node) (moves, bool) {
	return moves{}, opbase.Size(graph.Children(n)[0].Shape()) == opbase.Size(n.Shape())
}

func transposed(n *gorgonia.Node) (m moves, ok bool) {
	axes, x, y := integers(fmt.Sprint(n.Op())), graph.Children(n)[0].Shape(), n.Shape()
	if len(axes) > maxDimensions || len(axes) != len(x) || len(axes) != len(y) {
		return m, false
	}

	all := layout.Copy{Dims: y, YStrides: y.CalcStrides()}
	for i, axis := range axes {
		if axis >= len(x) || slices.Contains(axes[:i], axis) || y[i] != x[axis] {
			return m, false
		}
		all.XStrides = append(all.XStrides, x.CalcStrides()[axis])
	}

	return moves{copies: []strided{{Copy: all}}}, true
}

// isMatrixTranspose reports whether n is the transpose of a matrix.
func isMatrixTranspose(n *gorgonia.Node) bool {
	return graph.OpType(n) == "gorgonia.transposeOp" && fmt.Sprint(n.Op()) == "Aᵀ{1, 0}"
}

// onlyUsedBy reports whether a node has users, kind holds for every user, and the node's value is not
// requested.
func (c *compiler) onlyUsedBy(n *gorgonia.Node, kind func(*gorgonia.Node) bool) bool {
	users, other := c.users[n], func(u *gorgonia.Node) bool { return !kind(u) }
	return len(users) > 0 && !c.lasting[n] && !slices.ContainsFunc(users, other)
}

// sliced describes Slice and its gradient. The inputs of the gradient are the sliced tensor and the
// gradient of the slice; its result is zero outside the slice.
func sliced(n *gorgonia.Node) (m moves, ok bool) {
	name, nodes := fmt.Sprint(n.Op()), graph.Children(n)
	inside, _, ok := strings.Cut(strings.TrimPrefix(name, "T["), "...]")
	gradient := strings.HasSuffix(name, "+=...")
	x, y, axis := nodes[0].Shape(), n.Shape(), strings.Count(inside, ", ")
	if gradient {
		y = nodes[1].Shape()
	}

	if !ok || axis >= len(x) || gradient && !slices.Equal(n.Shape(), x) {
		return m, false
	}

	outer, along, inner := splitAt(x, axis)
	first, count, step := 0, along, 1
	if limits := integers(inside); len(limits) == 3 {
		first, step = limits[0], max(1, limits[2])
		count = max(1, (min(limits[1], along)-first)/step) // the number that Gorgonia computes
	}

	if first+(count-1)*step >= along || outer*count*inner != opbase.Size(y) {
		return m, false
	}

	part := layout.Copy{Dims: []int{outer, count, inner}, YStrides: []int{count * inner, inner, 1},
		XStrides: []int{along * inner, step * inner, 1}}
	switch {
	case gradient:
		part.YStrides, part.XStrides = part.XStrides, part.YStrides
		return moves{[]strided{{input: 1, y: first * inner, Copy: part}}, true}, true
	case count == along:
		return m, true
	}

	return moves{copies: []strided{{x: first * inner, Copy: part}}}, true
}

func concatenated(n *gorgonia.Node) (m moves, ok bool) {
	axes, y := integers(fmt.Sprint(n.Op())), n.Shape()
	if len(axes) != 1 || axes[0] >= len(y) {
		return m, false
	}

	outer, along, inner := splitAt(y, axes[0])
	at := 0
	for i, child := range graph.Children(n) {
		s := child.Shape().Clone()
		if len(s) != len(y) {
			return m, false
		}
		width := s[axes[0]] * inner
		if s[axes[0]] = along; !slices.Equal(s, y) {
			return m, false
		}
		m.copies = append(m.copies, strided{input: i, y: at, Copy: layout.Copy{
			Dims: []int{outer, width}, YStrides: []int{along * inner, 1},
			XStrides: []int{width, 1}}})
		at += width
	}

	return m, at == along*inner
}

// repetition describes the repetition of each index of an axis, a given number of times.
type repetition struct{ outer, along, times, inner int }

// repetitionOf returns the repetition that a node computes. The number of repetitions is the value of the
// second input, but it also follows from the shapes. A vector repeated along an axis that it lacks counts
// as a column.
func repetitionOf(n *gorgonia.Node) (r repetition, ok bool) {
	if !isRepeat(n) {
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
	r.outer, r.along, r.inner = splitAt(x, axis)
	r.times = y[axis] / r.along
	x[axis] *= r.times
	return r, slices.Equal(x, y)
}

func isRepeat(n *gorgonia.Node) bool { return graph.OpType(n) == "*gorgonia.repeatOp" }

func repeats(n *gorgonia.Node) (m moves, ok bool) {
	r, ok := repetitionOf(n)
	if !ok || r.times == 1 {
		return m, ok
	}
	return moves{copies: []strided{{Copy: layout.Copy{
		Dims:     []int{r.outer, r.along, r.times, r.inner},
		YStrides: []int{r.along * r.times * r.inner, r.times * r.inner, r.inner, 1},
		XStrides: []int{r.along * r.inner, r.inner, 0, 1}}}}}, true
}

// stockSize lowers SizeOf to a constant.
func stockSize(n *gorgonia.Node) lowering {
	v, ok := sizeOf(n)
	if !ok || n.Dtype() != tensor.Float32 {
		return nil
	}
	return func(c *compiler, _ *gorgonia.Node, _ []*program.Array) *program.Array {
		return c.NewConstant([]float32{float32(v)}).View(0)
	}
}

// sizeOf returns the size of a dimension if the node is a SizeOf op. The op's string contains the size,
// since the shape was known when the op was created.
func sizeOf(n *gorgonia.Node) (size int, ok bool) {
	_, err := fmt.Sscanf(fmt.Sprint(n.Op()), "SizeOf=%d", &size)
	return size, err == nil && graph.OpType(n) == "gorgonia.sizeOp"
}
