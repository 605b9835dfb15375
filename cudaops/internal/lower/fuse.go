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

// Groups of nodes that are lowered together to save passes over memory:
//
//   - a linear layer or perceptron, and the addition of another matrix to its result, which the last
//     product performs;
//   - a sum and its norm, both written by one kernel;
//   - the gradient of the input of a norm or linear layer, and its addition to another gradient,
//     provided that nothing else needs the former;
//   - the queries, keys and values of an attention, if they are linear functions of one input (see
//     project.go);
//   - the gradients of an embedding and an output layer with a shared table, added in place.
//
// A value is omitted only if all nodes that use it are lowered together with it and the value was not
// requested. Such a value is folded: an array without memory.

// folded returns the value of a node that exists only within another value.
func folded(n *gorgonia.Node) *program.Array { return &program.Array{Shape: n.Shape()} }

// soleUser returns the only user of n. It returns nil if n has no user or several, or if n's value was
// requested.
func (c *compiler) soleUser(n *gorgonia.Node) *gorgonia.Node {
	if users := c.users[n]; len(users) > 0 && c.onlyUsedBy(n, func(u *gorgonia.Node) bool {
		return u == users[0]
	}) {
		return users[0]
	}
	return nil
}

// partOf returns the node that extracts the part of a packed result starting at the given element, or
// nil.
func (c *compiler) partOf(n *gorgonia.Node, offset int) *gorgonia.Node {
	for _, u := range c.users[n] {
		if o, ok := u.Op().(*opbase.PartOp); ok && o.Offset == offset {
			return u
		}
	}
	return nil
}

// addends returns the two operands of the sum n, which must be distinct matrices of n's shape.
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

// otherAddend returns the addend of sum n that differs from the given one, or nil if n is not such a sum.
func otherAddend(n, addend *gorgonia.Node) *gorgonia.Node {
	switch a, b, ok := addends(n); {
	case ok && a == addend:
		return b
	case ok && b == addend:
		return a
	}
	return nil
}

// available returns the value of a node, or nil if the node has not been lowered yet. Inputs, and weights
// modified by seeds, are lowered on demand.
func (c *compiler) available(n *gorgonia.Node) *program.Array {
	late := func(n *gorgonia.Node) bool { return c.available(n) == nil }
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

// availableActivation returns the value of a node if it is available, contiguous and stored in the
// activation type, and otherwise nil.
func (c *compiler) availableActivation(n *gorgonia.Node) *program.Array {
	if a := c.available(n); a != nil && a.Buffer != nil && a.Stride == 0 && a.Type == c.o.Activation {
		return a
	}
	return nil
}

// addend looks for a sum that the kernel writing y, the value of n, can compute as well. If n's only user
// adds an available matrix to it, addend returns the user and the matrix, and y becomes the value of the
// user. Otherwise it returns n and nil.
func (c *compiler) addend(n *gorgonia.Node, y *program.Array) (*gorgonia.Node, *program.Array) {
	sum := c.soleUser(n)
	add := c.availableActivation(otherAddend(sum, n))
	if add == nil {
		return n, nil
	}
	c.Values[n], c.Values[sum] = folded(n), y
	return sum, add
}

// fuseNorm lowers sum n together with an RMSNorm op that reads it.
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
	x, residual, weight := c.availableActivation(a), c.availableActivation(b), c.available(graph.Children(norm)[1])
	if x == nil || residual == nil || weight == nil {
		return false
	}

	c.Values[norm], c.Values[n] = c.norm(norm, norm.Op().(*op.RMSNormOp), x, residual, weight)
	return true
}

// tiedGradient returns the gradient of an output layer that shares its table with an embedding, if n, the
// gradient of the embedding, is only added to it. The sum reuses the memory. Otherwise tiedGradient
// returns nil.
func (c *compiler) tiedGradient(n *gorgonia.Node) *program.Array {
	sum := c.soleUser(n)
	head := otherAddend(sum, n)
	if head == nil || c.soleUser(head) == nil {
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

// addProduct adds a product and the computation that follows it. The candidates are the calls in several,
// the product first, and the single call one, which has a launch of type kernel.Tuned and is allowed only
// if can is set. The single call saves a pass over memory, while the separate calls use the fastest
// product. The chooser decides, and addProduct reports whether it added the single call.
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
