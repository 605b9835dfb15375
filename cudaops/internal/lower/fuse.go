package lower

import (
	"slices"

	"gorgonia.org/gorgonia"

	"github.com/kasmina-go/kasmina/cudaops/internal/gpu"
	"github.com/kasmina-go/kasmina/cudaops/internal/program"
	"github.com/kasmina-go/kasmina/internal/graph"
	"github.com/kasmina-go/kasmina/internal/opbase"
	"github.com/kasmina-go/kasmina/op"
	"github.com/kasmina-go/kasmina/op/graft"
)

// Nodes that are lowered together, since that takes fewer passes over memory than one after the
// other:
//
//   - a linear layer or a perceptron and the sum of its result and another matrix, which the last
//     product adds;
//   - a sum and a norm of it: one kernel writes both;
//   - the gradient of a norm's or a linear layer's input and the sum of it and another gradient,
//     where nothing else needs the former;
//   - the queries, keys and values of an attention, linear functions of one input (project.go);
//   - the gradients of an embedding and of the output layer that shares its table: one is added to
//     the other in place.
//
// A value is left out only if the nodes that it is for are all lowered with it and nobody asked for
// it. Such a value is folded: an array without memory.

// folded is a value that exists only within another one.
func folded(n *gorgonia.Node) *program.Array { return &program.Array{Shape: n.Shape()} }

// sole returns the node that alone uses n, nil if there is none, if there are several, or if n's
// value is asked for.
func (c *compiler) sole(n *gorgonia.Node) *gorgonia.Node {
	if users := c.users[n]; len(users) > 0 && c.onlyUsedBy(n, func(u *gorgonia.Node) bool {
		return u == users[0]
	}) {
		return users[0]
	}
	return nil
}

// partOf returns the node that takes the part of a packed result that begins at the given element,
// nil if there is none.
func (c *compiler) partOf(n *gorgonia.Node, offset int) *gorgonia.Node {
	for _, u := range c.users[n] {
		if o, ok := u.Op().(*opbase.PartOp); ok && o.Offset == offset {
			return u
		}
	}
	return nil
}

// addends returns the two different nodes whose sum n is, if they are matrices of its shape.
func addends(n *gorgonia.Node) (a, b *gorgonia.Node, ok bool) {
	if n == nil || graph.Symbol(n) != "+" || !floats(n) {
		return nil, nil, false
	}

	in := graph.Children(n)
	for _, a := range in {
		if _, repeated := spreadOf(a); repeated || len(a.Shape()) != 2 ||
			!slices.Equal(a.Shape(), n.Shape()) {
			return nil, nil, false
		}
	}

	return in[0], in[1], in[0] != in[1]
}

// other returns the addend of the sum n that is not the given one, nil if n is no such sum.
func other(n, addend *gorgonia.Node) *gorgonia.Node {
	switch a, b, ok := addends(n); {
	case ok && a == addend:
		return b
	case ok && b == addend:
		return a
	}
	return nil
}

// there returns the value of a node, nil if that is still to come. That of an input, or of a weight
// that seeds have grown on, can come at once.
func (c *compiler) there(n *gorgonia.Node) *program.Array {
	late := func(n *gorgonia.Node) bool { return c.there(n) == nil }
	switch {
	case n == nil:
		return nil
	case c.Values[n] != nil:
	case n.Op() == nil:
		c.input(n)
	case isOp[*graft.LowRankOp](n) && !slices.ContainsFunc(graph.Children(n), late):
		c.lower(n)
	}

	return c.Values[n]
}

// activation returns the value of a node if it is there and stored as activations are, without
// gaps, else nil.
func (c *compiler) activation(n *gorgonia.Node) *program.Array {
	if a := c.there(n); a != nil && a.Buffer != nil && a.Stride == 0 && a.Type == c.o.Activation {
		return a
	}
	return nil
}

// addend returns what the kernel that writes y, the value of n, is to add to it, as another node
// would. It is nil if there is no such sum, or what n is added to is not there yet. The value y is
// then that of the node which is returned, n or the sum.
func (c *compiler) addend(n *gorgonia.Node, y *program.Array) (*gorgonia.Node, *program.Array) {
	sum := c.sole(n)
	add := c.activation(other(sum, n))
	if add == nil {
		return n, nil
	}
	c.Values[n], c.Values[sum] = folded(n), y
	return sum, add
}

// fuseNorm lowers the sum n and a norm of it.
func (c *compiler) fuseNorm(n *gorgonia.Node) bool {
	i := slices.IndexFunc(c.users[n], func(u *gorgonia.Node) bool {
		_, ok := u.Op().(*op.RMSNormOp)
		return ok && c.Values[u] == nil && graph.Children(u)[0] == n
	})
	a, b, ok := addends(n)
	if !ok || i < 0 {
		return false
	}

	norm := c.users[n][i]
	x, residual, weight := c.activation(a), c.activation(b), c.there(graph.Children(norm)[1])
	if x == nil || residual == nil || weight == nil {
		return false
	}

	c.Values[norm], c.Values[n] = c.norm(norm, norm.Op().(*op.RMSNormOp), x, residual, weight)
	return true
}

// tied returns the gradient of an output layer to which alone n, that of its table, is added. The
// sum takes its memory. It is nil if there is none.
func (c *compiler) tied(n *gorgonia.Node) *program.Array {
	sum := c.sole(n)
	head := other(sum, n)
	if head == nil || c.sole(head) == nil {
		return nil
	}

	part, ok := head.Op().(*opbase.PartOp)
	if !ok || part.Offset == 0 {
		return nil
	}

	grad, ok := graph.Children(head)[0].Op().(*op.LinearCrossEntropyGradOp)
	to := c.Values[head]
	if !ok || len(c.gradients[grad.Forward]) != 1 || to == nil || to.Type != gpu.Float32 {
		return nil
	}

	c.Values[n], c.Values[sum], c.Values[head] = folded(n), to, folded(head)
	return to
}

// addProduct adds a product and what is done with its result: either as several calls, the product
// first, or as the single call one, whose launch is kernel.Tuned, if can allows that. The single call
// saves a pass over memory; the separate calls have the fastest product. The chooser decides, and
// addProduct reports whether it added the single call.
func (c *compiler) addProduct(several []*program.Call, can bool, one *program.Call) (fused bool) {
	product := several[0]
	one.Op, one.Node, one.Layer = product.Op, product.Node, product.Layer
	one.FLOPs, one.Float8 = product.FLOPs, product.Float8

	g, variants := program.VariantsOf(one, c.o.Variants)
	if !can || len(variants) == 0 || slices.ContainsFunc(one.Args, func(a program.Arg) bool {
		return a.At%program.VectorBytes != 0
	}) {
		c.Calls = append(c.Calls, several...)
		return false
	}

	g.FLOPs = one.FLOPs
	g.Alternatives = slices.Insert(g.Alternatives, 0,
		program.Alternative{Name: "separate", Calls: several})
	i, choice, err := c.o.Choose(g)
	if c.fail(err); err != nil || i == 0 {
		c.Calls = append(c.Calls, several...)
		return false
	}

	one.SetVariant(variants[i-1])
	one.Choice = choice
	c.Add(one)
	return true
}
